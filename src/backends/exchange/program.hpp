// An ExchangePlan worked out: everything that each transport needs from it. Made once for each plan; never
// changes; any thread.
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
    std::int64_t element, elements;                  ///< bytes of one, and how many
    std::int64_t offset;                             ///< in this rank's field
    std::array<std::int64_t, Dims::kMaxDims> steps;  ///< there
    /// The numbers in the place of the indices of dimension 0 there; null: the indices themselves.
    const std::int64_t* list;
    std::int64_t at;  ///< in the packed bytes
    /// The loops between this rank's field and the packed bytes: from the field if the box is sent, to it
    /// if the box is received.
    Loops loops;
  };
  /// The traffic in one direction with one rank. Boxes without elements are left out.
  struct Side {
    int peer = 0;
    std::int64_t bytes = 0, runs = 0;  ///< runs: of bytes in one piece, in this rank's memory
    std::vector<Box> boxes{};
    /// Kind add, receiving: for each box the loops from the packed bytes to the sums of its field.
    std::vector<Loops> sums{};
    /// A hash of everything that both ranks must have alike: fields, and the counts of their boxes.
    std::uint64_t form = 0;
    /// The same in words.
    std::string about{};
  };
  /// Bytes [low, high) from where a field begins. Empty: low == high.
  struct Span {
    std::int64_t low = 0, high = 0;
  };
  /// A box that this rank sends to itself: from `in + from` to `out + to`; kind add: to `sums + to`.
  struct Own {
    std::size_t field;
    Loops loops;
    std::int64_t from, to;
  };
  /// Kind add: where the sums of a field are. `at` < 0: in the field itself. Otherwise the sum of the
  /// field's element at byte `low` stands at byte `at` of the memory of sums; elements are `widen` times as
  /// far apart there.
  struct Sums {
    std::int64_t at = -1, low = 0, widen = 1;
    /// The place of the field's element at byte `offset`, counted from where the memory of sums, or the
    /// field, begins.
    std::int64_t place(std::int64_t offset) const noexcept {
      return at < 0 ? offset : at + (offset - low) * widen;
    }
  };
  /// Kind add: a box into which elements are added, and whose sums are not in the field: the loops from the
  /// field to its sums, and back.
  struct Widened {
    std::size_t field;
    Loops widen, round;
    std::int64_t in_field, in_sums;
  };

  ExchangeProgram(const ExchangePlan& plan, int rank);
  // Its loops borrow its lists, which stay where they are when it is moved.
  ExchangeProgram(const ExchangeProgram&) = delete;
  ExchangeProgram& operator=(const ExchangeProgram&) = delete;
  ExchangeProgram(ExchangeProgram&&) noexcept = default;
  ExchangeProgram& operator=(ExchangeProgram&&) noexcept = default;
  ~ExchangeProgram() = default;

  bool adds = false;
  int rank = 0;
  std::vector<DType> fields{};
  std::vector<Side> sends{}, receives{};     ///< of other ranks, in the order of the ranks
  std::vector<Own> own{};                    ///< in the order of the boxes
  std::vector<Span> sent{}, written{};       ///< of each field: what is read from `in`, and written to `out`
  std::int64_t in_bytes = 0, out_bytes = 0;  ///< to, and from, other ranks
  std::vector<Sums> sums{};                  ///< kind add: of each field
  std::vector<Widened> widened{};
  std::int64_t sums_bytes = 0;                     ///< of the memory of sums
  std::vector<std::vector<std::int64_t>> lists{};  ///< the indices of boxes, where they have no one step

  /// Kind add: adds the received elements in the order of the ranks, this rank's own at its place.
  /// `memory`: where the fields lie. `sums_memory`: sums_bytes of it. `add(i)` adds the elements received
  /// from receives[i].
  void add_all(const ExchangeField* memory, std::byte* sums_memory,
               const std::function<void(std::size_t receive)>& add) const;
  /// The same for one rank's packed bytes; for use in `add`.
  void add_packed(std::size_t receive, const std::byte* packed, const ExchangeField* memory,
                  std::byte* sums_memory) const;
  /// Where the sums of a field begin, so that Sums::place() counts from there.
  std::byte* sums_of(std::size_t field, const ExchangeField* memory, std::byte* sums_memory) const noexcept {
    return sums[field].at < 0 ? static_cast<std::byte*>(memory[field].out) : sums_memory;
  }
  void copy_own(const ExchangeField* memory) const;
};

/// Up to a whole number of cache lines.
inline std::int64_t on_lines(std::int64_t bytes) { return (bytes + 63) / 64 * 64; }

/// Throws bad_argument if a plan is wrong in itself: `exchange: box 3 of what is sent to rank 1: field is
/// 2; expected 0 to 1`. `tail`: the end of each text.
void check_exchange(const ExchangePlan& plan, int rank, int size, const std::string& tail);
/// Throws bad_argument if these fields cannot be exchanged: one has no memory, or elements that are written
/// share memory with elements that are read, or with other elements that are written. The time grows with
/// the number of boxes.
void check_exchange_memory(const ExchangePlan& plan, const ExchangeProgram& program,
                           const ExchangeField* fields, const std::string& tail);

}  // namespace weft
