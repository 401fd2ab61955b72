// Chooses the kernels of the best instruction set once, and calls them.
#include "reduce/reduce.hpp"

#include <algorithm>
#include <cassert>
#include <cstring>

#include "base/cpu/isa.hpp"
#include "base/mutant.hpp"
#include "reduce/reduce_isa.hpp"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace weft {

using Kind = ReduceOp::Kind;

// The rows and columns of WEFT_REDUCE_TABLE.
static_assert(static_cast<int>(DType::f64) == 0 && static_cast<int>(DType::f32) == 1 &&
              static_cast<int>(DType::f16) == 2 && static_cast<int>(DType::bf16) == 3 &&
              static_cast<int>(DType::i8) == 4 && static_cast<int>(DType::i16) == 5 &&
              static_cast<int>(DType::i32) == 6 && static_cast<int>(DType::i64) == 7 &&
              static_cast<int>(DType::u8) == 8 && static_cast<int>(DType::u16) == 9 &&
              static_cast<int>(DType::u32) == 10 && static_cast<int>(DType::u64) == 11 &&
              static_cast<int>(DType::boolean) == 12 && static_cast<int>(DType::f8e4m3) == 13 &&
              static_cast<int>(DType::f8e5m2) == 14 && static_cast<int>(DType::c64) == 15 &&
              static_cast<int>(DType::c128) == 16 && kDTypeCount == kReduceDTypes);
static_assert(static_cast<int>(Kind::sum) == 0 && static_cast<int>(Kind::avg) == 1 &&
              static_cast<int>(Kind::min) == 2 && static_cast<int>(Kind::max) == 3 &&
              static_cast<int>(Kind::prod) == 4 && static_cast<int>(Kind::premul_sum) == 5 &&
              static_cast<int>(Kind::bit_and) == 6 && static_cast<int>(Kind::bit_or) == 7 &&
              static_cast<int>(Kind::bit_xor) == 8 && static_cast<int>(Kind::logical_and) == 9 &&
              static_cast<int>(Kind::logical_or) == 10 && static_cast<int>(Kind::logical_xor) == 11 &&
              static_cast<int>(Kind::user) == kReduceKinds && kReduceKindCount == kReduceKinds + 1);

namespace {

// For each dtype and kind, the best kernel that cpu_isa() allows.
[[gnu::noinline]] ReduceIsa choose() noexcept {
  const ReduceIsa* all[kReduceIsas];
  const int n = runnable_reduce_isas(all);
  ReduceIsa chosen = *all[0];
  for (int i = 1; i < n; ++i)
    for (int d = 0; d < kReduceDTypes; ++d)
      for (int k = 0; k < kReduceKinds; ++k)
        if (chosen.kernel[d][k] == nullptr) chosen.kernel[d][k] = all[i]->kernel[d][k];
  return chosen;
}
const ReduceIsa& best() noexcept {
  static const ReduceIsa chosen = choose();
  return chosen;
}

ReduceKernel kernel_of(const ReduceIsa& isa, DType dtype, Kind kind) noexcept {
  return isa.kernel[static_cast<int>(dtype)][static_cast<int>(kind)];
}

// Results larger than the shared cache are reduced block by block into a buffer in the first-level cache, and
// written from there past the caches. Each block ends at a place at which the first output is aligned to a
// cache line. Blocks are short, so that the CPU reads the next block while it still writes this block.
// Prefetching instead would be three times slower.
constexpr int kStreamBlock = 1024;   // bytes
constexpr int kStreamInputs = 64;    // more inputs are reduced without streaming
constexpr int kStreamLeast = 65536;  // bytes; smaller results gain nothing

// If an output is also an input, it is in the cache when it is written, and writing past the cache would take
// twice the time.
[[gnu::noinline]] bool worth_streaming(std::span<const std::byte* const> in, std::span<std::byte* const> out,
                                       std::int64_t bytes) noexcept {
  if (bytes < kStreamLeast || in.size() > kStreamInputs || out.empty()) return false;
  return std::none_of(out.begin(), out.end(),
                      [&](const std::byte* o) { return std::find(in.begin(), in.end(), o) != in.end(); });
}

[[gnu::noinline]] void reduce_streaming(const ReduceIsa& isa, ReduceKernel kernel, double scale,
                                        std::int64_t element_bytes, std::span<const std::byte* const> in,
                                        std::span<std::byte* const> out, std::int64_t count) noexcept {
  alignas(64) std::byte block[kStreamBlock];
  std::byte* const block_out[1] = {block};
  const std::byte* in_here[kStreamInputs];
  const std::int64_t bytes = count * element_bytes;
  std::int64_t here =
      kStreamBlock - static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(out[0]) & 63u);
  here -= here % element_bytes;  // complex numbers need not begin at multiples of their size
  for (std::int64_t first = 0; first < bytes; first += here, here = kStreamBlock) {
    here = std::min(here, bytes - first);
    for (std::size_t k = 0; k < in.size(); ++k) in_here[k] = in[k] + first;
    kernel(in_here, static_cast<int>(in.size()), block_out, 1, here / element_bytes, scale);
    for (std::byte* const to : out) isa.stream_copy(to + first, block, here);
  }
  stream_fence();
}

