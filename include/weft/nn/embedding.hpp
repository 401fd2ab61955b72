// A table that is looked up by number.
#pragma once

#include "weft/nn/module.hpp"

namespace weft {

/// y[…] = weight[tokens[…]]; tokens: i64 (…), weight: (count, dim), y: (…, dim). The weight is whole on every
/// rank; its gradient is Partial(sum) on axes that split the tokens. A token outside [0, count) is
/// bad_argument that names it. Tokens have no gradient: backward gives an empty list.
class Embedding : public Module {
 public:
  Embedding(std::int64_t count, std::int64_t dim, Init init = Normal{0.02});

  ParameterRef weight;

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
};

}  // namespace weft
