// Sums of boxes of elements between strided memories, and copies around the caches. No state; any thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "host/strided/loops.hpp"
#include "weft/base/dtype.hpp"

namespace weft {

/// CopyRuns around the caches, for runs of some hundred bytes and more; stream_fence() comes before what is
/// published (reduce/reduce.hpp).
void stream_runs(const std::byte* in, std::byte* out, std::int64_t count, std::int64_t in_step,
                 std::int64_t out_step, std::int64_t run);

/// out += in, element by element in order; in the host's memory. `in` is of `dtype`, which can be added
/// (can_add), `out` of sum_dtype(dtype).
void add_to(const Loops& loops, DType dtype, const std::byte* in, std::byte* out);
/// out = in, where `in` is of `dtype` and `out` of sum_dtype(dtype), which has all its values.
void widen_to(const Loops& loops, DType dtype, const std::byte* in, std::byte* out);
/// out = in, where `in` is of sum_dtype(dtype) and `out` of `dtype`: rounded.
void round_to(const Loops& loops, DType dtype, const std::byte* in, std::byte* out);

/// Floating-point and integer dtypes.
bool can_add(DType dtype) noexcept;
/// The dtype in which sums of `dtype` are kept: f32 for bf16 and f16, itself otherwise.
DType sum_dtype(DType dtype) noexcept;

}  // namespace weft
