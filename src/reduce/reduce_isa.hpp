// The kernels of one instruction set for `reduce`: a table of kernels, each table in a file of its own
// compiled for that set. Private to reduce.cpp, the kernel files and the tests, which run every table the
// machine can. Any thread.
//
// The kernel files are compiled with flags the running machine may not support. An inline function or
// template with external linkage that such a file emits could be the copy the linker keeps for the whole
// program; so this header and reduce_kernels.hpp and its parts use the C++ library for plain types only, and
// all code lies in an unnamed namespace.
#pragma once

#include <cstddef>
#include <cstdint>

namespace weft {

/// Combines in[0..n) element by element in the canonical order into every out[0..outs); n >= 1, count >= 0.
/// `scale` is premul_sum's.
using ReduceKernel = void (*)(const std::byte* const* in, int n, std::byte* const* out, int outs,
                              std::int64_t count, double scale) noexcept;
/// memcpy around the caches; the caller fences.
using StreamCopy = void (*)(std::byte* to, const std::byte* from, std::int64_t bytes) noexcept;

inline constexpr int kReduceDTypes = 17;  // all
inline constexpr int kReduceKinds = 12;   // all but the user's own

struct ReduceIsa {
  const char* name;
  /// [DType][ReduceOp::Kind]. Null: use the kernel of the next best table. Null in all tables: this
  /// reduction is not defined for this dtype.
  ReduceKernel kernel[kReduceDTypes][kReduceKinds];
  StreamCopy stream_copy;
};

extern const ReduceIsa kReduceBaseline;
extern const ReduceIsa kReduceAvx2;        // x86-64 with AVX2, FMA and F16C
extern const ReduceIsa kReduceAvx512;      // x86-64 with AVX-512 F, BW, DQ, VL
extern const ReduceIsa kReduceAvx512Bf16;  // and BF16: that dtype alone

inline constexpr int kReduceIsas = 4;
/// The tables this machine can run, best first: fills `to` (room for kReduceIsas) and returns how many.
int runnable_reduce_isas(const ReduceIsa** to) noexcept;

}  // namespace weft
