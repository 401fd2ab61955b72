// Attention's backward in exact mode. Only files of nn include it.
#pragma once

#include "weft/nn/frame.hpp"
#include "weft/nn/kernels.hpp"

namespace weft::exact {

/// The operands of a backward pass, and the place of dq.
struct HeadsPass {
  const Tensor &dout, &q, &k, &v, &out, &softmax, &dq;
};

/// kernels::attention_backward, in which the gradient of a key/value head is a balanced tree over its query
/// heads, also over the query heads of other ranks. Then dk and dv, given with their memory and layouts, are
/// summed. Scores and their gradients stay inside the documents of the pass. `path`: of the module.
void attention_backward(Frame& frame, const std::string& path, const HeadsPass& pass,
                        const kernels::AttentionShape& s, Tensor& dk, Tensor& dv);

}  // namespace weft::exact
