// The loops of a reduction over elements and inputs: chunks, the tree, the kernel. Part of
// reduce_kernels.hpp, which explains the design.
#pragma once

#include <cstddef>
#include <cstdint>

#include "reduce/kernels/reductions.hpp"

namespace weft {
namespace {

// Calls f.at<W>(i) for every chunk: first in full width, then the remainder in half the width, a quarter, and
// so on, down to one element.
template <int W, class F>
WEFT_INLINE void chunks(std::int64_t count, const F& f, std::int64_t i = 0) {
  for (; i + W <= count; i += W) f.template at<W>(i);
  if constexpr (W > 1) chunks<(W > 4 ? W / 4 : 1)>(count, f, i);
}

// Each input is prefetched this many bytes ahead, which hides the latency at the start of a page. Nothing
// beyond the last element is prefetched, because another rank's part begins there, which lies in that rank's
// cache. Measured by `chrt -f 10 weft bench all_reduce --memory shared --dtype f32,bf16`. Smaller inputs lie
// in the first-level cache and gain nothing. f32 of 128 KB to 512 KB gains an eighth, bf16 of 32 MB a sixth.
constexpr std::int64_t kAheadBytes = 2048;
constexpr std::int64_t kAheadFrom = 32 << 10;

// Processes chunks with prefetch of their inputs. Returns the first element that is left for the loop without
// prefetch.
template <class R, class F>
WEFT_INLINE std::int64_t chunks_ahead(const std::byte* const* in, int n, std::int64_t count, const F& f) {
  constexpr std::int64_t kElement = sizeof(typename R::Stored), kAhead = kAheadBytes / kElement;
  std::int64_t i = 0;
  if (count * kElement < kAheadFrom) return i;
  // chunks per cache line
  constexpr int kChunks = R::kLanes * kElement < 64 ? 64 / (R::kLanes * kElement) : 1;
  for (; i + kChunks * R::kLanes + kAhead <= count; i += kChunks * R::kLanes) {
    for (int k = 0; k < n; ++k) __builtin_prefetch(in[k] + (i + kAhead) * kElement);
    for (int c = 0; c < kChunks; ++c) f.template at<R::kLanes>(i + c * R::kLanes);
  }
  return i;
}

// The tree over n <= 4 inputs, in registers.
template <class R, int n, int W>
WEFT_INLINE auto leaf(const std::byte* const* in, std::int64_t i) {
  if constexpr (n == 1) {
    return R::template load<W>(in[0], i);
  } else {
    constexpr int left = n > 2 ? 2 : 1;
    return R::template combine<W>(leaf<R, left, W>(in, i), leaf<R, n - left, W>(in + left, i));
  }
}

template <class R, class V>
WEFT_INLINE void store(V x, std::byte* to, std::int64_t i) {
  __builtin_memcpy(to + i * static_cast<std::int64_t>(sizeof(typename R::Stored)), &x, sizeof x);
}

// Finishes elements [first, first + count) one at a time, for a chunk in which some sums, in double or float,
// are not finite.
template <class R>
[[gnu::noinline, gnu::cold]] void finish_rescued(const std::byte* const* in, int n, std::byte* const* out,
                                                 int outs, std::int64_t first, int count) {
  if constexpr (R::kRescues) {
    for (std::int64_t i = first; i < first + count; ++i) {
      const auto total = R::sum_of_one(in, n, i, 1);
      const auto x = total - total == 0 ? R::template finish<1>(total, R::divisor(n)) : R::rescued(in, n, i);
      for (int j = 0; j < outs; ++j) store<R>(x, out[j], i);
    }
  }
}

// Reduces n <= 4 inputs directly to all outputs. The pointers are copied, because the compiler then knows
// that stores cannot change them.
template <class R, int n, int outs>
struct Direct {
  const std::byte* in[n];
  std::byte* out[outs];
  Divisor<typename R::Quotient> by;

  template <int W>
  WEFT_INLINE void at(std::int64_t i) const {
    const auto total = leaf<R, n, W>(in, i);
    if constexpr (R::kRescues) {
      const auto average = R::template divided_chunk<W>(total, by);
      if (R::template plain<W>(average)) [[likely]]
        return put(R::template rounded<W>(average), i);
      if (!R::template kByHardware<W> || R::template may_be_infinite<W>(average)) return rescue(i, W);
    }
    put(R::template finish<W>(total, by), i);
  }

  // Copies the pointers once more, because stores could change objects whose address a function gets.
  [[gnu::noinline, gnu::cold]] static void rescue_copy(Direct copy, std::int64_t i, int count) {
    finish_rescued<R>(copy.in, n, copy.out, outs, i, count);
  }
  WEFT_INLINE void rescue(std::int64_t i, int count) const {
    if constexpr (R::kRescues) rescue_copy(*this, i, count);
  }

  template <class V>
  WEFT_INLINE void put(V x, std::int64_t i) const {
    for (int j = 0; j < outs; ++j) store<R>(x, out[j], i);
  }

