#include "weft/domain/loss.hpp"

#include "domain/space.hpp"
#include "nn/element_loss.hpp"
#include "weft/base/error.hpp"
#include "weft/nn/loss.hpp"

namespace weft {
namespace {

LayoutRef rows_of(const LayoutRef& y) {
  if (y == nullptr) return nullptr;
  const Shape rows{y->global[domain::kHeight]};
  LayoutRef layout = replicated_layout(y->mesh(), rows);
  for (const int a : y->nesting)
    if (is_shard(y->placements[static_cast<std::size_t>(a)], domain::kHeight))
      layout = layout->with(y->mesh_shape().name(a), Shard{0});
  return layout;
}

}  // namespace

Tensors MapSquaredError::do_forward(Inputs inputs, Frame& frame) {
  if (inputs.size() != 3) expect_count(inputs, 2, "inputs");
  const Tensor &y = inputs[0], &target = inputs[1];
  expect_dtype(layouts::named(*this, "y"), y, DType::f32);
  maps::expect_map(*this, y);
  layouts::expect_whole(layouts::named(*this, "y"), y, "a loss", false);
  const TensorName of_target = layouts::named(*this, "target");
  expect_dtype(of_target, target, DType::f32);
  layouts::expect_same(of_target, target.layout(), y.layout(), "as y");
  if (!(target.shape() == y.shape()))
    throw Error(ErrorCode::bad_argument, fmt::format("{} is {}; expected {} as y", of_target.text(),
                                                     to_string(target.shape()), to_string(y.shape())));
  Tensor weights;
  if (inputs.size() == 3) {
    weights = inputs[2];
    const TensorName what = layouts::named(*this, "weights");
    expect_dtype(what, weights, DType::f32);
    layouts::expect_same(what, weights.layout(), rows_of(y.layout()), "as the rows of y");
    if (!(weights.shape() == Shape{y.size(domain::kHeight)}))
      throw Error(ErrorCode::bad_argument,
                  fmt::format("{} is {}; expected ({}), one for each row of y", what.text(),
                              to_string(weights.shape()), y.size(domain::kHeight)));
  }
  return {losses::of_elements(*this, frame, kernels::LossTerm::squared_error, y, target,
                              global_count(frame.compute(), y), weights)};
}

Tensors MapSquaredError::do_backward(Inputs gradients, Frame& frame) {
  if (!gradients.empty()) expect_count(gradients, 1, "gradients");
  return {losses::of_elements_backward(*this, frame, kernels::LossTerm::squared_error, gradients,
                                       Memory::shared)};
}

}  // namespace weft
