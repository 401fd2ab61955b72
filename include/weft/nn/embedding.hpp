// A table of rows, found by number.
#pragma once

#include "weft/nn/module.hpp"

namespace weft {

/// y[…] = weight[tokens[…]]; tokens: i64 (…), weight: (count, dim), y: (…, dim). By the weight's placement on
/// each axis:
///
///   weight      tokens       y             its gradient
///   Replicate   Replicate    Replicate     Replicate
///   Replicate   Shard(d)     Shard(d)      Partial(sum)
///   Shard(0)    Replicate    Partial(sum)  Shard(0): each rank looks up the rows that it holds, the others give 0
///
/// Everything else is a layout error. A token outside [0, count) is bad_argument that names it, on every rank
/// that has the token. Tokens have no gradient: backward gives an empty list.
class Embedding : public Module {
 public:
  Embedding(std::int64_t count, std::int64_t dim, Init init = Normal{0.02});

  ParameterRef weight;

  /// By rows: over the vocabulary, in parts that may differ in size or be empty. Not by columns.
  ShardRule shard_rule(Split split) const override;

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
};

}  // namespace weft