  static void run(const std::byte* const* in, std::byte* const* out, std::int64_t count) {
    Direct d{};
    for (int k = 0; k < n; ++k) d.in[k] = in[k];
    for (int j = 0; j < outs; ++j) d.out[j] = out[j];
    d.by = R::divisor(n);
    chunks<R::kLanes>(count, d, chunks_ahead<R>(d.in, n, count, d));
  }
};

template <class R, int n>
struct LeafToBlock {
  const std::byte* in[n];
  std::int64_t first;
  typename R::Acc* to;
  template <int W>
  WEFT_INLINE void at(std::int64_t i) const {
    put_chunk(leaf<R, n, W>(in, first + i), to + i);
  }
  static void run(const std::byte* const* in, std::int64_t first, int count, typename R::Acc* to) {
    LeafToBlock b{};
    for (int k = 0; k < n; ++k) b.in[k] = in[k];
    b.first = first;
    b.to = to;
    chunks<R::kLanes>(count, b);
  }
};

// Multiplies each element of a single input.
template <class R>
struct ScaledToBlock {
  const std::byte* in;
  std::int64_t first;
  typename R::Acc factor;
  typename R::Acc* to;
  template <int W>
  WEFT_INLINE void at(std::int64_t i) const {
    put_chunk(R::template scaled<W>(R::template load<W>(in, first + i), factor), to + i);
  }
};

template <class R>
struct CombineBlocks {
  typename R::Acc* left;  // becomes left ⊕ right
  const typename R::Acc* right;
  template <int W>
  WEFT_INLINE void at(std::int64_t i) const {
    typename R::template Chunk<W> a, b;
    take_chunk(a, left + i);
    take_chunk(b, right + i);
    put_chunk(R::template combine<W>(a, b), left + i);
  }
};

template <class R>
struct FinishBlock {
  const typename R::Acc* block;
  const std::byte* const* in;
  int n;
  std::byte* const* out;
  int outs;
  std::int64_t first;
  Divisor<typename R::Quotient> by;
  template <int W>
  WEFT_INLINE void at(std::int64_t i) const {
    typename R::template Chunk<W> a;
    take_chunk(a, block + i);
    if constexpr (R::kRescues) {
      if (R::template may_be_infinite<W>(R::template divided_chunk<W>(a, by))) [[unlikely]]
        return finish_rescued<R>(in, n, out, outs, first + i, W);
    }
    const auto x = R::template finish<W>(a, by);
    for (int j = 0; j < outs; ++j) store<R>(x, out[j], first + i);
  }
};

// The tree over any number of inputs, for `count` <= kBlock elements from `first` on. Uses one block of stack
// for each doubling of n.
template <class R>
void tree(const std::byte* const* in, int n, std::int64_t first, int count, typename R::Acc* to,
          double scale) noexcept {
  if constexpr (R::kScales) {
    if (n == 1) return chunks<R::kLanes>(count, ScaledToBlock<R>{in[0], first, R::factor(scale), to});
  } else {
    if (n == 1) return LeafToBlock<R, 1>::run(in, first, count, to);
  }
  if constexpr (R::kFewShapes) {
    if (n == 2) return LeafToBlock<R, 2>::run(in, first, count, to);
  }
  if constexpr (R::kManyShapes) {
    if (n == 4) return LeafToBlock<R, 4>::run(in, first, count, to);
  }
  int left = 1;
  while (left * 2 < n) left *= 2;
  alignas(kVectorBytes) typename R::Acc right[R::kBlock];
  tree<R>(in, left, first, count, to, scale);
  tree<R>(in + left, n - left, first, count, right, scale);
  chunks<R::kLanes>(count, CombineBlocks<R>{to, right});
}

// Two: the reduction to use for two inputs, which gives the same bits in a faster way.
template <class R, class Two = R>
void kernel(const std::byte* const* in, int n, std::byte* const* out, int outs, std::int64_t count,
            double scale) noexcept {
  if constexpr (R::kFewShapes) {
    if (n == 2 && outs == 1) return Direct<Two, 2, 1>::run(in, out, count);
    if (n == 2 && outs == 2) return Direct<Two, 2, 2>::run(in, out, count);
  }
  if constexpr (R::kManyShapes) {
    if (n == 3 && outs == 1) return Direct<R, 3, 1>::run(in, out, count);
    if (n == 3 && outs == 3) return Direct<R, 3, 3>::run(in, out, count);
    if (n == 4 && outs == 1) return Direct<R, 4, 1>::run(in, out, count);
    if (n == 4 && outs == 4) return Direct<R, 4, 4>::run(in, out, count);
  }
  alignas(kVectorBytes) typename R::Acc block[R::kBlock];
  for (std::int64_t first = 0; first < count; first += R::kBlock) {
    const int here = count - first < R::kBlock ? static_cast<int>(count - first) : R::kBlock;
    tree<R>(in, n, first, here, block, scale);
    chunks<R::kLanes>(here, FinishBlock<R>{block, in, n, out, outs, first, R::divisor(n)});
  }
}

// For elements that consist of `parts` adjacent smaller elements.
template <class R, int parts, class Two = R>
void kernel_of_parts(const std::byte* const* in, int n, std::byte* const* out, int outs, std::int64_t count,
                     double scale) noexcept {
  kernel<R, Two>(in, n, out, outs, count * parts, scale);
}

}  // namespace
}  // namespace weft
