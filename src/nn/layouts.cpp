#include "weft/nn/layouts.hpp"

#include <fmt/format.h>

#include "weft/base/error.hpp"

namespace weft::layouts {
namespace {

bool one_rank(const LayoutRef& layout) { return layout == nullptr || layout->mesh_shape().size() == 1; }
int axes(const LayoutRef& layout) { return layout->mesh_shape().axis_count(); }
const Placement& on(const LayoutRef& layout, int axis) {
  return layout->placements[static_cast<std::size_t>(axis)];
}

std::string plain_error(const TensorName& what, const LayoutRef& other) {
  return fmt::format("{} is a plain tensor; on {} it needs a layout, which says what part of the whole it is",
                     what.text(), to_string(other->mesh_shape()));
}

/// The rule by which a dimension is sharded: the axes of several ranks, outermost first, and the segments.
struct CutDim {
  std::vector<int> axes;
  std::vector<std::int64_t> segments;  // empty if no axis shards
  friend bool operator==(const CutDim&, const CutDim&) = default;
};

CutDim cut_of(const Layout& layout, int dim) {
  CutDim cut;
  for (const int axis : layout.nesting)
    if (layout.mesh_shape().size(axis) > 1 &&
        is_shard(layout.placements[static_cast<std::size_t>(axis)], dim))
      cut.axes.push_back(axis);
  if (!cut.axes.empty() && layout.segments.dim == dim) cut.segments = layout.segments.sizes;
  return cut;
}

// The layout of y. It is like that of x (`in`) in all dimensions except the features. In the features it is
// like the rows of the weight, with equal nesting of axes and equal segments.
LayoutRef with_features(const Layout& in, const Layout& weight, int features) {
  Shape global = in.global;
  global[features] = weight.global[0];
  LayoutRef y = in.segmented(0, {})->with_global(global);
  std::vector<std::string> columns;
  for (const int axis : weight.nesting)
    if (is_shard(weight.placements[static_cast<std::size_t>(axis)], 0))
      columns.push_back(in.mesh_shape().name(axis));
  if (columns.size() > 1) y = y->with(in.mesh().submesh(columns), Shard{features});
  if (!weight.segments.sizes.empty() && weight.segments.dim == 0)
    y = y->segmented(features, weight.segments.sizes);
  return y;
}

// Throws layout if the features of x are not sharded exactly like the weight's columns, including nesting and
// segments.
void expect_columns(const TensorName& what, const Layout& x, const Layout& weight, int features) {
  const CutDim of_x = cut_of(x, features), of_w = cut_of(weight, 1);
  if (of_x.segments != of_w.segments)
    throw Error(ErrorCode::layout,
                fmt::format("{} is {}, the weight {}; expected the same segments of features", what.text(),
                            to_string(x), to_string(weight)));
  if (of_x.axes != of_w.axes)
    throw Error(ErrorCode::layout,
                fmt::format("{} is {}, the weight {}; expected features nested in the same order",
                            what.text(), to_string(x), to_string(weight)));
}

}  // namespace

TensorName named(const Module& module, std::string_view tensor) { return {module.path(), tensor}; }

std::string axis_name(const Layout& layout, int axis) {
  return fmt::format("{}={}", layout.mesh_shape().name(axis), layout.mesh_shape().size(axis));
}

bool same(const LayoutRef& a, const LayoutRef& b) {
  if (a == b) return true;
  if (a == nullptr || b == nullptr) return one_rank(a) && one_rank(b);
  if (!(a->global == b->global)) return false;
  if (one_rank(a) && one_rank(b)) return true;
  if (!(a->mesh() == b->mesh())) return false;
  for (int i = 0; i < axes(a); ++i)
    if (a->mesh_shape().size(i) > 1 && on(a, i) != on(b, i)) return false;
  for (int dim = 0; dim < a->global.rank(); ++dim)
    if (cut_of(*a, dim) != cut_of(*b, dim)) return false;
  return true;
}

void expect_same(const TensorName& what, const LayoutRef& got, const LayoutRef& expected,
                 std::string_view why) {
  if (same(got, expected)) return;
  if (got == nullptr) throw Error(ErrorCode::layout, plain_error(what, expected));
  if (expected == nullptr)
    throw Error(ErrorCode::layout,
                fmt::format("{} is {}; expected a plain tensor ({})", what.text(), to_string(*got), why));
  if (!(got->mesh() == expected->mesh()))
    throw Error(ErrorCode::layout,
                fmt::format("{} lies over {}; expected another mesh, {} ({})", what.text(),
                            to_string(got->mesh_shape()), to_string(expected->mesh_shape()), why));
  if (got->global == expected->global)
    for (int i = 0; i < axes(got); ++i)
      if (got->mesh_shape().size(i) > 1 && on(got, i) != on(expected, i))
        throw Error(ErrorCode::layout,
                    fmt::format("{} is {} on {}; expected {} ({})", what.text(), to_string(on(got, i)),
                                axis_name(*got, i), to_string(on(expected, i)), why));
  throw Error(ErrorCode::layout, fmt::format("{} is {}; expected {} ({})", what.text(), to_string(*got),
                                             to_string(*expected), why));
}

Tensor beside(const Module& module, std::string_view tensor, const Tensor& x, const Parameter& weight) {
  const LayoutRef& of_weight = weight.weight().layout();
  if (x.layout() == nullptr) {
    if (of_weight == nullptr) return x;
    if (!one_rank(of_weight)) throw Error(ErrorCode::layout, plain_error(named(module, tensor), of_weight));
    return x.with_layout(replicated_layout(of_weight->mesh(), x.shape()));
  }
  if (of_weight == nullptr) {
    if (one_rank(x.layout())) return x.with_layout(nullptr);
    throw Error(
        ErrorCode::layout,
        fmt::format("{} lies over {}, but \"{}\" is plain; replicate() or parallelize() the model "
                    "over that mesh first",
                    named(module, tensor).text(), to_string(x.layout()->mesh_shape()), weight.path()));
  }
  if (!(x.layout()->mesh() == of_weight->mesh()))
    throw Error(ErrorCode::layout,
                fmt::format("{} lies over {}, \"{}\" over {}: not the same DeviceMesh; use one for both",
                            named(module, tensor).text(), to_string(x.layout()->mesh_shape()), weight.path(),
                            to_string(of_weight->mesh_shape())));
  return x;
}

void expect_whole(const TensorName& what, const Tensor& x, std::string_view layer, bool last) {
  expect_whole_dim(what, x, layer, last ? x.shape().rank() - 1 : -1);
}

void expect_whole_dim(const TensorName& what, const Tensor& x, std::string_view layer, int dim) {
  const LayoutRef& layout = x.layout();
  if (layout == nullptr) return;
  for (int i = 0; i < axes(layout); ++i) {
    if (layout->mesh_shape().size(i) == 1) continue;
    const Placement& p = on(layout, i);
    if (is_partial(p))
      throw Error(
          ErrorCode::layout,
          fmt::format(
              "{} is {} on {}; {} needs values, not contributions to them: a boundary must reduce it first",
              what.text(), to_string(p), axis_name(*layout, i), layer));
    if (dim >= 0 && is_shard(p, dim))
      throw Error(ErrorCode::layout,
                  fmt::format("{} is {} on {}; {} needs {} whole: a boundary must gather it first",
                              what.text(), to_string(p), axis_name(*layout, i), layer,
                              dim == layout->global.rank() - 1 ? "its last dimension"
                                                               : fmt::format("dimension {}", dim)));
  }
}

LayoutRef gradient_of(const LayoutRef& weight, const LayoutRef& x, int features) {
  if (weight == nullptr) return nullptr;
  Placements placements = weight->placements;
  for (int i = 0; i < axes(weight); ++i)
    if (weight->mesh_shape().size(i) > 1 &&
        (is_partial(on(x, i)) || (is_shard(on(x, i)) && !is_shard(on(x, i), features))))
      placements[static_cast<std::size_t>(i)] = Partial{};
  return weight->with(std::move(placements));
}

// The layout of y, by the rule in the header, one axis at a time. Throws layout if x does not fit the weight.
LayoutRef linear_output(const TensorName& what, const LayoutRef& x, const LayoutRef& weight, int features) {
  if (x == nullptr) return nullptr;
  const Layout& in = *x;
  const Layout& w = *weight;
  const int dim = features < 0 ? in.global.rank() - 1 : features;
  Placements placements = in.placements;
  for (int axis = 0; axis < in.mesh_shape().axis_count(); ++axis) {
    Placement& y = placements[static_cast<std::size_t>(axis)];
    const Placement& how = w.placements[static_cast<std::size_t>(axis)];
    const bool column = is_shard(how, 0), row = is_shard(how, 1);
    const bool fits = column ? is_replicate(y) : row ? is_shard(y, dim) : !is_partial(y) && !is_shard(y, dim);
    // An axis of one rank is not checked. If such an axis is in a list of axes with others, y is equal on all
    // of them.
    if (!fits && in.mesh_shape().size(axis) == 1) continue;
    if (!fits)
      throw Error(ErrorCode::layout,
                  fmt::format("{} is {} on {}; expected {}, since the weight is {}", what.text(),
                              to_string(y), axis_name(in, axis),
                              column ? "Replicate"
                              : row  ? fmt::format("Shard({})", dim)
                                     : fmt::format("Replicate or a Shard other than ({})", dim),
                              to_string(how)));
    if (column) y = Shard{dim};
    if (row) y = Partial{};
  }
  expect_columns(what, in, w, dim);
  return with_features(*in.with(std::move(placements)), w, dim);
}

void expect_bias(const TensorName& what, const LayoutRef& y, const LayoutRef& bias, int features) {
  if (y == nullptr || one_rank(y)) return;
  const std::string_view expected = "expected its features cut as the bias is";
  if (bias == nullptr) throw Error(ErrorCode::layout, plain_error(what.and_then(": the bias"), y));
  const int dim = features < 0 ? y->global.rank() - 1 : features;
  if (y->mesh() == bias->mesh() && y->global[dim] == bias->global.back() &&
      cut_of(*y, dim) == cut_of(*bias, 0))
    return;
  throw Error(ErrorCode::layout, fmt::format("{} is {}, the bias {}; {}", what.text(), to_string(*y),
                                             to_string(*bias), expected));
}

// The layout of dx: Partial(sum) on axes that split the columns of y, since each rank has only the
// contribution of its own columns.
LayoutRef linear_input_gradient(const LayoutRef& x, const LayoutRef& weight) {
  if (x == nullptr) return nullptr;
  Placements placements = x->placements;
  for (std::size_t axis = 0; axis < placements.size(); ++axis)
    if (is_shard(weight->placements[axis], 0) && x->mesh_shape().size(static_cast<int>(axis)) > 1)
      placements[axis] = Partial{};
  return x->with(std::move(placements));
}

// The layout that a gradient of y must have: the layout of y, with Replicate in place of Partial (the
// gradient of every contribution is the gradient of the sum).
LayoutRef gradient_of_output(const LayoutRef& y) {
  if (y == nullptr) return nullptr;
  Placements placements = y->placements;
  for (Placement& p : placements)
    if (is_partial(p)) p = Replicate{};
  return y->with(std::move(placements));
}

LayoutRef partial_as(const LayoutRef& layout, const LayoutRef& contribution) {
  if (layout == nullptr || contribution == nullptr || !(layout->mesh() == contribution->mesh()))
    return layout;
  Placements placements = layout->placements;
  for (int i = 0; i < axes(layout); ++i)
    if (layout->mesh_shape().size(i) > 1 && is_partial(on(contribution, i)))
      placements[static_cast<std::size_t>(i)] = Partial{};
  return layout->with(std::move(placements));
}

LayoutRef with_global(const LayoutRef& layout, const Shape& global) {
  return layout == nullptr ? nullptr : layout->with_global(global);
}

const Shape& global_shape(const Tensor& t) { return t.layout() ? t.layout()->global : t.shape(); }

Shape with_last(Shape shape, std::int64_t last) {
  shape[shape.rank() - 1] = last;
  return shape;
}

}  // namespace weft::layouts
