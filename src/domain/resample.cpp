// Padding, pooling, resizing and pixel shuffles of maps that are sharded in space. Each rank makes its own
// pixels of y, and of dx, from a window.
#include <algorithm>

#include "domain/conv.hpp"
#include "domain/plans.hpp"
#include "nn/maps/taps.hpp"
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

// Maps of the layout `of_out`. Each rank computes its part from the window on other maps that the taps need.
struct Resampled {
  LayoutRef of_out;
  TapsOfParts rows, columns;
  Window window;
  Resampled(const LayoutRef& of_in, const LayoutRef& of_out_in, Taps rows_in, Taps columns_in)
      : of_out(of_out_in),
        rows(std::move(rows_in), parts_of(of_out, kHeight)),
        columns(std::move(columns_in), parts_of(of_out, kWidth)),
        window(of_in, {rows.window(), columns.window()}) {}
  Tensor run(Frame& frame, const Tensor& in) const {
    const Tensor seen = widened(frame, fetch(frame, window, in)), out = make_maps(frame, of_out);
    kernels::resample(
        frame.kernels(), seen.data_ptr<float>(), out.data_ptr<float>(),
        {out.size(0) * out.size(1), seen.size(kHeight), seen.size(kWidth), rows.own(), columns.own()});
    return out;
  }
};

class ResamplingPasses final : public MapPasses {
 public:
  using MapPasses::MapPasses;

 private:
  Tensors forward_cut(Module& module, const Tensor& x, Frame& frame) const override {
    maps::expect_map(module, x);
    const auto plan = plan_of(module, x.layout());
    return {plan->there.run(frame, x)};
  }
  Tensors backward_cut(Module& module, const Tensor& dy, const LayoutRef& of_x, Frame& frame) const override {
    const auto plan = plan_of(module, of_x);
    expect_gradient(module, dy, plan->there.of_out->local_shape(), plan->there.of_out, as_activation(dy));
    return {plan->back.run(frame, dy)};
  }

  struct Plan {
    Resampled there, back;
  };
  std::shared_ptr<const Plan> plan_of(const Module& module, const LayoutRef& x) const {
    return plans_.of(x, [&] {
      const auto& layer = dynamic_cast<const Resampling2d&>(module);
      const std::int64_t height = x->global[kHeight], width = x->global[kWidth];
      const Taps rows = layer.rows(height), columns = layer.columns(width);
      const LayoutRef of_y = like(x, x->global[1], rows.outputs(), columns.outputs());
      return Plan{Resampled(x, of_y, rows, columns),
                  Resampled(of_y, x, taps::transposed(rows, height), taps::transposed(columns, width))};
    });
  }
  Plans<Plan> plans_;
};

class MaxPoolPasses final : public MapPasses {
 public:
  using MapPasses::MapPasses;

 private:
  Tensors forward_cut(Module& module, const Tensor& x, Frame& frame) const override {
    maps::expect_map(module, x);
    const auto plan = plan_of(module, x.layout());
    const Sliding &height = plan->height, &width = plan->width;
    const Parts &rows = plan->rows, &columns = plan->columns;
    const Tensor window = widened(frame, fetch(frame, plan->seen, x)), y = make_maps(frame, plan->of_y);
    const Tensor place = frame.compute().make(y.shape(), DType::i32, Memory::shared).with_layout(plan->of_y);
    const IndexRange seen_rows = within(height, rows.own()), seen_columns = within(width, columns.own());
    kernels::max_pool_forward(
        frame.kernels(), window.data_ptr<float>(), y.data_ptr<float>(), place.data_ptr<std::int32_t>(),
        {x.size(0) * x.size(1), window.size(kHeight), window.size(kWidth), height.kernel, width.kernel,
         height.stride, width.stride, height.padding + seen_rows.lo - rows.own().lo * height.stride,
         width.padding + seen_columns.lo - columns.own().lo * width.stride, height.dilation, width.dilation,
         rows.own().size(), columns.own().size(), kernels::Padding::zeros});
    frame.push(module, {place});
    return {y};
  }

  Tensors backward_cut(Module& module, const Tensor& dy, const LayoutRef& of_x, Frame& frame) const override {
    const Tensor place = frame.pop(module)[0];
    expect_gradient(module, dy, place.shape(), place.layout(), as_activation(dy));
    const auto plan = plan_of(module, of_x);
    const Sliding &height = plan->height, &width = plan->width;
    const Parts &rows = plan->seeing.rows, &columns = plan->seeing.columns;
    const Window& window = plan->seeing.window;
    // Gradients and places go in one message.
    const Shape wide = window.window_shape(dy.shape());
    const Tensor all_dy = frame.compute().make(wide, dy.dtype(), Memory::shared),
                 all_places = frame.compute().make(wide, DType::i32, Memory::shared);
    const WindowField fields[] = {{dy, all_dy}, {place, all_places}};
    window.start(fields, frame.compute().stream()).finish();
    const Tensor dx = make_maps(frame, of_x);
    const IndexRange from_rows = height.seeing(rows.own()), from_columns = width.seeing(columns.own());
    kernels::max_pool_backward(
        frame.kernels(), widened(frame, all_dy).data_ptr<float>(), all_places.data_ptr<std::int32_t>(),
        dx.data_ptr<float>(),
        {dx.size(0) * dx.size(1), dx.size(kHeight), dx.size(kWidth), height.kernel, width.kernel,
         height.stride, width.stride, height.padding + rows.own().lo - from_rows.lo * height.stride,
         width.padding + columns.own().lo - from_columns.lo * width.stride, height.dilation, width.dilation,
         from_rows.size(), from_columns.size(), kernels::Padding::zeros});
    return {dx};
  }

