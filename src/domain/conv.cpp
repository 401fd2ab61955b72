// Convolutions and transposed convolutions of maps that are cut in space.
//
// Each rank makes its own pixels of the output, whole, from a window on the input; and in backward its own pixels of dx, whole, from a window
// on dy. So no pixel is a sum of several ranks' parts, and its bits are those of one rank. Of the weight's gradient each rank has the part of its own
// pixels of dy.
#include "domain/rules.hpp"
#include "domain/space.hpp"
#include "nn/maps/conv_maps.hpp"
#include "nn/maps/taps.hpp"
#include "weft/nn/maps/conv_transpose.hpp"

namespace weft::domain {
namespace {

using kernels::Padding;
using kernels::UnfoldShape;

UnfoldShape unfolding(std::int64_t channels, const Sliding& h, const Sliding& w) {
  return {channels, 0, 0,          h.kernel,   w.kernel, h.stride, w.stride,
          0,        0, h.dilation, w.dilation, 0,        0,        Padding::zeros};
}

// Both dimensions of a convolution: the larger map that its kernel goes over, and the other that has a pixel for each place of it.
struct Both {
  Sliding height, width;
  UnfoldShape shape(std::int64_t channels) const { return unfolding(channels, height, width); }
};

Both of_conv(const Conv2d& conv, const LayoutRef& x) {
  const Conv2dConfig& c = conv.config();
  const auto along = [&](const char* what, std::int64_t n, std::int64_t k, std::int64_t s, std::int64_t p,
                         std::int64_t d) {
    maps::expect_padding(conv, what, n, p, c.padding_mode);
    return Sliding{k, s, p, d, n, maps::outputs_of(conv, what, n, k, s, p, d)};
  };
  return {
      along("height", x->global[kHeight], c.kernel.height, c.stride.height, c.padding.height,
            c.dilation.height),
      along("width", x->global[kWidth], c.kernel.width, c.stride.width, c.padding.width, c.dilation.width)};
}

void expect_input(const Module& module, const Tensor& x, std::int64_t channels) {
  maps::expect_map(module, x);
  layouts::expect_whole_dim(layouts::named(module, "x"), x, "a convolution", 1);
  if (x.size(1) != channels)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{} is {}; expected (batch, {}, height, width)",
                            layouts::named(module, "x").text(), to_string(x.shape()), channels));
}

// What the kernel sees of this rank's window on the larger map, for its own pixels of the other. The window holds all, padding included.
Tensor fetch_seen(const Tensor& larger, const Both& k, const Parts& rows, const Parts& columns,
                  const Edge& edge) {
  return fetch_window(larger, {window_for(
                                   rows, [&](const IndexRange& o) { return k.height.seen(o); }, edge),
                               window_for(
                                   columns, [&](const IndexRange& o) { return k.width.seen(o); }, edge)});
}

UnfoldShape shape_of_seen(UnfoldShape s, const Tensor& window, const Parts& rows, const Parts& columns) {
  s.height = window.size(kHeight), s.width = window.size(kWidth);
  s.out_height = rows.own().size(), s.out_width = columns.own().size();
  return s;
}

// The smaller map's pixels that see any of this rank's of the larger one, and what these make of it: `spread` it over.
Tensor fetch_seeing(const Tensor& smaller, const Both& k, const Parts& rows, const Parts& columns) {
  return fetch_window(smaller, {window_for(rows, [&](const IndexRange& i) { return k.height.seeing(i); }),
                                window_for(columns, [&](const IndexRange& i) { return k.width.seeing(i); })});
}

UnfoldShape shape_of_spread(UnfoldShape s, const Both& k, const IndexRange& rows, const IndexRange& columns) {
  const IndexRange from_rows = k.height.seeing(rows), from_columns = k.width.seeing(columns);
  s.height = rows.size(), s.width = columns.size();
  s.out_height = from_rows.size(), s.out_width = from_columns.size();
  s.padding_height = k.height.padding + rows.lo - from_rows.lo * k.height.stride;
  s.padding_width = k.width.padding + columns.lo - from_columns.lo * k.width.stride;
  return s;
}

class ConvPasses final : public Passes {
 public:
  Tensors forward(Module& module, Inputs inputs, Frame& frame) const override {
    auto& conv = dynamic_cast<Conv2d&>(module);
    if (inputs.size() != 1 || !cut_in_space(inputs[0].layout())) return own_forward(module, inputs, frame);
    const Tensor& x = inputs[0];
    expect_input(conv, x, conv.config().in);
    const Both k = of_conv(conv, x.layout());
    const LayoutRef of_y = like(x.layout(), conv.config().out, k.height.out, k.width.out);
    const Parts rows = parts_of(of_y, kHeight), columns = parts_of(of_y, kWidth);
    const Tensor seen = fetch_seen(x, k, rows, columns, edge_of(conv.config().padding_mode));
    Tensors kept{seen, maps::shape_alone(frame, x)};
    const Tensor w =
        conv.spectral_norm() ? conv.spectral_norm()->forward(frame, kept) : conv.weight->weight();
    const Tensor y = frame.compute().make(of_y->local_shape(), DType::f32, Memory::shared).with_layout(of_y);
    conv::correlate(frame, seen, w, conv.config().groups,
                    shape_of_seen(k.shape(conv.config().in), seen, rows, columns), y);
    if (conv.bias) conv::add_bias(frame, conv.bias->weight(), y);
    frame.push(module, std::move(kept));
    return {y};
  }

