#include "weft/tp/linear.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <utility>

#include "mesh/axis_ranks.hpp"
#include "nn/operands.hpp"
#include "tp/views.hpp"
#include "weft/host/copy.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/layouts.hpp"

namespace weft {
namespace {

using kernels::LinearShape;
using kernels::Stored;
using layouts::with_last;
using views::as;
using views::given;
using views::group_of;
using views::Input;
using views::Output;

// A view that was given, also one of no elements, which may be null: a rank may have no part of a sequence, and still takes part in what is
// sent.
bool wanted(const TensorView& v) { return v.data != nullptr || v.shape.rank() > 0; }

std::string shown(const Shape& s) { return to_string(s); }

struct Checker : views::Checker {
  Checker(const char* function_in, Device device_in) : views::Checker{function_in, device_in} {}
  // What is multiplied: x says in which dtype.
  void check_x(const ConstTensorView& x) const { check_floats("x", x); }
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
  // The layer that x and w make: x: (…, in), of which `x_shape` are all rows that the layer computes on; w: (out, in).
  LinearShape layer(const ConstTensorView& x, const Shape& x_shape, const ConstTensorView& w) const {
    check_x(x);
    check_operand("w", w, x);
    if (x_shape.rank() < 1) wrong("x", "is a scalar; expected (…, in)");
    if (w.shape.rank() != 2) wrong("w", fmt::format("is {}; expected (out, in)", shown(w.shape)));
    const std::int64_t in = x_shape.back();
    if (w.shape[1] != in)
      wrong("w", fmt::format("is {}; expected ({}, {}), from x {}", shown(w.shape), w.shape[0], in,
                             shown(x_shape)));
    return {rows(x_shape), in, w.shape[0]};
  }
  static std::int64_t rows(const Shape& s) {
    std::int64_t n = 1;
    for (int d = 0; d + 1 < s.rank(); ++d) n *= s[d];
    return n;
  }
};

std::string pair_text(const char* a, const Shape& of_a, const char* b, const Shape& of_b) {
  return fmt::format("{} {} and {} {}", a, shown(of_a), b, shown(of_b));
}

// Which part of `whole` this rank holds where `dim` is divided over `axes`.
LayoutRef divided(const DeviceMesh& axes, const Shape& whole, int dim) {
  return replicated_layout(axes, whole)->with(axes, Shard{dim});
}

// This rank's words in texts: "rank 1 of 3".
std::string of_ranks(const DeviceMesh& axes) {
  return fmt::format("rank {} of {}", axes.rank(), axes.size());
}

// What a column layer (x, w, y or dy) or a row layer says of its sequence: `part` is divided, `full` is not. Returns the shape of the
// whole of `part`.
Shape check_sequence(const Checker& c, const DeviceMesh& axes, int dim, const char* part_name,
                     const ConstTensorView& part, const char* full_name, const ConstTensorView& full) {
  const int rank = full.shape.rank();
  if (dim < 0 || dim > rank - 2)
    throw Error(ErrorCode::bad_argument,
                rank < 2
                    ? fmt::format("{}: sequence_dim is {}, and {} is {}; expected two dimensions or more",
                                  c.function, dim, full_name, shown(full.shape))
                    : fmt::format("{}: sequence_dim is {}; expected 0 to {}, as {} is {}, or -1: none",
                                  c.function, dim, rank - 2, full_name, shown(full.shape)));
  c.check(full_name, full);
  c.check(part_name, part);
  if (part.shape.rank() != rank)
    c.wrong(part_name, fmt::format("is {}; expected {} dimensions, as {} {} has", shown(part.shape), rank,
                                   full_name, shown(full.shape)));
  const Shape whole = with_last(full.shape, part.shape.back());
  const Shape own = divided(axes, whole, dim)->local_shape();  // a copy: the layout goes with this line
  if (!(part.shape == own))
    c.wrong(part_name,
            fmt::format("is {}; expected {}, what {} has of the sequence of {} {}", shown(part.shape),
                        shown(own), of_ranks(axes), full_name, shown(full.shape)));
  return whole;
}

// The features of this rank among the `all` of y or dy, which `name` is.
std::int64_t check_features(const Checker& c, const DeviceMesh& axes, const ConstTensorView& w,
                            const char* name, const ConstTensorView& y) {
  if (y.shape.rank() < 1) c.wrong(name, "is a scalar; expected (…, out)");
  c.check(name, y);
  if (w.shape.rank() != 2) c.wrong("w", fmt::format("is {}; expected (out, in)", shown(w.shape)));
  const Shape all{y.shape.back()};
  const std::int64_t own = divided(axes, all, 0)->local_shape()[0];
  if (w.shape[0] != own)
    c.wrong("w", fmt::format("is {}; expected ({}, {}), what {} has of the {} features of {}", shown(w.shape),
                             own, w.shape[1], of_ranks(axes), all[0], name));
  return own;
}

// The shapes on which a rank computes: x of the whole sequence, y of the whole sequence with this rank's features.
struct Sides {
  Shape x, y;
  bool divided = false;  // the sequence of one of them is
};

// `y_name`: y, or dy in backward.
Sides column_sides(const Checker& c, const DeviceMesh& axes, const ColumnOptions& o, const ConstTensorView& x,
                   const ConstTensorView& w, const char* y_name, const ConstTensorView& y) {
  Sides sides{x.shape, y.shape, o.sequence_dim != -1};
  if (sides.divided) sides.x = check_sequence(c, axes, o.sequence_dim, "x", x, y_name, y);
  if (o.gather_output) sides.y = with_last(y.shape, check_features(c, axes, w, y_name, y));
  return sides;
}

Sides row_sides(const Checker& c, const DeviceMesh& axes, const RowOptions& o, const ConstTensorView& x,
                const char* y_name, const ConstTensorView& y) {
  Sides sides{x.shape, y.shape, o.sequence_dim != -1};
  if (sides.divided) sides.y = check_sequence(c, axes, o.sequence_dim, y_name, y, "x", x);
  return sides;
}

LinearShape check_forward(const Checker& c, const Sides& sides, const ConstTensorView& x,
                          const ConstTensorView& w, const ConstTensorView& b, const TensorView& y) {
  const LinearShape s = c.layer(x, sides.x, w);
  const std::string from = pair_text("x", sides.x, "w", w.shape);
  c.check_other("y", y, x);
  c.expect("y", sides.y, with_last(sides.x, s.out), from);
  if (given(b)) c.check_other("b", b, x);
  if (given(b)) c.expect("b", b.shape, {s.out}, from);
  c.expect_apart("y", y, {{"x", x}, {"w", w}, {"b", b}});
  return s;
}

LinearShape check_backward(const Checker& c, const Sides& sides, const ConstTensorView& dy,
                           const ConstTensorView& x, const ConstTensorView& w, const LinearGradients& g) {
  const LinearShape s = c.layer(x, sides.x, w);
  const std::string from = pair_text("x", sides.x, "w", w.shape);
  c.check_operand("dy", dy, x);
  c.expect("dy", sides.y, with_last(sides.x, s.out), from);
  const auto expect_written = [&](const char* what, const TensorView& v, const Shape& shape,
                                  const std::string& why) {
    if (!given(v) && !(sides.divided && wanted(v))) return;
    c.check_other(what, v, x);
    c.expect(what, v.shape, shape, why);
  };
  expect_written("dx", g.dx, x.shape, x.shape == sides.x ? from : fmt::format("x {}", shown(x.shape)));
  expect_written("dw", g.dw, w.shape, from);
  expect_written("db", g.db, {s.out}, from);
  c.expect_apart("dx", g.dx, {{"dy", dy}, {"x", x}, {"w", w}, {"dw", g.dw}, {"db", g.db}});
  c.expect_apart("dw", g.dw, {{"dy", dy}, {"x", x}, {"w", w}, {"db", g.db}});
  c.expect_apart("db", g.db, {{"dy", dy}, {"x", x}, {"w", w}});
  return s;
}

// Whether column_linear_backward() reduces dx. Not where it has no elements: a view of those may be null on one rank and
// not on another, and the ranks would not agree.
bool reduces(const TensorView& dx) { return given(dx) && dx.count() > 0; }

// y = x wᵀ, and + b where it is given.
void forward(Compute& compute, const ConstTensorView& x, const ConstTensorView& w, const ConstTensorView& b,
             const TensorView& y, const LinearShape& s) {
  kernels::KernelContext& ctx = kernels_of(compute);
  const Output out(compute, y);
  const Input bias(compute, b);
  const float* const of_b = given(b) ? bias.data() : nullptr;
  if (x.dtype == DType::f32)
    kernels::linear_forward(ctx, as<float>(x), as<float>(w), of_b, out.data(), s);
  else
    kernels::linear_forward(ctx, as<bf16>(x), as<bf16>(w), of_b, out.data(), s);
  out.round();
}

// dx = dy w
void input_gradient(Compute& compute, const ConstTensorView& dy, const ConstTensorView& w,
                    const TensorView& dx, const LinearShape& s) {
  const Output out(compute, dx);
  multiply(kernels_of(compute), dy, Stored::plain, w, Stored::plain, out.data(), s.tokens, s.in, s.out,
           false);
  out.round();
}

void weight_gradients(Compute& compute, const ConstTensorView& dy, const ConstTensorView& x,
                      const LinearGradients& g, const LinearShape& s) {
  kernels::KernelContext& ctx = kernels_of(compute);
  if (given(g.dw)) {
    const Output dw(compute, g.dw);
    if (g.accumulate) dw.read();
    multiply(ctx, dy, Stored::transposed, x, Stored::plain, dw.data(), s.out, s.in, s.tokens, g.accumulate);
    dw.round();
  }
  if (!given(g.db)) return;
  const Output db(compute, g.db);
  const Input from(compute, dy);
  if (g.accumulate)
    db.read();
  else
    kernels::fill(ctx, db.data(), 0.0f, s.out);
  kernels::bias_backward(ctx, from.data(), db.data(), s.tokens, s.out);
  db.round();
}

// Memory of the caller's as a tensor, ordered on the rank's stream.
Tensor borrowed(Compute& compute, const ConstTensorView& v, LayoutRef layout) {
  return Tensor(Storage::borrow(const_cast<std::byte*>(v.data), static_cast<std::size_t>(v.bytes()),
                                compute.stream()),
                0, v.shape, v.dtype)
      .with_layout(std::move(layout));
}

// Begins to give every rank the whole of what is divided along `dim`.
Transfer start_gather(Compute& compute, const DeviceMesh& axes, const ConstTensorView& part,
                      const Shape& whole, int dim) {
  return start_redistribute(borrowed(compute, part, divided(axes, whole, dim)),
                            replicated_layout(axes, whole));
}

// Begins to add up what each rank has of a whole, and to give each its part of the sum.
Transfer start_reduce_scatter(const DeviceMesh& axes, const Tensor& contribution, int dim) {
  const Shape& whole = contribution.shape();
  return start_redistribute(
      contribution.with_layout(replicated_layout(axes, whole)->with(axes, Partial{ReduceOp::sum})),
      divided(axes, whole, dim));
}

void put(Compute& compute, const Tensor& from, const TensorView& to) {
  if (to.count() > 0) copy(compute.context(), from.view(), to, compute.stream());
}

// x is this rank's part of (…, in) along `dim`. Sent are x, where dw needs the whole of it, while dy w is computed; then dx, while
// dw and db are. All ranks begin and finish both in this order.
void column_backward_divided(Compute& compute, const DeviceMesh& axes, const Shape& whole,
                             const ConstTensorView& dy, const ConstTensorView& x, const ConstTensorView& w,
                             const LinearGradients& g, const LinearShape& s, int dim) {
  if (wanted(g.dx) || wanted(g.dw)) group_of(axes);
  Transfer x_comes, dx_goes;
  if (wanted(g.dw)) x_comes = start_gather(compute, axes, x, whole, dim);
  if (wanted(g.dx)) {
    const Tensor contribution = compute.make(whole, g.dx.dtype, Memory::shared);
    input_gradient(compute, dy, w, contribution.view(), s);
    dx_goes = start_reduce_scatter(axes, contribution, dim);
  }
  Tensor whole_x;
  if (wanted(g.dw)) whole_x = x_comes.finish();
  weight_gradients(compute, dy, whole_x ? ConstTensorView(whole_x) : x, g, s);
  if (wanted(g.dx)) put(compute, dx_goes.finish(), g.dx);
}

void row_backward(Compute& compute, const ConstTensorView& dy, const ConstTensorView& x,
                  const ConstTensorView& w, const LinearGradients& g, const LinearShape& s) {
  if (given(g.dx)) input_gradient(compute, dy, w, g.dx, s);
  weight_gradients(compute, dy, x, g, s);
}

}  // namespace

void column_linear_forward(Compute& compute, const ConstTensorView& x, const ConstTensorView& w,
                           const ConstTensorView& b, const TensorView& y) {
  const Checker c{"column_linear_forward", compute.device()};
  forward(compute, x, w, b, y, check_forward(c, {x.shape, y.shape}, x, w, b, y));
}

void column_linear_forward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& x,
                           const ConstTensorView& w, const ConstTensorView& b, const TensorView& y,
                           const ColumnOptions& o) {
  const Checker c{"column_linear_forward", compute.device()};
  given_mesh(c.function, axes);
  const Sides sides = column_sides(c, axes, o, x, w, "y", y);
  const LinearShape s = check_forward(c, sides, x, w, b, y);
  if (sides.divided || o.gather_output) group_of(axes);
  Tensor whole_x;
  if (sides.divided) whole_x = start_gather(compute, axes, x, sides.x, o.sequence_dim).finish();
  const ConstTensorView in = sides.divided ? ConstTensorView(whole_x) : x;
  if (!o.gather_output) {
    forward(compute, in, w, b, y, s);
    return;
  }
  const Tensor own = compute.make(sides.y, y.dtype, Memory::shared);
  forward(compute, in, w, b, own.view(), s);
  redistribute(own.view(), divided(axes, y.shape, y.shape.rank() - 1), y, replicated_layout(axes, y.shape),
               compute.stream());
}

