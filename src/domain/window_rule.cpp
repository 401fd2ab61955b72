// A layer that declares which inputs its outputs see (SpaceRule::Kind::window), on maps that are sharded in
// space. Its own code runs on a window that holds all inputs of this rank's outputs. These outputs are then
// cut out of its result. Backward is the adjoint. If outputs of several ranks see an input, the input gets
// the sum of their parts.
#include "domain/conv.hpp"
#include "domain/plans.hpp"

namespace weft::domain {
namespace {

// One dimension. The module's own code pads the window, too. The outputs that see that padding are the first
// and the last, and are dropped.
struct Along {
  Sliding k;
  std::int64_t skipped() const {
    return ceil_div(k.padding, k.stride);
  }  // outputs before the first that is right
  // A part without outputs gets the window of one output, so that the module's own code never runs on a map
  // that is too small for it.
  IndexRange window(const IndexRange& outputs) const {
    const IndexRange o = outputs.size() > 0 ? outputs : IndexRange{0, 1};
    return {(o.lo - skipped()) * k.stride, (o.hi - 1) * k.stride - k.padding + k.span()};
  }
  std::int64_t made_of(std::int64_t window) const {
    return floor_div(window + 2 * k.padding - k.span(), k.stride) + 1;
  }
};

struct WindowPlan {
  Along rows, columns;
  LayoutRef of_y;  // with the channels of x
  Window seen;
};

class WindowPasses final : public MapPasses {
 public:
  WindowPasses(const DeviceMesh& axes, const SpaceRule::Reach& height, const SpaceRule::Reach& width)
      : MapPasses(axes), height_(height), width_(width) {}

 private:
  Tensors forward_cut(Module& module, const Tensor& x, Frame& frame) const override {
    maps::expect_map(module, x);
    layouts::expect_whole_dim(layouts::named(module, "x"), x, "a layer with a window", 1);
    const auto plan = plan_of(module, x.layout());
    const Tensor window = fetch(frame, plan->seen, x);
    const Tensor made = own_forward(module, as_samples(window, x.layout()), frame)[0];
    const Shape expected{x.size(0), made.shape().rank() == 4 ? made.size(1) : 0,
                         plan->rows.made_of(window.size(kHeight)),
                         plan->columns.made_of(window.size(kWidth))};
    if (!(made.shape() == expected))
      throw Error(ErrorCode::bad_argument,
                  fmt::format("{} is {} for a window {}; expected (batch, channels, {}, {}), by the layer's "
                              "rule for maps that are cut in space",
                              layouts::named(module, "y").text(), to_string(made.shape()),
                              to_string(window.shape()), expected[kHeight], expected[kWidth]));
    frame.push(module, {maps::shape_alone(frame, made)});
    return {cut_out(frame, made, plan->rows.skipped(), plan->columns.skipped(), of_y(*plan, made.size(1)))};
  }

  Tensors backward_cut(Module& module, const Tensor& dy, const LayoutRef& of_x, Frame& frame) const override {
    const Tensor made = frame.pop(module)[0];
    const Shape shape = maps::shape_kept(made);
    const auto plan = plan_of(module, of_x);
    const LayoutRef layout = of_y(*plan, shape[1]);
    expect_gradient(module, dy, layout->local_shape(), layout, as_activation(dy));
    const Tensor zeros = frame.compute().zeros(shape).with_layout(made.layout());
    const Tensor dmade = weft::cast(frame, zeros, dy.dtype());
    if (dy.count() > 0)
      copy(frame.compute().context(), dy,
           part_of(dmade.view(), plan->rows.skipped(), plan->columns.skipped(), dy.shape()),
           frame.compute().stream());
    const Tensor dwindow = widened(frame, own_backward(module, dmade, frame)[0], Memory::shared),
                 dx = make_maps(frame, of_x);
    plan->seen.adjoint(dwindow, dx);
    return {dx};
  }

  static LayoutRef of_y(const WindowPlan& plan, std::int64_t channels) {
    return like(plan.of_y, channels, plan.rows.k.out, plan.columns.k.out);
  }
  std::shared_ptr<const WindowPlan> plan_of(const Module& module, const LayoutRef& x) const {
    return plans_.of(x, [&] {
      const auto along = [&](const char* what, std::int64_t n, const SpaceRule::Reach& r) {
        return Along{{r.kernel, r.stride, r.padding, r.dilation, n,
                      maps::outputs_of(module, what, n, r.kernel, r.stride, r.padding, r.dilation)}};
      };
      const Along rows = along("height", x->global[kHeight], height_),
                  columns = along("width", x->global[kWidth], width_);
      const LayoutRef y = like(x, x->global[1], rows.k.out, columns.k.out);
      const auto window = [&](int dim, const Along& a, const Edge& edge) {
        return window_for(
            parts_of(y, dim), [&](const IndexRange& o) { return a.window(o); }, edge);
      };
      return WindowPlan{
          rows, columns, y,
          Window(x, {window(kHeight, rows, height_.edge), window(kWidth, columns, width_.edge)})};
    });
  }

  SpaceRule::Reach height_, width_;
  Plans<WindowPlan> plans_;
};

}  // namespace

std::shared_ptr<const Passes> window_passes(const DeviceMesh& axes, const SpaceRule::Reach& height,
                                            const SpaceRule::Reach& width) {
  return std::make_shared<WindowPasses>(axes, height, width);
}

}  // namespace weft::domain
