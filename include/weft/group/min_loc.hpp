// The least and the largest value of all ranks, and where they are: MPI's MINLOC and MAXLOC.
#pragma once

#include "weft/backends/call.hpp"
#include "weft/group/process_group.hpp"

namespace weft {

/// For each i: least[i] becomes the least of values[i] of all ranks, and where[i] the index that came with
/// it. All ranks get the same. `values` and `least` are of one dtype, f64, f32, i64 or i32; `indices` and
/// `where` are i64, any numbers: a rank's offset, or its own number. All four have the same count, equal on
/// all ranks. In place where `least` is `values`, or `where` is `indices`; outputs may overlap inputs in any
/// way, but not each other.
///
/// If values are equal, the lowest index wins. Values are ordered as by ReduceOp::min: -0 before +0, and a
/// NaN before all others; then least[i] is the one quiet NaN, and where[i] the lowest index of a NaN.
///
/// Waits until it is done: one all_reduce of 16 bytes for each element, by a function of weft's own, and a
/// pass over the buffers before and after it. Errors of the call name that all_reduce:
/// `all_reduce c128 … user "min_loc of f32"`. On the host only. Only the deadline of `options` is used.
/// Throws bad_argument and unsupported before anything is sent.
void min_loc(ProcessGroup& group, const ConstBuffer& values, const ConstBuffer& indices, const Buffer& least,
             const Buffer& where, const CallOptions& options = {});
/// In place.
inline void min_loc(ProcessGroup& group, const Buffer& values, const Buffer& indices,
                    const CallOptions& options = {}) {
  min_loc(group, values, indices, values, indices, options);
}

/// The same of the largest values, ordered as by ReduceOp::max: +0 above -0, and a NaN above all others.
void max_loc(ProcessGroup& group, const ConstBuffer& values, const ConstBuffer& indices,
             const Buffer& largest, const Buffer& where, const CallOptions& options = {});
/// In place.
inline void max_loc(ProcessGroup& group, const Buffer& values, const Buffer& indices,
                    const CallOptions& options = {}) {
  max_loc(group, values, indices, values, indices, options);
}

}  // namespace weft
