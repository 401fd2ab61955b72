// Domain parallelism. The maps of a model (batch, channels, height, width) are too large for one rank and are
// cut in space. The split model computes the same as the serial model. Its outputs and gradients have the
// same bits as on one rank. There are two exceptions. Gradients of weights differ by the order in which the
// ranks' parts are summed. In norms over space the order of the f64 sums depends on the number of ranks. So a
// result may be rounded to the next f32. One thread per rank uses it. Passes of a split model are collective
// among the ranks of the axes.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <typeindex>
#include <vector>

#include "weft/mesh/mesh.hpp"
#include "weft/nn/module.hpp"

namespace weft {

/// A function that returns the rule by which modules of one kind compute on parts of maps.
using SpaceRuleOf = std::function<SpaceRule(Module& module)>;

struct DomainOptions {
  /// dims[i] is the dimension of maps that axis i cuts. Entries beyond the number of axes do not count.
  std::vector<int> dims{2, 3};
  /// The axes along which ranks have different samples. An empty mesh means none. shard_spatial() treats the
  /// batch of a plain tensor as cut along these axes.
  DeviceMesh data{};
  /// Rules for kinds of layers that have no rule, or whose own rules are to be replaced.
  std::map<std::type_index, SpaceRuleOf> rules{};
};

/// The result of apply_domain_parallel(): the axes that cut maps, and how they cut them. The functions below
/// need it. A value. Copies share the plans of exchanges that the functions below have made, so all copies
/// belong to the thread of one rank.
class DomainManager {
 public:
  DomainManager() = default;
  DomainManager(DeviceMesh axes, DomainOptions options);

  explicit operator bool() const noexcept { return static_cast<bool>(axes_); }
  const DeviceMesh& axes() const noexcept { return axes_; }
  const DomainOptions& options() const noexcept { return options_; }
  /// The number of ranks over which a map is cut, and this rank's number among these ranks.
  int size() const { return axes_.size(); }
  int rank() const { return axes_.rank(); }
  /// The layout of maps with this global shape: cut in space, and by samples along the data axes.
  LayoutRef layout(const Shape& global) const;

  struct Plans;  // private
  const std::shared_ptr<Plans>& plans() const noexcept { return plans_; }

