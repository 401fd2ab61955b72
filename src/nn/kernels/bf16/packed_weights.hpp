// Weights in bf16, packed as the matrix library multiplies them and kept from call to call. Private to
// cpu_*.cpp and tests; one per KernelContext, used by one thread at a time.
//
// The library packs the second matrix of a bf16 product in every call; with few tokens that takes as long as
// the product itself. A weight of which the caller says the version (WeightMatrix) is packed at its third
// use, since to pack it costs about what two uses gain: in inference, or if several micro-batches come
// between two steps of the optimizer. The bits of a product are the same either way.
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
  /// Blocks of 64 columns one after the other; in each all rows, a multiple of 32, by pairs: oneDNN's
  /// BA16a64b2a.
  static constexpr std::int64_t kColumns = 64, kRows = 32;
  /// Uses of a version in one product, the first ones, that do not pack it.
  static constexpr int kUsesBefore = 2;
  /// The limits of the store: at most so many bytes, and words on so many weights (each in y = x wᵀ and in
  /// dx = dy w is one).
  static constexpr std::size_t kMostBytes = std::size_t{256} << 20, kMostEntries = 1024;
  /// Memory of a weight that was not used in so many calls is given to another that needs it. If there is
  /// none, the other is not packed: weights that are used in turns and do not all have room would be packed
  /// for nothing.
  static constexpr std::uint64_t kOldAfter = 4096;

  explicit PackedWeights(Context* context) : context_(context) {}

  /// b, (k, n) with rows (columns, where it is stored as its transpose) ld apart, packed. Valid until the
  /// next call. Null where b is to be multiplied as it is.
  const bf16* find(KernelContext::State& state, const WeightMatrix& b, Stored stored, std::int64_t ld,
                   std::int64_t k, std::int64_t n);

  /// Columns from a multiple of 64 on, of what find() gave.
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
