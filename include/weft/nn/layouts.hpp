// Checks and rules of layouts that several layers share. Layers outside the library may use them, too. Pure
// arithmetic, any thread.
//
// Axes of one rank are never checked, because all placements mean the same there.
#pragma once

#include <string>
#include <string_view>

#include "weft/mesh/layout.hpp"
#include "weft/nn/module.hpp"

namespace weft::layouts {

/// `"layers.0.mlp": x`, the name of a layer's tensor in errors.
TensorName named(const Module& module, std::string_view tensor);

/// `tp=2`
std::string axis_name(const Layout& layout, int axis);

/// Whether both layouts have the same mesh and global shape, and every rank holds the same elements in the
/// same form. They have equal placements on every axis of more than one rank, and equal nesting and segments
/// of the dimensions that are cut. Two null layouts are equal. A null layout equals any layout over a mesh of
/// one rank.
bool same(const LayoutRef& a, const LayoutRef& b);

/// Throws layout unless same(): `<what> is Shard(1) on tp=2; expected Replicate (<why>)`, for the first axis
/// that differs.
void expect_same(const TensorName& what, const LayoutRef& got, const LayoutRef& expected,
                 std::string_view why);

/// Returns x in a form that the layer with weight `weight` accepts. If both are plain, it returns x. If only
/// one of the two is plain, and the other lies over a mesh of several ranks, it throws layout. Over a mesh of
/// one rank, the result is x with a replicated layout.
Tensor beside(const Module& module, std::string_view tensor, const Tensor& x, const Parameter& weight);

/// Throws layout if x is Partial on any axis, or sharded in its last dimension: `<what> is Partial(sum) on
/// tp=2; a norm needs whole values …`. For norms and losses. With `last` false, the last dimension may be
/// sharded: for nonlinearities.
void expect_whole(const TensorName& what, const Tensor& x, std::string_view layer, bool last = true);
/// Like the function above, but dimension `dim` must not be sharded.
void expect_whole_dim(const TensorName& what, const Tensor& x, std::string_view layer, int dim);

/// The layout of the gradient of a weight with layout `weight`, which the layer applies to all of x. It is
/// Partial(sum) on axes that split x or where x is Partial. On other axes it is like the weight. `features`:
/// the dimension of x that the weight itself splits. A split of this dimension does not count. -1: none.
LayoutRef gradient_of(const LayoutRef& weight, const LayoutRef& x, int features);

/// The layout of y = x wᵀ by the rule of Linear (weft/nn/linear.hpp), one axis at a time. x: (…, in), weight:
/// (out, in). Throws layout if x does not fit the weight: `<what> is Shard(1) on tp=2; expected Replicate,
/// since the weight is Shard(0)`. Returns null if x is plain. `features`: the feature dimension of x and y.
/// -1: the last.
LayoutRef linear_output(const TensorName& what, const LayoutRef& x, const LayoutRef& weight,
                        int features = -1);
/// Throws layout unless the features of y (the last dimension, or the given one) are sharded exactly like the
/// bias, including nesting and segments.
void expect_bias(const TensorName& what, const LayoutRef& y, const LayoutRef& bias, int features = -1);
/// The layout of dx = dy w. It is Partial(sum) on axes that split the columns of y, because each rank has
/// only the contribution of its own columns. On other axes it is like x.
LayoutRef linear_input_gradient(const LayoutRef& x, const LayoutRef& weight);
/// The layout that a gradient of y must have: the layout of y, with Replicate in place of Partial. The
/// gradient of every contribution is the gradient of the sum.
LayoutRef gradient_of_output(const LayoutRef& y);
/// Returns `layout`, but with Partial(sum) on the axes on which `contribution` is Partial(sum). A linear
/// function of a contribution to a sum is a contribution itself. Null stays null.
LayoutRef partial_as(const LayoutRef& layout, const LayoutRef& contribution);

/// Returns `layout` with another global shape. Null stays null.
LayoutRef with_global(const LayoutRef& layout, const Shape& global);
/// The global shape of a tensor. For a plain tensor, its shape.
const Shape& global_shape(const Tensor& t);
/// Returns `shape` with another last dimension.
Shape with_last(Shape shape, std::int64_t last);

}  // namespace weft::layouts
