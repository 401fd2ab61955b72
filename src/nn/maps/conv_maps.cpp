#include "nn/maps/conv_maps.hpp"

#include <algorithm>

#include "nn/operands.hpp"

namespace weft::conv {
namespace {

using kernels::Stored;
using kernels::UnfoldShape;

// Sample b of maps (batch, channels, …) as a matrix of `rows` rows.
Tensor sample(const Tensor& maps, std::int64_t b, std::int64_t rows) {
  const std::int64_t size = maps.count() / maps.size(0);
  return maps.slice_flat(b * size, {rows, rows == 0 ? 0 : size / rows});
}

// Rows of group g of a matrix that holds `groups` groups of rows.
Tensor group(const Tensor& matrix, std::int64_t g, std::int64_t groups) {
  const std::int64_t rows = matrix.size(0) / groups,
                     columns = matrix.count() / std::max<std::int64_t>(1, matrix.size(0));
  return matrix.slice_flat(g * rows * columns, {rows, columns});
}

Tensor in_dtype(Frame& frame, const Tensor& x, DType dtype) {
  return dtype == DType::bf16 && x.dtype() == DType::f32 ? rounded_to_bf16(frame, x) : x;
}

// c = a b; both are matrices as they are stored.
void product(Frame& frame, const Tensor& a, Stored a_stored, const Tensor& b, const Tensor& c) {
  const bool turned = a_stored == Stored::transposed;
  multiply(frame, a, a_stored, b, Stored::plain, c, a.size(turned ? 1 : 0), b.size(1), a.size(turned ? 0 : 1),
           false);
}

// The kernel sees each pixel once, where it is.
bool one_to_one(const UnfoldShape& s) {
  return s.kernel_height == 1 && s.kernel_width == 1 && s.stride_height == 1 && s.stride_width == 1 &&
         s.padding_height == 0 && s.padding_width == 0 && s.out_height == s.height && s.out_width == s.width;
}

Tensor columns_of(Frame& frame, const UnfoldShape& s) {
  return frame.compute().make({s.channels * s.kernel_height * s.kernel_width, s.out_height * s.out_width});
}

kernels::MapShape map_shape(const Tensor& y) { return {y.size(0), y.size(1), y.size(2) * y.size(3)}; }

}  // namespace

void correlate(Frame& frame, const Tensor& x, const Tensor& w, std::int64_t groups, const UnfoldShape& s,
               const Tensor& y) {
  if (y.count() == 0) return;
  const std::int64_t out = w.size(0);
  const Tensor rows = w.reshape({out, w.count() / out});
  const bool as_it_is = one_to_one(s);
  const Tensor columns = as_it_is ? Tensor() : columns_of(frame, s);
  for (std::int64_t b = 0; b < y.size(0); ++b) {
    if (!as_it_is)
      kernels::unfold(frame.kernels(), sample(x, b, s.channels).data_ptr<float>(), columns.data_ptr<float>(),
                      s);
    const Tensor seen = in_dtype(frame, as_it_is ? sample(x, b, s.channels) : columns, w.dtype()),
                 of_y = sample(y, b, out);
    for (std::int64_t g = 0; g < groups; ++g)
      product(frame, group(rows, g, groups), Stored::plain, group(seen, g, groups), group(of_y, g, groups));
  }
}

void spread(Frame& frame, const Tensor& dy, const Tensor& w, std::int64_t groups, const UnfoldShape& s,
            const Tensor& dx) {
  if (dx.count() == 0) return;
  if (dy.count() == 0) return kernels::fill(frame.kernels(), dx.data_ptr<float>(), 0.0f, dx.count());
  const std::int64_t out = w.size(0);
  const Tensor rows = w.reshape({out, w.count() / out}), operand = in_dtype(frame, dy, w.dtype());
  const bool as_it_is = one_to_one(s);
  const Tensor columns = as_it_is ? Tensor() : columns_of(frame, s);
  for (std::int64_t b = 0; b < dx.size(0); ++b) {
    const Tensor of_dy = sample(operand, b, out), of_dx = sample(dx, b, s.channels);
    const Tensor& into = as_it_is ? of_dx : columns;
    for (std::int64_t g = 0; g < groups; ++g)
      product(frame, group(rows, g, groups), Stored::transposed, group(of_dy, g, groups),
              group(into, g, groups));
    if (!as_it_is) kernels::fold(frame.kernels(), columns.data_ptr<float>(), of_dx.data_ptr<float>(), s);
  }
}

void weight_gradient(Frame& frame, const Tensor& x, const Tensor& dy, std::int64_t groups,
                     const UnfoldShape& s, DType like, const Tensor& dw, bool add) {
  if (dy.count() == 0 || x.count() == 0) {
    if (!add) kernels::fill(frame.kernels(), dw.data_ptr<float>(), 0.0f, dw.count());
    return;
  }
  const std::int64_t out = dw.size(0);
  const Tensor rows = dw.reshape({out, dw.count() / out}), operand = in_dtype(frame, dy, like);
  const bool as_it_is = one_to_one(s);
  const Tensor columns = as_it_is ? Tensor() : columns_of(frame, s);
  for (std::int64_t b = 0; b < dy.size(0); ++b) {
    if (!as_it_is)
      kernels::unfold(frame.kernels(), sample(x, b, s.channels).data_ptr<float>(), columns.data_ptr<float>(),
                      s);
    const Tensor seen = in_dtype(frame, as_it_is ? sample(x, b, s.channels) : columns, like),
                 of_dy = sample(operand, b, out);
    for (std::int64_t g = 0; g < groups; ++g) {
      const Tensor a = group(of_dy, g, groups), c = group(seen, g, groups);
      multiply(frame, a, Stored::plain, c, Stored::transposed, group(rows, g, groups), a.size(0), c.size(0),
               a.size(1), add || b > 0);
    }
  }
}

void add_bias(Frame& frame, const Tensor& bias, const Tensor& y) {
  const Tensor b = widened(frame, bias);
  kernels::add_channel_bias(frame.kernels(), b.data_ptr<float>(), y.data_ptr<float>(), map_shape(y));
}

void bias_gradient(Frame& frame, const Tensor& dy, const Tensor& dbias, bool add) {
  if (!add) kernels::fill(frame.kernels(), dbias.data_ptr<float>(), 0.0f, dbias.count());
  kernels::channel_bias_backward(frame.kernels(), dy.data_ptr<float>(), dbias.data_ptr<float>(),
                                 map_shape(dy));
}

}  // namespace weft::conv
