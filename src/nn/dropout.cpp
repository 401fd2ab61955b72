#include "weft/nn/dropout.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "nn/operands.hpp"
#include "nn/runs.hpp"
#include "weft/base/error.hpp"
#include "weft/base/random.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/layouts.hpp"

namespace weft {
namespace {

// One seed for each step of a training.
std::uint64_t seed_of_step(const Pass& pass) {
  const auto seed = pass.seed, step = static_cast<std::uint64_t>(pass.step);
  const auto word = [](std::uint64_t x, int half) { return static_cast<std::uint32_t>(x >> (32 * half)); };
  const auto mixed = philox({word(step, 0), word(step, 1), 0, 0}, {word(seed, 0), word(seed, 1)});
  return mixed[0] | static_cast<std::uint64_t>(mixed[1]) << 32;
}

// The shape and the layout of x, without its memory: what backward compares dy with.
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

Tensor Dropout::apply(const Tensor& x, Frame& frame, Memory memory) const {
  const Pass& pass = frame.pass();
  if (!pass.training || p_ == 0) return x;
  if (pass.step < 0 || pass.micro_batch < 0)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format(
            "\"{}\": dropout in step {}, micro-batch {}; expected 0 or more of both: Frame(compute, {{.seed "
            "= …, .step = …}}) says which pass it is",
            path(), pass.step, pass.micro_batch));
  const Tensor y = frame.compute().make(x.shape(), DType::f32, memory).with_layout(x.layout());
  const RandomStream stream(seed_of_step(pass), path());
  const Shape& global = layouts::global_shape(x);
  const std::uint64_t before =
      static_cast<std::uint64_t>(pass.micro_batch) *
      static_cast<std::uint64_t>(global.count());  // elements of the micro-batches before
  const auto p = static_cast<float>(p_), scale = static_cast<float>(1 / (1 - p_));
  each_run(global, x.layout(), x.shape(), [&](std::int64_t start, std::int64_t place, std::int64_t count) {
    kernels::dropout(frame.kernels(), x.data_ptr<float>() + place, y.data_ptr<float>() + place, count,
                     {stream, before + static_cast<std::uint64_t>(start), p, scale});
  });
  return y;
}

Tensors Dropout::do_forward(Inputs x, Frame& frame) {
  expect_count(x, 1, "inputs");
  expect_dtype(layouts::named(*this, "x"), x[0], DType::f32);
  const Tensor y = apply(x[0], frame, out_memory());
  frame.push(*this, {form_of(frame, x[0])});
  return {y};
}

Tensors Dropout::do_backward(Inputs dy, Frame& frame) {
  expect_count(dy, 1, "gradients");
  const Tensor form = frame.pop(*this)[0];
  expect_gradient(*this, dy[0], Shape(std::span<const std::int64_t>(form.as<std::int64_t>())), form.layout());
  return {apply(dy[0], frame, dx_memory())};
}

}  // namespace weft
