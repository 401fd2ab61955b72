// The operation on a tensor between two modules. There is an interface, and its most common kind: a
// redistribution along axes of a mesh in forward and its adjoint in backward. Collective among the ranks of
// the axes. One thread per rank.
#pragma once

#include <memory>

#include "weft/mesh/redistribute.hpp"
#include "weft/mesh/tensor_name.hpp"

namespace weft {

/// Immutable, so several modules may share one Boundary. Examples of other kinds: the exchange of halos, the
/// dispatch of tokens to experts, a gather in another dtype.
class Boundary {
 public:
  virtual ~Boundary() = default;

  /// Begins to convert x to its form after the boundary. Throws layout if x is not in the form that the
  /// boundary expects: `"layers.0.mlp": x is Replicate on tp=2; expected Shard(2)`. `what` is the name of x
  /// in the text.
  virtual Transfer start_forward(const Tensor& x, const TensorName& what) const = 0;
  /// Begins the adjoint, which converts the gradient of the output to the gradient of the input.
  virtual Transfer start_backward(const Tensor& dy, const TensorName& what) const = 0;
  /// The layout of the output for an input with this layout. Pure arithmetic. Throws the layout errors of
  /// start_forward().
  virtual LayoutRef out_layout(const LayoutRef& in, const TensorName& what) const = 0;

  /// Like start_forward() and start_backward(), but wait for the result.
  Tensor forward(const Tensor& x, const TensorName& what) const { return start_forward(x, what).finish(); }
  Tensor backward(const Tensor& dy, const TensorName& what) const {
    return start_backward(dy, what).finish();
  }

 protected:
  Boundary() = default;
  Boundary(const Boundary&) = default;
  Boundary& operator=(const Boundary&) = default;
};

using BoundaryRef = std::shared_ptr<const Boundary>;

/// A redistribution from placement `from` to placement `to` along `axes`. The layout of a gradient states its
/// form. Backward redistributes the gradient to the form that `from` needs. So the adjoint is right for every
/// form of the gradient:
///
///   value       its gradient may come as                                  and is given on as
///   Replicate   Replicate, or Partial(sum) where each rank used           Replicate
///               the value for its own part of the work
///   Shard(d)    Shard(d)                                                  Shard(d)
///   Partial     Replicate: every contribution has the sum's gradient      Replicate
///
/// On axes of one rank, forward and backward only change the layout, and a plain tensor passes unchanged. The
/// placements on all other axes do not change.
class RedistributeBoundary final : public Boundary {
 public:
  /// `axes`: a sub-mesh of one or more axes, which all have the same placement. If several of them shard a
  /// dimension, they nest in their order. A negative dimension counts from the end. Throws layout for a
  /// Partial that is not a sum, because its adjoint differs.
  RedistributeBoundary(DeviceMesh axes, Placement from, Placement to);

  Transfer start_forward(const Tensor& x, const TensorName& what) const override;
  /// Throws layout if dy is in none of the forms above for `to`.
  Transfer start_backward(const Tensor& dy, const TensorName& what) const override;
  LayoutRef out_layout(const LayoutRef& in, const TensorName& what) const override;

  const DeviceMesh& axes() const noexcept { return axes_; }
  const Placement& from() const noexcept { return from_; }
  const Placement& to() const noexcept { return to_; }

 private:
  DeviceMesh axes_;
  Placement from_, to_;
};

/// The usual boundaries. f and g are those of Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3. A
/// negative `dim` counts from the end: -1 is the last dimension (the features) of any tensor.
namespace boundary {

/// f: forward the identity; backward Partial → Replicate, an all-reduce.
BoundaryRef enter(const DeviceMesh& axes);
/// g: forward Partial → Replicate, an all-reduce; backward the identity.
BoundaryRef leave(const DeviceMesh& axes);
/// Forward Shard(dim) → Replicate, an all-gather; backward Partial → Shard(dim), a reduce-scatter, or
/// Replicate → Shard(dim), a slice.
BoundaryRef gather(const DeviceMesh& axes, int dim);
/// Forward Partial → Shard(dim), a reduce-scatter, or Replicate → Shard(dim), a slice, as `from` says;
/// backward Shard(dim) → Replicate, an all-gather.
BoundaryRef scatter(const DeviceMesh& axes, int dim, const Placement& from);

}  // namespace boundary

}  // namespace weft
