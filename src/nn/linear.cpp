#include "weft/nn/linear.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "weft/base/error.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/layouts.hpp"

namespace weft {
namespace {

// Whether the weight's input features are split: then y is Partial and the bias waits for the sum.
bool row_parallel(const Parameter& weight) {
  const LayoutRef layout = weight.value().layout();
  if (layout == nullptr) return false;
  for (int axis = 0; axis < layout->mesh_shape().axis_count(); ++axis)
    if (layout->mesh_shape().size(axis) > 1 &&
        is_shard(layout->placements[static_cast<std::size_t>(axis)], 1))
      return true;
  return false;
}

// dbias: (out) = or += the sum of dy's rows; dy: (tokens, out)
void accumulate_bias(Frame& frame, Parameter& bias, const Tensor& dy) {
  const int last = dy.shape().rank() - 1;
  bias.accumulate(layouts::gradient_of(bias.value().layout(), dy.layout(), last),
                  [&](const Tensor& into, bool add) {
                    const std::int64_t out = into.count();
                    if (!add) std::fill_n(into.f32().data(), out, 0.0f);
                    kernels::bias_backward(frame.kernels(), dy.f32().data(), into.f32().data(),
                                           out == 0 ? 0 : dy.count() / out, out);
                  });
}

void expect_bias_fits(const Module& module, const Tensor& y, const Parameter& bias) {
  if (y.layout() == nullptr) return;
  layouts::expect_whole(layouts::named(module, "y"), y, "a bias", false);
  if (y.shape().back() != bias.value().count())
    throw Error(ErrorCode::layout,
                fmt::format("{} has {} features on this rank, the bias {}",
                            layouts::named(module, "y").text(), y.shape().back(), bias.value().count()));
}

}  // namespace

Linear::Linear(std::int64_t in, std::int64_t out, bool with_bias, Init init) {
  weight = add("weight", std::make_shared<Parameter>(Shape{out, in}, init));
  if (with_bias) bias = add("bias", std::make_shared<Parameter>(Shape{out}));
}

ShardRule Linear::shard_rule(Split split) const {
  const bool columns = split == Split::column;
  ShardRule rule;
  rule.parameters.push_back({weight.get(), Shard{columns ? 0 : 1}});
  if (bias) rule.parameters.push_back({bias.get(), columns ? Placement(Shard{0}) : Placement(Replicate{})});
  const Shape& shape = weight->global_shape();
  rule.whole_units.push_back(columns ? Unit{"output features", shape[0]} : Unit{"input features", shape[1]});
  return rule;
}

void Linear::tie_weight(ParameterRef other) { weight = tie("weight", std::move(other)); }

Tensors Linear::do_forward(Inputs inputs, Frame& frame) {
  expect_count(inputs, 1, "inputs");
  const Tensor x = layouts::beside(*this, "x", inputs[0], *weight);
  const Tensor& w = weight->value();
  const LayoutRef layout = layouts::linear_output(layouts::named(*this, "x"), x.layout(), w.layout());
  const std::int64_t in = w.size(1), out = w.size(0);
  if (x.shape().rank() == 0 || x.shape().back() != in)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("{} is {}; expected {} features (the second dimension of weight {})",
                    layouts::named(*this, "x").text(), to_string(x.shape()), in, to_string(w.shape())));
  const Tensor y =
      frame.compute().make(layouts::with_last(x.shape(), out), DType::f32, out_memory()).with_layout(layout);
  const bool add_bias_here = bias && !row_parallel(*weight);
  if (add_bias_here) expect_bias_fits(*this, y, *bias);
  const std::int64_t tokens = out == 0 ? 0 : y.count() / out;
  kernels::linear_forward(frame.kernels(), x.f32().data(), w.f32().data(),
                          add_bias_here ? bias->value().f32().data() : nullptr, y.f32().data(),
                          {tokens, in, out});
  frame.push(*this, {x});
  return {y};
}

void Linear::finish_forward(Tensors& y, Frame& frame) {
  if (!bias || !row_parallel(*weight)) return;
  expect_bias_fits(*this, y[0], *bias);
  const std::int64_t out = bias->value().count();
  kernels::add_bias(frame.kernels(), bias->value().f32().data(), y[0].f32().data(),
                    out == 0 ? 0 : y[0].count() / out, out);
}

void Linear::begin_backward(Inputs dy, Frame& frame) {
  expect_count(dy, 1, "gradients");
  if (bias && row_parallel(*weight))
    accumulate_bias(frame, *bias, layouts::beside(*this, "dy", dy[0], *weight));
}

Tensors Linear::do_backward(Inputs gradients, Frame& frame) {
  const Tensor x = frame.pop(*this)[0];
  const Tensor& w = weight->value();
  const LayoutRef y_layout = layouts::linear_output(layouts::named(*this, "x"), x.layout(), w.layout());
  const Tensor& dy = gradients[0];
  layouts::expect_same(layouts::named(*this, "dy"), dy.layout(), layouts::gradient_of_output(y_layout),
                       "as y");
  const std::int64_t in = w.size(1), out = w.size(0);
  if (!(dy.shape() == layouts::with_last(x.shape(), out)))
    throw Error(ErrorCode::bad_argument,
                fmt::format("{} is {}; expected {}", layouts::named(*this, "dy").text(),
                            to_string(dy.shape()), to_string(layouts::with_last(x.shape(), out))));
  if (bias && !row_parallel(*weight)) accumulate_bias(frame, *bias, dy);

  const std::int64_t tokens = in == 0 ? 0 : x.count() / in;
  const int last = x.shape().rank() - 1;
  weight->accumulate(layouts::gradient_of(w.layout(), x.layout(), last), [&](const Tensor& dw, bool add) {
    kernels::matmul(frame.kernels(), dy.f32().data(), kernels::Stored::transposed, x.f32().data(),
                    kernels::Stored::plain, dw.f32().data(), out, in, tokens, add);
  });
  const Tensor dx = frame.compute()
                        .make(x.shape(), DType::f32, dx_memory())
                        .with_layout(layouts::linear_input_gradient(x.layout(), w.layout()));
  kernels::linear_backward_input(frame.kernels(), dy.f32().data(), w.f32().data(), dx.f32().data(),
                                 {tokens, in, out});
  return {dx};
}

}  // namespace weft
