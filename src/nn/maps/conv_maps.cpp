#include "nn/maps/conv_maps.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "nn/operands.hpp"
#include "weft/host/copy.hpp"

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
  return dtype == DType::bf16 && x.dtype() == DType::f32 ? rounded_to_bf16(frame, x)
         : dtype == DType::f32                           ? widened(frame, x)
                                                         : x;
}

// c = a b. b has one column for each pixel, and both are matrices in their stored form.
void product(Frame& frame, const Tensor& a, Stored a_stored, const Tensor& b, const Tensor& c) {
  const bool turned = a_stored == Stored::transposed;
  const std::int64_t m = a.size(turned ? 1 : 0), n = b.size(1), k = a.size(turned ? 0 : 1);
  multiply(frame, a, a_stored, b, Stored::plain, c, m, n, k, false);
}

// Returns whether the kernel sees each pixel once, at its place.
bool one_to_one(const UnfoldShape& s) {
  return s.kernel_height == 1 && s.kernel_width == 1 && s.stride_height == 1 && s.stride_width == 1 &&
         s.padding_height == 0 && s.padding_width == 0 && s.out_height == s.height && s.out_width == s.width;
}

// In bf16, products of few pixels are computed as their transposes, which have the same bits. A product packs
// its second matrix in each call. So the weight should be the second matrix, which can also be packed once
// and kept. Up to this many pixels the transposed product is faster, even if nothing is kept.
constexpr std::int64_t kFewPixels = 16;
bool few_pixels(const UnfoldShape& s, const Tensor& w, std::int64_t groups) {
  return w.dtype() == DType::bf16 && groups == 1 && one_to_one(s) && s.height * s.width <= kFewPixels;
}

// y = w x, or wᵀ x: (k, pixels), y: (m, pixels). `w_transposed`: how the transpose of the matrix that
// multiplies x is stored.
void product_of_few(Frame& frame, const Tensor& w, const Parameter* of, Stored w_transposed, const Tensor& x,
                    const Tensor& y) {
  const std::int64_t k = x.size(0), m = y.size(0), pixels = y.size(1);
  const Tensor operand = in_dtype(frame, x, w.dtype()), turned = frame.compute().make({pixels, m});
  kernels::matmul(frame.kernels(), operand.data_ptr<bf16>(), Stored::transposed,
                  of != nullptr ? as_matrix(w, *of) : kernels::WeightMatrix(w.data_ptr<bf16>()), w_transposed,
                  turned.data_ptr<float>(), pixels, m, k, false);
  kernels::permute(frame.kernels(), turned.data_ptr<float>(), y.data_ptr<float>(), {{pixels, m}, {1, 0}});
}

Tensor columns_of(Frame& frame, const UnfoldShape& s) {
  return frame.compute().make({s.channels * s.kernel_height * s.kernel_width, s.out_height * s.out_width});
}

// The geometry of the kernel if only these pixels of the output are computed. Outside x the kernel sees
// zeros: padding is zeros.
UnfoldShape for_pixels(UnfoldShape s, const Pixels& p) {
  s.padding_height -= p.row * s.stride_height;
  s.padding_width -= p.column * s.stride_width;
  s.out_height = p.rows, s.out_width = p.columns;
  return s;
}

// Calls see(block) for blocks of `all`, complete rows or parts of a row, so small that the unfolded pixels of
// a block stay in the cache. Only the shape decides the blocks.
template <class See>
void each_block(const Pixels& all, std::int64_t floats_of_pixel, std::int64_t most_floats, const See& see) {
  constexpr std::int64_t kLeastPixels = 128;
  const std::int64_t most = std::max(kLeastPixels, most_floats / std::max<std::int64_t>(1, floats_of_pixel));
  const std::int64_t columns = std::min(all.columns, most),
                     rows = columns < all.columns
                                ? 1
                                : std::max<std::int64_t>(1, most / std::max<std::int64_t>(1, columns));
  for (std::int64_t r = 0; r < all.rows; r += rows)
    for (std::int64_t c = 0; c < all.columns; c += columns)
      see(Pixels{all.row + r, std::min(rows, all.rows - r), all.column + c,
                 std::min(columns, all.columns - c)});
}
constexpr std::int64_t kBlockFloats = std::int64_t{1} << 17;

// These pixels of a map (channels, pixels) that is `width` wide, as (channels, rows, columns).
template <class View>
View at_pixels(View map, const Pixels& p, std::int64_t width) {
  const std::int64_t channels = map.shape[0], step = map.strides[0];
  map.data += (p.row * width + p.column) * size_bytes(map.dtype);
  map.shape = {channels, p.rows, p.columns};
  map.strides = {step, width, 1};
  return map;
}

