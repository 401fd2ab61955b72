// Functions that a Linear layer and its form in float8 share. Included only inside nn.
#pragma once

#include "nn/exact/sums.hpp"
#include "nn/operands.hpp"
#include "weft/nn/layouts.hpp"
#include "weft/nn/parameter.hpp"

namespace weft {

/// dbias: (out) = or += the sum of dy's rows; dy: (tokens, out)
inline void accumulate_bias(Frame& frame, Parameter& bias, const Tensor& dy) {
  const int last = dy.shape().rank() - 1;
  bias.accumulate(layouts::gradient_of(bias.weight().layout(), dy.layout(), last),
                  [&](const Tensor& into, bool add) {
                    const std::int64_t out = into.count();
                    if (!add) kernels::fill(frame.kernels(), into.data_ptr<float>(), 0.0f, out);
                    by_element(dy, [&]<class T>() {
                      kernels::bias_backward(frame.kernels(), dy.data_ptr<T>(), into.data_ptr<float>(),
                                             out == 0 ? 0 : dy.count() / out, out);
                    });
                  });
}

/// dbias = or += the sum of dy's rows, in exact mode as its rule says.
inline void accumulate_bias_of(const Module& layer, Frame& frame, Parameter& bias, const Tensor& dy) {
  if (!frame.exact()) return accumulate_bias(frame, bias, dy);
  const std::int64_t out = dy.shape().back();
  Parameter* const parameters[] = {&bias};
  exact::over_positions(frame, layer, dy, parameters, [&](Chunk rows, std::span<float* const> sums) {
    kernels::bias_backward(frame.kernels(), dy.data_ptr<float>() + rows.offset * out, sums[0], rows.size,
                           out);
  });
}

/// The layout that dy must have. If neither y nor the weight is sharded, dy may be a contribution to a sum,
/// like the gradient of a key/value head that several ranks share. dx and dw are then contributions, too.
inline LayoutRef expected_gradient(const LayoutRef& of_y, const LayoutRef& weight, const LayoutRef& dy) {
  if (of_y == nullptr || dy == nullptr || !(of_y->mesh() == dy->mesh())) return of_y;
  Placements placements = of_y->placements;
  for (std::size_t axis = 0; axis < placements.size(); ++axis)
    if (is_replicate(placements[axis]) && is_replicate(weight->placements[axis]) &&
        dy->placements[axis] == Placement(Partial{}))
      placements[axis] = Partial{};
  return of_y->with(std::move(placements));
}

}  // namespace weft
