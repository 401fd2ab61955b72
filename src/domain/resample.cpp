// Padding, pooling, resizing and pixel shuffles of maps that are cut in space: each rank makes its own pixels of y, and of dx, from a window.
#include <algorithm>

#include "domain/rules.hpp"
#include "nn/maps/taps.hpp"
#include "weft/host/copy.hpp"
#include "weft/nn/maps/conv_transpose.hpp"
#include "weft/nn/maps/resample.hpp"

namespace weft::domain {

using kernels::Taps;

TapsOfParts::TapsOfParts(Taps all, const Parts& outputs) : window_{outputs.dim, {}, {}, {}} {
  for (std::size_t p = 0; p < outputs.ranges.size(); ++p) {
    const IndexRange& range = outputs.ranges[p];
    const auto begin = all.begin[static_cast<std::size_t>(range.lo)],
               end = all.begin[static_cast<std::size_t>(range.hi)];
    std::vector<std::int64_t> needed(all.index.begin() + begin, all.index.begin() + end);
    std::sort(needed.begin(), needed.end());
    needed.erase(std::unique(needed.begin(), needed.end()), needed.end());
    window_.wanted.push_back(as_ranges(needed));
    if (static_cast<int>(p) != outputs.mine) continue;
    Taps own;
    for (std::int64_t r = range.lo; r < range.hi; ++r) {
      for (std::int64_t e = all.begin[static_cast<std::size_t>(r)];
           e < all.begin[static_cast<std::size_t>(r) + 1]; ++e) {
        const auto place =
            std::lower_bound(needed.begin(), needed.end(), all.index[static_cast<std::size_t>(e)]);
        own.index.push_back(place - needed.begin());
        own.weight.push_back(all.weight[static_cast<std::size_t>(e)]);
      }
      own.begin.push_back(static_cast<std::int64_t>(own.index.size()));
    }
    own_ = std::make_shared<const Taps>(std::move(own));
  }
}

namespace {

// out, of that layout, from the window on in that the taps need.
Tensor resampled(Frame& frame, const Tensor& in, const LayoutRef& of_out, Taps rows, Taps columns) {
  const TapsOfParts of_rows(std::move(rows), parts_of(of_out, kHeight)),
      of_columns(std::move(columns), parts_of(of_out, kWidth));
  const Tensor window = fetch_window(in, {of_rows.window(), of_columns.window()});
  const Tensor out =
      frame.compute().make(of_out->local_shape(), DType::f32, Memory::shared).with_layout(of_out);
  kernels::resample(frame.kernels(), window.data_ptr<float>(), out.data_ptr<float>(),
                    {out.size(0) * out.size(1), window.size(kHeight), window.size(kWidth), of_rows.own(),
                     of_columns.own()});
  return out;
}

class ResamplingPasses final : public Passes {
 public:
  Tensors forward(Module& module, Inputs inputs, Frame& frame) const override {
    if (inputs.size() != 1 || !cut_in_space(inputs[0].layout())) return own_forward(module, inputs, frame);
    const auto& layer = dynamic_cast<const Resampling2d&>(module);
    const Tensor& x = inputs[0];
    maps::expect_map(module, x);
    Taps rows = layer.rows(x.layout()->global[kHeight]), columns = layer.columns(x.layout()->global[kWidth]);
    const LayoutRef of_y = like(x.layout(), x.layout()->global[1], rows.outputs(), columns.outputs());
    frame.push(module, {maps::shape_alone(frame, x)});
    return {resampled(frame, x, of_y, std::move(rows), std::move(columns))};
  }
  Tensors backward(Module& module, Inputs gradients, Frame& frame) const override {
    if (gradients.size() != 1 || !cut_in_space(gradients[0].layout()))
      return own_backward(module, gradients, frame);
    const auto& layer = dynamic_cast<const Resampling2d&>(module);
    const LayoutRef of_x = frame.pop(module)[0].layout();
    const std::int64_t height = of_x->global[kHeight], width = of_x->global[kWidth];
    const Taps rows = layer.rows(height), columns = layer.columns(width);
    const LayoutRef of_y = like(of_x, of_x->global[1], rows.outputs(), columns.outputs());
    expect_gradient(module, gradients[0], of_y->local_shape(), of_y);
    return {resampled(frame, gradients[0], of_x, taps::transposed(rows, height),
                      taps::transposed(columns, width))};
  }
};

class MaxPoolPasses final : public Passes {
 public:
  Tensors forward(Module& module, Inputs inputs, Frame& frame) const override {
    if (inputs.size() != 1 || !cut_in_space(inputs[0].layout())) return own_forward(module, inputs, frame);
    const Tensor& x = inputs[0];
    maps::expect_map(module, x);
    const auto [height, width] = sliding(module, x.layout());
    const LayoutRef of_y = like(x.layout(), x.layout()->global[1], height.out, width.out);
    const Parts rows = parts_of(of_y, kHeight), columns = parts_of(of_y, kWidth);
    const Tensor window =
        fetch_window(x, {window_for(rows, [&, h = height](const IndexRange& o) { return within(h, o); }),
                         window_for(columns, [&, w = width](const IndexRange& o) { return within(w, o); })});
    const Tensor y = frame.compute().make(of_y->local_shape(), DType::f32, Memory::shared).with_layout(of_y);
    const Tensor place = frame.compute().make(y.shape(), DType::i32, Memory::shared).with_layout(of_y);
    const IndexRange seen_rows = within(height, rows.own()), seen_columns = within(width, columns.own());
    kernels::max_pool_forward(
        frame.kernels(), window.data_ptr<float>(), y.data_ptr<float>(), place.data_ptr<std::int32_t>(),
        {x.size(0) * x.size(1), window.size(kHeight), window.size(kWidth), height.kernel, width.kernel,
         height.stride, width.stride, height.padding + seen_rows.lo - rows.own().lo * height.stride,
         width.padding + seen_columns.lo - columns.own().lo * width.stride, height.dilation, width.dilation,
         rows.own().size(), columns.own().size(), kernels::Padding::zeros});
    frame.push(module, {maps::shape_alone(frame, x), place});
    return {y};
  }

