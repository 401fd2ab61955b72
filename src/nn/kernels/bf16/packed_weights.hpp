// Weights in bf16, packed in the form that the matrix products read (gemm/gemm.hpp), and kept from call to
// call. Private to cpu_*.cpp and tests. There is one per KernelContext, which one thread at a time uses.
//
// A product packs its second matrix in every call. With few tokens the packing takes as long as the product
// itself. A weight whose version the caller gives (WeightMatrix) is packed at its third use, since packing it
// costs about as much as two uses gain. This happens in inference, or if there are several micro-batches
// between two steps of the optimizer. The bits of a product are equal either way.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>

#include "nn/kernels/gemm/gemm.hpp"
#include "nn/kernels/scratch.hpp"
#include "weft/nn/kernels.hpp"

namespace weft::kernels {

class PackedWeights {
 public:
  /// The number of first uses of a version in one product at which it is not packed.
  static constexpr int kUsesBefore = 2;
  /// The limits of the store: the most bytes, and entries for the most weights (a weight has one entry for y
  /// = x wᵀ and one for dx = dy w).
  static constexpr std::size_t kMostBytes = std::size_t{256} << 20, kMostEntries = 1024;
  /// If a weight was not used in this many calls, its memory is given to another weight that needs memory. If
  /// no weight is that old, the other weight is not packed. Weights that are used in turns and do not all
  /// have room would be packed without a gain.
  static constexpr std::uint64_t kOldAfter = 4096;

  explicit PackedWeights(Context* context) : context_(context) {}

  /// Returns b packed for state.bf16: b, (k, n), is the weight `of`. The result is valid until the next call.
  /// Returns null if b is to be multiplied as it is, as always if state.bf16 widens: packed floats would take
  /// twice the weight's memory.
  const float* find(KernelContext::State& state, const gemm::Matrix& b, const WeightMatrix& of,
                    std::int64_t k, std::int64_t n);

  std::size_t bytes() const noexcept { return bytes_; }
  std::size_t entries() const noexcept { return entries_.size(); }
  bool is_packed(std::uint64_t weight) const;  ///< for any product
  std::size_t limit = kMostBytes;              ///< of bytes(); tests set less

 private:
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