// A sum of parts that arrive one after the other. They are added pairwise: sums of two parts, of four parts,
// …
class PairwiseSum {
 public:
  PairwiseSum(Frame& frame, const Shape& shape) : frame_(frame), shape_(shape) {}
  /// Memory for the next part.
  Tensor part() {
    if (spare_.empty()) return frame_.compute().make(shape_);
    const Tensor t = spare_.back();
    spare_.pop_back();
    return t;
  }
  void add(Tensor part) {
    std::size_t level = 0;
    for (; level < levels_.size() && levels_[level]; ++level) part = take(level, part);
    if (level == levels_.size()) levels_.emplace_back();
    levels_[level] = std::move(part);
  }
  /// Sets `out` to the sum, or adds the sum to `out`.
  void finish(const Tensor& out, bool add_to) {
    Tensor sum;
    for (std::size_t level = 0; level < levels_.size(); ++level)
      if (levels_[level]) sum = sum ? take(level, sum) : std::exchange(levels_[level], Tensor());
    if (add_to)
      kernels::add(frame_.kernels(), out.data_ptr<float>(), sum.data_ptr<float>(), out.data_ptr<float>(),
                   out.count());
    else
      copy(frame_.compute().context(), ConstTensorView(sum.reshape(out.shape()).view()), out.view(),
           frame_.compute().stream());
  }

 private:
  // to += levels_[level], which is free then
  Tensor take(std::size_t level, const Tensor& to) {
    const Tensor from = std::exchange(levels_[level], Tensor());
    kernels::add(frame_.kernels(), from.data_ptr<float>(), to.data_ptr<float>(), to.data_ptr<float>(),
                 to.count());
    spare_.push_back(from);
    return to;
  }
  Frame& frame_;
  Shape shape_;
  std::vector<Tensor> levels_, spare_;
};

kernels::MapShape map_shape(const Tensor& y) { return {y.size(0), y.size(1), y.size(2) * y.size(3)}; }

}  // namespace

void correlate(Frame& frame, const Tensor& x, const Tensor& w, std::int64_t groups, const UnfoldShape& s,
               const Tensor& y, const Parameter* of) {
  correlate(frame, x, w, groups, s, y, {0, s.out_height, 0, s.out_width}, {}, of);
}

void correlate(Frame& frame, const Tensor& x, const Tensor& w, std::int64_t groups, const UnfoldShape& s,
               const Tensor& y, const Pixels& pixels, const std::function<void()>& between,
               const Parameter* of) {
  if (y.count() == 0 || pixels.rows == 0 || pixels.columns == 0) return;
  Compute& compute = frame.compute();
  const std::int64_t out = w.size(0), kernel = w.count() / out * groups;
  const Tensor rows = w.reshape({out, w.count() / out});
  const auto into = [&](const Tensor& seen, const Tensor& of_y) {
    for (std::int64_t g = 0; g < groups; ++g)
      product(frame, group(rows, g, groups), Stored::plain, group(seen, g, groups), group(of_y, g, groups));
  };
  const bool whole = pixels.rows == s.out_height && pixels.columns == s.out_width;
  const std::int64_t block_floats = kBlockFloats * frame.kernels().threads();
  for (std::int64_t b = 0; b < y.size(0); ++b) {
    Tensor of_x = sample(x, b, s.channels);
    const Tensor of_y = sample(y, b, out);
    if (whole && few_pixels(s, w, groups)) {
      product_of_few(frame, w, of, Stored::transposed, of_x, of_y);
      continue;
    }
    if (whole && one_to_one(s)) {
      into(in_dtype(frame, of_x, w.dtype()), of_y);
      continue;
    }
    of_x = widened(frame, of_x);
    each_block(pixels, kernel, block_floats, [&](const Pixels& block) {
      const UnfoldShape seen = for_pixels(s, block);
      const Tensor columns = columns_of(frame, seen);
      kernels::unfold(frame.kernels(), of_x.data_ptr<float>(), columns.data_ptr<float>(), seen);
      const Tensor operand = in_dtype(frame, columns, w.dtype());
      if (block.rows == s.out_height && block.columns == s.out_width) return into(operand, of_y);
      const Tensor part = compute.make({out, block.rows * block.columns});
      into(operand, part);
      copy(compute.context(), ConstTensorView(part.reshape({out, block.rows, block.columns}).view()),
           at_pixels(of_y.view(), block, s.out_width), compute.stream());
      if (between) between();
    });
  }
}

