// Transposed convolutions of maps that are sharded in space: like convolutions (conv.cpp), with x and y
// exchanged.
#include "weft/nn/maps/conv_transpose.hpp"
#include "domain/conv.hpp"
#include "domain/plans.hpp"

namespace weft::domain {
namespace {

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

// Everything about maps of one layout that a pass needs.
struct TransposePlan {
  Both k;
  LayoutRef of_y;
  Seeing seeing;  // the window on x, for y
  Seen seen;      // the window on dy, for dx
  TransposePlan(const ConvTranspose2d& conv, const LayoutRef& x)
      : k(of_transpose(conv, x)),
        of_y(like(x, conv.config().out, k.height.n, k.width.n)),
        seeing(x, of_y, k),
        seen(of_y, x, k, Edge::zero()) {}
};

class ConvTransposePasses final : public MapPasses {
 public:
  using MapPasses::MapPasses;

 private:
  Tensors forward_cut(Module& module, const Tensor& x, Frame& frame) const override {
    auto& conv = dynamic_cast<ConvTranspose2d&>(module);
    expect_input(conv, x, conv.config().in);
    const auto plan = plan_of(conv, x.layout());
    const Tensor seeing = fetch(frame, plan->seeing.window, x);
    const Tensor y = make_maps(frame, plan->of_y);
    conv::spread(frame, seeing, conv.weight->weight(), conv.config().groups,
                 plan->seeing.shape(plan->k.shape(conv.config().out), plan->k), y);
    if (conv.bias) conv::add_bias(frame, conv.bias->weight(), y);
    frame.push(module, {x});
    return {y};
  }

  Tensors backward_cut(Module& module, const Tensor& dy, const LayoutRef&, Frame& frame) const override {
    auto& conv = dynamic_cast<ConvTranspose2d&>(module);
    const Tensor x = frame.pop(module)[0];
    const auto plan = plan_of(conv, x.layout());
    expect_gradient(module, dy, plan->of_y->local_shape(), plan->of_y, as_activation(dy));
    Fetched seen = start(frame, plan->seen.window, dy);
    const kernels::UnfoldShape shape = plan->seen.shape(plan->k.shape(conv.config().out));
    const Tensor& w = conv.weight->weight();
    if (conv.bias)
      conv.bias->accumulate(layouts::gradient_of(conv.bias->weight().layout(), plan->of_y, 1),
                            [&](const Tensor& into, bool add) { conv::bias_gradient(frame, dy, into, add); });
    seen.transfer.finish();
    const LayoutRef of_dw = layouts::gradient_of(w.layout(), x.layout(), 1);
    frame.later([&conv, window = seen.window, x, shape, of_dw, dtype = w.dtype()](Frame& f) {
      conv.weight->accumulate(of_dw, [&](const Tensor& into, bool add) {
        conv::weight_gradient(f, window, x, conv.config().groups, shape, dtype, into, add);
      });
    });
    const Tensor dx = make_maps(frame, x.layout());
    conv::correlate(frame, seen.window, w, conv.config().groups, shape, dx);
    return {dx};
  }

  std::shared_ptr<const TransposePlan> plan_of(const ConvTranspose2d& conv, const LayoutRef& x) const {
    return plans_.of(x, [&] { return TransposePlan(conv, x); });
  }
  Plans<TransposePlan> plans_;
};

}  // namespace

SpaceRule conv_transpose_rule(const Module& module, const DeviceMesh& axes) {
  return rule_by<ConvTranspose2d, ConvTransposePasses>(module, axes);
}

}  // namespace weft::domain
