// Attention over a sequence that is cut over ranks: keys and values go round in a ring, and each rank meets every block with its own
// queries. H. Liu, M. Zaharia, P. Abbeel, "Ring Attention with Blockwise Transformers", 2023. Collective among the ranks of the ring. Inside domain.
#pragma once

#include "weft/mesh/window.hpp"
#include "weft/nn/frame.hpp"
#include "weft/nn/kernels.hpp"

namespace weft::domain {

/// The axes that cut dimension 1 of a tensor (batch, sequence, …), and which positions each of their ranks has.
struct Ring {
  explicit Ring(const LayoutRef& sequence);
  DeviceMesh axes;
  std::vector<IndexRange> parts;  ///< of keys
  IndexRange queries;             ///< this rank's; those of its keys unless said otherwise
  int me = 0;
  const IndexRange& own() const { return parts[static_cast<std::size_t>(me)]; }
};

/// What a rank has of the heads.
struct HeadsShape {
  std::int64_t batch, heads, kv_heads, head_dim;
};

/// out and log_sum_exp of this rank's queries over all keys, of those up to its own position where `causal`. q, out: (batch, own queries, heads,
/// head_dim), k, v: (batch, own keys, kv_heads, head_dim), log_sum_exp: (batch, heads, own queries). Blocks are met in the order own, one before, two before, …, and
/// put together in f64; so the last bits depend on how the sequence is cut.
void ring_attention_forward(Frame& frame, const Ring& ring, const HeadsShape& s, bool causal, const Tensor& q,
                            const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& log_sum_exp);
/// dq, dk, dv of this rank's positions. The gradients of a block of keys go round with it.
void ring_attention_backward(Frame& frame, const Ring& ring, const HeadsShape& s, bool causal,
                             const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                             const Tensor& out, const Tensor& log_sum_exp, const Tensor& dq, const Tensor& dk,
                             const Tensor& dv);

}  // namespace weft::domain