void spread(Frame& frame, const Tensor& dy, const Tensor& w, std::int64_t groups, const UnfoldShape& s,
            const Tensor& dx, const Parameter* of) {
  if (dx.count() == 0) return;
  if (dy.count() == 0) return kernels::fill(frame.kernels(), dx.data_ptr<float>(), 0.0f, dx.count());
  const std::int64_t out = w.size(0);
  const Tensor rows = w.reshape({out, w.count() / out}), operand = in_dtype(frame, dy, w.dtype());
  const bool as_it_is = one_to_one(s);
  const Tensor columns = as_it_is ? Tensor() : columns_of(frame, s);
  for (std::int64_t b = 0; b < dx.size(0); ++b) {
    const Tensor of_dy = sample(operand, b, out), of_dx = sample(dx, b, s.channels);
    if (few_pixels(s, w, groups)) {
      product_of_few(frame, w, of, Stored::plain, of_dy, of_dx);
      continue;
    }
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
  Compute& compute = frame.compute();
  const std::int64_t out = dw.size(0), kernel = dw.count() / out * groups,
                     pixels = s.out_height * s.out_width;
  const bool as_it_is = one_to_one(s);
  // A matrix product is faster for many elements; with this many elements, the largest sums are well above
  // its error.
  constexpr std::int64_t kMostOfRows = std::int64_t{1} << 16;
  const bool by_rows = like == DType::f32 && dw.count() / groups <= kMostOfRows;
  PairwiseSum sum(frame, {out, dw.count() / out});
  const auto each = [&](const Pixels& all, const auto& see) {
    if (as_it_is && !by_rows) return see(all);  // both operands are there
    each_block(all, kernel, kBlockFloats, see);
  };
  for (std::int64_t b = 0; b < dy.size(0); ++b) {
    const Tensor of_x = in_dtype(frame, sample(x, b, s.channels), as_it_is ? like : DType::f32),
                 of_dy = like == DType::f32 ? widened(frame, sample(dy, b, out)) : sample(dy, b, out);
    each({0, s.out_height, 0, s.out_width}, [&](const Pixels& block) {
      const std::int64_t n = block.rows * block.columns, first = block.row * s.out_width + block.column;
      const Tensor part = sum.part();
      Tensor seen = of_x;  // (kernel, n), or, as it is, (kernel, pixels)
      if (!as_it_is) {
        const UnfoldShape of_block = for_pixels(s, block);
        seen = columns_of(frame, of_block);
        kernels::unfold(frame.kernels(), of_x.data_ptr<float>(), seen.data_ptr<float>(), of_block);
      }
      if (by_rows) {
        for (std::int64_t g = 0; g < groups; ++g)
          kernels::row_products(frame.kernels(), group(of_dy, g, groups).data_ptr<float>() + first, pixels,
                                group(seen, g, groups).data_ptr<float>() + (as_it_is ? first : 0),
                                as_it_is ? pixels : n, group(part, g, groups).data_ptr<float>(), out / groups,
                                kernel / groups, n);
        return sum.add(part);
      }
      Tensor part_of_dy = of_dy;
      if (n < pixels) {
        part_of_dy = compute.make({out, n}, of_dy.dtype());
        copy(compute.context(), at_pixels(ConstTensorView(of_dy.view()), block, s.out_width),
             part_of_dy.reshape({out, block.rows, block.columns}).view(), compute.stream());
      }
      const Tensor a = in_dtype(frame, part_of_dy, like), c = in_dtype(frame, seen, like);
      for (std::int64_t g = 0; g < groups; ++g)
        multiply(frame, group(a, g, groups), Stored::plain, group(c, g, groups), Stored::transposed,
                 group(part, g, groups), out / groups, kernel / groups, n, false);
      sum.add(part);
    });
  }
  sum.finish(dw, add);
}

void add_bias(Frame& frame, const Tensor& bias, const Tensor& y) {
  const Tensor b = widened(frame, bias);
  kernels::add_channel_bias(frame.kernels(), b.data_ptr<float>(), y.data_ptr<float>(), map_shape(y));
}

void bias_gradient(Frame& frame, const Tensor& dy, const Tensor& dbias, bool add) {
  if (!add) kernels::fill(frame.kernels(), dbias.data_ptr<float>(), 0.0f, dbias.count());
  const Tensor wide = widened(frame, dy);
  kernels::channel_bias_backward(frame.kernels(), wide.data_ptr<float>(), dbias.data_ptr<float>(),
                                 map_shape(dy));
}

}  // namespace weft::conv
