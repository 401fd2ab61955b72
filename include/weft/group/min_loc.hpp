// The least and the largest value of all ranks, and their indices, as with MPI's MINLOC and MAXLOC.
#pragma once

#include "weft/backends/call.hpp"
#include "weft/group/process_group.hpp"

namespace weft {

/// For each i: least[i] becomes the least values[i] of all ranks, and where[i] becomes the indices[i] of the
/// rank with that value. All ranks get the same results. `values` and `least` have one dtype: f64, f32, i64
/// or i32. `indices` and `where` are i64. An index may be any number, such as an element's offset or the
/// rank's own number. All four buffers have the same count, on all ranks. `least` may be the same memory as
/// `values`, and `where` the same as `indices`. Outputs may overlap inputs in any way, but not each other.
///
/// If values are equal, the result has the lowest index. Values are ordered as by ReduceOp::min: -0 before
/// +0, and a NaN before all others. If there is a NaN, least[i] is the quiet NaN, and where[i] is the lowest
/// index of a NaN.
///
/// Waits until the call is done. It costs one all_reduce of 16 bytes per element, with a reduction of weft's
/// own, and a pass over the buffers before and after the all_reduce. Errors of the call name that all_reduce:
/// `all_reduce c128 … user "min_loc of f32"`. For host memory only. It uses only the deadline of `options`.
/// Throws bad_argument and unsupported before anything is sent.
void min_loc(ProcessGroup& group, const ConstBuffer& values, const ConstBuffer& indices, const Buffer& least,
             const Buffer& where, const CallOptions& options = {});
/// In place.
inline void min_loc(ProcessGroup& group, const Buffer& values, const Buffer& indices,
                    const CallOptions& options = {}) {
  min_loc(group, values, indices, values, indices, options);
}

/// Like min_loc(), for the largest values. They are ordered as by ReduceOp::max: +0 above -0, and a NaN above
/// all others.
void max_loc(ProcessGroup& group, const ConstBuffer& values, const ConstBuffer& indices,
             const Buffer& largest, const Buffer& where, const CallOptions& options = {});
/// In place.
inline void max_loc(ProcessGroup& group, const Buffer& values, const Buffer& indices,
                    const CallOptions& options = {}) {
  max_loc(group, values, indices, values, indices, options);
}

}  // namespace weft
