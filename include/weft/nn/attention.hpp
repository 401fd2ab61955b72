// Self-attention over a sequence.
#pragma once

#include <memory>
#include <span>

#include "weft/nn/linear.hpp"
#include "weft/nn/module.hpp"

namespace weft {

struct KeyValues;

/// Rotary position tables: J. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding",
/// 2021. Features i and i + head_dim/2 form a pair, which is rotated by the angle position ·
/// theta^(−2i/head_dim). The tables are computed in f32.
struct RopeTables {
  std::vector<float> cos, sin;  ///< (positions, head_dim/2)
  std::int64_t positions = 0, half = 0;
  static std::shared_ptr<const RopeTables> make(std::int64_t positions, std::int64_t head_dim, double theta);
};

struct AttentionConfig {
  std::int64_t dim = 0, heads = 0, kv_heads = 0, head_dim = 0;
  Init init = Normal{0.02}, out_init = Normal{0.02};
};

/// Causal grouped-query attention (J. Ainslie et al., "GQA", 2023), without biases; x, y: (batch, sequence,
/// dim). softmax(rope(q) rope(k)ᵀ / sqrt(head_dim)) v, where kv head h serves query heads h·n … (h+1)·n − 1,
/// n = heads / kv_heads; then o_proj. q, k, v features are head-major.
///
/// The shapes of the projections' outputs give the number of this rank's heads. Over an axis that splits
/// heads, q_proj, k_proj and v_proj are column layers, with their boundary before this module. o_proj is a
/// row layer, with its boundary after this module.
///
/// If there are fewer key/value heads than ranks, there must be several axes, and the outermost has one rank
/// per key/value head. k_proj and v_proj are split only over the outermost axis, and are whole on the other
/// axes. q_proj and o_proj are split over all axes. The ranks of the other axes share a key/value head. So
/// the gradients of the head, and of the weights of k_proj and v_proj, are Partial(sum) on these axes.
class Attention : public Module {
 public:
  Attention(const AttentionConfig& config, std::shared_ptr<const RopeTables> rope);

  Linear q_proj, k_proj, v_proj, o_proj;

  const AttentionConfig& config() const noexcept { return config_; }
  std::vector<Unit> units() const override {
    return {{"heads", config_.heads}, {"kv heads", config_.kv_heads, &k_proj}};
  }
  void set_rope(std::shared_ptr<const RopeTables> rope) noexcept { rope_ = std::move(rope); }
  const std::shared_ptr<const RopeTables>& rope() const noexcept { return rope_; }
  /// For KeyValueCache: the place where forward passes keep keys and values, so that later passes continue
  /// after the known positions. Null: they are not kept.
  void remember(KeyValues* known) noexcept { known_ = known; }
  const KeyValues* known() const noexcept { return known_; }
  bool has_exact_rule() const override { return typeid(*this) == typeid(Attention); }

 protected:
  OwnPlan class_plan() const override;

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
  AttentionConfig config_;
  std::shared_ptr<const RopeTables> rope_;
  KeyValues* known_ = nullptr;
};

struct CrossAttentionConfig {
  std::int64_t dim = 0, heads = 0, head_dim = 0;
  std::int64_t context_dim = 0;  ///< 0: dim
  std::int64_t kv_heads = 0;     ///< 0: heads
  bool bias = false;             ///< biases in all four projections
  Init init = Normal{0.02}, out_init = Normal{0.02};
};

/// y = o_proj(softmax(q kᵀ / sqrt(head_dim) + mask) v), where q is computed from x, and k and v from another
/// sequence, the context. Inputs: x: (batch, queries, dim), context: (batch, keys, context_dim), and
/// optionally a mask. y has the shape of x. A. Vaswani et al., "Attention Is All You Need", 2017, section
/// 3.2.3. backward gives the gradients of x and context, in this order.
///
/// mask: (batch, queries, keys) f32, where batch may be 1 (for every sample), and queries may be 1 (for every
/// query). It is added to the scores of all heads. −infinity hides a key (see key_padding_mask()). It gets no
/// gradient. A query that sees no key gets o_proj of zeros.
///
/// All inputs may be split in the batch in the same way. A mask of batch 1 is replicated over those axes. If
/// sequences are cut (weft/domain/domain.hpp), the mask may be whole, sharded over queries like x, or sharded
/// over keys like the context. Heads are split as in Attention, by the module's own plan. q_proj, k_proj and
/// v_proj are split by columns, with one boundary before this module for each input (number 0 and 1 of
/// Module::add_before). o_proj is split by rows.
class CrossAttention : public Module {
 public:
  /// Throws bad_argument, naming the value, if a value is below 1, or if kv_heads does not divide heads.
  explicit CrossAttention(const CrossAttentionConfig& config);

  Linear q_proj, k_proj, v_proj, o_proj;

  const CrossAttentionConfig& config() const noexcept { return config_; }
  std::vector<Unit> units() const override {
    return {{"heads", config_.heads}, {"kv heads", config_.kv_heads, &k_proj}};
  }

 protected:
  OwnPlan class_plan() const override;

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
  CrossAttentionConfig config_;
};

/// Makes a mask for contexts of different lengths that were padded to `keys`: (samples, 1, keys) on the
/// device of `compute`. It is 0 for the first lengths[i] keys of sample i and −infinity for the other keys.
/// Throws bad_argument if a length is below 0 or above keys.
Tensor key_padding_mask(Compute& compute, std::span<const std::int64_t> lengths, std::int64_t keys);

}  // namespace weft