  struct Plan {
    Sliding height, width;
    LayoutRef of_y;
    Parts rows, columns;  // of y
    Window seen;          // the window on x, for y
    Seeing seeing;        // the window on dy, for dx
  };
  std::shared_ptr<const Plan> plan_of(const Module& module, const LayoutRef& x) const {
    return plans_.of(x, [&] {
      const Pool2dConfig& c = dynamic_cast<const MaxPool2d&>(module).config();
      const auto along = [&](const char* what, std::int64_t n, std::int64_t k, std::int64_t s, std::int64_t p,
                             std::int64_t d) {
        return Sliding{k, s, p, d, n, maps::outputs_of(module, what, n, k, s, p, d)};
      };
      const Both k{along("height", x->global[kHeight], c.kernel.height, c.stride.height, c.padding.height,
                         c.dilation.height),
                   along("width", x->global[kWidth], c.kernel.width, c.stride.width, c.padding.width,
                         c.dilation.width)};
      const LayoutRef of_y = like(x, x->global[1], k.height.out, k.width.out);
      const Parts rows = parts_of(of_y, kHeight), columns = parts_of(of_y, kWidth);
      const Window seen(x, {window_for(rows, [&](const IndexRange& o) { return within(k.height, o); }),
                            window_for(columns, [&](const IndexRange& o) { return within(k.width, o); })});
      return Plan{k.height, k.width, of_y, rows, columns, seen, Seeing(of_y, x, k)};
    });
  }
  // The pixels that the outputs see.
  static IndexRange within(const Sliding& s, const IndexRange& outputs) {
    const IndexRange seen = s.seen(outputs);
    const IndexRange pixels{std::clamp<std::int64_t>(seen.lo, 0, s.n),
                            std::clamp<std::int64_t>(seen.hi, 0, s.n)};
    return outputs.size() > 0 ? pixels : IndexRange{};
  }
  Plans<Plan> plans_;
};

class PixelShufflePasses final : public MapPasses {
 public:
  using MapPasses::MapPasses;

 private:
  Tensors forward_cut(Module& module, const Tensor& x, Frame& frame) const override {
    const std::int64_t f = dynamic_cast<const PixelShuffle&>(module).factor();
    maps::expect_map(module, x);
    layouts::expect_whole_dim(layouts::named(module, "x"), x, "a pixel shuffle", 1);
    if (x.layout()->global[1] % (f * f) != 0)
      return own_forward(module, as_samples(x, x.layout()), frame);  // refuses it
    const auto plan = plan_of(f, x.layout());
    Frame scratch = Frame::inference(frame.compute());
    const Tensor wide = own_forward(module, fetch(frame, plan->seen, x), scratch)[0];
    return {cut_out(frame, wide, plan->row, plan->column, plan->of_y)};
  }
  Tensors backward_cut(Module& module, const Tensor& dy, const LayoutRef& of_x, Frame& frame) const override {
    const std::int64_t f = dynamic_cast<const PixelShuffle&>(module).factor();
    const auto plan = plan_of(f, of_x);
    expect_gradient(module, dy, plan->of_y->local_shape(), plan->of_y, as_activation(dy));
    const Tensor window = fetch(frame, plan->made, dy);
    const Shape seen{window.size(0), window.size(1), window.size(kHeight) / f, f, window.size(kWidth) / f, f};
    return {permuted(frame, window, seen, {0, 1, 3, 5, 2, 4}, of_x->local_shape(), of_x, Memory::shared)};
  }

  struct Plan {
    LayoutRef of_y;
    Window seen;               // on x, for y: whole pixels of x
    std::int64_t row, column;  // the place in the result at which this rank's y begins
    Window made;               // on dy, for dx: all that pixels of x made
  };
  std::shared_ptr<const Plan> plan_of(std::int64_t f, const LayoutRef& x) const {
    return plans_.of(x, [&] {
      const Shape& whole = x->global;
      const LayoutRef of_y = like(x, whole[1] / (f * f), whole[kHeight] * f, whole[kWidth] * f);
      const Parts rows = parts_of(of_y, kHeight), columns = parts_of(of_y, kWidth);
      const auto from = [&](const IndexRange& o) {
        return o.size() > 0 ? IndexRange{o.lo / f, ceil_div(o.hi, f)} : IndexRange{};
      };
      const auto of = [&](const IndexRange& i) { return IndexRange{i.lo * f, i.hi * f}; };
      return Plan{of_y, Window(x, {window_for(rows, from), window_for(columns, from)}),
                  rows.own().lo - from(rows.own()).lo * f, columns.own().lo - from(columns.own()).lo * f,
                  Window(of_y, {window_for(parts_of(x, kHeight), of), window_for(parts_of(x, kWidth), of)})};
    });
  }
  Plans<Plan> plans_;
};

}  // namespace

SpaceRule resampling_rule(const Module& module, const DeviceMesh& axes) {
  if (dynamic_cast<const Resampling2d*>(&module) != nullptr)  // its passes are final
    return {SpaceRule::Kind::by_passes, std::make_shared<const ResamplingPasses>(axes), {}, {}};
  return either(rule_by<MaxPool2d, MaxPoolPasses>(module, axes),
                rule_by<PixelShuffle, PixelShufflePasses>(module, axes));
}

}  // namespace weft::domain
