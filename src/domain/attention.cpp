// Window attention of maps that are sharded in space. A window is a square of neighbouring pixels, or pixels
// spread over the whole map. In both cases each window is complete on one rank while it is computed. The map
// is sharded again, at borders of windows, and afterwards as it was. For spread-out (strided) windows this
// becomes an all-to-all.
#include "domain/plans.hpp"
#include "domain/rules.hpp"
#include "weft/host/copy.hpp"
#include "weft/nn/exact.hpp"
#include "weft/nn/window_attention.hpp"

namespace weft::domain {
namespace {

// The rows, or columns, that each part has while windows are complete. Each part has its share of the H / w
// rows of windows. The rows of a near window are neighbours. For far (strided) windows, row l H/w + r of the
// map is row l of the windows r.
std::vector<IndexRanges> whole_windows(std::int64_t size, std::int64_t window, Windows kind,
                                       std::size_t parts) {
  const std::int64_t count = size / window;
  std::vector<IndexRanges> wanted;
  for (std::size_t p = 0; p < parts; ++p) {
    const Chunk share = chunk_of(count, static_cast<int>(parts), static_cast<int>(p));
    IndexRanges ranges;
    if (share.size > 0 && kind == Windows::neighbours)
      ranges.push_back({share.offset * window, (share.offset + share.size) * window});
    if (share.size > 0 && kind == Windows::strided)
      for (std::int64_t l = 0; l < window; ++l)
        ranges.push_back({l * count + share.offset, l * count + share.offset + share.size});
    wanted.push_back(std::move(ranges));
  }
  return wanted;
}

// Divides maps into windows, and joins them again.
class Recut {
 public:
  Recut(const LayoutRef& maps, const WindowAttentionConfig& config)
      : windows(like(maps, config.dim, maps->global[kHeight] / config.window,
                     maps->global[kWidth] / config.window)),
        layout_(maps) {
    const Partition now(maps);
    std::vector<WindowDim> wanted, back;
    std::vector<PartitionDim> parts;
    for (const int dim : {kHeight, kWidth}) {
      const PartitionDim of = now.dim(dim);
      if (of.parts.size() == 1) continue;
      const std::vector<IndexRanges> cut_at =
          whole_windows(maps->global[dim], config.window, config.windows, of.parts.size());
      wanted.push_back({dim, cut_at, {}, {}});
      back.push_back({dim, of.parts, {}, {}});
      parts.push_back({dim, of.axes, cut_at});
    }
    there_ = std::make_unique<Window>(now, wanted);
    back_ = std::make_unique<Window>(Partition(maps->mesh(), maps->global, parts), back);
  }
  Tensor there(Frame& frame, const Tensor& maps) const {
    const Tensor moved = run(frame, *there_, maps, there_->window_shape(maps.shape()));
    // In exact mode parts are equal, and rows of windows are cut as the rows of maps are.
    return frame.exact() ? moved.with_layout(layout_) : as_samples(moved, layout_);
  }
  // `there` may be a contribution to a sum over ranks that split the heads.
  Tensor back(Frame& frame, const Tensor& there) const {
    return run(frame, *back_, there, layout_->local_shape())
        .with_layout(layouts::partial_as(layout_, there.layout()));
  }

  /// The layout of maps with one pixel for each window, sharded like the windows.
  const LayoutRef windows;

 private:
  static Tensor run(Frame& frame, const Window& window, const Tensor& in, const Shape& shape) {
    const Tensor out = frame.compute().make(shape, in.dtype(), Memory::shared);
    window.start(in, out, frame.compute().stream()).finish();
    return out;
  }
  LayoutRef layout_;
  std::unique_ptr<Window> there_, back_;
};

class WindowAttentionPasses final : public MapPasses {
 public:
  explicit WindowAttentionPasses(const DeviceMesh& axes)
      : MapPasses(axes), axes_(axes.shape().axis_count()) {}
  std::string exact_refusal() const override {
    return axes_ == 1 ? ""
                      : "is cut in rows and in columns, which has no rule for exact mode; expected one axis";
  }

 private:
  Tensors forward_cut(Module& module, const Tensor& x, Frame& frame) const override {
    auto& attention = dynamic_cast<WindowAttention&>(module);
    const auto& config = attention.config();
    expect(module, x, config);
    if (frame.exact()) expect_exact_rows(module, x, config);
    const auto recut = plans_.of(x.layout(), [&] { return Recut(x.layout(), config); });
    // In exact mode the norm has the rows of maps, and its sums are over blocks of them.
    const Tensor there = frame.exact() ? recut->there(frame, attention.norm.forward(x, frame)[0])
                                       : attention.norm.forward(recut->there(frame, x), frame)[0];
    return {recut->back(frame, attention.forward_part(there, frame, recut->windows)[0])};
  }
  Tensors backward_cut(Module& module, const Tensor& dy, const LayoutRef& of_x, Frame& frame) const override {
    auto& attention = dynamic_cast<WindowAttention&>(module);
    const auto& config = attention.config();
    expect_gradient(module, dy, of_x->local_shape(), of_x, as_activation(dy));
    const auto recut = plans_.of(of_x, [&] { return Recut(of_x, config); });
    const Tensor dthere = attention.backward_part(recut->there(frame, dy), frame, recut->windows);
    if (frame.exact()) return attention.norm.backward(recut->back(frame, dthere), frame);
    return {recut->back(frame, attention.norm.backward(dthere, frame)[0])};
  }

  static void expect(const Module& module, const Tensor& t, const WindowAttentionConfig& config) {
    maps::expect_map(module, t);
    const TensorName what = layouts::named(module, "x");
    layouts::expect_whole_dim(what, t, "window attention", 1);
    const Shape& whole = t.layout()->global;
    if (whole[1] != config.dim || whole[kHeight] % config.window != 0 || whole[kWidth] % config.window != 0)
      throw Error(
          ErrorCode::bad_argument,
          fmt::format(
              "{} is {}; expected (batch, {}, height, width), height and width in whole windows of {}x{}",
              what.text(), to_string(whole), config.dim, config.window, config.window));
  }
  // Throws unless ranks cut the rows alone, and have equally many rows of windows.
  static void expect_exact_rows(const Module& module, const Tensor& x, const WindowAttentionConfig& config) {
    const TensorName what = layouts::named(module, "x in exact mode");
    layouts::expect_whole_dim(what, x, "window attention", kWidth);
    const Parts rows = parts_of(x.layout(), kHeight);
    expect_exact_parts(fmt::format("{}: rows of windows of {}", what.text(), config.window),
                       rows.size / config.window, static_cast<int>(rows.ranges.size()));
  }
  int axes_;
  Plans<Recut> plans_;
};

}  // namespace

SpaceRule window_attention_rule(const Module& module, const DeviceMesh& axes) {
  return rule_by<WindowAttention, WindowAttentionPasses>(module, axes);
}

}  // namespace weft::domain
