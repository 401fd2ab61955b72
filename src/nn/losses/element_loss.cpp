// The common code of losses of elements that each have a target: everything but the term.
#include <fmt/format.h>

#include <utility>

#include "nn/element_loss.hpp"
#include "nn/exact/loss.hpp"
#include "nn/losses/checks.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/layouts.hpp"
#include "weft/nn/loss.hpp"

namespace weft {

namespace losses {

namespace {

kernels::LossShape shape_of(const Tensor& y, const Tensor& weights) {
  if (!weights) return {y.count()};
  return {y.count(), weights.count(), y.shape().back()};
}

}  // namespace

Tensor of_elements(const Module& module, Frame& frame, kernels::LossTerm term, const Tensor& y,
                   const Tensor& target, const Tensor& count, const Tensor& weights) {
  if (frame.exact() && weights)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("\"{}\": weights of rows have no rule for exact mode; expected none", module.path()));
  if (frame.exact()) {
    frame.push(module, {y, target, count});
    return exact::element_loss(frame, y, target, count, term);
  }
  const Tensor loss =
      frame.compute().make({1}, DType::f64, Memory::shared).with_layout(loss_layout(y.layout()));
  kernels::element_loss_forward(frame.kernels(), y.data_ptr<float>(), target.data_ptr<float>(),
                                weights ? weights.data_ptr<float>() : nullptr, loss.data_ptr<double>(),
                                shape_of(y, weights), count.data_ptr<std::int64_t>(), term);
  Tensors kept{y, target, count};
  if (weights) kept.push_back(weights);
  frame.push(module, std::move(kept));
  return loss;
}

Tensor of_elements_backward(const Module& module, Frame& frame, kernels::LossTerm term, Inputs gradients,
                            Memory memory) {
  const Tensors kept = frame.pop(module);
  const Tensor &y = kept[0], &target = kept[1], &count = kept[2],
               weights = kept.size() > 3 ? kept[3] : Tensor();
  if (!gradients.empty()) expect_gradient_of_loss(kernels::name(term), gradients[0]);
  const Tensor dy = frame.compute().make(y.shape(), DType::f32, memory).with_layout(y.layout());
  kernels::element_loss_backward(frame.kernels(), y.data_ptr<float>(), target.data_ptr<float>(),
                                 weights ? weights.data_ptr<float>() : nullptr,
                                 gradients.empty() ? nullptr : gradients[0].data_ptr<double>(),
                                 dy.data_ptr<float>(), shape_of(y, weights), count.data_ptr<std::int64_t>(),
                                 term);
  return dy;
}

}  // namespace losses

ElementLoss::ElementLoss(kernels::LossTerm term) : term_(term) {}

Tensors ElementLoss::do_forward(Inputs inputs, Frame& frame) {
  expect_count(inputs, 3, "inputs (y, target, count)");
  const char* const loss_name = kernels::name(term_);
  const Tensor &y = inputs[0], &target = inputs[1], &count = inputs[2];
  const std::string of_y = fmt::format("{}: y", loss_name), of_target = fmt::format("{}: target", loss_name);
  expect_dtype(of_y, y, DType::f32);
  expect_dtype(of_target, target, DType::f32);
  layouts::expect_whole(of_y, y, "a loss", false);
  if (!(layouts::global_shape(target) == layouts::global_shape(y)))
    throw Error(ErrorCode::bad_argument,
                fmt::format("{} is {}; expected {}, as y", of_target,
                            to_string(layouts::global_shape(target)), to_string(layouts::global_shape(y))));
  layouts::expect_same(of_target, target.layout(), y.layout(), "as y");
  losses::expect_count_of_all(loss_name, "count", count, y.layout(), y.layout(),
                              {"the number of elements of all ranks", "y", "global_count(compute, y)"});
  return {losses::of_elements(*this, frame, term_, y, target, count)};
}

Tensors ElementLoss::do_backward(Inputs gradients, Frame& frame) {
  if (gradients.size() > 1) expect_count(gradients, 1, "gradients");
  return {losses::of_elements_backward(*this, frame, term_, gradients, dx_memory())};
}

}  // namespace weft
