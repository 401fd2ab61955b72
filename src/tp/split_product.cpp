#include "tp/split_product.hpp"

#include <fmt/format.h>

#include <utility>

#include "mesh/axis_ranks.hpp"
#include "tp/views.hpp"
#include "weft/host/copy.hpp"
#include "weft/mesh/redistribute.hpp"

namespace weft::split {
namespace {

using views::given;
using views::group_of;

// Returns whether a view was given. A view of no elements, which may be null, counts as given. A rank may
// have no part of a sequence, and still takes part in the communication.
bool wanted(const TensorView& v) { return v.data != nullptr || v.shape.rank() > 0; }

std::string shown(const Shape& s) { return to_string(s); }

struct Checker : views::Checker {
  Checker(const Layer& layer, Device device_in)
      : views::Checker{layer.function, device_in}, form(layer.product.form) {}
  const Form& form;

  int features(const Shape& s) const { return form.features < 0 ? s.rank() - 1 : form.features; }
  Shape with_features(Shape s, std::int64_t size) const {
    s[features(s)] = size;
    return s;
  }
  Shape weight_shape(std::int64_t out, std::int64_t in) const {
    Shape s{out, in};
    while (s.rank() < form.weight_rank) s.push_back(1);
    return s;
  }
  // x, or y and dy.
  void check_rank(const char* what, const Shape& s) const {
    const char* const expected = what[0] == 'x' ? form.x : form.y;
    if (form.rank == 0 && s.rank() < 1) wrong(what, fmt::format("is a scalar; expected {}", expected));
    if (form.rank > 0 && s.rank() != form.rank)
      wrong(what, fmt::format("is {}; expected {}", shown(s), expected));
  }
  void check_weight(const Shape& w) const {
    bool fits = w.rank() == form.weight_rank;
    for (int d = 2; fits && d < w.rank(); ++d) fits = w[d] == 1;
    if (!fits) wrong("w", fmt::format("is {}; expected {}", shown(w), form.w));
  }
  // The operands of the product must have the dtype of x.
  void check_operand(const char* what, const ConstTensorView& v, const ConstTensorView& x) const {
    if (v.dtype != x.dtype)
      wrong(what, fmt::format("is {}; expected {}, as x", name(v.dtype), name(x.dtype)));
    check(what, v);
  }
  void check_other(const char* what, const ConstTensorView& v, const ConstTensorView& x) const {
    if (v.dtype != DType::f32 && v.dtype != x.dtype)
      wrong(what, fmt::format("is {}; expected f32{}", name(v.dtype),
                              x.dtype == DType::f32 ? "" : fmt::format(", or {} as x", name(x.dtype))));
    check(what, v);
  }
  // Checks x and w. `x_shape` is the shape on which the layer computes. Returns the number of features of y.
  std::int64_t layer(const ConstTensorView& x, const Shape& x_shape, const ConstTensorView& w) const {
    check_floats("x", x);
    check_operand("w", w, x);
    check_rank("x", x_shape);
    check_weight(w.shape);
    const std::int64_t in = x_shape[features(x_shape)];
    if (w.shape[1] != in)
      wrong("w", fmt::format("is {}; expected {}, from x {}", shown(w.shape),
                             shown(weight_shape(w.shape[0], in)), shown(x_shape)));
    return w.shape[0];
  }
};

std::string pair_text(const char* a, const Shape& of_a, const char* b, const Shape& of_b) {
  return fmt::format("{} {} and {} {}", a, shown(of_a), b, shown(of_b));
}

// Which part of `whole` this rank holds if `dim` is divided over `axes`.
LayoutRef divided(const DeviceMesh& axes, const Shape& whole, int dim) {
  return replicated_layout(axes, whole)->with(axes, Shard{dim});
}

// This rank's name in texts: "rank 1 of 3".
std::string of_ranks(const DeviceMesh& axes) {
  return fmt::format("rank {} of {}", axes.rank(), axes.size());
}

// Checks the sequence of a column layer (x, w, y or dy) or a row layer: `part` is divided, `full` is not.
// Returns the shape of the whole tensor of which `part` is a part.
Shape check_sequence(const Checker& c, const DeviceMesh& axes, int dim, const char* part_name,
                     const ConstTensorView& part, const char* full_name, const ConstTensorView& full) {
  const int rank = full.shape.rank();
  if (c.form.rank > 0) c.check_rank(full_name, full.shape);
  if (dim < 0 || dim >= rank || dim == c.features(full.shape))
    throw Error(
        ErrorCode::bad_argument,
        rank < 2
            ? fmt::format("{}: sequence_dim is {}, and {} is {}; expected two dimensions or more", c.function,
                          dim, full_name, shown(full.shape))
            : fmt::format(
                  "{}: sequence_dim is {}; expected {}, as {} is {}, or -1: none", c.function, dim,
                  c.form.sequence_dims != nullptr ? c.form.sequence_dims : fmt::format("0 to {}", rank - 2),
                  full_name, shown(full.shape)));
  c.check(full_name, full);
  c.check(part_name, part);
  if (part.shape.rank() != rank)
    c.wrong(part_name, fmt::format("is {}; expected {} dimensions, as {} {} has", shown(part.shape), rank,
                                   full_name, shown(full.shape)));
  const Shape whole = c.with_features(full.shape, part.shape[c.features(part.shape)]);
  const Shape own = divided(axes, whole, dim)->local_shape();  // a copy: the layout goes with this line
  if (!(part.shape == own))
    c.wrong(part_name,
            fmt::format("is {}; expected {}, what {} has of the sequence of {} {}", shown(part.shape),
                        shown(own), of_ranks(axes), full_name, shown(full.shape)));
  return whole;
}

// Checks y or dy, as `name` says, and w. Returns how many of its features this rank has.
std::int64_t check_features(const Checker& c, const DeviceMesh& axes, const ConstTensorView& w,
                            const char* name, const ConstTensorView& y) {
  c.check_rank(name, y.shape);
  c.check(name, y);
  c.check_weight(w.shape);
  const Shape all{y.shape[c.features(y.shape)]};
  const std::int64_t own = divided(axes, all, 0)->local_shape()[0];
  if (w.shape[0] != own)
    c.wrong("w", fmt::format("is {}; expected {}, what {} has of the {} {}s of {}", shown(w.shape),
                             shown(c.weight_shape(own, w.shape[1])), of_ranks(axes), all[0], c.form.feature,
                             name));
  return own;
}

// The shapes on which a rank computes: x with the whole sequence, and y with the whole sequence and this
// rank's features.
struct Sides {
  Shape x, y;
  bool divided = false;  // the sequence of one of them is
};

// `y_name`: y, or dy in backward.
Sides column_sides(const Checker& c, const DeviceMesh& axes, const ColumnOptions& o, const ConstTensorView& x,
                   const ConstTensorView& w, const char* y_name, const ConstTensorView& y) {
  Sides sides{x.shape, y.shape, o.sequence_dim != -1};
  if (sides.divided) sides.x = check_sequence(c, axes, o.sequence_dim, "x", x, y_name, y);
  if (o.gather_output) sides.y = c.with_features(y.shape, check_features(c, axes, w, y_name, y));
  return sides;
}

Sides row_sides(const Checker& c, const DeviceMesh& axes, const RowOptions& o, const ConstTensorView& x,
                const char* y_name, const ConstTensorView& y) {
  Sides sides{x.shape, y.shape, o.sequence_dim != -1};
  if (sides.divided) sides.y = check_sequence(c, axes, o.sequence_dim, y_name, y, "x", x);
  return sides;
}

void check_forward(const Checker& c, const Sides& sides, const ConstTensorView& x, const ConstTensorView& w,
                   const ConstTensorView& b, const TensorView& y) {
  const std::int64_t out = c.layer(x, sides.x, w);
  const std::string from = pair_text("x", sides.x, "w", w.shape);
  c.check_other("y", y, x);
  c.expect("y", sides.y, c.with_features(sides.x, out), from);
  if (given(b)) c.check_other("b", b, x);
  if (given(b)) c.expect("b", b.shape, {out}, from);
  c.expect_apart("y", y, {{"x", x}, {"w", w}, {"b", b}});
}

void check_backward(const Checker& c, const Sides& sides, const ConstTensorView& dy, const ConstTensorView& x,
                    const ConstTensorView& w, const LinearGradients& g) {
  const std::int64_t out = c.layer(x, sides.x, w);
  const std::string from = pair_text("x", sides.x, "w", w.shape);
  c.check_operand("dy", dy, x);
  c.expect("dy", sides.y, c.with_features(sides.x, out), from);
  const auto expect_written = [&](const char* what, const TensorView& v, const Shape& shape,
                                  const std::string& why) {
    if (!given(v) && !(sides.divided && wanted(v))) return;
    c.check_other(what, v, x);
    c.expect(what, v.shape, shape, why);
  };
  expect_written("dx", g.dx, x.shape, x.shape == sides.x ? from : fmt::format("x {}", shown(x.shape)));
  expect_written("dw", g.dw, w.shape, from);
  expect_written("db", g.db, {out}, from);
  c.expect_apart("dx", g.dx, {{"dy", dy}, {"x", x}, {"w", w}, {"dw", g.dw}, {"db", g.db}});
  c.expect_apart("dw", g.dw, {{"dy", dy}, {"x", x}, {"w", w}, {"db", g.db}});
  c.expect_apart("db", g.db, {{"dy", dy}, {"x", x}, {"w", w}});
}

// Returns whether column_linear_backward() reduces dx. It does not reduce a view without elements. The view
// may be null on one rank and not on another, so the ranks would disagree.
bool reduces(const TensorView& dx) { return given(dx) && dx.count() > 0; }

void weight_gradients(const Product& product, Compute& compute, const ConstTensorView& dy,
                      const ConstTensorView& x, const LinearGradients& g) {
  if (given(g.dw)) product.weight_gradient(compute, dy, x, g.dw, g.accumulate);
  if (given(g.db)) product.bias_gradient(compute, dy, g.db, g.accumulate);
}

Tensor borrowed(Compute& compute, const ConstTensorView& v, LayoutRef layout) {
  return views::borrowed(compute, v).with_layout(std::move(layout));
}

// Begins to gather the parts along `dim`, so that every rank gets the whole tensor.
Transfer start_gather(Compute& compute, const DeviceMesh& axes, const ConstTensorView& part,
                      const Shape& whole, int dim) {
  return start_redistribute(borrowed(compute, part, divided(axes, whole, dim)),
                            replicated_layout(axes, whole));
}

// Begins to add the contributions of all ranks, and to give each rank its part of the sum.
Transfer start_reduce_scatter(const DeviceMesh& axes, const Tensor& contribution, int dim) {
  const Shape& whole = contribution.shape();
  return start_redistribute(
      contribution.with_layout(replicated_layout(axes, whole)->with(axes, Partial{ReduceOp::sum})),
      divided(axes, whole, dim));
}

void put(Compute& compute, const Tensor& from, const TensorView& to) {
  if (to.count() > 0) copy(compute.context(), from.view(), to, compute.stream());
}

// x is this rank's part of (…, in) along `dim`. If dw needs the whole of x, x is sent while dy w is computed.
// Then dx is sent while dw and db are computed. All ranks begin and finish both transfers in this order.
void column_backward_divided(const Product& product, Compute& compute, const DeviceMesh& axes,
                             const Shape& whole, const ConstTensorView& dy, const ConstTensorView& x,
                             const ConstTensorView& w, const LinearGradients& g, int dim) {
  if (wanted(g.dx) || wanted(g.dw)) group_of(axes);
  Transfer x_comes, dx_goes;
  if (wanted(g.dw)) x_comes = start_gather(compute, axes, x, whole, dim);
  if (wanted(g.dx)) {
    const Tensor contribution = compute.make(whole, g.dx.dtype, Memory::shared);
    product.input_gradient(compute, dy, w, contribution.view());
    dx_goes = start_reduce_scatter(axes, contribution, dim);
  }
  Tensor whole_x;
  if (wanted(g.dw)) whole_x = x_comes.finish();
  weight_gradients(product, compute, dy, whole_x ? ConstTensorView(whole_x) : x, g);
  if (wanted(g.dx)) put(compute, dx_goes.finish(), g.dx);
}

void row_gradients(const Product& product, Compute& compute, const ConstTensorView& dy,
                   const ConstTensorView& x, const ConstTensorView& w, const LinearGradients& g) {
  if (given(g.dx)) product.input_gradient(compute, dy, w, g.dx);
  weight_gradients(product, compute, dy, x, g);
}

}  // namespace

void Layer::column_forward(Compute& compute, const ConstTensorView& x, const ConstTensorView& w,
                           const ConstTensorView& b, const TensorView& y) const {
  const Checker c(*this, compute.device());
  check_forward(c, {x.shape, y.shape}, x, w, b, y);
  product.forward(compute, x, w, b, y);
}

void Layer::column_forward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& x,
                           const ConstTensorView& w, const ConstTensorView& b, const TensorView& y,
                           const ColumnOptions& o) const {
  const Checker c(*this, compute.device());
  given_mesh(c.function, axes);
  const Sides sides = column_sides(c, axes, o, x, w, "y", y);
  check_forward(c, sides, x, w, b, y);
  if (sides.divided || o.gather_output) group_of(axes);
  Tensor whole_x;
  if (sides.divided) whole_x = start_gather(compute, axes, x, sides.x, o.sequence_dim).finish();
  const ConstTensorView in = sides.divided ? ConstTensorView(whole_x) : x;
  if (!o.gather_output) {
    product.forward(compute, in, w, b, y);
    return;
  }
  const Tensor own = compute.make(sides.y, y.dtype, Memory::shared);
  product.forward(compute, in, w, b, own.view());
  redistribute(own.view(), divided(axes, y.shape, c.features(y.shape)), y, replicated_layout(axes, y.shape),
               compute.stream());
}