void column_linear_backward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& dy,
                            const ConstTensorView& x, const ConstTensorView& w, const LinearGradients& g,
                            const ColumnOptions& o) {
  const Checker c{"column_linear_backward", compute.device()};
  given_mesh(c.function, axes);
  const Sides sides = column_sides(c, axes, o, x, w, "dy", dy);
  const LinearShape s = check_backward(c, sides, dy, x, w, g);
  Tensor own_dy;
  if (o.gather_output)
    own_dy = redistribute(borrowed(compute, dy, replicated_layout(axes, dy.shape)),
                          divided(axes, dy.shape, dy.shape.rank() - 1));
  const ConstTensorView from = o.gather_output ? ConstTensorView(own_dy) : dy;
  if (sides.divided) {
    column_backward_divided(compute, axes, sides.x, from, x, w, g, s, o.sequence_dim);
    return;
  }
  ProcessGroup* const group = reduces(g.dx) ? group_of(axes) : nullptr;
  Work sum;
  if (given(g.dx)) {
    input_gradient(compute, from, w, g.dx, s);
    if (group != nullptr) sum = group->all_reduce(g.dx, g.dx, {.stream = compute.stream()});
  }
  weight_gradients(compute, from, x, g, s);
  if (sum.valid()) sum.wait();
}

