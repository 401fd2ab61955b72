#include "weft/nn/embedding.hpp"

#include <fmt/format.h>

#include "nn/operands.hpp"
#include "weft/base/error.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/layouts.hpp"

namespace weft {

Embedding::Embedding(std::int64_t count, std::int64_t dim, Init init) {
  weight = add("weight", std::make_shared<Parameter>(Shape{count, dim}, init));
}

Tensors Embedding::do_forward(Inputs inputs, Frame& frame) {
  expect_count(inputs, 1, "inputs");
  const Tensor tokens = layouts::beside(*this, "tokens", inputs[0], *weight);
  expect_dtype(layouts::named(*this, "tokens"), tokens, DType::i64);
  const Tensor& w = weight->weight();
  if (w.layout())
    layouts::expect_same(TensorName::of("", weight->path()), w.layout(),
                         replicated_layout(w.layout()->mesh(), w.layout()->global),
                         "every rank looks up any token");
  if (tokens.layout() && tokens.layout()->partial())
    throw Error(ErrorCode::layout,
                fmt::format("{} is {}; token numbers are not sums", layouts::named(*this, "tokens").text(),
                            to_string(*tokens.layout())));
  const std::int64_t count = w.size(0), dim = w.size(1);
  Shape shape = tokens.shape(), global = layouts::global_shape(tokens);
  shape.push_back(dim);
  global.push_back(dim);
  const Tensor y = frame.compute()
                       .make(shape, DType::f32, out_memory())
                       .with_layout(layouts::with_global(tokens.layout(), global));
  const std::int64_t* const ids = tokens.data_ptr<std::int64_t>();
  if (w.dtype() == DType::bf16)
    kernels::embedding_forward(frame.kernels(), ids, w.data_ptr<bf16>(), y.data_ptr<float>(), tokens.count(),
                               count, dim);
  else
    kernels::embedding_forward(frame.kernels(), ids, w.data_ptr<float>(), y.data_ptr<float>(), tokens.count(),
                               count, dim);
  frame.push(*this, {tokens});
  return {y};
}

Tensors Embedding::do_backward(Inputs gradients, Frame& frame) {
  expect_count(gradients, 1, "gradients");
  const Tensor& dy = gradients[0];
  const Tensor tokens = frame.pop(*this)[0];
  const Tensor& w = weight->weight();
  Shape shape = tokens.shape(), global = layouts::global_shape(tokens);
  shape.push_back(w.size(1));
  global.push_back(w.size(1));
  expect_gradient(*this, dy, shape, layouts::with_global(tokens.layout(), global));
  weight->accumulate(layouts::gradient_of(w.layout(), tokens.layout(), -1), [&](const Tensor& dw, bool add) {
    if (!add) kernels::fill(frame.kernels(), dw.data_ptr<float>(), 0.0f, dw.count());
    kernels::embedding_backward(frame.kernels(), tokens.data_ptr<std::int64_t>(), dy.data_ptr<float>(),
                                dw.data_ptr<float>(), tokens.count(), w.size(0), w.size(1));
  });
  return {};
}

}  // namespace weft