  Tensors backward(Module& module, Inputs gradients, Frame& frame) const override {
    auto& conv = dynamic_cast<Conv2d&>(module);
    const Conv2dConfig& c = conv.config();
    if (gradients.size() != 1 || !cut_in_space(gradients[0].layout()))
      return own_backward(module, gradients, frame);
    const Tensor& dy = gradients[0];
    const Tensors kept = frame.pop(module);
    const Tensor& seen = kept[0];
    const LayoutRef of_x = kept[1].layout();
    const Both k = of_conv(conv, of_x);
    const LayoutRef of_y = like(of_x, c.out, k.height.out, k.width.out);
    expect_gradient(module, dy, of_y->local_shape(), of_y);
    const Tensor w = conv.spectral_norm() ? conv.spectral_norm()->again(frame, kept) : conv.weight->weight();
    const UnfoldShape shape = k.shape(c.in);
    if (conv.bias)
      conv.bias->accumulate(layouts::gradient_of(conv.bias->weight().layout(), of_x, 1),
                            [&](const Tensor& into, bool add) { conv::bias_gradient(frame, dy, into, add); });
    const LayoutRef of_dw = layouts::gradient_of(w.layout(), of_x, 1);
    const auto write = [&](const Tensor& into, bool add) {
      conv::weight_gradient(frame, seen, dy, c.groups,
                            shape_of_seen(shape, seen, parts_of(of_y, kHeight), parts_of(of_y, kWidth)),
                            w.dtype(), into, add);
    };
    if (conv.spectral_norm())
      conv.spectral_norm()->accumulate(frame, kept, of_dw, write);
    else
      conv.weight->accumulate(of_dw, write);
    if (c.padding_mode != Padding::zeros) return {through_padding(frame, c, dy, w, k, of_x)};
    const Parts rows = parts_of(of_x, kHeight), columns = parts_of(of_x, kWidth);
    const Tensor seeing = fetch_seeing(dy, k, rows, columns);
    const Tensor dx = frame.compute().make(of_x->local_shape(), DType::f32, Memory::shared).with_layout(of_x);
    conv::spread(frame, seeing, w, c.groups, shape_of_spread(shape, k, rows.own(), columns.own()), dx);
    return {dx};
  }

 private:
  // A dimension with its padding: each part has the places of its own pixels, the first one that is not empty also those before them, the
  // last one those after.
  static Parts with_padding(const Parts& x, std::int64_t padding) {
    Parts wide = x;
    wide.size += 2 * padding;
    IndexRange *first = nullptr, *last = nullptr;
    for (IndexRange& r : wide.ranges) {
      if (r.size() == 0) {
        r = {};
        continue;
      }
      if (first == nullptr) first = &r;
      last = &r;
      r.lo += padding, r.hi += padding;
    }
    if (first != nullptr) first->lo -= padding, last->hi += padding;
    return wide;
  }

  // The gradient of the padded map first, each place whole on one rank; then each pixel takes those of all its places, as on one rank.
  static Tensor through_padding(Frame& frame, const Conv2dConfig& c, const Tensor& dy, const Tensor& w,
                                const Both& k, const LayoutRef& of_x) {
    const Parts rows = parts_of(of_x, kHeight), columns = parts_of(of_x, kWidth);
    const Parts wide_rows = with_padding(rows, c.padding.height),
                wide_columns = with_padding(columns, c.padding.width);
    Both over = k;  // in places, of which none is beyond the border
    over.height.padding = over.width.padding = 0;
    const Tensor seeing = fetch_seeing(dy, over, wide_rows, wide_columns);
    const Tensor dwide = frame.compute().make(
        {dy.size(0), c.in, wide_rows.own().size(), wide_columns.own().size()}, DType::f32, Memory::shared);
    conv::spread(frame, seeing, w, c.groups,
                 shape_of_spread(k.shape(c.in), over, wide_rows.own(), wide_columns.own()), dwide);

    const Partition cut(of_x);
    const auto dim_of = [&](const Parts& wide) {
      PartitionDim d{wide.dim, cut.dim(wide.dim).axes, {}};
      for (const IndexRange& r : wide.ranges) d.parts.push_back({r});
      return d;
    };
    const Partition places(of_x->mesh(), {dy.size(0), c.in, wide_rows.size, wide_columns.size},
                           {dim_of(wide_rows), dim_of(wide_columns)});
    const TapsOfParts back_rows(
        taps::transposed(taps::padded(rows.size, c.padding.height, c.padding.height, c.padding_mode),
                         rows.size),
        rows),
        back_columns(
            taps::transposed(taps::padded(columns.size, c.padding.width, c.padding.width, c.padding_mode),
                             columns.size),
            columns);
    const Window window(places, {back_rows.window(), back_columns.window()});
    const Tensor all = frame.compute().make(window.window_shape(dwide.shape()), DType::f32, Memory::shared);
    window.start(dwide, all, frame.compute().stream()).finish();
    const Tensor dx = frame.compute().make(of_x->local_shape(), DType::f32, Memory::shared).with_layout(of_x);
    kernels::resample(
        frame.kernels(), all.data_ptr<float>(), dx.data_ptr<float>(),
        {dx.size(0) * dx.size(1), all.size(kHeight), all.size(kWidth), back_rows.own(), back_columns.own()});
    return dx;
  }
};

