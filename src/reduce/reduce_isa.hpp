// The kernels of one instruction set for `reduce`, as a table. Each table is in a separate file that is
// compiled for its set. Private to reduce.cpp, the kernel files and the tests, which run every table that the
// machine can run. Any thread.
//
// The kernel files are compiled with flags that the running machine may not support. If such a file emitted
// an inline function or template with external linkage, the linker could keep that copy for the whole
// program. So this header, reduce_kernels.hpp and its parts use only plain types of the C++ library, and all
// their code lies in an unnamed namespace.
#pragma once

#include <cstddef>
#include <cstdint>

namespace weft {

/// Combines in[0..n) element by element, in the canonical order, into every out[0..outs); n >= 1, count >= 0.
/// `scale` is the scale of premul_sum.
using ReduceKernel = void (*)(const std::byte* const* in, int n, std::byte* const* out, int outs,
                              std::int64_t count, double scale) noexcept;
/// Like memcpy, but writes past the caches; the caller must fence.
using StreamCopy = void (*)(std::byte* to, const std::byte* from, std::int64_t bytes) noexcept;

inline constexpr int kReduceDTypes = 17;  // all
inline constexpr int kReduceKinds = 12;   // all except the user's own

struct ReduceIsa {
  const char* name;
  /// [DType][ReduceOp::Kind]. Null: use the kernel of the next best table. If it is null in all tables, this
  /// reduction is not defined for this dtype.
  ReduceKernel kernel[kReduceDTypes][kReduceKinds];
  StreamCopy stream_copy;
};

extern const ReduceIsa kReduceBaseline;
extern const ReduceIsa kReduceAvx2;        // x86-64 with AVX2, FMA and F16C
extern const ReduceIsa kReduceAvx512;      // x86-64 with AVX-512 F, BW, DQ, VL
extern const ReduceIsa kReduceAvx512Bf16;  // also with BF16; only kernels for bf16

inline constexpr int kReduceIsas = 4;
/// Writes the tables that this machine can run to `to`, which must have room for kReduceIsas, the best first.
/// Returns their number.
int runnable_reduce_isas(const ReduceIsa** to) noexcept;

}  // namespace weft