// Applies a user's function, a block at a time, to the elements as they are stored.
constexpr std::int64_t kUserBlock = 2048;  // bytes

struct UserTree {
  const UserReduction& user;
  DType dtype;
  const std::byte* const* in;

  // Reduces inputs [k, k + n), bytes [first, first + bytes), into `to`. It needs one block of stack for each
  // doubling of n.
  void run(int k, int n, std::int64_t first, std::int64_t bytes, std::byte* to) const noexcept {
    if (n == 1) {
      std::memcpy(to, in[k] + first, static_cast<std::size_t>(bytes));
    } else if (n == 2) {
      combine(in[k] + first, in[k + 1] + first, to, bytes);
    } else {
      int left = 2;
      while (left * 2 < n) left *= 2;
      alignas(64) std::byte right[kUserBlock];
      run(k, left, first, bytes, to);
      run(k + left, n - left, first, bytes, right);
      combine(to, right, to, bytes);
    }
  }
  void combine(const std::byte* left, const std::byte* right, std::byte* to,
               std::int64_t bytes) const noexcept {
    user.combine(left, right, to, bytes / size_bytes(dtype), dtype);
  }
};

[[gnu::noinline]] void reduce_user(const UserReduction& user, DType dtype,
                                   std::span<const std::byte* const> in, std::span<std::byte* const> out,
                                   std::int64_t bytes) noexcept {
  alignas(64) std::byte block[kUserBlock];
  for (std::int64_t first = 0; first < bytes; first += kUserBlock) {
    const std::int64_t here = std::min(kUserBlock, bytes - first);
    UserTree{user, dtype, in.data()}.run(0, static_cast<int>(in.size()), first, here, block);
    for (std::byte* const to : out) std::memcpy(to + first, block, static_cast<std::size_t>(here));
  }
}

}  // namespace

int runnable_reduce_isas(const ReduceIsa** to) noexcept {
  int n = 0;
#if defined(__x86_64__)
  const CpuIsa isa = cpu_isa();
  if (isa >= CpuIsa::avx512_bf16) to[n++] = &kReduceAvx512Bf16;
  if (isa >= CpuIsa::avx512) to[n++] = &kReduceAvx512;
  if (isa >= CpuIsa::avx2) to[n++] = &kReduceAvx2;
#endif
  to[n++] = &kReduceBaseline;
  return n;
}

bool can_reduce(DType dtype, Kind kind) noexcept {
  if (kind == Kind::user) return dtype != DType::f8e4m3 && dtype != DType::f8e5m2;
  return kernel_of(kReduceBaseline, dtype, kind) != nullptr;
}

void reduce(DType dtype, const ReduceOp& op, std::span<const std::byte* const> in,
            std::span<std::byte* const> out, std::int64_t count, bool stream) noexcept {
  assert(can_reduce(dtype, op.kind) && !in.empty() && count >= 0);
  const Kind kind = WEFT_MUTANT("avg_undivided") && op.kind == Kind::avg ? Kind::sum : op.kind;
  const std::int64_t bytes = count * size_bytes(dtype);
  if (kind == Kind::user) [[unlikely]]
    return reduce_user(*op.user, dtype, in, out, bytes);
  const ReduceIsa& isa = best();
  const ReduceKernel kernel = kernel_of(isa, dtype, kind);
  const int n = static_cast<int>(in.size()), outs = static_cast<int>(out.size());
  if (stream && worth_streaming(in, out, bytes)) [[unlikely]]
    return reduce_streaming(isa, kernel, op.scale, size_bytes(dtype), in, out, count);
  kernel(in.data(), n, out.data(), outs, count, op.scale);
}

void copy_bytes(std::byte* to, const std::byte* from, std::int64_t bytes, bool stream) noexcept {
  assert(bytes >= 0);
  if (stream && bytes >= kStreamLeast) {
    stream_bytes(to, from, bytes);
    stream_fence();
  } else if (bytes > 0) {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
}

void stream_bytes(std::byte* to, const std::byte* from, std::int64_t bytes) noexcept {
  best().stream_copy(to, from, bytes);
}

// Only a fence orders non-temporal stores.
void stream_fence() noexcept {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace weft
