// Weights and activations in the form that a kernel takes: dtypes, shapes. Included only inside nn.
#pragma once

#include <fmt/format.h>

#include <string_view>
#include <vector>

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

/// Throws bad_argument unless t may be an activation: `"layers.0.mlp": x is i64; expected f32 or bf16`.
inline void expect_activation(const TensorName& what, const Tensor& t) {
  if (t.dtype() != DType::f32 && t.dtype() != DType::bf16)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{} is {}; expected f32 or bf16", what.text(), name(t.dtype())));
}

/// Calls run.template operator()<T>() with the element of the activation x, float or bf16.
template <class Run>
void by_element(const Tensor& x, Run&& run) {
  if (x.dtype() == DType::bf16)
    run.template operator()<bf16>();
  else
    run.template operator()<float>();
}

/// The dtype that Module::set_output_dtype() got, for its caller to keep.
inline DType checked_output_dtype(const Module& module, DType dtype) {
  if (dtype != DType::f32 && dtype != DType::bf16)
    throw Error(ErrorCode::bad_argument, fmt::format("\"{}\": set_output_dtype got {}; expected f32 or bf16",
                                                     module.path(), name(dtype)));
  return dtype;
}

/// Throws unless dy has the dtype, shape and layout of the gradient of the module's y.
inline void expect_gradient(const Module& module, const Tensor& dy, const Shape& shape,
                            const LayoutRef& layout, DType dtype = DType::f32) {
  const TensorName what = layouts::named(module, "dy");
  expect_dtype(what, dy, dtype);
  layouts::expect_same(what, dy.layout(), layout, "as y");
  if (!(dy.shape() == shape))
    throw Error(ErrorCode::bad_argument,
                fmt::format("{} is {}; expected {}", what.text(), to_string(dy.shape()), to_string(shape)));
}

/// Throws unless `context` has as many samples as x, sharded in the same way. The error's text calls
/// `context` by `name`.
inline void expect_same_samples(const Module& module, const Tensor& x, const Tensor& context,
                                std::string_view name) {
  const Shape &of_x = layouts::global_shape(x), &of_context = layouts::global_shape(context);
  const TensorName what = layouts::named(module, name);
  if (of_context[0] != of_x[0])
    throw Error(ErrorCode::bad_argument, fmt::format("{} is {}; expected a batch of {}, as x has",
                                                     what.text(), to_string(of_context), of_x[0]));
  const auto cuts = [](const LayoutRef& layout) {  // the axes that cut samples, outermost first
    std::vector<int> axes;
    for (const int axis : layout->nesting)
      if (layout->mesh_shape().size(axis) > 1 &&
          is_shard(layout->placements[static_cast<std::size_t>(axis)], 0))
        axes.push_back(axis);
    return axes;
  };
  if (x.layout() && context.layout() && cuts(x.layout()) != cuts(context.layout()))
    throw Error(ErrorCode::layout,
                fmt::format("{} is {}; expected its samples cut as those of x, {}", what.text(),
                            to_string(*context.layout()), to_string(*x.layout())));
}

/// Throws unless the mask has x's samples and queries and the context's keys.
inline void expect_mask_shape(const TensorName& what, const Tensor& mask, const Tensor& x,
                              const Tensor& context) {
  const Shape &got = layouts::global_shape(mask), &of_x = layouts::global_shape(x);
  const std::int64_t keys = layouts::global_shape(context)[1];
  const auto is = [&](int dim, std::int64_t full) { return got[dim] == full || got[dim] == 1; };
  if (got.rank() != 3 || !is(0, of_x[0]) || !is(1, of_x[1]) || got[2] != keys)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{} is {}; expected ({} or 1, {} or 1, {}), of batch, queries and keys",
                            what.text(), to_string(got), of_x[0], of_x[1], keys));
}

/// x (f32) rounded to bf16, with the layout of x.
inline Tensor rounded_to_bf16(Frame& frame, const Tensor& x, Memory memory = Memory::local) {
  const Tensor y = frame.compute().make(x.shape(), DType::bf16, memory).with_layout(x.layout());
  kernels::round_to_bf16(frame.kernels(), x.data_ptr<float>(), y.data_ptr<bf16>(), x.count());
  return y;
}

/// Returns whether products of activations with each other are computed in bf16 if the CPU can do so, like
/// products with the weight w.
inline bool bf16_products(const Parameter& w) { return w.dtype() == DType::bf16; }

/// A weight or an activation as f32: itself, or a copy if it is bf16, with its layout.
inline Tensor widened(Frame& frame, const Tensor& w, Memory memory = Memory::local) {
  if (w.dtype() != DType::bf16) return w;
  const Tensor y = frame.compute().make(w.shape(), DType::f32, memory).with_layout(w.layout());
  kernels::widen_bf16(frame.kernels(), w.data_ptr<bf16>(), y.data_ptr<float>(), w.count());
  return y;
}