  Tensors backward(Module& module, Inputs gradients, Frame& frame) const override {
    if (gradients.size() != 1 || !cut_in_space(gradients[0].layout()))
      return own_backward(module, gradients, frame);
    const Tensor& dy = gradients[0];
    const Tensors kept = frame.pop(module);
    const LayoutRef of_x = kept[0].layout();
    const Tensor& place = kept[1];
    expect_gradient(module, dy, place.shape(), place.layout());
    const auto [height, width] = sliding(module, of_x);
    const Parts rows = parts_of(of_x, kHeight), columns = parts_of(of_x, kWidth);
    // Gradients and places go in one message.
    const Window window(Partition(place.layout()),
                        {window_for(rows, [&, h = height](const IndexRange& i) { return h.seeing(i); }),
                         window_for(columns, [&, w = width](const IndexRange& i) { return w.seeing(i); })});
    const Shape wide = window.window_shape(dy.shape());
    const Tensor all_dy = frame.compute().make(wide, DType::f32, Memory::shared),
                 all_places = frame.compute().make(wide, DType::i32, Memory::shared);
    const WindowField fields[] = {{dy, all_dy}, {place, all_places}};
    window.start(fields, frame.compute().stream()).finish();
    const Tensor dx = frame.compute().make(of_x->local_shape(), DType::f32, Memory::shared).with_layout(of_x);
    const IndexRange from_rows = height.seeing(rows.own()), from_columns = width.seeing(columns.own());
    kernels::max_pool_backward(
        frame.kernels(), all_dy.data_ptr<float>(), all_places.data_ptr<std::int32_t>(), dx.data_ptr<float>(),
        {dx.size(0) * dx.size(1), dx.size(kHeight), dx.size(kWidth), height.kernel, width.kernel,
         height.stride, width.stride, height.padding + rows.own().lo - from_rows.lo * height.stride,
         width.padding + columns.own().lo - from_columns.lo * width.stride, height.dilation, width.dilation,
         from_rows.size(), from_columns.size(), kernels::Padding::zeros});
    return {dx};
  }

