// Weights and activations as a kernel takes them: dtypes, shapes. Inside nn.
#pragma once

#include <fmt/format.h>

#include "weft/base/error.hpp"
#include "weft/nn/frame.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/layouts.hpp"

namespace weft {

/// Throws bad_argument: `"layers.0.mlp": x is bf16; expected f32`.
inline void expect_dtype(const TensorName& what, const Tensor& t, DType expected) {
  if (t.dtype() != expected)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{} is {}; expected {}", what.text(), name(t.dtype()), name(expected)));
}

/// Throws unless dy is f32 and of the shape and layout that the gradient of the module's y has.
inline void expect_gradient(const Module& module, const Tensor& dy, const Shape& shape,
                            const LayoutRef& layout) {
  const TensorName what = layouts::named(module, "dy");
  expect_dtype(what, dy, DType::f32);
  layouts::expect_same(what, dy.layout(), layout, "as y");
  if (!(dy.shape() == shape))
    throw Error(ErrorCode::bad_argument,
                fmt::format("{} is {}; expected {}", what.text(), to_string(dy.shape()), to_string(shape)));
}

/// x, f32, rounded to bf16; with the same layout.
inline Tensor rounded_to_bf16(Frame& frame, const Tensor& x) {
  const Tensor y = frame.compute().make(x.shape(), DType::bf16).with_layout(x.layout());
  kernels::round_to_bf16(frame.kernels(), x.data_ptr<float>(), y.data_ptr<bf16>(), x.count());
  return y;
}

/// x, f32, in the dtype of the weight w that it is multiplied with.
inline Tensor as_operand(Frame& frame, const Tensor& x, const Tensor& w) {
  return w.dtype() == DType::bf16 ? rounded_to_bf16(frame, x) : x;
}

/// A weight as f32: itself, or a copy where it is bf16; with the same layout.
inline Tensor widened(Frame& frame, const Tensor& w) {
  if (w.dtype() != DType::bf16) return w;
  const Tensor y = frame.compute().make(w.shape()).with_layout(w.layout());
  kernels::widen_bf16(frame.kernels(), w.data_ptr<bf16>(), y.data_ptr<float>(), w.count());
  return y;
}

/// c (=, or += where `add`) a b, with a: (m, k) and b: (k, n) of one dtype, f32 or bf16, as they are stored; c: f32 (m, n).
inline void multiply(Frame& frame, const Tensor& a, kernels::Stored a_stored, const Tensor& b,
                     kernels::Stored b_stored, const Tensor& c, std::int64_t m, std::int64_t n,
                     std::int64_t k, bool add) {
  float* const out = c.data_ptr<float>();
  if (a.dtype() == DType::bf16)
    kernels::matmul(frame.kernels(), a.data_ptr<bf16>(), a_stored, b.data_ptr<bf16>(), b_stored, out, m, n, k,
                    add);
  else
    kernels::matmul(frame.kernels(), a.data_ptr<float>(), a_stored, b.data_ptr<float>(), b_stored, out, m, n,
                    k, add);
}

}  // namespace weft
