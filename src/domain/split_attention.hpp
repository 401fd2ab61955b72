// Attention over a sequence that is sharded over ranks. Each rank attends from its own queries to all keys,
// which arrive in pieces. Collective over the ranks over which the sequence is sharded. Only files of domain
// include it.
//
// The idea is that of H. Liu, M. Zaharia, P. Abbeel, "Ring Attention with Blockwise Transformers", 2023: a
// rank holds its own part and one piece of another part, so that memory is that of T / n positions. But in
// weft, pieces arrive in the order of the sequence on every rank. Pieces begin and end at the borders of the
// blocks into which the kernels divide the sequence on one rank, not at the borders of ranks. So every sum
// has the order, and the bits, of one rank. Forward and dq process keys from the first to the last. dk and dv
// of a rank's own keys process queries from the last to the first. So no rank's sum waits for another's. The
// price is that backward computes the scores twice, 7 products instead of 5.
#pragma once

#include "weft/mesh/window.hpp"
#include "weft/nn/frame.hpp"
#include "weft/nn/kernels.hpp"

namespace weft::domain {

/// Dimension 1 of a tensor (batch, sequence, …) in pieces, each of which goes to the ranks that need it.
struct Pieces {
  std::int64_t first = 0, size = 0;  ///< this rank's own positions
  std::vector<IndexRange> wanted;    ///< the range that this rank needs of each piece, perhaps empty
  std::vector<Window> windows;       ///< which fetch it
};

/// The plan of transfers for queries and keys with these layouts, which are sharded along the same axes. If
/// causal, there are as many queries as keys. It is made once. The thread of one rank uses it in every
/// pass.
struct SplitAttention {
  SplitAttention(const LayoutRef& q, const LayoutRef& k, bool causal);
  Pieces keys, queries;
  bool causal;
};

/// The part that this rank needs of the mask that is added to scores. The global mask is (batch or 1, queries
/// or 1, keys). Without a mask it holds nothing.
struct SplitMask {
  Tensor of_queries;  ///< (batch or 1, own queries or 1, keys)
  Tensor of_keys;     ///< (batch or 1, queries or 1, own keys); for backward alone
  bool of_each_sample = false, of_each_query = false;
};

/// The heads that a rank has.
struct HeadsShape {
  std::int64_t batch, heads, kv_heads, head_dim;
  bool bf16_products = false;  ///< as in kernels::AttentionShape
};

/// Computes out and softmax of this rank's queries over all keys, or if `causal` over the keys up to the
/// query's own position. q, out: (batch, own queries, heads, head_dim), k, v: (batch, own keys, kv_heads,
/// head_dim), softmax: (batch, heads, own queries, kSoftmaxTerms).
void split_attention_forward(Frame& frame, const SplitAttention& split, const HeadsShape& s, const Tensor& q,
                             const Tensor& k, const Tensor& v, const SplitMask& mask, const Tensor& out,
                             const Tensor& softmax);
/// dq, dk, dv of this rank's positions.
void split_attention_backward(Frame& frame, const SplitAttention& split, const HeadsShape& s,
                              const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                              const SplitMask& mask, const Tensor& out, const Tensor& softmax,
                              const Tensor& dq, const Tensor& dk, const Tensor& dv);

}  // namespace weft::domain
