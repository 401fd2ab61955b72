#include "weft/nn/loss.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/mutant.hpp"
#include "mesh/axis_ranks.hpp"
#include "nn/exact/loss.hpp"
#include "nn/losses/checks.hpp"
#include "nn/operands.hpp"
#include "weft/base/error.hpp"
#include "weft/host/copy.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/layouts.hpp"

namespace weft {
namespace {

static_assert(CrossEntropy::kIgnore == kernels::kIgnoredTarget);

// The axes that split the classes; empty if no axis does.
std::vector<std::string> class_axes(const LayoutRef& logits) {
  std::vector<std::string> names;
  if (logits == nullptr) return names;
  for (const int axis :
       logits->nesting)  // outermost first: parts of the vocabulary in the order of the ranks
    if (logits->mesh_shape().size(axis) > 1 &&
        is_shard(logits->placements[static_cast<std::size_t>(axis)], logits->global.rank() - 1))
      names.push_back(logits->mesh_shape().name(axis));
  return names;
}

// The layout of the tokens: that of the logits, without the classes. Returns null if the logits are plain.
LayoutRef token_layout(const LayoutRef& logits) {
  if (logits == nullptr) return nullptr;
  const Shape& global = logits->global;
  Placements placements = logits->placements;
  for (Placement& p : placements)
    if (is_shard(p, global.rank() - 1)) p = Replicate{};
  return logits->segmented(0, {})
      ->with(std::move(placements))
      ->with_global(Shape(global.values().first(static_cast<std::size_t>(global.rank()) - 1)));
}

// The part of the classes that this rank holds.
kernels::VocabPart part_of(const Tensor& logits) {
  const std::int64_t here = logits.shape().back();
  if (logits.layout() == nullptr) return here;
  return {logits.layout()->parts().front().offset[logits.shape().rank() - 1], here,
          logits.layout()->global.back()};
}

// terms: (parts here, …, kLossTerms) of this rank's classes. Returns the terms of all parts: (parts, …,
// kLossTerms).
Tensor of_all_parts(const Tensor& terms, const LayoutRef& tokens, const DeviceMesh& axes) {
  Shape global{axes.size() * terms.size(0)};
  for (const std::int64_t extent : tokens->global) global.push_back(extent);
  global.push_back(kernels::kLossTerms);
  Placements placements = tokens->placements;
  for (Placement& p : placements)
    if (Shard* const shard = std::get_if<Shard>(&p)) ++shard->dim;
  const LayoutRef apart = tokens->with_global(global)->with(std::move(placements))->with(axes, Shard{0});
  return redistribute(as_layout(terms, apart), axes, Replicate{});
}

// The sum over all ranks of a number that each rank has.
Tensor over_ranks(const Tensor& own, const LayoutRef& of_labels) {
  if (of_labels == nullptr) return own;
  const LayoutRef layout = losses::loss_layout(of_labels);
  return redistribute(own.with_layout(layout), Placements(layout->placements.size(), Replicate{}));
}

}  // namespace

CrossEntropy::CrossEntropy(double label_smoothing, double z_loss)
    : label_smoothing_(label_smoothing), z_loss_(z_loss) {
  if (!(label_smoothing >= 0 && label_smoothing <= 1))
    throw Error(ErrorCode::bad_argument,
                fmt::format("cross entropy: label_smoothing is {}; expected 0 to 1", label_smoothing));
  if (!(z_loss >= 0 && std::isfinite(z_loss)))
    throw Error(ErrorCode::bad_argument,
                fmt::format("cross entropy: z_loss is {}; expected a finite number of 0 or more", z_loss));
}

Tensors CrossEntropy::do_forward(Inputs inputs, Frame& frame) {
  expect_count(inputs, 3, "inputs (logits, labels, valid)");
  const Tensor &logits = inputs[0], &labels = inputs[1], &valid = inputs[2];
  expect_dtype("cross entropy: logits", logits, DType::f32);
  expect_dtype("cross entropy: labels", labels, DType::i64);
  layouts::expect_whole("cross entropy: logits", logits, "a loss", false);
  if (logits.shape().rank() == 0)
    throw Error(ErrorCode::bad_argument, "cross entropy: logits have no dimension; expected (…, classes)");
  Shape of_labels(logits.shape().values().first(static_cast<std::size_t>(logits.shape().rank()) - 1));
  if (!(labels.shape() == of_labels))
    throw Error(ErrorCode::bad_argument,
                fmt::format("cross entropy: labels are {}; expected {}, as of logits {}",
                            to_string(labels.shape()), to_string(of_labels), to_string(logits.shape())));
  const std::vector<std::string> split = class_axes(logits.layout());
  const LayoutRef tokens_lie = token_layout(logits.layout());
  layouts::expect_same(
      "cross entropy: labels", labels.layout(), tokens_lie,
      split.empty() ? "as logits" : "as logits; all ranks that share the classes of a token");
  if (!split.empty() && !logits.layout()->segments.sizes.empty())
    throw Error(ErrorCode::layout,
                fmt::format("cross entropy: logits are {}; expected classes without segments",
                            to_string(*logits.layout())));
  losses::expect_count_of_all(
      "cross entropy", "valid", valid, logits.layout(), tokens_lie,
      {"the number of valid tokens of all ranks", "logits", "global_valid(context, labels)"});
  const std::int64_t tokens = labels.count();
  const kernels::VocabPart classes = part_of(logits);
  Tensor terms;
  if (frame.exact()) {
    terms = exact::loss_terms(frame, logits, labels, classes, valid, label_smoothing_);
  } else {
    Shape of_terms{1};
    for (const std::int64_t extent : labels.shape()) of_terms.push_back(extent);
    of_terms.push_back(kernels::kLossTerms);
    terms = frame.compute().make(of_terms, DType::f64, split.empty() ? Memory::local : Memory::shared);
    kernels::cross_entropy_terms(frame.kernels(), logits.data_ptr<float>(), labels.data_ptr<std::int64_t>(),
                                 terms.data_ptr<double>(), tokens, classes, valid.data_ptr<std::int64_t>(),
                                 label_smoothing_);
  }
  if (!split.empty() && !WEFT_MUTANT("loss_of_own_classes"))
    terms = of_all_parts(terms, tokens_lie, logits.layout()->mesh().submesh(split));
  const Tensor softmax = frame.compute().make({tokens, kernels::kSoftmaxTerms}, DType::f64);
  const Tensor loss = frame.compute().make({1}, DType::f64).with_layout(losses::loss_layout(tokens_lie));
  if (frame.exact())
    exact::loss_sum(frame, terms, labels, softmax, loss, classes.whole, valid, label_smoothing_, z_loss_);
  else
    kernels::cross_entropy_sum(frame.kernels(), terms.data_ptr<double>(), static_cast<int>(terms.size(0)),
                               labels.data_ptr<std::int64_t>(), softmax.data_ptr<double>(),
                               loss.data_ptr<double>(), tokens, classes.whole, valid.data_ptr<std::int64_t>(),
                               label_smoothing_, z_loss_);
  frame.push(*this, {logits, labels, valid, softmax});
  return {loss};
}

Tensors CrossEntropy::do_backward(Inputs gradients, Frame& frame) {
  const Tensors kept = frame.pop(*this);
  const Tensor &logits = kept[0], &labels = kept[1], &valid = kept[2], &softmax = kept[3];
  const Tensor dlogits =
      frame.compute().make(logits.shape(), DType::f32, dx_memory()).with_layout(logits.layout());
  if (gradients.size() > 1) expect_count(gradients, 1, "gradients");
  if (!gradients.empty()) losses::expect_gradient_of_loss("cross entropy", gradients[0]);
  kernels::cross_entropy_backward(
      frame.kernels(), logits.data_ptr<float>(), labels.data_ptr<std::int64_t>(), softmax.data_ptr<double>(),
      gradients.empty() ? nullptr : gradients[0].data_ptr<double>(), dlogits.data_ptr<float>(),
      labels.count(), part_of(logits), valid.data_ptr<std::int64_t>(), label_smoothing_, z_loss_);
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

Tensor global_count(Compute& compute, const Tensor& y) {
  const std::int64_t count = layouts::global_shape(y).count();
  const Tensor here = y.layout() ? scalar(y.layout()->mesh(), count) : scalar(compute.context(), count);
  return to_device(compute.context(), here, compute.stream());
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
