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

template <class T>
const T* as(const ConstTensorView& v) {
  return reinterpret_cast<const T*>(v.data);
}
template <class T>
T* as(const TensorView& v) {
  return reinterpret_cast<T*>(v.data);
}
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
    if (v.device != device)
      wrong(what, fmt::format("is on {}; expected {}, the device of the Compute", to_string(v.device),
                              to_string(device)));
    if (const std::string fault = memory_fault(v); !fault.empty()) wrong(what, fault);
  }
  // What is multiplied: x says in which dtype.
  void check_x(const ConstTensorView& x) const {
    if (x.dtype != DType::f32 && x.dtype != DType::bf16)
      wrong("x", fmt::format("is {}; expected f32 or bf16", name(x.dtype)));
    check("x", x);
  }
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
  void expect(const char* what, const ConstTensorView& v, const Shape& shape, const std::string& from) const {
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
    check_x(x);
    check_operand("w", w, x);
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
  c.check_other("y", y, x);
  c.expect("y", y, with_last(x.shape, s.out), from);
  if (given(b)) c.check_other("b", b, x);
  if (given(b)) c.expect("b", b, {s.out}, from);
  c.expect_apart("y", y, {{"x", x}, {"w", w}, {"b", b}});
  return s;
}

LinearShape check_backward(const Checker& c, const ConstTensorView& dy, const ConstTensorView& x,
                           const ConstTensorView& w, const LinearGradients& g) {
  const LinearShape s = c.layer(x, w);
  const std::string from = pair_text("x", x.shape, "w", w.shape);
  c.check_operand("dy", dy, x);
  c.expect("dy", dy, with_last(x.shape, s.out), from);
  const auto expect_written = [&](const char* what, const TensorView& v, const Shape& shape) {
    if (!given(v)) return;
    c.check_other(what, v, x);
    c.expect(what, v, shape, from);
  };
  expect_written("dx", g.dx, x.shape);
  expect_written("dw", g.dw, w.shape);
  expect_written("db", g.db, {s.out});
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

// What kernels write, f32: the memory of a view, or memory that round() brings to the view.
class Output {
 public:
  Output(Compute& compute, const TensorView& to) : compute_(compute), to_(to) {
    if (to.dtype != DType::f32) wide_ = compute.make(to.shape);
  }
  float* data() const { return wide_ ? wide_.data_ptr<float>() : as<float>(to_); }
  /// The values that the view has now, to be added to.
  void read() const {
    if (wide_) kernels::widen_bf16(kernels_of(compute_), as<bf16>(ConstTensorView(to_)), data(), to_.count());
  }
  void round() const {
    if (wide_) kernels::round_to_bf16(kernels_of(compute_), data(), as<bf16>(to_), to_.count());
  }

 private:
  Compute& compute_;
  const TensorView& to_;
  Tensor wide_;
};

// What kernels read as f32.
class Input {
 public:
  Input(Compute& compute, const ConstTensorView& from) : from_(from) {
    if (!given(from) || from.dtype == DType::f32) return;
    wide_ = compute.make(from.shape);
    kernels::widen_bf16(kernels_of(compute), as<bf16>(from), wide_.data_ptr<float>(), from.count());
  }
  const float* data() const { return wide_ ? wide_.data_ptr<float>() : as<float>(from_); }

 private:
  const ConstTensorView& from_;
  Tensor wide_;
};

// c (=, or += where `add`) a b; a: (m, k), b: (k, n), as they are stored.
void multiply(kernels::KernelContext& ctx, const ConstTensorView& a, Stored a_stored,
              const ConstTensorView& b, Stored b_stored, float* c, std::int64_t m, std::int64_t n,
              std::int64_t k, bool add) {
  if (a.dtype == DType::bf16)
    kernels::matmul(ctx, as<bf16>(a), a_stored, as<bf16>(b), b_stored, c, m, n, k, add);
  else
    kernels::matmul(ctx, as<float>(a), a_stored, as<float>(b), b_stored, c, m, n, k, add);
}

// y = x wᵀ, and + b where it is given.
void forward(Compute& compute, const ConstTensorView& x, const ConstTensorView& w, const ConstTensorView& b,
             const TensorView& y, const LinearShape& s) {
  kernels::KernelContext& ctx = kernels_of(compute);
  const Output out(compute, y);
  const Input bias(compute, b);
  if (x.dtype == DType::f32) {
    kernels::linear_forward(ctx, as<float>(x), as<float>(w), given(b) ? bias.data() : nullptr, out.data(), s);
  } else {
    multiply(ctx, x, Stored::plain, w, Stored::transposed, out.data(), s.tokens, s.out, s.in, false);
    if (given(b)) kernels::add_bias(ctx, bias.data(), out.data(), s.tokens, s.out);
  }
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

}  // namespace

void column_linear_forward(Compute& compute, const ConstTensorView& x, const ConstTensorView& w,
                           const ConstTensorView& b, const TensorView& y) {
  const LinearShape s = check_forward({"column_linear_forward", compute.device()}, x, w, b, y);
  forward(compute, x, w, b, y, s);
}

void column_linear_backward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& dy,
                            const ConstTensorView& x, const ConstTensorView& w, const LinearGradients& g) {
  given_mesh("column_linear_backward", axes);
  const LinearShape s = check_backward({"column_linear_backward", compute.device()}, dy, x, w, g);
  ProcessGroup* const group = reduces(g.dx) ? group_of(axes) : nullptr;
  Work sum;
  if (given(g.dx)) {
    input_gradient(compute, dy, w, g.dx, s);
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
  forward(compute, x, w, {}, y, s);
  if (group != nullptr) group->all_reduce(y, y, {.stream = compute.stream()}).wait();
  if (!given(b)) return;
  const Output out(compute, y);
  const Input bias(compute, b);
  out.read();
  kernels::add_bias(kernels_of(compute), bias.data(), out.data(), s.tokens, s.out);
  out.round();
}

void row_linear_backward(Compute& compute, const ConstTensorView& dy, const ConstTensorView& x,
                         const ConstTensorView& w, const LinearGradients& g) {
  const LinearShape s = check_backward({"row_linear_backward", compute.device()}, dy, x, w, g);
  if (given(g.dx)) input_gradient(compute, dy, w, g.dx, s);
  weight_gradients(compute, dy, x, g, s);
}

}  // namespace weft
