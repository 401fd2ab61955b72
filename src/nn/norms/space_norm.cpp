#include "nn/norms/space_norm.hpp"

#include <fmt/format.h>

#include "nn/norms/numbers.hpp"
#include "nn/operands.hpp"

namespace weft::space_norm {
namespace {

// The first dimension of x that is normalised.
int first_of(const LayerNorm& norm, const Tensor& x) {
  return x.shape().rank() - norm.weight->global_shape().rank();
}

void check(const LayerNorm& norm, const Tensor& x, const Tensor& w) {
  const TensorName what = layouts::named(norm, "x");
  expect_activation(what, x);
  layouts::expect_whole(what, x, "a norm", false);  // not Partial
  const Shape& global = layouts::global_shape(x);
  const Shape& gain = norm.weight->global_shape();
  const int first = first_of(norm, x);
  bool fits = first >= 0;
  for (int d = 0; fits && d < gain.rank(); ++d) fits = global[first + d] == gain[d];
  if (!fits)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{} is {}; expected last dimensions of {} (the weight's)", what.text(),
                            to_string(global), to_string(gain)));
  if (x.layout() == nullptr) return;
  const LayoutRef &of_x = x.layout(), &of_w = w.layout();
  for (std::size_t axis = 0; axis < of_x->placements.size(); ++axis) {
    if (of_x->mesh_shape().size(static_cast<int>(axis)) == 1) continue;
    if (norms::cuts(*of_x, axis, first) && is_replicate(of_w->placements[axis]))
      throw Error(ErrorCode::layout,
                  fmt::format("{} is {} on {}; a norm over {} needs it whole there: apply_domain_parallel() "
                              "makes one of a map that is cut in space",
                              what.text(), to_string(of_x->placements[axis]),
                              layouts::axis_name(*of_x, static_cast<int>(axis)), to_string(gain)));
    const Placement as_x = norms::cuts(*of_x, axis, first)
                               ? Placement(Shard{std::get<Shard>(of_x->placements[axis]).dim - first})
                               : Placement(Replicate{});
    if (of_w->placements[axis] != as_x)
      throw Error(
          ErrorCode::layout,
          fmt::format("{} is {} on {}, and the weight {} is {}; expected {}, cut as x is", what.text(),
                      to_string(of_x->placements[axis]), layouts::axis_name(*of_x, static_cast<int>(axis)),
                      to_string(gain), to_string(of_w->placements[axis]), to_string(as_x)));
  }
}

// The statistics of this rank's part.
struct SpaceSizes {
  std::int64_t rows, dim;
};
SpaceSizes sizes_of(const LayerNorm& norm, const Tensor& x) {
  std::int64_t rows = 1;
  for (int d = 0; d < first_of(norm, x); ++d) rows *= x.size(d);
  return {rows, rows == 0 ? 0 : x.count() / rows};
}

// Two numbers for each row, over all ranks that have a part of the rows. First are the first numbers of all
// rows, then the second numbers.
Tensor summed(const LayerNorm& norm, const Tensor& mine, const Tensor& x) {
  return norms::summed(mine, x.layout(),
                       [&](std::size_t axis) { return norms::cuts(*x.layout(), axis, first_of(norm, x)); });
}

// How many elements a row has, over all ranks.
double count_of(const LayerNorm& norm) { return static_cast<double>(norm.weight->global_shape().count()); }

// The gradient is sharded like the gain, and Partial(sum) on axes that shard x in other dimensions.
LayoutRef of_gradient(const LayoutRef& gain, const LayoutRef& x) {
  if (gain == nullptr || x == nullptr) return gain;
  Placements placements = gain->placements;
  for (std::size_t axis = 0; axis < placements.size(); ++axis)
    if (gain->mesh_shape().size(static_cast<int>(axis)) > 1 && is_shard(x->placements[axis]) &&
        !is_shard(placements[axis]))
      placements[axis] = Partial{};
  return gain->with(std::move(placements));
}

}  // namespace

