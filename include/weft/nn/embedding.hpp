// A table of rows that are looked up by number.
#pragma once

#include "weft/nn/module.hpp"

namespace weft {

/// y[…] = weight[tokens[…]]; tokens: i64 (…), weight: (count, dim), y: (…, dim). The weight's placement on
/// each axis decides the layouts:
///
/// - a Replicate weight with Replicate tokens: y and its gradient are Replicate
/// - a Replicate weight with tokens that are Shard(d): y and its gradient are Shard(d)
/// - a Shard(0) weight with Replicate tokens: y is Partial(sum) and its gradient Replicate. Each rank looks
/// up the rows that it holds. For other rows it gives 0.
///
/// All other cases are layout errors. If a token is outside [0, count), every rank that has the token throws
/// bad_argument that names it. Tokens have no gradient: backward gives an empty list.
class Embedding : public Module {
 public:
  Embedding(std::int64_t count, std::int64_t dim, Init init = Normal{0.02});

  ParameterRef weight;

  /// The weight may be split by rows, over the vocabulary, in parts that may differ in size or be empty. It
  /// is not split by columns.
  ShardRule shard_rule(Split split) const override;
  bool has_exact_rule() const override { return typeid(*this) == typeid(Embedding); }
  /// y is f32 by default, whatever dtype the weight has.
  bool set_output_dtype(DType dtype) override;

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
  DType output_ = DType::f32;
};

}  // namespace weft
