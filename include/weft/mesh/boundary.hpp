// Where parallel layers meet: a redistribution on one axis in forward, its adjoint in backward. Collective
// among the ranks of the axis; one thread per rank.
#pragma once

#include <string_view>

#include "weft/mesh/redistribute.hpp"

namespace weft {

/// (axis, from, to). A gradient's layout says what it is, and backward brings it to what `from` calls for, so
/// the adjoint is right for each form the gradient may come in:
///
///   value       its gradient may come as                                  and is given on as
///   Replicate   Replicate, or Partial(sum) where each rank used           Replicate
///               the value for its own part of the work
///   Shard(d)    Shard(d)                                                  Shard(d)
///   Partial     Replicate: every contribution has the sum's gradient      Replicate
///
/// The well-known ones have names:
///
/// - enter (Megatron-LM's f): forward the identity; backward Partial → Replicate, an all-reduce
/// - leave (g): forward Partial → Replicate, an all-reduce; backward the identity
/// - gather(d): forward Shard(d) → Replicate, an all-gather; backward Partial → Shard(d), a reduce-scatter, or
///   Replicate → Shard(d), a slice
/// - scatter(d): forward Partial → Shard(d), a reduce-scatter, or Replicate → Shard(d), a slice; backward
///   Shard(d) → Replicate, an all-gather
///
/// A negative dimension counts from the end: gather(-1) for the features of whatever tensor comes.
/// f and g are those of Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3. On an axis of one rank both
/// directions only restate the layout. Every other axis is left as it is.
class Boundary {
 public:
  /// `axis`: a sub-mesh of one axis. Throws layout for a Partial that is not a sum: its adjoint is another
  /// one.
  Boundary(DeviceMesh axis, Placement from, Placement to);
  static Boundary enter(DeviceMesh axis) { return {std::move(axis), Replicate{}, Replicate{}}; }
  static Boundary leave(DeviceMesh axis) { return {std::move(axis), Partial{}, Replicate{}}; }
  static Boundary gather(DeviceMesh axis, int dim) { return {std::move(axis), Shard{dim}, Replicate{}}; }
  /// `from`: Partial (reduce-scatter) or Replicate (slice).
  static Boundary scatter(DeviceMesh axis, int dim, Placement from) {
    return {std::move(axis), from, Shard{dim}};
  }

  /// x, which must have `from` on the axis, with `to`. Throws layout: `<what> is Replicate on tp=2; expected
  /// Shard(2)`. `what` names the layer and the tensor: "layers.0.mlp: x". A plain tensor passes unchanged
  /// where the axis has one rank.
  Tensor forward(const Tensor& x, std::string_view what) const;
  /// dy in one of the forms above for `to`; gives dx in the form for `from`. Throws layout naming `what` and
  /// the axis.
  Tensor backward(const Tensor& dy, std::string_view what) const;

  const DeviceMesh& axis() const noexcept { return axis_; }
  const Placement& from() const noexcept { return from_; }
  const Placement& to() const noexcept { return to_; }

 private:
  DeviceMesh axis_;
  Placement from_, to_;
};

}  // namespace weft