 private:
  DeviceMesh axes_;
  DomainOptions options_;
  std::shared_ptr<Plans> plans_;
};

/// Makes every layer of the tree compute on maps that are cut along `axes`, a sub-mesh of one or two axes.
/// The first axis cuts the height, and the second axis cuts the width. Call it before materialise(), and
/// before or after parallelize() on other axes. It changes only two things: the layers' passes, and the
/// layouts of parameters with one element per pixel (SpaceRule::pixelwise). Types, paths and all other
/// parameters stay the same. A layer's rule is the first existing one of these: the rule of options.rules for
/// exactly the layer's kind; the layer's own space_rule(); the passes that weft has for exactly the layer's
/// kind. If a module with children has the rule any_part, the rule is for the module's own code between the
/// children. Each child has its own rule. The layers of weft have these rules:
///
///   theirs                  Sequential, SwiGLU, ChannelFeedForward, WeatherStage, TransformerBlock: what they do between their children is local
///   on any part as it is    activations, dropout, 1x1 convolutions, ChannelNorm, RMSNorm, LayerNorm and Linear over the last dimension
///   with a window           Conv2d of any kernel, stride, padding, dilation and padding mode, ConvTranspose2d, PixelShuffle, pooling, resizing, padding
///   with sums over ranks    BatchNorm, GroupNorm; LayerNorm over {channels, height, width} or {height, width}, whose gain and bias are cut as the maps are
///   cut again for a while    WindowAttention: whole windows on each rank, near and far ones
///   in pieces               Attention (causal) and CrossAttention of sequences that are cut: options.dims {1}. Keys and queries go from rank to rank, in the order of one rank
///
/// Other weights are replicated, and their gradients are Partial(sum) on the axes. reduce_gradients(),
/// sync_domain_gradients() or a GradientReducer over these axes sums them (and does not change the gradients
/// of cut weights). Divide a loss by a global count.
///
/// On axes of one rank it only checks the rules and sets the result of get_domain_manager(). The model may
/// then be split over other axes. Throws bad_argument, before anything changes, if a layer has no rule (the
/// text names the layer, its kind and the remedy), if a layer's rule refuses it, if there are more axes than
/// options.dims, or if other code has already replaced passes in the model.
DomainManager apply_domain_parallel(Module& model, const DeviceMesh& axes, const DomainOptions& options = {});

/// The manager of a model. Empty if apply_domain_parallel() was not called for it.
DomainManager get_domain_manager(const Module& model);

/// Returns this rank's part of maps that are the same on every rank of the axes. The maps are a plain tensor,
/// (batch, …) of this rank's samples, or a tensor with a layout. No communication, with one exception: for a
/// plain tensor the ranks of options.data exchange their numbers of samples. These must be equal, or one more
/// on the first ranks if the samples do not divide evenly. Throws bad_argument if a dimension that is cut has
/// fewer elements than ranks: `shard_spatial: x (1, 3, 2, 8) has 2 elements in dimension 2 for y=4; each rank
/// needs at least one`, and on all ranks of the data axes if their numbers of samples or their sizes do not
/// fit: `shard_spatial: x has 1, 3 samples on the ranks of dp=2; expected 2, 2, …`.
Tensor shard_spatial(const Tensor& x, const DomainManager& manager);
/// Gathers the global maps on every rank of the axes. The maps' layout on other axes stays. Collective.
Tensor gather_spatial(const Tensor& y, const DomainManager& manager);

/// The numbers of rows and columns of padding around a map.
struct SpatialPadding {
  std::int64_t top = 0, bottom = 0, left = 0, right = 0;
};
/// Removes the padding: returns the maps of `height` x `width` inside y. Each rank gets the rows and columns
/// that it holds of a map of that size. It redistributes and never interpolates, so the result is exact. The
/// manager keeps the plan for maps of the same layout. Collective. Throws bad_argument if y is not height +
/// top + bottom by width + left + right.
Tensor crop_padding(const Tensor& y, const SpatialPadding& padding, const DomainManager& manager,
                    std::int64_t height, std::int64_t width);
/// The adjoint of crop_padding(). It takes a gradient of its result, and gives a gradient that is 0 at the
/// padding. `y`: the layout of the argument y of crop_padding(). Pass the same manager to use the plan of
/// crop_padding() again. Throws layout if dy does not have the layout of the result:
/// `crop_padding_adjoint: dy is (…); expected …`.
Tensor crop_padding_adjoint(const Tensor& dy, const SpatialPadding& padding, const LayoutRef& y,
                            const DomainManager& manager = {});
/// crop_padding() and its adjoint, under the names that they have in the domain-parallel code of weather
/// models (NCAR/miles-credit).
inline Tensor unpad_shard_interp(const Tensor& y, const SpatialPadding& padding, const DomainManager& manager,
                                 std::int64_t height, std::int64_t width) {
  return crop_padding(y, padding, manager, height, width);
}
inline Tensor unpad_shard_interp_adjoint(const Tensor& dy, const SpatialPadding& padding, const LayoutRef& y,
                                         const DomainManager& manager = {}) {
  return crop_padding_adjoint(dy, padding, y, manager);
}

/// Calls reduce_gradients() (weft/dp/reduce_gradients.hpp) for the model's trained parameters over the axes.
/// It sums gradients that are Partial on these axes. Collective. Throws the errors of reduce_gradients(), and
/// bad_argument if a parameter has no gradient.
void sync_domain_gradients(Module& model, const DomainManager& manager);

}  // namespace weft