 private:
  static std::pair<Sliding, Sliding> sliding(const Module& module, const LayoutRef& x) {
    const Pool2dConfig& c = dynamic_cast<const MaxPool2d&>(module).config();
    const auto along = [&](const char* what, std::int64_t n, std::int64_t k, std::int64_t s, std::int64_t p,
                           std::int64_t d) {
      return Sliding{k, s, p, d, n, maps::outputs_of(module, what, n, k, s, p, d)};
    };
    return {
        along("height", x->global[kHeight], c.kernel.height, c.stride.height, c.padding.height,
              c.dilation.height),
        along("width", x->global[kWidth], c.kernel.width, c.stride.width, c.padding.width, c.dilation.width)};
  }
  // What outputs see that is a pixel.
  static IndexRange within(const Sliding& s, const IndexRange& outputs) {
    const IndexRange seen = s.seen(outputs);
    const IndexRange pixels{std::clamp<std::int64_t>(seen.lo, 0, s.n),
                            std::clamp<std::int64_t>(seen.hi, 0, s.n)};
    return outputs.size() > 0 ? pixels : IndexRange{};
  }
};

// Rows [lo, lo + rows) and columns of a map, in memory of their own.
Tensor cut_out(Frame& frame, const Tensor& map, std::int64_t row, std::int64_t column,
               const LayoutRef& layout) {
  const Tensor out =
      frame.compute().make(layout->local_shape(), DType::f32, Memory::shared).with_layout(layout);
  ConstTensorView part = map.view();
  part.data += (row * part.strides[kHeight] + column) * size_bytes(map.dtype());
  part.shape = out.shape();
  if (out.count() > 0) copy(frame.compute().context(), part, out.view(), frame.compute().stream());
  return out;
}

class PixelShufflePasses final : public Passes {
 public:
  Tensors forward(Module& module, Inputs inputs, Frame& frame) const override {
    if (inputs.size() != 1 || !cut_in_space(inputs[0].layout())) return own_forward(module, inputs, frame);
    const std::int64_t f = dynamic_cast<const PixelShuffle&>(module).factor();
    const Tensor& x = inputs[0];
    maps::expect_map(module, x);
    layouts::expect_whole_dim(layouts::named(module, "x"), x, "a pixel shuffle", 1);
    const Shape& whole = x.layout()->global;
    if (whole[1] % (f * f) == 0) {
      const LayoutRef of_y = like(x.layout(), whole[1] / (f * f), whole[kHeight] * f, whole[kWidth] * f);
      const Parts rows = parts_of(of_y, kHeight), columns = parts_of(of_y, kWidth);
      const auto from = [&](const IndexRange& o) {
        return o.size() > 0 ? IndexRange{o.lo / f, ceil_div(o.hi, f)} : IndexRange{};
      };
      const Tensor window = fetch_window(x, {window_for(rows, from), window_for(columns, from)});
      Frame scratch = Frame::inference(frame.compute());
      const Tensor wide = own_forward(module, window, scratch)[0];
      frame.push(module, {maps::shape_alone(frame, x)});
      return {cut_out(frame, wide, rows.own().lo - from(rows.own()).lo * f,
                      columns.own().lo - from(columns.own()).lo * f, of_y)};
    }
    return own_forward(module, as_samples(x, x.layout()), frame);  // refuses it
  }
  Tensors backward(Module& module, Inputs gradients, Frame& frame) const override {
    if (gradients.size() != 1 || !cut_in_space(gradients[0].layout()))
      return own_backward(module, gradients, frame);
    const std::int64_t f = dynamic_cast<const PixelShuffle&>(module).factor();
    const LayoutRef of_x = frame.pop(module)[0].layout();
    const Shape& whole = of_x->global;
    const LayoutRef of_y = like(of_x, whole[1] / (f * f), whole[kHeight] * f, whole[kWidth] * f);
    expect_gradient(module, gradients[0], of_y->local_shape(), of_y);
    const auto from = [&](const IndexRange& i) { return IndexRange{i.lo * f, i.hi * f}; };
    const Tensor window = fetch_window(
        gradients[0], {window_for(parts_of(of_x, kHeight), from), window_for(parts_of(of_x, kWidth), from)});
    const Shape seen{window.size(0), window.size(1), window.size(kHeight) / f, f, window.size(kWidth) / f, f};
    return {permuted(frame, window, seen, {0, 1, 3, 5, 2, 4}, of_x->local_shape(), of_x, Memory::shared)};
  }
};

}  // namespace

std::shared_ptr<const Passes> resampling_passes() { return std::make_shared<ResamplingPasses>(); }
std::shared_ptr<const Passes> max_pool_passes() { return std::make_shared<MaxPoolPasses>(); }
std::shared_ptr<const Passes> pixel_shuffle_passes() { return std::make_shared<PixelShufflePasses>(); }

}  // namespace weft::domain