/// x in `dtype` if both are f32 or bf16, in the same kind of memory. Otherwise x.
inline Tensor cast(Frame& frame, const Tensor& x, DType dtype) {
  const Memory memory = x.storage().memory();
  if (x.dtype() == DType::f32 && dtype == DType::bf16) return rounded_to_bf16(frame, x, memory);
  if (x.dtype() == DType::bf16 && dtype == DType::f32) return widened(frame, x, memory);
  return x;
}

/// x (f32 or bf16) in the dtype of the weight w with which it is multiplied.
inline Tensor as_operand(Frame& frame, const Tensor& x, const Tensor& w) {
  return w.dtype() == DType::bf16 && x.dtype() == DType::f32 ? rounded_to_bf16(frame, x)
         : w.dtype() == DType::f32                           ? widened(frame, x)
                                                             : x;
}

/// The dtype that an activation must have which has the dtype of another one, t: f32 unless that is bf16.
inline DType as_activation(const Tensor& t) { return t.dtype() == DType::bf16 ? DType::bf16 : DType::f32; }

/// Calls run(p) for the elements of y as f32. If y is bf16, p is other memory, which is rounded into y.
template <class Run>
void into_f32(Frame& frame, const Tensor& y, Run&& run) {
  if (y.dtype() != DType::bf16) return run(y.data_ptr<float>());
  const Tensor wide = frame.compute().make(y.shape());
  run(wide.data_ptr<float>());
  kernels::round_to_bf16(frame.kernels(), wide.data_ptr<float>(), y.data_ptr<bf16>(), y.count());
}

/// Returns whether the weight's input features, its second dimension, are split: then y is Partial, and the
/// bias is added after the sum.
inline bool row_parallel(const Parameter& weight) {
  const LayoutRef layout = weight.weight().layout();
  if (layout == nullptr) return false;
  for (int axis = 0; axis < layout->mesh_shape().axis_count(); ++axis)
    if (layout->mesh_shape().size(axis) > 1 &&
        is_shard(layout->placements[static_cast<std::size_t>(axis)], 1))
      return true;
  return false;
}

/// Throws layout unless y has whole values and its dimension `features`, to which the bias belongs, is
/// sharded like the bias.
inline void expect_bias_fits(const Module& module, const Tensor& y, const Parameter& bias, int features) {
  if (y.layout() == nullptr) return;
  const TensorName what = layouts::named(module, "y");
  layouts::expect_whole(what, y, "a bias", false);
  if (y.size(features) != bias.weight().count())
    throw Error(ErrorCode::layout, fmt::format("{} has {} features on this rank, the bias {}", what.text(),
                                               y.size(features), bias.weight().count()));
  layouts::expect_bias(what, y.layout(), bias.weight().layout(), features);
}

/// x in the shape `as`, with its dimensions permuted, then in the shape `out`; the result has that layout.
inline Tensor permuted(Frame& frame, const Tensor& x, const Shape& as, const Dims& order, const Shape& out,
                       const LayoutRef& layout, Memory memory = Memory::local) {
  const Tensor y = frame.compute().make(out, as_activation(x), memory).with_layout(layout);
  const Tensor from = widened(frame, x);
  into_f32(frame, y, [&](float* to) {
    kernels::permute(frame.kernels(), from.data_ptr<float>(), to, {as, order});
  });
  return y;
}

/// w (bf16) in the form that a kernel reads. A packed form may be kept if w is the parameter's own tensor,
/// not one made for this pass.
inline kernels::WeightMatrix as_matrix(const Tensor& w, const Parameter& of) {
  const bool own = w.data() == of.weight().data();
  return {w.data_ptr<bf16>(), of.number(), own ? of.weight_version() : 0};
}

/// c = a b, or c += a b if `add`, with a: (m, k) and b: (k, n) of one dtype, f32 or bf16, in their stored
/// form; c: f32 (m, n).
inline void multiply(kernels::KernelContext& ctx, const ConstTensorView& a, kernels::Stored a_stored,
                     const ConstTensorView& b, kernels::Stored b_stored, float* c, std::int64_t m,
                     std::int64_t n, std::int64_t k, bool add) {
  const auto product = [&]<class T>(const T*) {
    kernels::matmul(ctx, reinterpret_cast<const T*>(a.data), a_stored, reinterpret_cast<const T*>(b.data),
                    b_stored, c, m, n, k, add);
  };
  if (a.dtype == DType::bf16)
    product(static_cast<const bf16*>(nullptr));
  else
    product(static_cast<const float*>(nullptr));
}
inline void multiply(Frame& frame, const Tensor& a, kernels::Stored a_stored, const Tensor& b,
                     kernels::Stored b_stored, const Tensor& c, std::int64_t m, std::int64_t n,
                     std::int64_t k, bool add) {
  multiply(frame.kernels(), a.view(), a_stored, b.view(), b_stored, c.data_ptr<float>(), m, n, k, add);
}

}  // namespace weft
