#include "weft/nn/loss.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "mesh/axis_ranks.hpp"
#include "nn/operands.hpp"
#include "weft/base/error.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/layouts.hpp"

namespace weft {
namespace {

static_assert(CrossEntropy::kIgnore == kernels::kIgnoredTarget);

// Partial(sum) on axes that split the tokens: each rank has the part of the sum that its own tokens give.
LayoutRef loss_layout(const LayoutRef& logits) {
  if (logits == nullptr) return nullptr;
  Placements placements = logits->placements;
  for (Placement& p : placements)
    if (is_shard(p)) p = Partial{};
  return make_layout(logits->mesh(), std::move(placements), {1});
}

bool splits_tokens(const LayoutRef& logits) {
  for (std::size_t a = 0; logits != nullptr && a < logits->placements.size(); ++a)
    if (is_shard(logits->placements[a]) && logits->mesh_shape().size(static_cast<int>(a)) > 1) return true;
  return false;
}

void expect_one(const char* what, const Tensor& t) {
  if (t.count() != 1)
    throw Error(ErrorCode::bad_argument,
                fmt::format("cross entropy: {} has {} elements; expected 1", what, t.count()));
}

// The sum over all ranks of a number that each has.
Tensor over_ranks(const Tensor& own, const LayoutRef& of_labels) {
  if (of_labels == nullptr) return own;
  const LayoutRef layout = loss_layout(of_labels);
  return redistribute(own.with_layout(layout), Placements(layout->placements.size(), Replicate{}));
}

}  // namespace

Tensors CrossEntropy::do_forward(Inputs inputs, Frame& frame) {
  expect_count(inputs, 3, "inputs (logits, labels, valid)");
  const Tensor &logits = inputs[0], &labels = inputs[1], &valid = inputs[2];
  expect_dtype("cross entropy: logits", logits, DType::f32);
  expect_dtype("cross entropy: labels", labels, DType::i64);
  expect_dtype("cross entropy: valid", valid, DType::i64);
  layouts::expect_whole("cross entropy: logits", logits, "a loss");
  if (logits.shape().rank() == 0)
    throw Error(ErrorCode::bad_argument, "cross entropy: logits have no dimension; expected (…, classes)");
  const std::int64_t classes = logits.shape().back();
  Shape of_labels(logits.shape().values().first(static_cast<std::size_t>(logits.shape().rank()) - 1));
  if (!(labels.shape() == of_labels))
    throw Error(ErrorCode::bad_argument,
                fmt::format("cross entropy: labels are {}; expected {}, as of logits {}",
                            to_string(labels.shape()), to_string(of_labels), to_string(logits.shape())));
  if (logits.layout()) {
    const Shape& global = logits.layout()->global;
    const Shape labels_global(global.values().first(static_cast<std::size_t>(global.rank()) - 1));
    layouts::expect_same("cross entropy: labels", labels.layout(),
                         logits.layout()->with_global(labels_global), "as logits");
  } else {
    layouts::expect_same("cross entropy: labels", labels.layout(), nullptr, "as logits");
  }
  expect_one("valid", valid);
  if (valid.layout() && !valid.layout()->replicated())
    throw Error(ErrorCode::layout,
                fmt::format("cross entropy: valid is {}; it is the number of valid tokens of all ranks",
                            to_string(*valid.layout())));
  if (valid.layout() == nullptr && splits_tokens(logits.layout()))
    throw Error(
        ErrorCode::layout,
        fmt::format("cross entropy: valid is a plain tensor; where logits are {} it must be stated as the "
                    "number of all ranks: global_valid(context, labels), or scalar(mesh, n)",
                    to_string(*logits.layout())));
  const std::int64_t tokens = labels.count();
  const Tensor log_sum_exp = frame.compute().make({tokens});
  const Tensor loss = frame.compute().make({1}, DType::f64).with_layout(loss_layout(logits.layout()));
  kernels::cross_entropy_forward(frame.kernels(), logits.data_ptr<float>(), labels.data_ptr<std::int64_t>(),
                                 log_sum_exp.data_ptr<float>(), loss.data_ptr<double>(), tokens, classes,
                                 valid.data_ptr<std::int64_t>());
  frame.push(*this, {logits, labels, valid, log_sum_exp});
  return {loss};
}

Tensors CrossEntropy::do_backward(Inputs gradients, Frame& frame) {
  const Tensors kept = frame.pop(*this);
  const Tensor &logits = kept[0], &labels = kept[1], &valid = kept[2], &log_sum_exp = kept[3];
  const Tensor dlogits =
      frame.compute().make(logits.shape(), DType::f32, dx_memory()).with_layout(logits.layout());
  if (gradients.size() > 1) expect_count(gradients, 1, "gradients");
  if (!gradients.empty()) {
    expect_dtype("cross entropy: d(loss)", gradients[0], DType::f64);
    expect_one("d(loss)", gradients[0]);
  }
  kernels::cross_entropy_backward(
      frame.kernels(), logits.data_ptr<float>(), labels.data_ptr<std::int64_t>(),
      log_sum_exp.data_ptr<float>(), gradients.empty() ? nullptr : gradients[0].data_ptr<double>(),
      dlogits.data_ptr<float>(), labels.count(), logits.shape().back(), valid.data_ptr<std::int64_t>());
  return {dlogits};
}

std::int64_t count_valid(const Tensor& labels) {
  const auto all = labels.as<std::int64_t>();
  return std::count_if(all.begin(), all.end(),
                       [](std::int64_t label) { return label != CrossEntropy::kIgnore; });
}

Tensor global_valid(Context& context, const Tensor& labels) {
  return over_ranks(scalar(context, count_valid(labels)), labels.layout());
}

Tensor global_valid(Compute& compute, const Tensor& labels) {
  compute.expect_here("global_valid: labels", labels);
  const Tensor own = compute.make({1}, DType::i64);
  kernels::count_valid(kernels_of(compute), labels.data_ptr<std::int64_t>(), own.data_ptr<std::int64_t>(),
                       labels.count());
  return over_ranks(own, labels.layout());
}

Tensor scalar(const DeviceMesh& mesh, std::int64_t value) {
  return scalar(given_mesh("scalar", mesh, "mesh").context(), value)
      .with_layout(replicated_layout(mesh.root(), {1}));
}

Tensor scalar(Context& context, std::int64_t value) {
  Tensor t(context, {1}, DType::i64);
  t.as<std::int64_t>()[0] = value;
  return t;
}

}  // namespace weft
