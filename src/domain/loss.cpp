#include "weft/domain/loss.hpp"

#include "domain/space.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

// Calls see(element, weight of its row) for each element of a rank's maps.
template <class See>
void each_element(const Tensor& y, const Tensor& weights, const See& see) {
  const std::int64_t height = y.size(domain::kHeight), width = y.size(domain::kWidth);
  for (std::int64_t i = 0; i < y.count(); ++i)
    see(static_cast<std::size_t>(i),
        weights ? static_cast<double>(weights.f32()[static_cast<std::size_t>(i / width % height)]) : 1.0);
}

LayoutRef rows_of(const LayoutRef& y) {
  if (y == nullptr) return nullptr;
  const Shape rows{y->global[domain::kHeight]};
  LayoutRef layout = replicated_layout(y->mesh(), rows);
  for (const int a : y->nesting)
    if (is_shard(y->placements[static_cast<std::size_t>(a)], domain::kHeight))
      layout = layout->with(y->mesh_shape().name(a), Shard{0});
  return layout;
}

// Of the loss, and of what takes part in it on every rank.
LayoutRef of_loss(const LayoutRef& y) {
  if (y == nullptr) return nullptr;
  LayoutRef layout = replicated_layout(y->mesh(), {1});
  for (int a = 0; a < y->mesh_shape().axis_count(); ++a)
    if (is_shard(y->placements[static_cast<std::size_t>(a)]))
      layout = layout->with(y->mesh_shape().name(a), Partial{});
  return layout;
}

}  // namespace

Tensors MapSquaredError::do_forward(Inputs inputs, Frame& frame) {
  if (inputs.size() != 3) expect_count(inputs, 2, "inputs");
  const Tensor &y = inputs[0], &target = inputs[1];
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
  const double count = static_cast<double>(layouts::global_shape(y).count());
  double sum = 0;
  each_element(y, weights, [&](std::size_t i, double weight) {
    const double off = static_cast<double>(y.f32()[i]) - static_cast<double>(target.f32()[i]);
    sum += weight * off * off;
  });
  const Tensor loss(frame.compute().context(), {1}, DType::f64, Memory::shared);
  loss.as<double>()[0] = sum / count;
  Tensors kept{y, target};
  if (weights) kept.push_back(weights);
  frame.push(*this, std::move(kept));
  return {loss.with_layout(of_loss(y.layout()))};
}

Tensors MapSquaredError::do_backward(Inputs gradients, Frame& frame) {
  const Tensors kept = frame.pop(*this);
  const Tensor &y = kept[0], &target = kept[1], weights = kept.size() > 2 ? kept[2] : Tensor();
  double scale = 2 / static_cast<double>(layouts::global_shape(y).count());
  if (!gradients.empty()) {
    expect_count(gradients, 1, "gradients");
    scale *= gradients[0].as<double>()[0];
  }
  const Tensor dy = frame.compute().make(y.shape(), DType::f32, Memory::shared).with_layout(y.layout());
  each_element(y, weights, [&](std::size_t i, double weight) {
    dy.f32()[i] = static_cast<float>(
        scale * weight * (static_cast<double>(y.f32()[i]) - static_cast<double>(target.f32()[i])));
  });
  return {dy};
}

}  // namespace weft
