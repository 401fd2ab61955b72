#include "weft/tp/element_loss.hpp"

#include <fmt/format.h>

#include <cmath>

#include "tp/views.hpp"
#include "weft/host/copy.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/loss.hpp"

namespace weft {
namespace {

using views::Checker;
using views::given;
using views::Input;
using views::Output;

double element_loss(const char* function, kernels::LossTerm term, Compute& compute, const ConstTensorView& y,
                    const ConstTensorView& target, const ElementLossOptions& options, const TensorView& dy) {
  const Checker c{function, compute.device()};
  c.check_floats("y", y);
  c.check_floats("target", target);
  c.expect("target", target.shape, y.shape, fmt::format("y {}", to_string(y.shape)));
  if (given(dy)) {
    c.check_floats("dy", dy);
    c.expect("dy", dy.shape, y.shape, fmt::format("y {}", to_string(y.shape)));
    c.expect_apart("dy", dy, {{"target", target}});
    if (dy.data != y.data || dy.dtype != y.dtype) c.expect_apart("dy", dy, {{"y", y}});
  }
  if (options.count <= 0)
    c.wrong("count", fmt::format("is {}; expected the number of elements of the whole batch, more than 0",
                                 options.count));
  if (!std::isfinite(options.scale))
    c.wrong("scale", fmt::format("is {}; expected a finite number", options.scale));

  kernels::KernelContext& ctx = kernels_of(compute);
  Context& context = compute.context();
  const Tensor count = to_device(context, scalar(context, options.count), compute.stream());
  const Input of_y(compute, y), of_target(compute, target);
  const Tensor loss = compute.make({1}, DType::f64);
  kernels::element_loss_forward(ctx, of_y.data(), of_target.data(), nullptr, loss.data_ptr<double>(),
                                {y.count()}, count.data_ptr<std::int64_t>(), term);
  if (given(dy)) {
    const Output out(compute, dy);
    kernels::element_loss_backward(ctx, of_y.data(), of_target.data(), nullptr, nullptr, out.data(),
                                   {y.count()}, count.data_ptr<std::int64_t>(), term);
    if (options.scale != 1) kernels::scale(ctx, out.data(), static_cast<float>(options.scale), dy.count());
    out.round();
  }
  return to_host(context, loss).as<double>()[0];
}

}  // namespace

double mean_squared_error(Compute& compute, const ConstTensorView& y, const ConstTensorView& target,
                          const ElementLossOptions& options, const TensorView& dy) {
  return element_loss("mean_squared_error", kernels::LossTerm::squared_error, compute, y, target, options,
                      dy);
}

double binary_cross_entropy(Compute& compute, const ConstTensorView& y, const ConstTensorView& target,
                            const ElementLossOptions& options, const TensorView& dy) {
  return element_loss("binary_cross_entropy", kernels::LossTerm::binary_cross_entropy, compute, y, target,
                      options, dy);
}

}  // namespace weft