void row_linear_forward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& x,
                        const ConstTensorView& w, const ConstTensorView& b, const TensorView& y,
                        const RowOptions& o) {
  const Checker c{"row_linear_forward", compute.device()};
  given_mesh(c.function, axes);
  const Sides sides = row_sides(c, axes, o, x, "y", y);
  const LinearShape s = check_forward(c, sides, x, w, b, y);
  ProcessGroup* const group = group_of(axes);
  if (sides.divided) {
    const Tensor partial = compute.make(sides.y, y.dtype, Memory::shared);
    forward(compute, x, w, {}, partial.view(), s);
    put(compute, start_reduce_scatter(axes, partial, o.sequence_dim).finish(), y);
  } else {
    forward(compute, x, w, {}, y, s);
    if (group != nullptr) group->all_reduce(y, y, {.stream = compute.stream()}).wait();
  }
  if (!given(b)) return;
  const Output out(compute, y);
  const Input bias(compute, b);
  out.read();
  kernels::add_bias(kernels_of(compute), bias.data(), out.data(), Checker::rows(y.shape), s.out);
  out.round();
}

void row_linear_backward(Compute& compute, const ConstTensorView& dy, const ConstTensorView& x,
                         const ConstTensorView& w, const LinearGradients& g) {
  const Checker c{"row_linear_backward", compute.device()};
  row_backward(compute, dy, x, w, g, check_backward(c, {x.shape, dy.shape}, dy, x, w, g));
}

void row_linear_backward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& dy,
                         const ConstTensorView& x, const ConstTensorView& w, const LinearGradients& g,
                         const RowOptions& o) {
  const Checker c{"row_linear_backward", compute.device()};
  given_mesh(c.function, axes);
  const Sides sides = row_sides(c, axes, o, x, "dy", dy);
  const LinearShape s = check_backward(c, sides, dy, x, w, g);
  if (!sides.divided) {
    row_backward(compute, dy, x, w, g, s);
    return;
  }
  group_of(axes);
  const Tensor whole_dy = start_gather(compute, axes, dy, sides.y, o.sequence_dim).finish();
  row_backward(compute, whole_dy, x, w, g, s);
}

}  // namespace weft
