// Domain parallel: a model whose maps (batch, channels, height, width) are larger than one rank, cut in
// space. The split model is the serial model: its outputs and gradients have the bits that one rank gives;
// only gradients of weights differ, by the order in which the ranks' parts are summed. Norms over space are
// an exception: the order of their f64 sums depends on the number of ranks, and a result may round to the
// next f32. One thread per rank; passes of a split model are collective among the ranks of the axes.
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

/// How modules of one kind compute on parts of maps.
using SpaceRuleOf = std::function<SpaceRule(Module& module)>;

struct DomainOptions {
  /// The dimension of maps that each of the axes cuts; if there are fewer axes than entries, the first
  /// entries count.
  std::vector<int> dims{2, 3};
  /// The axes along which ranks have other samples; none where empty. shard_spatial() cuts a plain tensor
  /// along them.
  DeviceMesh data{};
  /// Rules for kinds of layers that have none of their own, or whose own rules are to be replaced.
  std::map<std::type_index, SpaceRuleOf> rules{};
};

/// The result of apply_domain_parallel(), which the functions below need: which axes cut maps, and how. A
/// value; its copies share the plans of exchanges that the functions below have made, and belong to the
/// thread of one rank.
class DomainManager {
 public:
  DomainManager() = default;
  DomainManager(DeviceMesh axes, DomainOptions options);

  explicit operator bool() const noexcept { return static_cast<bool>(axes_); }
  const DeviceMesh& axes() const noexcept { return axes_; }
  const DomainOptions& options() const noexcept { return options_; }
  /// The number of ranks that a map is cut over, and this rank's among them.
  int size() const { return axes_.size(); }
  int rank() const { return axes_.rank(); }
  /// The layout of maps of this shape as a whole, cut in space, and by samples along the axes of the data.
  LayoutRef layout(const Shape& global) const;

  struct Plans;  // private
  const std::shared_ptr<Plans>& plans() const noexcept { return plans_; }

 private:
  DeviceMesh axes_;
  DomainOptions options_;
  std::shared_ptr<Plans> plans_;
};

/// Makes every layer of the tree compute on maps that are cut along `axes`, a sub-mesh of one or two axes:
/// the first cuts the height, the second the width. Before or after parallelize() on other axes; before
/// materialise(). Sets what the layers' passes do and the layouts of parameters that have an element for each
/// pixel (SpaceRule::pixelwise), nothing else: types, paths and parameters stay. A layer's rule is, in this
/// order: that of options.rules for its kind, and no other; its own space_rule(); the passes that weft has
/// for its kind, and no other. If a module with children has the rule any_part, the rule is for the module's
/// own code between the children, which have rules of their own. Layers of weft's have these:
///
///   theirs                  Sequential, SwiGLU, ChannelFeedForward, WeatherStage, TransformerBlock: what they do between their children is local
///   on any part as it is    activations, dropout, 1x1 convolutions, ChannelNorm, RMSNorm, LayerNorm and Linear over the last dimension
///   with a window           Conv2d of any kernel, stride, padding, dilation and padding mode, ConvTranspose2d, PixelShuffle, pooling, resizing, padding
///   with sums over ranks    BatchNorm, GroupNorm; LayerNorm over {channels, height, width} or {height, width}, whose gain and bias are cut as the maps are
///   cut again for a while    WindowAttention: whole windows on each rank, near and far ones
///   in pieces               Attention (causal) and CrossAttention of sequences that are cut: options.dims {1}. Keys and queries go from rank to rank, in the order of one rank
///
/// Other weights are replicated, and their gradients Partial(sum) on the axes: reduce_gradients(),
/// sync_domain_gradients() or a GradientReducer over these axes sums them (and leaves those that are cut). A
/// loss is to be divided by a global number.
///
/// On axes of one rank the rules are checked and nothing is set except the result of get_domain_manager();
/// the model may then be split over other axes. Throws bad_argument, before anything changes, for a layer
/// without a rule, naming it, its kind and the remedy; for one whose rule refuses it; for more axes than
/// options.dims; for a model in which other code has replaced passes already.
DomainManager apply_domain_parallel(Module& model, const DeviceMesh& axes, const DomainOptions& options = {});

/// The manager of a model, an empty one where apply_domain_parallel() was not called for it.
DomainManager get_domain_manager(const Module& model);
/// The model itself: nothing is wrapped around it.
inline Module& get_raw_model(Module& model) noexcept { return model; }

/// This rank's part of maps that are the same on every rank of the axes: plain ones, (batch, …) of this
/// rank's samples, or with a layout. No communication, except for plain tensors along options.data: its ranks
/// exchange how many samples they have, as many on each, or one more on the first ones if the samples do not
/// divide evenly. Throws bad_argument if a dimension that is cut has fewer elements than ranks:
/// `shard_spatial: x (1, 3, 2, 8) has 2 elements in dimension 2 for y=4; each rank needs at least one`, and
/// on all ranks of the data where their samples or sizes do not fit: `shard_spatial: x has 1, 3 samples on
/// the ranks of dp=2; expected 2, 2, …`.
Tensor shard_spatial(const Tensor& x, const DomainManager& manager);
/// The whole maps on every rank of the axes, with their layout on other axes. Collective.
Tensor gather_spatial(const Tensor& y, const DomainManager& manager);

/// Rows and columns around a map.
struct SpatialPadding {
  std::int64_t top = 0, bottom = 0, left = 0, right = 0;
};
/// Takes the padding off again: the maps of `height` x `width` within y, each rank having the rows and
/// columns that it holds of a map of that size. Exact: a redistribution, never an interpolation. The plan is
/// kept for maps of the same layout. Collective. Throws bad_argument if y is not height + top + bottom by
/// width + left + right.
Tensor unpad_shard_interp(const Tensor& y, const SpatialPadding& padding, const DomainManager& manager,
                          std::int64_t height, std::int64_t width);
/// Its adjoint, for a gradient of its result: 0 at the padding. `y`: the layout of its argument. If the
/// manager of the call before is given, the plan that was made there is used again. Throws layout if dy is
/// not laid out as what was given: `unpad_shard_interp_adjoint: dy is (…); expected …`.
Tensor unpad_shard_interp_adjoint(const Tensor& dy, const SpatialPadding& padding, const LayoutRef& y,
                                  const DomainManager& manager = {});

/// reduce_gradients() (weft/dp/reduce_gradients.hpp) of the model's trained parameters over the axes: sums
/// gradients that are Partial there. Collective; throws as that does, and bad_argument for a parameter
/// without gradient.
void sync_domain_gradients(Module& model, const DomainManager& manager);

}  // namespace weft
