// Convolutions of maps that are sharded in space.
//
// In forward each rank makes its own pixels of the output completely, from a window on the input. In backward
// it makes its own pixels of dx completely, from a window on dy. So no pixel is a sum of several ranks'
// parts, and its bits are the bits of one rank. Each rank has the part of the weight's gradient that comes
// from its own pixels of dy.
//
// While the window on x arrives, the rank computes the pixels of y that see no neighbour's pixels, if that is
// quicker. While the window on dy arrives, it computes the gradients of weight and bias.
#include "domain/conv.hpp"

#include <array>
#include <cstdint>
#include <optional>

#include "base/quickest.hpp"
#include "domain/plans.hpp"
#include "nn/maps/taps.hpp"

namespace weft::domain {
namespace {

using kernels::Padding;

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

// A dimension with its padding: each part has the places of its own pixels. The first part that is not empty
// also has the padding before them, and the last one the padding after them.
Parts with_padding(const Parts& x, std::int64_t padding) {
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

// Maps the gradient of a padded map, whose places are sharded as with_padding() says, back to the pixels.
// Each pixel gets the sum of the gradients of all its places.
struct Unpadding {
  TapsOfParts rows, columns;
  Window window;

  static TapsOfParts taps_of(const Parts& x, std::int64_t padding, Padding mode) {
    return TapsOfParts(taps::transposed(taps::padded(x.size, padding, padding, mode), x.size), x);
  }
  Unpadding(const Conv2dConfig& c, const LayoutRef& x, const Seeing& places)
      : rows(taps_of(parts_of(x, kHeight), c.padding.height, c.padding_mode)),
        columns(taps_of(parts_of(x, kWidth), c.padding.width, c.padding_mode)),
        window(partition(x, places), {rows.window(), columns.window()}) {}

 private:
  static Partition partition(const LayoutRef& x, const Seeing& places) {
    const Partition cut(x);
    const auto dim_of = [&](const Parts& wide) {
      PartitionDim d{wide.dim, cut.dim(wide.dim).axes, {}};
      for (const IndexRange& r : wide.ranges) d.parts.push_back({r});
      return d;
    };
    return Partition(x->mesh(), {x->global[0], x->global[1], places.rows.size, places.columns.size},
                     {dim_of(places.rows), dim_of(places.columns)});
  }
};

// The range of outputs that see only inputs of [known.lo, known.hi) of this rank's window.
IndexRange outputs_within(const Sliding& k, const IndexRange& known, std::int64_t outputs) {
  const IndexRange within{ceil_div(known.lo, k.stride),
                          std::min(outputs, floor_div(known.hi - k.span(), k.stride) + 1)};
  return known.size() >= k.span() && within.lo < within.hi ? within : IndexRange{};
}

enum class Order : std::uint8_t { interior_first, window_first };
using Orders = Quickest<Order, 2>;

// Everything about maps of one layout that a pass needs.
struct ConvPlan {
  Both k;
  LayoutRef of_y;
  Seen seen;              // the window on x, for y
  conv::Pixels interior;  // of y, this rank's, that see no neighbour's pixels nor padding
  Both back;              // kernel k; in places of the padded map if the padding is not zeros
  Seeing seeing;          // on dy, for dx or the gradient of the padded map
  std::optional<Unpadding> unpadding;
  mutable Orders orders{};  // of forward

  ConvPlan(const Conv2d& conv, const LayoutRef& x) : ConvPlan(conv.config(), x, of_conv(conv, x)) {}

 private:
  ConvPlan(const Conv2dConfig& c, const LayoutRef& x, const Both& both)
      : k(both),
        of_y(like(x, c.out, both.height.out, both.width.out)),
        seen(x, of_y, both, edge_of(c.padding_mode)),
        back(c.padding_mode == Padding::zeros ? both : in_places(both)),
        seeing(c.padding_mode == Padding::zeros
                   ? Seeing(of_y, x, both)
                   : Seeing(of_y, back, with_padding(parts_of(x, kHeight), c.padding.height),
                            with_padding(parts_of(x, kWidth), c.padding.width))) {
    const IndexRange rows = outputs_within(k.height, seen.window.own(kHeight), seen.rows.own().size()),
                     columns = outputs_within(k.width, seen.window.own(kWidth), seen.columns.own().size());
    interior = {rows.lo, rows.size(), columns.lo, columns.size()};
    if (c.padding_mode != Padding::zeros) unpadding.emplace(c, x, seeing);
  }
  // No place of the padded map is beyond the border.
  static Both in_places(Both both) {
    both.height.padding = both.width.padding = 0;
    return both;
  }
};

class ConvPasses final : public MapPasses {
 public:
  using MapPasses::MapPasses;

 private:
  Tensors forward_cut(Module& module, const Tensor& x, Frame& frame) const override {
    auto& conv = dynamic_cast<Conv2d&>(module);
    expect_input(conv, x, conv.config().in);
    const auto plan = plan_of(conv, x.layout());
    Fetched seen = start(frame, plan->seen.window, x);
    Tensors kept{seen.window};
    const Tensor w =
        conv.spectral_norm() ? conv.spectral_norm()->forward(frame, kept) : conv.weight->weight();
    const Tensor y = make_maps(frame, plan->of_y);
    correlate_meanwhile(frame, conv, *plan, seen, w, y);
    if (conv.bias) conv::add_bias(frame, conv.bias->weight(), y);
    frame.push(module, std::move(kept));
    return {y};
  }

  Tensors backward_cut(Module& module, const Tensor& dy, const LayoutRef& of_x, Frame& frame) const override {
    auto& conv = dynamic_cast<Conv2d&>(module);
    const Conv2dConfig& c = conv.config();
    const Tensors kept = frame.pop(module);
    const auto plan = plan_of(conv, of_x);
    expect_gradient(module, dy, plan->of_y->local_shape(), plan->of_y, as_activation(dy));
    Fetched seeing = start(frame, plan->seeing.window, dy);
    const Tensor w = conv.spectral_norm() ? conv.spectral_norm()->again(frame, kept) : conv.weight->weight();
    if (conv.bias)
      conv.bias->accumulate(layouts::gradient_of(conv.bias->weight().layout(), of_x, 1),
                            [&](const Tensor& into, bool add) { conv::bias_gradient(frame, dy, into, add); });
    const LayoutRef of_dw = layouts::gradient_of(w.layout(), of_x, 1);
    frame.later([&conv, kept, dy, plan, of_dw, dtype = w.dtype()](Frame& f) {
      const auto write = [&](const Tensor& into, bool add) {
        conv::weight_gradient(f, kept[0], dy, conv.config().groups,
                              plan->seen.shape(plan->k.shape(conv.config().in)), dtype, into, add);
      };
      if (conv.spectral_norm())
        conv.spectral_norm()->accumulate(f, kept, of_dw, write);
      else
        conv.weight->accumulate(of_dw, write);
    });
    seeing.transfer.finish();
    const kernels::UnfoldShape shape = plan->seeing.shape(plan->k.shape(c.in), plan->back);
    const Tensor dx = make_maps(frame, of_x);
    if (!plan->unpadding) {
      conv::spread(frame, seeing.window, w, c.groups, shape, dx);
      return {dx};
    }
    // First the gradient of the padded map is computed, each place complete on one rank. Then each pixel gets
    // the sum over all its places, as on one rank.
    const Tensor places =
        frame.compute().make({dy.size(0), c.in, shape.height, shape.width}, DType::f32, Memory::shared);
    conv::spread(frame, seeing.window, w, c.groups, shape, places);
    const Tensor all = fetch(frame, plan->unpadding->window, places);
    kernels::resample(frame.kernels(), all.data_ptr<float>(), dx.data_ptr<float>(),
                      {dx.size(0) * dx.size(1), all.size(kHeight), all.size(kWidth),
                       plan->unpadding->rows.own(), plan->unpadding->columns.own()});
    return {dx};
  }

  std::shared_ptr<const ConvPlan> plan_of(const Conv2d& conv, const LayoutRef& x) const {
    return plans_.of(x, [&] { return ConvPlan(conv, x); });
  }

  // Computes y from the window. The bits do not depend on what was computed before the window arrived.
  // Computing the interior separately costs a separate pass over the edges. It pays if the window takes long
  // to arrive, so both ways are measured. Each rank chooses by itself.
  static void correlate_meanwhile(Frame& frame, const Conv2d& conv, const ConvPlan& plan, Fetched& seen,
                                  const Tensor& w, const Tensor& y) {
    const kernels::UnfoldShape shape = plan.seen.shape(plan.k.shape(conv.config().in));
    const auto make = [&](const conv::Pixels& pixels, const std::function<void()>& between) {
      conv::correlate(frame, seen.window, w, conv.config().groups, shape, y, pixels, between);
    };
    const conv::Pixels all{0, y.size(kHeight), 0, y.size(kWidth)}, in = plan.interior;
    const double products =
        static_cast<double>(w.count()) * static_cast<double>(y.size(0) * in.rows * in.columns);
    Orders::Next next{Order::window_first, false};
    if (products >= kLeastProducts && frame.compute().device() == Device{})
      next = plan.orders.next(std::array{Order::interior_first, Order::window_first});
    const std::uint64_t since = next.timed ? now_ns() : 0;
    if (next.way == Order::window_first) {
      seen.transfer.finish();
      make(all, {});
    } else {
      make(in, [&] { seen.transfer.done(); });
      seen.transfer.finish();
      const std::int64_t below = in.row + in.rows, right = in.column + in.columns;
      for (const conv::Pixels& edge : {conv::Pixels{0, in.row, 0, all.columns},
                                       {below, all.rows - below, 0, all.columns},
                                       {in.row, in.rows, 0, in.column},
                                       {in.row, in.rows, right, all.columns - right}})
        make(edge, {});
    }
    if (next.timed) plan.orders.took(next.way, now_ns() - since);
  }
  // The least number of products in an interior; with fewer products, nothing is hidden.
  static constexpr double kLeastProducts = 1 << 20;

  Plans<ConvPlan> plans_;
};

}  // namespace

SpaceRule conv_rule(const Module& module, const DeviceMesh& axes) {
  return rule_by<Conv2d, ConvPasses>(module, axes);
}

}  // namespace weft::domain
