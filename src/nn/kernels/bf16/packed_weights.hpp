// Weights in bf16, packed in the form that the matrix library multiplies, and kept from call to call. Private
// to cpu_*.cpp and tests; one per KernelContext, used by one thread at a time.
//
// The library packs the second matrix of a bf16 product in every call; with few tokens the packing takes as
// long as the product itself. A weight whose version the caller gives (WeightMatrix) is packed at its third
// use, since packing it costs about as much as two uses gain. This happens in inference, or if there are
// several micro-batches between two steps of the optimizer. The bits of a product are equal either way.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>

#include "nn/kernels/scratch.hpp"
#include "weft/nn/kernels.hpp"

namespace weft::kernels {

class PackedWeights {
 public:
  /// Blocks of 64 columns one after the other; each block has all rows, a multiple of 32, in pairs: oneDNN's
  /// BA16a64b2a.
  static constexpr std::int64_t kColumns = 64, kRows = 32;
  /// The number of first uses of a version in one product at which it is not packed.
  static constexpr int kUsesBefore = 2;
  /// The limits of the store: at most so many bytes, and entries for so many weights (a weight has one entry
  /// for y = x wᵀ and one for dx = dy w).
  static constexpr std::size_t kMostBytes = std::size_t{256} << 20, kMostEntries = 1024;
  /// If a weight was not used in so many calls, its memory is given to another weight that needs memory. If
  /// no weight is that old, the other weight is not packed: weights that are used in turns and do not all
  /// have room would be packed for nothing.
  static constexpr std::uint64_t kOldAfter = 4096;

  explicit PackedWeights(Context* context) : context_(context) {}

  /// Returns b packed: b is (k, n) with rows (columns, if it is stored as its transpose) ld apart. The result
  /// is valid until the next call. Returns null if b is to be multiplied as it is.
  const bf16* find(KernelContext::State& state, const WeightMatrix& b, Stored stored, std::int64_t ld,
                   std::int64_t k, std::int64_t n);

  /// Columns from a multiple of 64 on, in the result of find().
  static const bf16* at_column(const bf16* packed, std::int64_t column, std::int64_t k) {
    return packed + column * rounded_up(k, kRows);
  }

  std::size_t bytes() const noexcept { return bytes_; }
  std::size_t entries() const noexcept { return entries_.size(); }
  bool is_packed(std::uint64_t weight) const;  ///< for any product
  std::size_t limit = kMostBytes;              ///< of bytes(); tests set less

 private:
  static constexpr std::int64_t rounded_up(std::int64_t x, std::int64_t to) { return (x + to - 1) / to * to; }
  struct Key {
    std::uint64_t weight;
    std::int64_t k, n;
    bool transposed;
    auto operator<=>(const Key&) const = default;
  };
  struct Entry {
    std::uint64_t version = 0, last_use = 0, no_room_at = 0;
    int uses = 0;  // of this version, at most kUsesBefore
    bool packed = false;
    Scratch memory{};
    std::size_t bytes = 0;
  };
  Entry& entry(const Key& key);
  bool make_room(Entry& of, std::size_t bytes);
  Context* context_;
  std::map<Key, Entry> entries_;
  std::size_t bytes_ = 0;
  std::uint64_t uses_ = 0;
};

}  // namespace weft::kernels
