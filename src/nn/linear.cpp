#include "weft/nn/linear.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "nn/exact/sums.hpp"
#include "nn/linear_parts.hpp"
#include "nn/operands.hpp"
#include "weft/base/error.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/layouts.hpp"

namespace weft {
namespace {

using kernels::Stored;

}  // namespace

Linear::Linear(std::int64_t in, std::int64_t out, bool with_bias, Init init)
    : WeightedLayer({out, in}, with_bias, init) {}

ShardRule Linear::shard_rule(Split split) const {
  ShardRule rule = rule_of_product(split, segments_);
  const Shape& shape = weight->global_shape();
  if (split == Split::row) {
    rule.whole_units.push_back({"input features", shape[1]});
    return rule;
  }
  rule.whole_units.push_back({"output features", shape[0]});
  for (const std::int64_t size : segments_) rule.whole_units.push_back({"features in a segment", size});
  return rule;
}

SpaceRule Linear::space_rule(const DeviceMesh&, std::span<const int>) const {
  return {typeid(*this) == typeid(Linear) ? SpaceRule::Kind::any_part : SpaceRule::Kind::unknown};
}

void Linear::set_segments(std::vector<std::int64_t> sizes) {
  const std::int64_t out = weight->global_shape()[0],
                     sum = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
  if (sum != out || std::ranges::any_of(sizes, [](std::int64_t s) { return s < 1; }))
    throw Error(ErrorCode::bad_argument,
                fmt::format("\"{}\": segments are {} = {}; expected sizes of at least 1 that add up to {} "
                            "outputs",
                            path(), fmt::join(sizes, " + "), sum, out));
  segments_ = std::move(sizes);
}

bool Linear::set_output_dtype(DType dtype) {
  output_ = checked_output_dtype(*this, dtype);
  return true;
}

void Linear::tie_weight(ParameterRef other) { weight = tie("weight", std::move(other)); }

Tensors Linear::do_forward(Inputs inputs, Frame& frame) {
  expect_count(inputs, 1, "inputs");
  const Tensor x = layouts::beside(*this, "x", inputs[0], *weight);
  expect_activation(layouts::named(*this, "x"), x);
  const Tensor& stored = weight->weight();
  const LayoutRef layout = layouts::linear_output(layouts::named(*this, "x"), x.layout(), stored.layout());
  const std::int64_t in = stored.size(1), out = stored.size(0);
  if (x.shape().rank() == 0 || x.shape().back() != in)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("{} is {}; expected {} features (the second dimension of weight {})",
                    layouts::named(*this, "x").text(), to_string(x.shape()), in, to_string(stored.shape())));
  const Tensor y = frame.compute()
                       .make(layouts::with_last(x.shape(), out), output_.value_or(x.dtype()), out_memory())
                       .with_layout(layout);
  const bool add_bias_here = bias && !row_parallel(*weight);
  if (add_bias_here) expect_bias_fits(*this, y, *bias, y.shape().rank() - 1);
  const std::int64_t tokens = out == 0 ? 0 : y.count() / out;
  const Tensor b = add_bias_here ? widened(frame, bias->weight()) : Tensor();
  Tensors kept{x};
  const Tensor w = weight_to_use(frame, kept);
  const float* const of_b = b ? b.data_ptr<float>() : nullptr;
  const kernels::LinearShape s{tokens, in, out};
  if (w.dtype() == DType::f32)
    for (const auto& [what, dtype] : {std::pair{"x", x.dtype()}, {"y", y.dtype()}})
      if (dtype == DType::bf16)
        throw Error(ErrorCode::bad_argument,
                    fmt::format("{} is bf16 and the weight f32; expected a weight in bf16",
                                layouts::named(*this, what).text()));
  kept[0] = as_operand(frame, x, w);
  if (w.dtype() == DType::bf16)  // for backward, the dtype of x
    kept.insert(kept.begin() + 1, Tensor(kept[0].storage(), 0, {0}, x.dtype()));
  if (frame.exact()) {
    expect_dtype(layouts::named(*this, "x in exact mode"), x, DType::f32);
    expect_dtype(layouts::named(*this, "y in exact mode"), y, DType::f32);
    exact::output(frame, *this, kept[0], w, of_b, y);
  } else if (w.dtype() == DType::bf16) {
    const bf16* const of_x = kept[0].data_ptr<bf16>();
    if (y.dtype() == DType::bf16)
      kernels::matmul_to_bf16(frame.kernels(), of_x, Stored::plain, as_matrix(w, *weight), Stored::transposed,
                              of_b, y.data_ptr<bf16>(), tokens, out, in);
    else
      kernels::linear_forward(frame.kernels(), of_x, as_matrix(w, *weight), of_b, y.data_ptr<float>(), s);
  } else {
    kernels::linear_forward(frame.kernels(), x.data_ptr<float>(), w.data_ptr<float>(), of_b,
                            y.data_ptr<float>(), s);
  }
  frame.push(*this, std::move(kept));
  return {y};
}

