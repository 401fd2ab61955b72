// Each layer against the plain-loop kernels, and its gradients against finite differences.
#include <numeric>

#include "nn/kernels/reference.hpp"
#include "nn/support.hpp"
#include "weft/nn/activation.hpp"
#include "weft/nn/attention.hpp"
#include "weft/nn/conv.hpp"
#include "weft/nn/dropout.hpp"
#include "weft/nn/embedding.hpp"
#include "weft/nn/linear.hpp"
#include "weft/nn/loss.hpp"
#include "weft/nn/norm.hpp"

namespace weft::layers_test {
namespace {

namespace reference = kernels::reference;
using test::doubles;
using test::error_text;
using test::random_tensor;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Random values of order one in every parameter, so that each of them matters.
void fill(Module& module, Compute& compute) {
  materialise(module, compute);
  for (Parameter* p : module.parameters()) {
    const float scale =
        p->global_shape().rank() == 2 ? 1.0f / std::sqrt(static_cast<float>(p->global_shape()[1])) : 1.0f;
    RandomStream(5, p->path()).normal(0, p->master().count(), p->write_master().f32().data());
    for (float& f : p->master().f32()) f *= scale;
  }
}

using Doubles = std::vector<double>;
Doubles zeros(std::int64_t n) { return Doubles(static_cast<std::size_t>(n)); }

Doubles linear(const Doubles& x, const Linear& layer, std::int64_t tokens) {
  const Shape& w = layer.weight->global_shape();
  const Doubles weight = doubles(layer.weight->master());
  Doubles y = zeros(tokens * w[0]), bias;
  if (layer.bias) bias = doubles(layer.bias->master());
  reference::linear_forward(x.data(), weight.data(), layer.bias ? bias.data() : nullptr, y.data(),
                            {tokens, w[1], w[0]});
  return y;
}

TEST(Linear, MultipliesAndAddsItsBias) {
  test::Bench bench;
  for (const bool bias : {false, true}) {
    Linear layer(5, 3, bias);
    fill(layer, bench.compute);
    const Tensor x = random_tensor(bench.context, {2, 7, 5}, "x");
    Frame frame = Frame::inference(bench.compute);
    const Tensor y = layer.forward(x, frame)[0];
    EXPECT_EQ(y.shape(), (Shape{2, 7, 3}));
    test::expect_near(y, linear(doubles(x), layer, 14), 1e-5, "y");
    test::expect_gradients_match_differences(layer, x, bench.compute);
  }
}

TEST(Linear, TakesEmptyAndRefusesWrongShapes) {
  test::Bench bench;
  Linear layer(4, 3, true);
  fill(layer, bench.compute);
  Frame frame(bench.compute);
  const Tensor empty(bench.context, {0, 4});
  EXPECT_EQ(layer.forward(empty, frame)[0].shape(), (Shape{0, 3}));
  EXPECT_EQ(layer.backward(Tensor(bench.context, {0, 3}), frame)[0].shape(), (Shape{0, 4}));
  EXPECT_THAT(test::floats(layer.bias->gradient()), ElementsAre(0, 0, 0));
  EXPECT_THAT(layer.weight->gradient().f32(), ::testing::Each(0.0f));
  EXPECT_EQ(error_text(ErrorCode::bad_argument,
                       [&] {
                         layer.forward(Tensor(bench.context, {2, 3}), frame);
                       }),
            "\"\": x is (2, 3); expected 4 features (the second dimension of weight (3, 4))");
  EXPECT_EQ(error_text(ErrorCode::bad_argument,
                       [&] {
                         layer.forward({empty, empty}, frame);
                       }),
            "\"\": got 2 inputs; expected 1");
  layer.forward(empty, frame);
  EXPECT_EQ(error_text(ErrorCode::bad_argument,
                       [&] {
                         layer.backward(Tensor(bench.context, {2, 3}), frame);
                       }),
            "\"\": dy is (2, 3); expected (0, 3)");
}

TEST(RMSNorm, DividesByTheRootMeanSquare) {
  test::Bench bench;
  RMSNorm layer(6, 1e-3);
  fill(layer, bench.compute);
  const Tensor x = random_tensor(bench.context, {3, 2, 6}, "x");
  Frame frame = Frame::inference(bench.compute);
  Doubles y = zeros(36), inv_rms = zeros(6);
  const Doubles in = doubles(x), weight = doubles(layer.weight->master());
  reference::rms_norm_forward(in.data(), weight.data(), y.data(), inv_rms.data(), 6, 6, 1e-3);
  test::expect_near(layer.forward(x, frame)[0], y, 1e-5, "y");
  test::expect_gradients_match_differences(layer, x, bench.compute);
  EXPECT_EQ(error_text(ErrorCode::bad_argument,
                       [&] {
                         layer.forward(Tensor(bench.context, {2, 5}), frame);
                       }),
            "\"\": x is (2, 5); expected a last dimension of 6 (the weight's)");
}

TEST(Embedding, LooksUpAndSumsGradientsOfRepeatedTokens) {
  test::Bench bench;
  Embedding layer(4, 2);
  fill(layer, bench.compute);
  const Tensor tokens = test::tokens_of(bench.context, {1, 3}, {3, 0, 3});
  Frame frame(bench.compute);
  const Tensor y = layer.forward(tokens, frame)[0];
  EXPECT_EQ(y.shape(), (Shape{1, 3, 2}));
  const auto w = layer.weight->master().f32();
  EXPECT_THAT(test::floats(y), ElementsAre(w[6], w[7], w[0], w[1], w[6], w[7]));
  EXPECT_TRUE(layer.backward(test::tensor_of(bench.context, {1, 3, 2}, {1, 2, 3, 4, 5, 6}), frame).empty());
  EXPECT_THAT(test::floats(layer.weight->gradient()), ElementsAre(3, 4, 0, 0, 0, 0, 6, 8));
  EXPECT_THAT(error_text(ErrorCode::bad_argument,
                         [&] { layer.forward(test::tokens_of(bench.context, {1}, {4}), frame); }),
              HasSubstr("4"));
}

// Notes the memory in which the tensors that pass through it lie.
class Noting final : public Boundary {
 public:
  explicit Noting(std::vector<Memory>& seen) : seen_(seen) {}
  Transfer start_forward(const Tensor& x, const TensorName&) const override { return passed(x); }
  Transfer start_backward(const Tensor& dy, const TensorName&) const override { return passed(dy); }
  LayoutRef out_layout(const LayoutRef& in, const TensorName&) const override { return in; }