Tensor forward(const LayerNorm& norm, const Tensor& input, Frame& frame, Memory memory) {
  const Tensor given = layouts::beside(norm, "x", input, *norm.weight);
  const Tensor w = widened(frame, norm.weight->weight()), b = widened(frame, norm.bias->weight());
  check(norm, given, w);
  const Tensor x = widened(frame, given);
  const auto [rows, dim] = sizes_of(norm, x);
  const Tensor mine = frame.compute().make({2 * rows}, DType::f64, Memory::shared);
  kernels::channel_moments(frame.kernels(), x.data_ptr<float>(), mine.data_ptr<double>(),
                           mine.data_ptr<double>() + rows, {1, rows, dim});
  const Tensor all = summed(norm, mine, x), means = frame.compute().make({rows}),
               inv = frame.compute().make({rows});
  kernels::batch_norm_statistics(frame.kernels(), all.data_ptr<double>(), all.data_ptr<double>() + rows,
                                 count_of(norm), norm.eps(), means.data_ptr<float>(), inv.data_ptr<float>(),
                                 nullptr, nullptr, rows);
  if (norms::cut(x.layout(), first_of(norm, x))) memory = Memory::shared;  // others' windows read it
  const Tensor y = frame.compute().make(x.shape(), DType::f32, memory).with_layout(x.layout());
  kernels::row_norm_forward(frame.kernels(), x.data_ptr<float>(), w.data_ptr<float>(), b.data_ptr<float>(),
                            means.data_ptr<float>(), inv.data_ptr<float>(), y.data_ptr<float>(), rows, dim);
  frame.push(norm, {given, means, inv});
  return cast(frame, y, given.dtype());
}

// With x^ = (x - mean) inv_std and g = dy weight: dweight = Σ dy x^ and dbias = Σ dy over the normalised
// samples, dx = inv_std (g - mean(g) - x^ mean(g x^)), with means over all ranks.
Tensor backward(const LayerNorm& norm, const Tensor& of_y, Frame& frame, Memory memory) {
  const Tensors kept = frame.pop(norm);
  const Tensor &means = kept[1], &inv = kept[2];
  expect_gradient(norm, of_y, kept[0].shape(), kept[0].layout(), kept[0].dtype());
  const Tensor x = widened(frame, kept[0]), dy = widened(frame, of_y);
  const Tensor w = widened(frame, norm.weight->weight());
  const std::int64_t rows = sizes_of(norm, x).rows, dim = sizes_of(norm, x).dim;
  const Tensor sums = frame.compute().make({2 * rows}, DType::f64, Memory::shared),
               dw = frame.compute().zeros(w.shape()), db = frame.compute().zeros(w.shape());
  kernels::row_norm_backward_sums(frame.kernels(), dy.data_ptr<float>(), x.data_ptr<float>(),
                                  w.data_ptr<float>(), means.data_ptr<float>(), inv.data_ptr<float>(),
                                  sums.data_ptr<double>(), sums.data_ptr<double>() + rows,
                                  dw.data_ptr<float>(), db.data_ptr<float>(), rows, dim);
  for (const auto& [parameter, gradient] : {std::pair{norm.bias.get(), &db}, {norm.weight.get(), &dw}})
    if (parameter->trainable())
      parameter->accumulate(gradient->with_layout(of_gradient(parameter->weight().layout(), x.layout())));
  const Tensor all = summed(norm, sums, x), means_of_g = frame.compute().make({2 * rows});
  kernels::divide_f64(frame.kernels(), all.data_ptr<double>(), count_of(norm), means_of_g.data_ptr<float>(),
                      2 * rows);
  if (norms::cut(x.layout(), first_of(norm, x))) memory = Memory::shared;
  const Tensor dx = frame.compute().make(x.shape(), DType::f32, memory).with_layout(x.layout());
  kernels::row_norm_backward(frame.kernels(), dy.data_ptr<float>(), x.data_ptr<float>(), w.data_ptr<float>(),
                             means.data_ptr<float>(), inv.data_ptr<float>(), means_of_g.data_ptr<float>(),
                             means_of_g.data_ptr<float>() + rows, dx.data_ptr<float>(), rows, dim);
  return cast(frame, dx, of_y.dtype());
}

}  // namespace weft::space_norm
