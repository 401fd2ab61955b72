// Sums of boxes of elements between strided memories, and copies past the caches. The functions have no
// state; any thread may call them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "host/strided/loops.hpp"
#include "weft/base/dtype.hpp"

namespace weft {

/// Like CopyRuns, but writes past the caches, for runs of at least some hundred bytes; call stream_fence()
/// before the result is published (reduce/reduce.hpp).
void stream_runs(const std::byte* in, std::byte* out, std::int64_t count, std::int64_t in_step,
                 std::int64_t out_step, std::int64_t run);

/// out += in, element by element in order, in the host's memory. `in` has `dtype`, which must be addable
/// (can_add); `out` has sum_dtype(dtype).
void add_to(const Loops& loops, DType dtype, const std::byte* in, std::byte* out);
/// out = in; `in` has `dtype`, and `out` has sum_dtype(dtype), which represents all its values.
void widen_to(const Loops& loops, DType dtype, const std::byte* in, std::byte* out);
/// out = in, rounded; `in` has sum_dtype(dtype), and `out` has `dtype`.
void round_to(const Loops& loops, DType dtype, const std::byte* in, std::byte* out);

/// Returns whether add_to() can add this dtype: true for floating-point and integer dtypes.
bool can_add(DType dtype) noexcept;
/// The dtype in which sums of `dtype` are kept: f32 for bf16 and f16, otherwise `dtype` itself.
DType sum_dtype(DType dtype) noexcept;

}  // namespace weft