 private:
  Transfer passed(const Tensor& t) const {
    seen_.push_back(t.storage().memory());
    return Transfer(t);
  }
  std::vector<Memory>& seen_;
};

// So that a boundary that communicates has nothing to copy: y of a layer with a boundary behind it, dx of a
// layer with a boundary before it.
TEST(Layers, WhatABoundaryTakesLiesInSharedMemory) {
  test::Bench bench;
  const auto seen_of = [&](Module& layer, const Shape& shape, DType dtype = DType::f32) {
    std::vector<Memory> after, before;
    layer.add_after(std::make_shared<Noting>(after));
    layer.add_before(std::make_shared<Noting>(before));
    fill(layer, bench.compute);
    Frame frame(bench.compute, {.seed = 1, .step = 0});
    const Tensor x = dtype == DType::f32 ? random_tensor(bench.context, shape, "x")
                                         : Tensor::zeros(bench.context, shape, dtype);
    const Tensor y = layer.forward(x, frame)[0];
    after.resize(1), before.clear();  // y's; and what is seen in backward
    layer.backward(y.clone(bench.context), frame);
    after.resize(1);
    after.insert(after.end(), before.begin(), before.end());
    return after;
  };
  const std::vector<Memory> both(2, Memory::shared);
  Linear linear(8, 6);
  EXPECT_EQ(seen_of(linear, {3, 8}), both);
  Conv2d conv({.in = 4, .out = 6}), wide({.in = 4, .out = 6, .kernel = 3, .padding = 1});
  EXPECT_EQ(seen_of(conv, {2, 4, 3, 3}), both);
  EXPECT_EQ(seen_of(wide, {2, 4, 3, 3}), both);
  LayerNorm norm(8);
  EXPECT_EQ(seen_of(norm, {3, 8}), both);
  RMSNorm root(8);
  EXPECT_EQ(seen_of(root, {3, 8}), both);
  GELU gelu;
  EXPECT_EQ(seen_of(gelu, {3, 8}), both);
  Dropout dropout(0.5);
  EXPECT_EQ(seen_of(dropout, {3, 8}), both);
  SwiGLU mlp(8, 12);
  mlp.down_proj.add_after(boundary::leave(DeviceMesh::arithmetic(bench.context, {{"tp", 1}}, 0)));
  EXPECT_EQ(seen_of(mlp, {3, 8}), both);
  Attention attention({8, 4, 2, 4}, RopeTables::make(4, 4, 10000.0));
  attention.o_proj.add_after(boundary::leave(DeviceMesh::arithmetic(bench.context, {{"tp", 1}}, 0)));
  EXPECT_EQ(seen_of(attention, {2, 3, 8}), both);
  Embedding embedding(5, 8);
  EXPECT_EQ(seen_of(embedding, {2, 3}, DType::i64), std::vector{Memory::shared});
}

TEST(Layers, RefuseGradientsOfAnotherShapeOrDtype) {
  test::Bench bench;
  const auto text = [&](Module& layer, const Tensor& x, const Tensor& dy) {
    if (layer.own_parameters()[0].second->materialised() == false) {
      materialise(layer, bench.compute);
      initialise(layer, 1);
    }
    Frame frame(bench.compute);
    return error_text(ErrorCode::bad_argument, [&] {
      layer.forward(x, frame);
      layer.backward(dy, frame);
    });
  };
  const auto zeros = [&](const Shape& shape, DType dtype = DType::f32) {
    return Tensor::zeros(bench.context, shape, dtype);
  };
  RMSNorm norm(4);
  Embedding embedding(8, 4);
  Linear linear(4, 3);
  EXPECT_EQ(text(norm, zeros({100, 4}), zeros({1, 4})), "\"\": dy is (1, 4); expected (100, 4)");
  EXPECT_EQ(text(embedding, zeros({100}, DType::i64), zeros({1, 4})),
            "\"\": dy is (1, 4); expected (100, 4)");
  EXPECT_EQ(text(linear, zeros({2, 4}), zeros({2, 3}, DType::bf16)), "\"\": dy is bf16; expected f32");
  EXPECT_EQ(text(linear, zeros({2, 4}, DType::i64), zeros({2, 3})), "\"\": x is i64; expected f32 or bf16");
  EXPECT_EQ(text(linear, zeros({2, 4}, DType::bf16), zeros({2, 3})),
            "\"\": x is bf16 and the weight f32; expected a weight in bf16");
  EXPECT_EQ(text(norm, zeros({2, 4}, DType::f16), zeros({2, 4})), "\"\": x is f16; expected f32 or bf16");
  EXPECT_EQ(text(norm, zeros({2, 4}, DType::bf16), zeros({2, 4})), "\"\": dy is f32; expected bf16");
  EXPECT_EQ(text(embedding, zeros({2}), zeros({2, 4})), "\"\": tokens is f32; expected i64");
}

TEST(SwiGLU, GatesAndProjectsBack) {
  test::Bench bench;
  SwiGLU layer(4, 6);
  fill(layer, bench.compute);
  const Tensor x = random_tensor(bench.context, {2, 3, 4}, "x");
  Frame frame = Frame::inference(bench.compute);
  const Doubles gate = linear(doubles(x), layer.gate_proj, 6), up = linear(doubles(x), layer.up_proj, 6);
  Doubles hidden = zeros(36);
  reference::swiglu_forward(gate.data(), up.data(), hidden.data(), 36);
  test::expect_near(layer.forward(x, frame)[0], linear(hidden, layer.down_proj, 6), 1e-5, "y");
  test::expect_gradients_match_differences(layer, x, bench.compute);
}

TEST(Attention, IsCausalGroupedAndRotated) {
  test::Bench bench;
  for (const std::int64_t kv_heads : {1, 2, 4}) {
    const AttentionConfig config{8, 4, kv_heads, 6};
    const auto rope = RopeTables::make(9, 6, 100.0);
    Attention layer(config, rope);
    fill(layer, bench.compute);
    constexpr std::int64_t b = 2, s = 5;
    const Tensor x = random_tensor(bench.context, {b, s, 8}, "x");
    Doubles q = linear(doubles(x), layer.q_proj, b * s), k = linear(doubles(x), layer.k_proj, b * s);
    const Doubles v = linear(doubles(x), layer.v_proj, b * s);
    const Doubles cosine(rope->cos.begin(), rope->cos.end()), sine(rope->sin.begin(), rope->sin.end());
    reference::rope_forward(q.data(), cosine.data(), sine.data(), q.data(), {b, s, 4, 6});
    reference::rope_forward(k.data(), cosine.data(), sine.data(), k.data(), {b, s, kv_heads, 6});
    Doubles out = zeros(b * s * 24), softmax = zeros(b * 4 * s * kernels::kSoftmaxTerms);
    reference::attention_forward(q.data(), k.data(), v.data(), out.data(), softmax.data(),
                                 {b, s, 4, kv_heads, 6});
    Frame frame = Frame::inference(bench.compute);
    const Tensor y = layer.forward(x, frame)[0];
    test::expect_near(y, linear(out, layer.o_proj, b * s), 2e-5, "y");
    test::expect_gradients_match_differences(layer, x, bench.compute);

    // Later positions do not affect the outputs of earlier positions.
    const Tensor changed = x.clone(bench.context);
    for (std::size_t i = 4 * 8; i < 5 * 8; ++i) changed.f32()[i] += 1;
    const Tensor y2 = layer.forward(changed, frame)[0];
    for (std::size_t i = 0; i < 4 * 8; ++i) ASSERT_EQ(y.f32()[i], y2.f32()[i]);
  }
}

TEST(Attention, RefusesWhatDoesNotFit) {
  test::Bench bench;
  const auto rope = RopeTables::make(4, 2, 10000.0);
  EXPECT_EQ(error_text(ErrorCode::bad_argument,
                       [&] {
                         Attention({8, 4, 3, 2}, rope);
                       }),
            "attention: heads 4 do not divide into kv_heads 3");
  EXPECT_EQ(error_text(ErrorCode::bad_argument,
                       [&] {
                         Attention({8, 4, 2, 3}, rope);
                       }),
            "attention: head_dim 3 is odd; rotary positions need pairs");
  Attention layer({8, 4, 2, 2}, rope);
  fill(layer, bench.compute);
  Frame frame(bench.compute);
  EXPECT_EQ(error_text(ErrorCode::bad_argument,
                       [&] {
                         layer.forward(Tensor(bench.context, {3, 8}), frame);
                       }),
            "\"\": x is (3, 8); expected (batch, sequence, 8)");
  EXPECT_EQ(error_text(ErrorCode::bad_argument,
                       [&] {
                         layer.forward(Tensor::zeros(bench.context, {1, 5, 8}), frame);
                       }),
            "\"\": sequence 5 of head_dim 2; the rotary tables are for 4 positions and head_dim 2");
}

TEST(CrossEntropy, IsTheSumOverValidTokensByTheirGlobalNumber) {
  test::Bench bench;
  CrossEntropy layer;
  const Tensor logits = random_tensor(bench.context, {2, 3, 5}, "logits");
  const Tensor labels =
      test::tokens_of(bench.context, {2, 3}, {0, CrossEntropy::kIgnore, 4, 2, 2, CrossEntropy::kIgnore});
  EXPECT_EQ(count_valid(labels), 4);
  for (const std::int64_t valid : {4, 8}) {  // 8: as if another rank had four more
    Frame frame(bench.compute);
    const Tensor loss = layer.forward({logits, labels, scalar(bench.context, valid)}, frame)[0];
    const Doubles x = doubles(logits);
    Doubles expected = zeros(30);
    double sum = 0;
    for (std::size_t t = 0; t < 6; ++t) {
      const std::int64_t label = labels.as<std::int64_t>()[t];
      if (label == CrossEntropy::kIgnore) continue;
      double total = 0;
      for (std::size_t c = 0; c < 5; ++c) total += std::exp(x[t * 5 + c]);
      sum += std::log(total) - x[t * 5 + static_cast<std::size_t>(label)];
      for (std::size_t c = 0; c < 5; ++c)
        expected[t * 5 + c] = (std::exp(x[t * 5 + c]) / total - (static_cast<std::int64_t>(c) == label)) /
                              static_cast<double>(valid);
    }
    EXPECT_NEAR(loss.as<double>()[0], sum / static_cast<double>(valid), 1e-6);
    test::expect_near(layer.backward({}, frame)[0], expected, 1e-7, "dlogits");

    layer.forward({logits, labels, scalar(bench.context, valid)}, frame);
    Tensor dloss(bench.context, {1}, DType::f64);
    dloss.as<double>()[0] = -3;
    for (double& d : expected) d *= -3;
    test::expect_near(layer.backward(dloss, frame)[0], expected, 3e-7, "dlogits of -3");
  }
}

TEST(CrossEntropy, RefusesWhatDoesNotFit) {
  test::Bench bench;
  CrossEntropy layer;
  Frame frame(bench.compute);
  const Tensor logits = random_tensor(bench.context, {2, 5}, "logits");
  const Tensor labels = test::tokens_of(bench.context, {2}, {0, 1});
  EXPECT_EQ(error_text(ErrorCode::bad_argument,
                       [&] {
                         layer.forward({logits, labels}, frame);
                       }),
            "\"\": got 2 inputs (logits, labels, valid); expected 3");
  EXPECT_EQ(error_text(ErrorCode::bad_argument,
                       [&] {
                         layer.forward({logits, labels.reshape({1, 2}), scalar(bench.context, 2)}, frame);
                       }),
            "cross entropy: labels are (1, 2); expected (2), as of logits (2, 5)");
  EXPECT_EQ(error_text(ErrorCode::bad_argument,
                       [&] {
                         layer.forward({logits, labels, labels}, frame);
                       }),
            "cross entropy: valid has 2 elements; expected 1");
  EXPECT_THAT(error_text(ErrorCode::bad_argument,
                         [&] {
                           layer.forward({logits, labels, scalar(bench.context, 0)}, frame);
                         }),
              HasSubstr("count"));
}

TEST(CrossEntropy, NamesATensorOfAnotherDtype) {
  test::Bench bench;
  CrossEntropy loss;
  const Tensor logits = Tensor::zeros(bench.context, {2, 4}),
               labels = test::tokens_of(bench.context, {2}, {0, 1}), valid = scalar(bench.context, 2);
  const auto text = [&](const Tensor& a, const Tensor& b, const Tensor& c, const Tensors& dy) {
    Frame frame(bench.compute);
    return error_text(ErrorCode::bad_argument, [&] {
      loss.forward({a, b, c}, frame);
      loss.backward(dy, frame);
    });
  };
  EXPECT_EQ(text(Tensor::zeros(bench.context, {2, 4}, DType::bf16), labels, valid, {}),
            "cross entropy: logits is bf16; expected f32");
  EXPECT_EQ(text(logits, Tensor::zeros(bench.context, {2}), valid, {}),
            "cross entropy: labels is f32; expected i64");
  EXPECT_EQ(text(logits, labels, Tensor::zeros(bench.context, {1}), {}),
            "cross entropy: valid is f32; expected i64");
  EXPECT_EQ(text(logits, labels, valid, {Tensor::zeros(bench.context, {1})}),
            "cross entropy: d(loss) is f32; expected f64");
}

TEST(Attention, RefusesHeadsWithoutSize) {
  test::Bench bench;
  const auto text = [&](const AttentionConfig& config, std::shared_ptr<const RopeTables> rope) {
    return error_text(ErrorCode::bad_argument, [&] {
      Attention attention(config, std::move(rope));
      materialise(attention, bench.compute);
      Frame frame(bench.compute);
      attention.forward(Tensor::zeros(bench.context, {1, 2, 8}), frame);
    });
  };
  const auto config = [](std::int64_t heads, std::int64_t head_dim) {
    AttentionConfig c;
    c.dim = 8;
    c.heads = heads;
    c.kv_heads = 1;
    c.head_dim = head_dim;
    return c;
  };
  EXPECT_EQ(text(config(0, 4), nullptr), "attention: 0 heads of head_dim 4; expected at least 1 of both");
  EXPECT_EQ(text(config(2, 0), nullptr), "attention: 2 heads of head_dim 0; expected at least 1 of both");
  EXPECT_EQ(text(config(2, 4), nullptr), "\"\": rope is null; expected its tables");
  for (const auto& [positions, head_dim] : {std::pair{-1, 4}, std::pair{4, 0}, std::pair{4, 3}})
    EXPECT_EQ(
        error_text(ErrorCode::bad_argument, [p = positions, h = head_dim] { RopeTables::make(p, h, 1e4); }),
        "rope: " + std::to_string(positions) + " positions of head_dim " + std::to_string(head_dim) +
            "; expected 0 positions or more, and an even head_dim of at least 2");
}

TEST(AddTensors, RefusesAnotherShape) {
  test::Bench bench;
  const Tensor a = Tensor::zeros(bench.context, {2, 3});
  EXPECT_EQ(error_text(ErrorCode::bad_argument,
                       [&] {
                         add_tensors(a, a.reshape({3, 2}), bench.compute, "x + mlp");
                       }),
            "x + mlp: terms of shapes (2, 3) and (3, 2)");
}

}  // namespace
}  // namespace weft::layers_test
