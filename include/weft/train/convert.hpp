// Converts elements between floating dtypes: masters to the weights that layers read, gradients of f16 as
// f32.
#pragma once

#include "weft/base/buffer.hpp"
#include "weft/host/compute.hpp"

namespace weft {

/// out = in, each element rounded once to the dtype of `out`, to nearest even; values beyond its range become
/// infinite, and a NaN stays a NaN. On the host it converts between any two of f64, f32, bf16 and f16, with
/// the threads of `compute`; their number does not change the result. On a device it converts between f32 and
/// bf16, on the stream of `compute` (the host does not wait). If both have one dtype, it copies. Used by the
/// thread that uses `compute`.
///
/// Throws bad_argument if the numbers of elements differ, a dtype is none of these dtypes, or memory overlaps
/// or is not on the device of `compute`; unsupported for f64 or f16 to another dtype on a device.
void convert(Compute& compute, const ConstBuffer& in, const Buffer& out);

}  // namespace weft