void Layer::column_backward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& dy,
                            const ConstTensorView& x, const ConstTensorView& w, const LinearGradients& g,
                            const ColumnOptions& o) const {
  const Checker c(*this, compute.device());
  given_mesh(c.function, axes);
  const Sides sides = column_sides(c, axes, o, x, w, "dy", dy);
  check_backward(c, sides, dy, x, w, g);
  Tensor own_dy;
  if (o.gather_output)
    own_dy = redistribute(borrowed(compute, dy, replicated_layout(axes, dy.shape)),
                          divided(axes, dy.shape, c.features(dy.shape)));
  const ConstTensorView from = o.gather_output ? ConstTensorView(own_dy) : dy;
  if (sides.divided) {
    column_backward_divided(product, compute, axes, sides.x, from, x, w, g, o.sequence_dim);
    return;
  }
  ProcessGroup* const group = reduces(g.dx) ? group_of(axes) : nullptr;
  Work sum;
  if (given(g.dx)) {
    product.input_gradient(compute, from, w, g.dx);
    if (group != nullptr) sum = group->all_reduce(g.dx, g.dx, {.stream = compute.stream()});
  }
  weight_gradients(product, compute, from, x, g);
  if (sum.valid()) sum.wait();
}

void Layer::row_forward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& x,
                        const ConstTensorView& w, const ConstTensorView& b, const TensorView& y,
                        const RowOptions& o) const {
  const Checker c(*this, compute.device());
  given_mesh(c.function, axes);
  const Sides sides = row_sides(c, axes, o, x, "y", y);
  check_forward(c, sides, x, w, b, y);
  ProcessGroup* const group = group_of(axes);
  if (sides.divided) {
    const Tensor partial = compute.make(sides.y, y.dtype, Memory::shared);
    product.forward(compute, x, w, {}, partial.view());
    put(compute, start_reduce_scatter(axes, partial, o.sequence_dim).finish(), y);
  } else {
    product.forward(compute, x, w, {}, y);
    if (group != nullptr) group->all_reduce(y, y, {.stream = compute.stream()}).wait();
  }
  if (given(b)) product.add_bias(compute, b, y);
}

void Layer::row_backward(Compute& compute, const ConstTensorView& dy, const ConstTensorView& x,
                         const ConstTensorView& w, const LinearGradients& g) const {
  const Checker c(*this, compute.device());
  check_backward(c, {x.shape, dy.shape}, dy, x, w, g);
  row_gradients(product, compute, dy, x, w, g);
}

void Layer::row_backward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& dy,
                         const ConstTensorView& x, const ConstTensorView& w, const LinearGradients& g,
                         const RowOptions& o) const {
  const Checker c(*this, compute.device());
  given_mesh(c.function, axes);
  const Sides sides = row_sides(c, axes, o, x, "dy", dy);
  check_backward(c, sides, dy, x, w, g);
  if (!sides.divided) {
    row_gradients(product, compute, dy, x, w, g);
    return;
  }
  group_of(axes);
  const Tensor whole_dy = start_gather(compute, axes, dy, sides.y, o.sequence_dim).finish();
  row_gradients(product, compute, whole_dy, x, w, g);
}

}  // namespace weft::split
