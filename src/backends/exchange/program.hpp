// A prepared ExchangePlan: all data that transports need from it. Made once for each plan. It never changes.
// Any thread may use it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "host/strided/loops.hpp"
#include "weft/backends/exchange.hpp"

namespace weft {

/// Offsets and steps are in bytes.
struct ExchangeProgram {
  struct Box {
    std::size_t field;
    Shape counts;
    std::int64_t element, elements;                  ///< the bytes of one element, and the number of elements
    std::int64_t offset;                             ///< of the box, in this rank's field
    std::array<std::int64_t, Dims::kMaxDims> steps;  ///< there
    /// The numbers that replace the indices of dimension 0 in this rank's field. Null: the indices
    /// themselves.
    const std::int64_t* list;
    std::int64_t at;  ///< the place in the packed bytes
    /// The loops between this rank's field and the packed bytes: from the field if the box is sent, to the
    /// field if the box is received.
    Loops loops;
  };
  /// The boxes that go to one rank, or come from it. Boxes without elements are left out.
  struct Side {
    int peer = 0;
    std::int64_t bytes = 0, runs = 0;  ///< runs: the number of contiguous runs of bytes in this rank's memory
    std::vector<Box> boxes{};
    /// For kind `add`, if boxes are received: for each box the loops from the packed bytes to the sums of its
    /// field.
    std::vector<Loops> sums{};
    /// A hash of the values that must be equal on both ranks: fields, and the counts of their boxes.
    std::uint64_t form = 0;
    /// These values in words.
    std::string about{};
  };
  /// Bytes [low, high), counted from the beginning of a field. Empty if low == high.
  struct Span {
    std::int64_t low = 0, high = 0;
  };
  /// A box that this rank sends to itself: from `in + from` to `out + to`, or, for kind `add`, to `sums +
  /// to`.
  struct Own {
    std::size_t field;
    Loops loops;
    std::int64_t from, to;
  };
  /// For kind `add`: the place of a field's sums. `at` < 0: the sums are in the field itself. Otherwise the
  /// sum of the field's element at byte `low` is at byte `at` of the memory of sums, where elements are
  /// `widen` times as far apart.
  struct Sums {
    std::int64_t at = -1, low = 0, widen = 1;
    /// The place of the sum for the field's element at byte `offset`, counted from the beginning of the
    /// memory of sums, or of the field.
    std::int64_t place(std::int64_t offset) const noexcept {
      return at < 0 ? offset : at + (offset - low) * widen;
    }
  };
  /// For kind `add`, a box whose sums are not in the field: the loops from the field to the sums, and back.
  struct Widened {
    std::size_t field;
    Loops widen, round;
    std::int64_t in_field, in_sums;
  };

  ExchangeProgram(const ExchangePlan& plan, int rank);
  // The loops borrow the lists, whose elements stay in place when the program is moved; a copy would not have
  // them.
  ExchangeProgram(const ExchangeProgram&) = delete;
  ExchangeProgram& operator=(const ExchangeProgram&) = delete;
  ExchangeProgram(ExchangeProgram&&) noexcept = default;
  ExchangeProgram& operator=(ExchangeProgram&&) noexcept = default;
  ~ExchangeProgram() = default;

  bool adds = false;
  int rank = 0;
  std::vector<DType> fields{};
  std::vector<Side> sends{}, receives{};  ///< with other ranks, in the order of the ranks
  std::vector<Own> own{};                 ///< in the order of the boxes
  /// for each field: the bytes that are read from `in`, and those that are written to `out`
  std::vector<Span> sent{}, written{};
  std::int64_t in_bytes = 0, out_bytes = 0;  ///< bytes to other ranks, and from other ranks
  std::vector<Sums> sums{};                  ///< for kind `add`: for each field
  std::vector<Widened> widened{};
  std::int64_t sums_bytes = 0;  ///< of the memory of sums
  /// the indices of boxes whose indices have no constant distance
  std::vector<std::vector<std::int64_t>> lists{};

  /// For kind `add`: adds the elements in the order of the ranks. This rank's own elements are added when it
  /// is this rank's turn. `memory`: the memory of the fields. `sums_memory`: sums_bytes bytes. `add(i)` must
  /// add the elements that were received by receives[i].
  void add_all(const ExchangeField* memory, std::byte* sums_memory,
               const std::function<void(std::size_t receive)>& add) const;
  /// Adds the packed bytes of one rank, for use in `add`.
  void add_packed(std::size_t receive, const std::byte* packed, const ExchangeField* memory,
                  std::byte* sums_memory) const;
  /// Returns the address from which Sums::place() counts.
  std::byte* sums_of(std::size_t field, const ExchangeField* memory, std::byte* sums_memory) const noexcept {
    return sums[field].at < 0 ? static_cast<std::byte*>(memory[field].out) : sums_memory;
  }
  void copy_own(const ExchangeField* memory) const;
};

/// Rounds up to a whole number of cache lines.
inline std::int64_t on_lines(std::int64_t bytes) { return (bytes + 63) / 64 * 64; }

/// Throws bad_argument if a plan is wrong, whatever fields it gets: `exchange: box 3 of the data sent to rank
/// 1: field is 2; expected 0 to 1`. `tail`: the end of each text.
void check_exchange(const ExchangePlan& plan, int rank, int size, const std::string& tail);
/// Throws bad_argument if a field has no memory, or if elements that are written share memory with elements
/// that are read, or with other elements that are written. The time grows with the number of boxes.
void check_exchange_memory(const ExchangePlan& plan, const ExchangeProgram& program,
                           const ExchangeField* fields, const std::string& tail);

}  // namespace weft
