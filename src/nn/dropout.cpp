#include "weft/nn/dropout.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "mesh/boxes.hpp"
#include "nn/operands.hpp"
#include "weft/base/error.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/layouts.hpp"

namespace weft {
namespace {

// The shape and the layout of x, without its memory: backward compares dy with them.
Tensor form_of(Frame& frame, const Tensor& x) {
  const Tensor extents(frame.compute().context(), {x.shape().rank()}, DType::i64);
  std::copy(x.shape().begin(), x.shape().end(), extents.as<std::int64_t>().begin());
  return extents.with_layout(x.layout());
}

}  // namespace

Dropout::Dropout(double p) : p_(p) {
  if (!(p >= 0 && static_cast<float>(p) < 1))  // just below 1 nothing would be left, and all of it dropped
    throw Error(ErrorCode::bad_argument, fmt::format("dropout: p is {}; expected 0 <= p < 1", p));
}

// A pass that does not come after the last one begins the step again.
void Dropout::expect_equal_micro_batches(const Tensor& x, const Pass& pass) {
  const Shape& global = layouts::global_shape(x);
  const std::int64_t samples = pass.first_sample >= 0 ? -1 : global.rank() == 0 ? 1 : global[0];
  const bool same_step = pass.seed == last_.seed && pass.step == last_.step;
  if (same_step && pass.micro_batch > last_.micro_batch && last_samples_ >= 0 && samples >= 0 &&
      samples != last_samples_)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("\"{}\": micro-batch {} of step {} has {} samples, micro-batch {} had {}; expected as "
                    "many, or Pass::first_sample",
                    path(), pass.micro_batch, pass.step, samples, last_.micro_batch, last_samples_));
  last_ = pass;
  last_samples_ = samples;
}

Tensor Dropout::apply(const Tensor& x, Frame& frame, Memory memory) const {
  if (!frame.pass().training || p_ == 0) return x;
  const PassRandom random = frame.rng(path());
  const Tensor y = frame.compute().make(x.shape(), x.dtype(), memory).with_layout(x.layout());
  const Shape& global = layouts::global_shape(x);
  const std::uint64_t before = random.first(global);  // elements of the micro-batches before
  const auto p = static_cast<float>(p_), scale = static_cast<float>(1 / (1 - p_));
  each_run(global, x.layout(), x.shape(), [&](std::int64_t start, std::int64_t place, std::int64_t count) {
    by_element(x, [&]<class T>() {
      kernels::dropout(frame.kernels(), x.data_ptr<T>() + place, y.data_ptr<T>() + place, count,
                       {random.stream(), before + static_cast<std::uint64_t>(start), p, scale});
    });
  });
  return y;
}

Tensors Dropout::do_forward(Inputs x, Frame& frame) {
  expect_count(x, 1, "inputs");
  expect_activation(layouts::named(*this, "x"), x[0]);
  if (frame.pass().training && p_ > 0 && !frame.recomputing()) expect_equal_micro_batches(x[0], frame.pass());
  const Tensor y = apply(x[0], frame, out_memory());
  const Tensor form = form_of(frame, x[0]);
  frame.push(*this, {form, Tensor(form.storage(), 0, {0}, y.dtype())});
  return {y};
}

Tensors Dropout::do_backward(Inputs dy, Frame& frame) {
  expect_count(dy, 1, "gradients");
  const Tensors kept = frame.pop(*this);
  const Tensor& form = kept[0];
  expect_gradient(*this, dy[0], Shape(std::span<const std::int64_t>(form.as<std::int64_t>())), form.layout(),
                  kept[1].dtype());
  return {apply(dy[0], frame, dx_memory())};
}

}  // namespace weft
