#include "weft/tp/linear.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <utility>

#include "mesh/axis_ranks.hpp"
#include "mesh/view_memory.hpp"
#include "weft/base/error.hpp"
#include "weft/nn/frame.hpp"
#include "weft/nn/kernels.hpp"

namespace weft {
namespace {

using kernels::LinearShape;
using kernels::Stored;

const float* floats(const ConstTensorView& v) { return reinterpret_cast<const float*>(v.data); }
float* floats(const TensorView& v) { return reinterpret_cast<float*>(v.data); }
// A view that has elements but no memory counts as given; the check then refuses it.
bool given(const ConstTensorView& v) { return v.data != nullptr || (v.shape.rank() > 0 && v.count() != 0); }

std::string shown(const Shape& s) { return to_string(s); }

struct Checker {
  const char* function;
  Device device;  // of the Compute

  [[noreturn]] void wrong(const char* what, const std::string& text) const {
    throw Error(ErrorCode::bad_argument, fmt::format("{}: {} {}", function, what, text));
  }
  // Checks what holds for every view.
  void check(const char* what, const ConstTensorView& v) const {
    if (v.dtype != DType::f32) wrong(what, fmt::format("is {}; expected f32", name(v.dtype)));
    if (v.device != device)
      wrong(what, fmt::format("is on {}; expected {}, the device of the Compute", to_string(v.device),
                              to_string(device)));
    if (const std::string fault = memory_fault(v); !fault.empty()) wrong(what, fault);
  }
  void expect(const char* what, const ConstTensorView& v, const Shape& shape, const std::string& from) const {
    check(what, v);
    if (!(v.shape == shape))
      wrong(what, fmt::format("is {}; expected {}, from {}", shown(v.shape), shown(shape), from));
  }
  // `out` is written while the others are read or written. Views that are not given overlap nothing.
  void expect_apart(const char* what, const ConstTensorView& out,
                    std::initializer_list<std::pair<const char*, ConstTensorView>> others) const {
    for (const auto& [name, other] : others)
      if (given(out) && given(other) && overlap(out, other))
        wrong(what, fmt::format("overlaps {}; expected memory of its own", name));
  }
  // The layer that x and w make: x: (…, in), w: (out, in).
  LinearShape layer(const ConstTensorView& x, const ConstTensorView& w) const {
    check("x", x);
    check("w", w);
    if (x.shape.rank() < 1) wrong("x", "is a scalar; expected (…, in)");
    if (w.shape.rank() != 2) wrong("w", fmt::format("is {}; expected (out, in)", shown(w.shape)));
    const std::int64_t in = x.shape.back();
    if (w.shape[1] != in)
      wrong("w", fmt::format("is {}; expected ({}, {}), from x {}", shown(w.shape), w.shape[0], in,
                             shown(x.shape)));
    return {in == 0 ? rows(x.shape) : x.count() / in, in, w.shape[0]};
  }
  static std::int64_t rows(const Shape& s) {
    std::int64_t n = 1;
    for (int d = 0; d + 1 < s.rank(); ++d) n *= s[d];
    return n;
  }
};

Shape with_last(Shape shape, std::int64_t last) {
  shape[shape.rank() - 1] = last;
  return shape;
}

std::string pair_text(const char* a, const Shape& of_a, const char* b, const Shape& of_b) {
  return fmt::format("{} {} and {} {}", a, shown(of_a), b, shown(of_b));
}

LinearShape check_forward(const Checker& c, const ConstTensorView& x, const ConstTensorView& w,
                          const ConstTensorView& b, const TensorView& y) {
  const LinearShape s = c.layer(x, w);
  const std::string from = pair_text("x", x.shape, "w", w.shape);
  c.expect("y", y, with_last(x.shape, s.out), from);
  if (given(b)) c.expect("b", b, {s.out}, from);
  c.expect_apart("y", y, {{"x", x}, {"w", w}, {"b", b}});
  return s;
}

LinearShape check_backward(const Checker& c, const ConstTensorView& dy, const ConstTensorView& x,
                           const ConstTensorView& w, const LinearGradients& g) {
  const LinearShape s = c.layer(x, w);
  const std::string from = pair_text("x", x.shape, "w", w.shape);
  c.expect("dy", dy, with_last(x.shape, s.out), from);
  if (given(g.dx)) c.expect("dx", g.dx, x.shape, from);
  if (given(g.dw)) c.expect("dw", g.dw, w.shape, from);
  if (given(g.db)) c.expect("db", g.db, {s.out}, from);
  c.expect_apart("dx", g.dx, {{"dy", dy}, {"x", x}, {"w", w}, {"dw", g.dw}, {"db", g.db}});
  c.expect_apart("dw", g.dw, {{"dy", dy}, {"x", x}, {"w", w}, {"db", g.db}});
  c.expect_apart("db", g.db, {{"dy", dy}, {"x", x}, {"w", w}});
  return s;
}

// Whether column_linear_backward() reduces dx. Not where it has no elements: a view of those may be null on one rank and
// not on another, and the ranks would not agree.
bool reduces(const TensorView& dx) { return given(dx) && dx.count() > 0; }

// Null where nothing is sent. Throws for a mesh that cannot communicate, before anything is written.
ProcessGroup* group_of(const DeviceMesh& axes) { return axes.size() > 1 ? &axes.group() : nullptr; }

void weight_gradients(Compute& compute, const ConstTensorView& dy, const ConstTensorView& x,
                      const LinearGradients& g, const LinearShape& s) {
  kernels::KernelContext& ctx = kernels_of(compute);
  if (given(g.dw))
    kernels::matmul(ctx, floats(dy), Stored::transposed, floats(x), Stored::plain, floats(g.dw), s.out, s.in,
                    s.tokens, g.accumulate);
  if (!given(g.db)) return;
  if (!g.accumulate) kernels::fill(ctx, floats(g.db), 0.0f, s.out);
  kernels::bias_backward(ctx, floats(dy), floats(g.db), s.tokens, s.out);
}

}  // namespace

void column_linear_forward(Compute& compute, const ConstTensorView& x, const ConstTensorView& w,
                           const ConstTensorView& b, const TensorView& y) {
  const LinearShape s = check_forward({"column_linear_forward", compute.device()}, x, w, b, y);
  kernels::linear_forward(kernels_of(compute), floats(x), floats(w), given(b) ? floats(b) : nullptr,
                          floats(y), s);
}

void column_linear_backward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& dy,
                            const ConstTensorView& x, const ConstTensorView& w, const LinearGradients& g) {
  given_mesh("column_linear_backward", axes);
  const LinearShape s = check_backward({"column_linear_backward", compute.device()}, dy, x, w, g);
  ProcessGroup* const group = reduces(g.dx) ? group_of(axes) : nullptr;
  Work sum;
  if (given(g.dx)) {
    kernels::linear_backward_input(kernels_of(compute), floats(dy), floats(w), floats(g.dx), s);
    if (group != nullptr) sum = group->all_reduce(g.dx, g.dx, {.stream = compute.stream()});
  }
  weight_gradients(compute, dy, x, g, s);
  if (sum.valid()) sum.wait();
}

void row_linear_forward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& x,
                        const ConstTensorView& w, const ConstTensorView& b, const TensorView& y) {
  given_mesh("row_linear_forward", axes);
  const LinearShape s = check_forward({"row_linear_forward", compute.device()}, x, w, b, y);
  ProcessGroup* const group = group_of(axes);
  kernels::linear_forward(kernels_of(compute), floats(x), floats(w), nullptr, floats(y), s);
  if (group != nullptr) group->all_reduce(y, y, {.stream = compute.stream()}).wait();
  if (given(b)) kernels::add_bias(kernels_of(compute), floats(b), floats(y), s.tokens, s.out);
}

void row_linear_backward(Compute& compute, const ConstTensorView& dy, const ConstTensorView& x,
                         const ConstTensorView& w, const LinearGradients& g) {
  const LinearShape s = check_backward({"row_linear_backward", compute.device()}, dy, x, w, g);
  if (given(g.dx))
    kernels::linear_backward_input(kernels_of(compute), floats(dy), floats(w), floats(g.dx), s);
  weight_gradients(compute, dy, x, g, s);
}

}  // namespace weft
