// Attention among the pixels of each window of a map, as weather models use it.
#pragma once

#include <cstdint>
#include <vector>

#include "weft/nn/dropout.hpp"
#include "weft/nn/linear.hpp"
#include "weft/nn/module.hpp"
#include "weft/nn/norm.hpp"

namespace weft {

/// A small network that computes a bias for each offset between two pixels of a window (the dynamic position
/// bias of W. Wang et al., "CrossFormer", 2021). `layers` is: Linear(2, d), LayerNorm, ReLU; two times
/// Linear(d, d), LayerNorm, ReLU; and Linear(d, 1), with d = dim / 4. x: (copies, offsets, 2) from
/// coordinates(), y: (copies, offsets, 1).
///
/// The bias of query pixel (y, x) and key pixel (y', x') of a window of w x w is row (dy + w - 1) (2w - 1) +
/// dx + w - 1 of the (2w + 1)^2 offsets (i, j), -w <= i, j <= w, with dy = y - y', dx = x - x'. This is not
/// the row of offset (dy, dx), because a line of the table has 2w + 1 offsets and not 2w - 1. weft uses it
/// because the models whose weights this layer reads (miles-credit) use it.
class PositionBias : public Module {
 public:
  PositionBias(std::int64_t dim, std::int64_t window, Init init = Normal{0.02});

  Sequential layers;

  /// The offsets, (copies, (2w + 1)^2, 2), for ranks whose scores have the layout `scores` (null: plain).
  /// There is one copy for each rank along the axes that cut the scores. Each rank has its own copy,
  /// Shard(0). So the gradients of the weights are Partial(sum) on these axes. Each rank has the part of its
  /// own heads and samples, and reduce_gradients sums them.
  /// In exact mode there are 8 copies, one for each block of samples, which the axes that cut samples share.
  Tensor coordinates(Frame& frame, const LayoutRef& scores) const;
  /// For each (query, key), the row of the table that is its bias: (pixels, pixels), i64.
  Tensor rows(Frame& frame) const;
  bool has_exact_rule() const override { return typeid(*this) == typeid(PositionBias); }
  std::int64_t offsets() const noexcept { return (2 * window_ + 1) * (2 * window_ + 1); }

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
  Tensor exact_copies(Frame& frame, const Tensor& one, const LayoutRef& scores) const;
  std::int64_t window_;
  std::vector<std::int64_t> rows_;
};

/// The pixels that make up a window. neighbours ("short" distance): a square of adjacent pixels. strided
/// ("long" distance): the same number of pixels, spread over the whole map. In a map of height H, window r
/// has the rows l H/window + r, l = 0 … window - 1.
enum class Windows : unsigned char { neighbours, strided };

struct WindowAttentionConfig {
  std::int64_t dim = 0, heads = 0, head_dim = 0;
  std::int64_t window = 0;  ///< the height and width of a window
  Windows windows = Windows::neighbours;
  double norm_eps = 1e-5;
  Init init = Normal{0.02}, out_init = Normal{0.02};
  double dropout = 0;  ///< dropout of the weights of attention, after the softmax
};

/// y = to_out(softmax(q kᵀ / sqrt(head_dim) + bias) v), with q, k, v = to_q, to_k, to_v of norm(x), among the
/// pixels of each window; all heads share one bias. x, y: (batch, dim, height, width); height and width are
/// multiples of the window. The module does not add the residual. heads · head_dim may be less than dim. Only
/// to_out has a bias. Names are those of miles-credit's WXFormer.
///
/// x may be split in the batch. The sizes of the outputs of to_q, to_k and to_v determine the number of this
/// rank's heads. Over an axis that splits heads these three layers are column layers, and a boundary after
/// `norm` sums their dx, once for all three. to_out is a row layer. The module's own plan says this. Norm and
/// position bias are replicated. The gradients of the position bias are Partial(sum), because each rank has
/// its own heads.
class WindowAttention : public Module {
 public:
  /// Throws bad_argument for sizes below 1.
  explicit WindowAttention(const WindowAttentionConfig& config);

  ChannelNorm norm;
  PositionBias dpb;
  Linear to_q, to_k, to_v, to_out;
  /// With dropout the module keeps the weights of attention for backward: pixels² numbers for each head of
  /// each window.
  Dropout dropout;

  const WindowAttentionConfig& config() const noexcept { return config_; }
  /// Heads that are split have none: the gradient of their common bias is a sum over all of them.
  bool has_exact_rule() const override;
  std::vector<Unit> units() const override { return {{"heads", config_.heads}}; }

  /// The passes behind `norm` for a part of the windows of larger maps, for code that cuts maps in space.
  /// normal: norm(x), (batch, dim, height, width) of whole windows. Its layout says how samples and weights
  /// are cut; in exact mode also the rows of windows, as rows of maps. `windows`: the layout of maps with one
  /// pixel per window. normal has this rank's windows. Samples beyond the batch of `windows` are padding. So
  /// the dropped weights do not depend on the cuts of the maps. backward_part returns the gradient of normal.
  Tensors forward_part(const Tensor& normal, Frame& frame, const LayoutRef& windows) {
    return forward_windows(normal, frame, windows);
  }
  Tensor backward_part(const Tensor& dy, Frame& frame, const LayoutRef& windows) {
    return backward_windows(dy, frame, windows);
  }

 protected:
  OwnPlan class_plan() const override;

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
  Tensors forward_windows(const Tensor& normal, Frame& frame, const LayoutRef& windows);
  Tensor backward_windows(const Tensor& dy, Frame& frame, const LayoutRef& windows);
  bool drops(const Frame& frame) const noexcept { return frame.pass().training && dropout.p() > 0; }
  WindowAttentionConfig config_;
};

}  // namespace weft