void Linear::finish_forward(Tensors& y, Frame& frame) {
  if (!bias || !row_parallel(*weight)) return;
  expect_bias_fits(*this, y[0], *bias, y[0].shape().rank() - 1);
  const Tensor b = widened(frame, bias->weight());
  const std::int64_t out = b.count();
  by_element(y[0], [&]<class T>() {
    kernels::add_bias(frame.kernels(), b.data_ptr<float>(), y[0].data_ptr<T>(),
                      out == 0 ? 0 : y[0].count() / out, out);
  });
}

void Linear::begin_backward(Inputs dy, Frame& frame) {
  expect_count(dy, 1, "gradients");
  if (!bias || !row_parallel(*weight)) return;
  expect_activation(layouts::named(*this, "dy"), dy[0]);
  accumulate_bias_of(*this, frame, *bias, layouts::beside(*this, "dy", dy[0], *weight));
}

Tensors Linear::do_backward(Inputs gradients, Frame& frame) {
  const Tensors kept = frame.pop(*this);
  const Tensor& x = kept[0];
  const Tensor w = weight_used(frame, kept);
  if (x.dtype() != w.dtype())  // the layer was a float8 layer, or its weight had another dtype
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("\"{}\": its forward pass kept x in {} on the Frame; expected {}, the dtype of its "
                    "weight: a layer must not change between forward and backward",
                    path(), name(x.dtype()), name(w.dtype())));
  const LayoutRef y_layout = layouts::linear_output(layouts::named(*this, "x"), x.layout(), w.layout());
  const Tensor& dy = gradients[0];
  const std::int64_t in = w.size(1), out = w.size(0);
  const DType of_x = w.dtype() == DType::bf16 ? kept[1].dtype() : x.dtype();
  expect_gradient(*this, dy, layouts::with_last(x.shape(), out),
                  expected_gradient(layouts::gradient_of_output(y_layout), w.layout(), dy.layout()),
                  output_.value_or(of_x));
  if (bias && !row_parallel(*weight)) accumulate_bias_of(*this, frame, *bias, dy);

  const std::int64_t tokens = in == 0 ? 0 : x.count() / in;
  const int last = x.shape().rank() - 1;
  const Tensor operand = as_operand(frame, dy, w);
  LayoutRef of_dw = layouts::partial_as(layouts::gradient_of(w.layout(), x.layout(), last), dy.layout());
  if (frame.exact() && last > 2) of_dw = exact::summed_over_positions(of_dw, x.layout());
  frame.later([this, kept, operand, of_dw, in, out, tokens, exact = frame.exact()](Frame& f) {
    accumulate_weight(f, kept, of_dw, [&](const Tensor& dw, bool add) {
      if (exact) return exact::weight_gradient(f, *this, operand, kept[0], dw, add);
      multiply(f, operand, Stored::transposed, kept[0], Stored::plain, dw, out, in, tokens, add);
    });
  });
  const Tensor dx = frame.compute()
                        .make(x.shape(), of_x, dx_memory())
                        .with_layout(layouts::partial_as(
                            layouts::linear_input_gradient(x.layout(), w.layout()), dy.layout()));
  if (frame.exact()) return {exact::input_gradient(frame, *this, operand, w, segments_, dx)};
  if (of_x == DType::bf16)
    kernels::matmul_to_bf16(frame.kernels(), operand.data_ptr<bf16>(), Stored::plain, as_matrix(w, *weight),
                            Stored::plain, nullptr, dx.data_ptr<bf16>(), tokens, in, out);
  else if (w.dtype() == DType::bf16)
    kernels::matmul(frame.kernels(), operand.data_ptr<bf16>(), Stored::plain, as_matrix(w, *weight),
                    Stored::plain, dx.data_ptr<float>(), tokens, in, out, false);
  else
    multiply(frame, operand, Stored::plain, w, Stored::plain, dx, tokens, in, out, false);
  return {dx};
}

}  // namespace weft