Both of_transpose(const ConvTranspose2d& conv, const LayoutRef& x) {
  const ConvTranspose2dConfig& c = conv.config();
  const auto along = [&](const char* what, std::int64_t n, std::int64_t k, std::int64_t s, std::int64_t p,
                         std::int64_t d, std::int64_t more) {
    return Sliding{k, s, p, d, maps::transposed_outputs_of(conv, what, n, k, s, p, d, more), n};
  };
  return {along("height", x->global[kHeight], c.kernel.height, c.stride.height, c.padding.height,
                c.dilation.height, c.output_padding.height),
          along("width", x->global[kWidth], c.kernel.width, c.stride.width, c.padding.width, c.dilation.width,
                c.output_padding.width)};
}

// The same with x and y in each other's place.
class ConvTransposePasses final : public Passes {
 public:
  Tensors forward(Module& module, Inputs inputs, Frame& frame) const override {
    auto& conv = dynamic_cast<ConvTranspose2d&>(module);
    if (inputs.size() != 1 || !cut_in_space(inputs[0].layout())) return own_forward(module, inputs, frame);
    const Tensor& x = inputs[0];
    expect_input(conv, x, conv.config().in);
    const Both k = of_transpose(conv, x.layout());
    const LayoutRef of_y = like(x.layout(), conv.config().out, k.height.n, k.width.n);
    const Parts rows = parts_of(of_y, kHeight), columns = parts_of(of_y, kWidth);
    const Tensor seeing = fetch_seeing(x, k, rows, columns);
    const Tensor y = frame.compute().make(of_y->local_shape(), DType::f32, Memory::shared).with_layout(of_y);
    conv::spread(frame, seeing, conv.weight->weight(), conv.config().groups,
                 shape_of_spread(k.shape(conv.config().out), k, rows.own(), columns.own()), y);
    if (conv.bias) conv::add_bias(frame, conv.bias->weight(), y);
    frame.push(module, {x});
    return {y};
  }

  Tensors backward(Module& module, Inputs gradients, Frame& frame) const override {
    auto& conv = dynamic_cast<ConvTranspose2d&>(module);
    if (gradients.size() != 1 || !cut_in_space(gradients[0].layout()))
      return own_backward(module, gradients, frame);
    const Tensor& dy = gradients[0];
    const Tensor x = frame.pop(module)[0];
    const Both k = of_transpose(conv, x.layout());
    const LayoutRef of_y = like(x.layout(), conv.config().out, k.height.n, k.width.n);
    expect_gradient(module, dy, of_y->local_shape(), of_y);
    const Parts rows = parts_of(x.layout(), kHeight), columns = parts_of(x.layout(), kWidth);
    const Tensor seen = fetch_seen(dy, k, rows, columns, Edge::zero());
    const UnfoldShape shape = shape_of_seen(k.shape(conv.config().out), seen, rows, columns);
    const Tensor& w = conv.weight->weight();
    if (conv.bias)
      conv.bias->accumulate(layouts::gradient_of(conv.bias->weight().layout(), of_y, 1),
                            [&](const Tensor& into, bool add) { conv::bias_gradient(frame, dy, into, add); });
    conv.weight->accumulate(
        layouts::gradient_of(w.layout(), x.layout(), 1), [&](const Tensor& into, bool add) {
          conv::weight_gradient(frame, seen, x, conv.config().groups, shape, w.dtype(), into, add);
        });
    const Tensor dx = frame.compute().make(x.shape(), DType::f32, Memory::shared).with_layout(x.layout());
    conv::correlate(frame, seen, w, conv.config().groups, shape, dx);
    return {dx};
  }
};

}  // namespace

std::shared_ptr<const Passes> conv_passes() { return std::make_shared<ConvPasses>(); }
std::shared_ptr<const Passes> conv_transpose_passes() { return std::make_shared<ConvTransposePasses>(); }

}  // namespace weft::domain
