// The common part of rules for maps that are sharded in space: which parts of which dimension each rank has,
// the windows that a local operation needs, and tensors of one rank in the form in which layers see them.
// Only files of domain include it.
#pragma once

#include <functional>
#include <vector>

#include "nn/maps/geometry.hpp"
#include "weft/domain/domain.hpp"
#include "weft/mesh/window.hpp"
#include "weft/nn/frame.hpp"
#include "weft/nn/module.hpp"

namespace weft::domain {

inline constexpr int kHeight = 2, kWidth = 3, kMapDims = 4;

/// The rule by which one dimension of maps is sharded: one range for each part, or one part if it is not
/// sharded.
struct Parts {
  int dim;
  std::int64_t size;
  std::vector<IndexRange> ranges;
  int mine;
  const IndexRange& own() const { return ranges[static_cast<std::size_t>(mine)]; }
};
Parts parts_of(const LayoutRef& layout, int dim);

/// Returns whether any axis of several ranks shards height or width.
bool cut_in_space(const LayoutRef& layout);

/// Calls wanted(range) for each part's range. wanted() returns what the part needs of another map, which has
/// equally many parts.
WindowDim window_for(const Parts& parts, const std::function<IndexRange(const IndexRange&)>& wanted,
                     const Edge& edge = {});

/// Like window_for(), for any indices in ascending order. It also returns the place of each index in the
/// window, by index.
IndexRanges as_ranges(const std::vector<std::int64_t>& ascending);

Edge edge_of(kernels::Padding padding);

/// The state that a DomainManager keeps for the functions in spatial.cpp.
std::shared_ptr<DomainManager::Plans> make_plans();

/// The layout of x's maps, with other channels, height and width.
LayoutRef like(const LayoutRef& x, std::int64_t channels, std::int64_t height, std::int64_t width);

/// Turns a tensor that only this rank has, (batch, …), into one whose samples are sharded along every axis
/// that shards x's samples, height or width. So layers accept it as it is, and gradients of weights are
/// Partial on these axes.
Tensor as_samples(const Tensor& local, const LayoutRef& x);

/// The passes of a layer with one map x, if x is sharded in space. A replicated map goes to the layer's own
/// code. A plain x is an error, because weft cannot know whether it is whole or a part. x and dy may be bf16:
/// windows on them are bf16, and results in f32 are rounded to their dtype.
class MapPasses : public Passes {
 public:
  explicit MapPasses(const DeviceMesh& axes) : axes_(axes) {}
  Tensors forward(Module& module, Inputs inputs, Frame& frame) const final;
  Tensors backward(Module& module, Inputs gradients, Frame& frame) const final;

 private:
  virtual Tensors forward_cut(Module& module, const Tensor& x, Frame& frame) const = 0;
  /// `of_x`: the layout that x had.
  virtual Tensors backward_cut(Module& module, const Tensor& dy, const LayoutRef& of_x,
                               Frame& frame) const = 0;
  DeviceMesh axes_;
};

/// a / b rounded up and down, b > 0.
constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return a >= 0 ? (a + b - 1) / b : -(-a / b);
}
constexpr std::int64_t floor_div(std::int64_t a, std::int64_t b) {
  return a >= 0 ? a / b : -((-a + b - 1) / b);
}

/// A kernel that slides over a dimension of n elements and has `out` outputs there.
struct Sliding {
  std::int64_t kernel, stride, padding, dilation, n, out;
  std::int64_t span() const { return dilation * (kernel - 1) + 1; }
  /// The inputs that outputs [o.lo, o.hi) see; some may lie beyond the ends.
  IndexRange seen(const IndexRange& o) const {
    if (o.size() <= 0) return {};
    return {o.lo * stride - padding, (o.hi - 1) * stride - padding + span()};
  }
  /// The outputs that see any of the inputs [i.lo, i.hi), all of them between 0 and `out`.
  IndexRange seeing(const IndexRange& i) const {
    if (i.size() <= 0) return {};
    const std::int64_t lo = std::max<std::int64_t>(0, ceil_div(i.lo + padding - (span() - 1), stride)),
                       hi = std::min(out, floor_div(i.hi - 1 + padding, stride) + 1);
    return lo < hi ? IndexRange{lo, hi} : IndexRange{};
  }
};

}  // namespace weft::domain
