#include "weft/models/transformer.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "weft/base/error.hpp"
#include "weft/nn/loss.hpp"

namespace weft::transformer_test {
namespace {

using ::testing::HasSubstr;

std::string refusal(const TransformerConfig& config) {
  try {
    Transformer model(config);
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::bad_argument);
    return e.what();
  }
  ADD_FAILURE() << "no error";
  return {};
}

TEST(Transformer, SaysWhichSizeDoesNotFit) {
  EXPECT_EQ(refusal({.dim = 30, .heads = 4}), "transformer: dim 30 does not divide into heads 4");
  EXPECT_EQ(refusal({.dim = 32, .heads = 4, .kv_heads = 3}),
            "transformer: heads 4 do not divide into kv_heads 3");
  EXPECT_EQ(refusal({.dim = 12, .heads = 4, .kv_heads = 4}),
            "transformer: head_dim = dim 12 / heads 4 = 3 is odd; rotary positions need pairs");
  EXPECT_EQ(refusal({.dim = 30, .heads = 4, .kv_heads = 4, .head_size = 7}),
            "transformer: head_dim 7 is odd; rotary positions need pairs");
  EXPECT_EQ(refusal({.head_size = -1}), "transformer: head_size is -1; expected 0 (dim / heads) or more");
  EXPECT_EQ(refusal({.vocab = 0}), "transformer: vocab is 0; expected at least 1");
  EXPECT_EQ(refusal({.layers = 10001}), "transformer: layers is 10001; expected at most 10000");
  EXPECT_EQ(refusal({.vocab = std::int64_t{1} << 31}),
            "transformer: vocab is 2147483648; expected at most 1073741824");
}

TEST(Transformer, HeadsMayBeOfAnotherSizeThanTheirPartOfTheModel) {
  Transformer model(
      {.dim = 6, .layers = 1, .heads = 4, .kv_heads = 2, .ffn_hidden = 8, .vocab = 16, .head_size = 4});
  EXPECT_EQ(model.parameter("layers.0.attention.q_proj.weight")->global_shape(), (Shape{16, 6}));
  EXPECT_EQ(model.parameter("layers.0.attention.o_proj.weight")->global_shape(), (Shape{6, 16}));
}

TEST(Transformer, TiedWeightsAreOne) {
  Transformer tied(
      {.dim = 8, .layers = 1, .heads = 2, .kv_heads = 1, .ffn_hidden = 8, .vocab = 16, .tied = true});
  EXPECT_EQ(tied.parameter("output_head.proj.weight"), tied.parameter("token_embedding.embedding.weight"));
  EXPECT_EQ(tied.parameter("output_head.proj.weight")->path(), "token_embedding.embedding.weight");
  for (const Parameter* p : tied.parameters())
    EXPECT_THAT(p->path(), ::testing::Not(HasSubstr("output_head")));
}

TEST(Transformer, EveryParameterIsReachedByItsPath) {
  Transformer model({.dim = 8, .layers = 2, .heads = 2, .kv_heads = 1, .ffn_hidden = 8, .vocab = 16});
  EXPECT_EQ(model.parameters().size(), 2u * 9 + 3);
  for (Parameter* p : model.parameters()) EXPECT_EQ(model.parameter(p->path()).get(), p);
  EXPECT_EQ(model.get("layers.1.mlp").path(), "layers.1.mlp");
  EXPECT_EQ(&model.block(1).mlp, &model.get("layers.1.mlp"));
}

// Two micro-batches with one global token count give the gradients of the whole batch, in whichever order
// their backward passes run: the loss is a sum, not a mean of means.
TEST(Transformer, MicroBatchesAddUpToTheBatch) {
  Context context;
  Compute compute(context);
  Transformer model({.dim = 16,
                     .layers = 2,
                     .heads = 2,
                     .kv_heads = 1,
                     .ffn_hidden = 24,
                     .vocab = 13,
                     .max_seq = 8,
                     .init_std = 0.2});
  materialise(model, compute);
  initialise(model, 3);
  Tensor tokens(context, {4, 6}, DType::i64), labels(context, {4, 6}, DType::i64);
  for (std::size_t i = 0; i < 24; ++i) {
    tokens.as<std::int64_t>()[i] = static_cast<std::int64_t>(i * 7 % 13);
    labels.as<std::int64_t>()[i] = i % 5 == 0 ? CrossEntropy::kIgnore : static_cast<std::int64_t>(i * 5 % 13);
  }
  const Tensor valid = scalar(context, count_valid(labels));
  CrossEntropy loss;
  const auto forward = [&](std::int64_t first, std::int64_t rows, Frame& frame) {
    const Tensor logits = model.forward(tokens.slice_flat(first * 6, {rows, 6}), frame)[0];
    return loss.forward({logits, labels.slice_flat(first * 6, {rows, 6}), valid}, frame)[0].as<double>()[0];
  };
  const auto backward = [&](Frame& frame) { model.backward(loss.backward({}, frame), frame); };

  Frame whole(compute);
  const double expected = forward(0, 4, whole);
  backward(whole);
  std::vector<std::vector<float>> gradients;
  for (Parameter* p : model.parameters()) {
    gradients.emplace_back(p->gradient().f32().begin(), p->gradient().f32().end());
    p->zero_gradient();
  }
  Frame a(compute), b(compute);
  const double first = forward(0, 1, a), second = forward(1, 3, b);
  EXPECT_NEAR(first + second, expected, 1e-6);
  backward(a);
  backward(b);
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const Parameter& p = *model.parameters()[i];
    for (std::size_t j = 0; j < gradients[i].size(); ++j)
      ASSERT_NEAR(p.gradient().f32()[j], gradients[i][j], 2e-6) << p.path();
  }
}

}  // namespace
}  // namespace weft::transformer_test
