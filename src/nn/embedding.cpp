#include "weft/nn/embedding.hpp"

#include <fmt/format.h>

#include <utility>

#include "base/mutant.hpp"
#include "nn/exact/sums.hpp"
#include "nn/operands.hpp"
#include "weft/base/error.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/layouts.hpp"

namespace weft {

Embedding::Embedding(std::int64_t count, std::int64_t dim, Init init) {
  weight = add("weight", std::make_shared<Parameter>(Shape{count, dim}, init));
}

ShardRule Embedding::shard_rule(Split split) const {
  if (split == Split::column) return Module::shard_rule(split);
  ShardRule rule;
  rule.parameters.push_back({weight.get(), Shard{0}});
  return rule;
}

bool Embedding::set_output_dtype(DType dtype) {
  output_ = checked_output_dtype(*this, dtype);
  return true;
}

namespace {

bool several(const LayoutRef& layout, std::size_t axis) {
  return layout->mesh_shape().size(static_cast<int>(axis)) > 1;
}

// The layout of y, by the table in the header. y: (…, dim). Returns null if the tokens are plain.
LayoutRef looked_up(const Module& module, const Tensor& tokens, const Parameter& weight,
                    const Shape& global) {
  const LayoutRef &of_w = weight.weight().layout(), &in = tokens.layout();
  if (of_w == nullptr || in == nullptr) return layouts::with_global(in, global);
  if (in->partial())
    throw Error(ErrorCode::layout, fmt::format("{} is {}; token numbers are not sums",
                                               layouts::named(module, "tokens").text(), to_string(*in)));
  if (of_w->segments.dim == 0 && !of_w->segments.sizes.empty())
    throw Error(ErrorCode::layout, fmt::format("\"{}\" is {}; expected a vocabulary without segments",
                                               weight.path(), to_string(*of_w)));
  Placements placements = in->placements;
  for (std::size_t axis = 0; axis < placements.size(); ++axis) {
    const Placement& how = of_w->placements[axis];
    const bool fits = is_replicate(how) || (is_shard(how, 0) && is_replicate(placements[axis]));
    // An axis of one rank is not checked. If such an axis may stand in a list of axes with others, y is equal
    // on all of them.
    if (!fits && !several(of_w, axis)) continue;
    if (!is_replicate(how) && !is_shard(how, 0))
      throw Error(
          ErrorCode::layout,
          fmt::format("\"{}\" is {} on {}; expected Replicate, or Shard(0), the vocabulary", weight.path(),
                      to_string(how), layouts::axis_name(*of_w, static_cast<int>(axis))));
    if (!fits)
      throw Error(
          ErrorCode::layout,
          fmt::format("{} is {} on {}; expected Replicate, since the weight is {}: each rank looks up its "
                      "rows for all tokens",
                      layouts::named(module, "tokens").text(), to_string(placements[axis]),
                      layouts::axis_name(*of_w, static_cast<int>(axis)), to_string(how)));
    if (!is_replicate(how)) placements[axis] = Partial{};
  }
  return in->with_global(global)->with(std::move(placements));
}

// The rows of the global table that this rank holds.
kernels::VocabPart rows_of(const Tensor& w) {
  if (w.layout() == nullptr) return w.size(0);
  return {WEFT_MUTANT("embedding_from_row_0") ? 0 : w.layout()->parts().front().offset[0], w.size(0),
          w.layout()->global[0]};
}

Shape with_dim(Shape shape, std::int64_t dim) {
  shape.push_back(dim);
  return shape;
}

}  // namespace

Tensors Embedding::do_forward(Inputs inputs, Frame& frame) {
  expect_count(inputs, 1, "inputs");
  const Tensor tokens = layouts::beside(*this, "tokens", inputs[0], *weight);
  expect_dtype(layouts::named(*this, "tokens"), tokens, DType::i64);
  const Tensor& w = weight->weight();
  const std::int64_t dim = w.size(1);
  const bool narrow = output_ == DType::bf16;
  const Tensor y =
      frame.compute()
          .make(with_dim(tokens.shape(), dim), DType::f32, narrow ? Memory::local : out_memory())
          .with_layout(looked_up(*this, tokens, *weight, with_dim(layouts::global_shape(tokens), dim)));
  const kernels::VocabPart vocab = rows_of(w);
  const std::int64_t* const ids = tokens.data_ptr<std::int64_t>();
  if (w.dtype() == DType::bf16)
    kernels::embedding_forward(frame.kernels(), ids, w.data_ptr<bf16>(), y.data_ptr<float>(), tokens.count(),
                               vocab, dim);
  else
    kernels::embedding_forward(frame.kernels(), ids, w.data_ptr<float>(), y.data_ptr<float>(), tokens.count(),
                               vocab, dim);
  frame.push(*this, {tokens});
  return {narrow ? rounded_to_bf16(frame, y, out_memory()) : y};
}

Tensors Embedding::do_backward(Inputs gradients, Frame& frame) {
  expect_count(gradients, 1, "gradients");
  const Tensor& dy = gradients[0];
  const Tensor tokens = frame.pop(*this)[0];
  const Tensor& w = weight->weight();
  const std::int64_t dim = w.size(1);
  const LayoutRef of_y = looked_up(*this, tokens, *weight, with_dim(layouts::global_shape(tokens), dim));
  expect_gradient(*this, dy, with_dim(tokens.shape(), dim), layouts::gradient_of_output(of_y), output_);
  const LayoutRef of_dw = layouts::gradient_of(w.layout(), tokens.layout(), -1);
  frame.later([this, w = weight, of_dw, tokens, dy, dim, exact = frame.exact()](Frame& f) {
    w->accumulate(of_dw, [&](const Tensor& dw, bool add) {
      const Tensor wide = widened(f, dy);
      if (exact)
        return exact::over_samples(f, *this, tokens, 0, dw, add, [&](Chunk part, const Tensor& sum) {
          kernels::fill(f.kernels(), sum.data_ptr<float>(), 0.0f, sum.count());
          kernels::embedding_backward(f.kernels(), tokens.data_ptr<std::int64_t>() + part.offset,
                                      wide.data_ptr<float>() + part.offset * dim, sum.data_ptr<float>(),
                                      part.size, rows_of(w->weight()), dim);
        });
      if (!add) kernels::fill(f.kernels(), dw.data_ptr<float>(), 0.0f, dw.count());
      kernels::embedding_backward(f.kernels(), tokens.data_ptr<std::int64_t>(), wide.data_ptr<float>(),
                                  dw.data_ptr<float>(), tokens.count(), rows_of(w->weight()), dim);
    });
  });
  return {};
}

}  // namespace weft
