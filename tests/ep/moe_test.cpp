// A mixture of experts on one rank has the numbers of plain loops in f64, in all its options.
#include "weft/ep/moe.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "ep/reference.hpp"
#include "ep/support.hpp"
#include "support/errors.hpp"
#include "weft/base/error.hpp"
#include "weft/nn/init.hpp"

namespace weft::moe_test {
namespace {

using test::doubles_of;
using test::expect_as_reference;
using test::normal_tensor;
using test::ReferenceMoE;

struct Case {
  const char* name;
  MoEConfig config;
};

MoEConfig small(RouterOptions router = {}) {
  MoEConfig c;
  c.dim = 12, c.hidden = 20, c.experts = 5;
  c.router = router;
  c.init = c.down_init = Normal{0.4};
  return c;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&](const char* name, MoEConfig c) { all.push_back({name, c}); };
  add("softmax", small());
  add("not_normalised", small({.top_k = 3, .normalise = false}));
  add("sigmoid", small({.scores = RouterScores::sigmoid}));
  add("sigmoid_not_normalised", small({.top_k = 1, .scores = RouterScores::sigmoid, .normalise = false}));
  add("bias_selects", small({.scores = RouterScores::sigmoid, .bias = RouterBias::selects}));
  add("bias_weighs", small({.scores = RouterScores::sigmoid, .bias = RouterBias::weighs}));
  add("softmax_bias_weighs", small({.bias = RouterBias::weighs, .aux_loss = 0.3, .z_loss = 0.2}));
  add("every_expert", small({.top_k = 5}));
  add("losses", small({.aux_loss = 0.7, .z_loss = 0.4}));
  add("losses_of_sigmoid", small({.scores = RouterScores::sigmoid, .aux_loss = 0.7, .z_loss = 0.4}));
  add("losses_of_sequences", small({.balance = Balance::sequence, .aux_loss = 0.7, .z_loss = 0.4}));
  add("capacity_by_weight", small({.capacity = Capacity::by_weight, .capacity_factor = 0.7}));
  add("capacity_by_position", small({.capacity = Capacity::by_position, .capacity_factor = 0.7}));
  add("capacity_per_choice", small({.capacity = Capacity::per_choice_and_rank, .capacity_factor = 0.4}));
  for (const auto& [name, kind] :
       {std::pair{"silu", ExpertKind::silu}, {"gelu", ExpertKind::gelu}, {"relu", ExpertKind::relu}}) {
    add(name, small());
    all.back().config.kind = kind;
  }
  add("shared", small());
  all.back().config.shared_hidden = 9;
  add("scaled_by_load", small({.aux_loss = 0.1}));
  all.back().config.scale_outputs_by_load = true;
  return all;
}

class MoEOptions : public ::testing::TestWithParam<Case> {};

TEST_P(MoEOptions, HasTheNumbersOfPlainLoops) {
  const MoEConfig config = GetParam().config;
  Context context;
  Compute compute(context, 1);
  MoE layer(config);
  test::set_up(layer, compute);
  const Tensor x = normal_tensor(context, {3, 7, config.dim}, "x"),
               dy = normal_tensor(context, x.shape(), "dy");
  ReferenceMoE reference = test::reference_of(layer, x);
  reference.run(doubles_of(x), doubles_of(dy));
  Frame frame(compute, {.seed = 1, .step = 0});
  const Tensor y = layer.forward(x, frame)[0];
  const Tensor dx = layer.backward(dy, frame)[0];
  EXPECT_TRUE(frame.empty());
  expect_as_reference(y, reference.y, "y");
  expect_as_reference(dx, reference.dx, "dx");
  test::expect_gradients_as(layer, reference);
  const RouterReport& report = layer.router.report();
  EXPECT_NEAR(report.aux_loss, reference.aux, 1e-5);
  EXPECT_NEAR(report.z_loss, reference.z, 1e-5 * reference.z);
  std::int64_t dropped = 0;
  for (const auto& of_token : reference.kept) dropped += std::ranges::count(of_token, 0);
  EXPECT_EQ(report.dropped, dropped);
  if (config.router.capacity != Capacity::none) {
    EXPECT_GT(dropped, 0);
  }
}

std::string case_name(const ::testing::TestParamInfo<Case>& info) { return info.param.name; }
INSTANTIATE_TEST_SUITE_P(Options, MoEOptions, ::testing::ValuesIn(cases()), case_name);

TEST(MoE, ASecondPassAddsItsGradients) {
  Context context;
  Compute compute(context, 1);
  MoE layer(small());
  test::set_up(layer, compute);
  const Tensor x = normal_tensor(context, {2, 4, 12}, "x"), dy = normal_tensor(context, x.shape(), "dy");
  std::vector<float> once;
  for (int pass = 0; pass < 2; ++pass) {
    Frame frame(compute, {.seed = 1, .step = 0});
    layer.forward(x, frame);
    layer.backward(dy, frame);
    const auto gradient = layer.experts.down_proj->gradient().f32();
    if (pass == 0) once.assign(gradient.begin(), gradient.end());
    for (std::size_t i = 0; pass == 1 && i < once.size(); ++i) ASSERT_NEAR(gradient[i], 2 * once[i], 1e-5);
  }
}

// dx first, the gradients of weights later: the same bits.
TEST(MoE, ABackwardPassInHalvesHasTheSameBits) {
  Context context;
  Compute compute(context, 1);
  for (const ExpertKind kind : {ExpertKind::swiglu, ExpertKind::gelu}) {
    MoEConfig config = small({.aux_loss = 0.3});
    config.kind = kind, config.shared_hidden = 8;
    MoE layer(config);
    test::set_up(layer, compute);
    const Tensor x = normal_tensor(context, {2, 6, 12}, "x"), dy = normal_tensor(context, x.shape(), "dy");
    std::vector<std::vector<float>> results[2];
    for (const bool halves : {false, true}) {
      for (Parameter* p : layer.parameters()) p->zero_gradient();
      Frame frame(compute, {.seed = 1, .step = 0});
      layer.forward(x, frame);
      LeftOver left_over;
      const Tensor dx = halves ? layer.backward(dy, frame, left_over)[0] : layer.backward(dy, frame)[0];
      EXPECT_EQ(layer.experts.up_proj->has_gradient(), !halves);
      left_over.run();
      auto& all = results[halves ? 1 : 0];
      all.emplace_back(dx.f32().begin(), dx.f32().end());
      for (const Parameter* p : layer.parameters())
        all.emplace_back(p->gradient().f32().begin(), p->gradient().f32().end());
    }
    EXPECT_EQ(results[0], results[1]);
  }
}

TEST(MoE, NoTokens) {
  Context context;
  Compute compute(context, 1);
  MoE layer(small({.bias = RouterBias::selects, .aux_loss = 1, .z_loss = 1}));
  test::set_up(layer, compute);
  const Tensor x(context, {0, 4, 12});
  Frame frame(compute, {.seed = 1, .step = 0});
  EXPECT_EQ(layer.forward(x, frame)[0].shape(), x.shape());
  EXPECT_EQ(layer.backward(x, frame)[0].shape(), x.shape());
  for (const Parameter* p : layer.parameters())
    for (const float g : p->gradient().f32()) ASSERT_EQ(g, 0) << p->path();
  EXPECT_EQ(layer.router.report().aux_loss, 0);
  update_router_biases(layer);
}

TEST(MoE, NoiseIsThatOfTheStepAndOnlyInTraining) {
  Context context;
  Compute compute(context, 1);
  MoE layer(small({.noise = 5}));
  test::set_up(layer, compute);
  const Tensor x = normal_tensor(context, {4, 8, 12}, "x");
  const auto counts = [&](const Pass& pass) {
    Frame frame(compute, pass);
    layer.forward(x, frame);
    frame.clear();
    return layer.router.report().counts;
  };
  const auto first = counts({.seed = 1, .step = 0});
  EXPECT_EQ(counts({.seed = 1, .step = 0}), first);
  EXPECT_NE(counts({.seed = 1, .step = 1}), first);
  EXPECT_NE(counts({.training = false}), first);
  EXPECT_EQ(counts({.training = false}), counts({.training = false}));
}

TEST(MoE, ABiasThatSelectsMovesTowardsAnEvenLoad) {
  Context context;
  Compute compute(context, 1);
  MoE layer(small({.bias = RouterBias::selects}));
  test::set_up(layer, compute);
  std::ranges::fill(layer.router.bias_buffer->tensor().f32(), 0.0f);
  const Tensor x = normal_tensor(context, {4, 8, 12}, "x");
  const auto pass = [&](bool training) {
    Frame frame(compute, {.seed = 1, .step = 0, .training = training});
    layer.forward(x, frame);
    frame.clear();
    return layer.router.report().imbalance();
  };
  const double before = pass(true);
  const std::vector<std::int64_t> counts = layer.router.report().counts;
  pass(false);  // counts only in training
  EXPECT_TRUE(std::ranges::equal(layer.router.counts_since_update(), counts));
  update_router_bias(layer.router, 0.5);
  EXPECT_TRUE(layer.router.counts_since_update().empty());
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const double difference = 64.0 / 5 - static_cast<double>(counts[i]);
    EXPECT_EQ(layer.router.bias_buffer->tensor().f32()[i], difference > 0 ? 0.5f : -0.5f);
  }
  std::ranges::fill(layer.router.bias_buffer->tensor().f32(), 0.0f);
  for (int step = 0; step < 200; ++step) {
    pass(true);
    update_router_bias(layer.router, 0.01);
  }
  EXPECT_LT(pass(false), before);
  EXPECT_LT(pass(false), 1.3);
}

TEST(MoE, SharesOfAStepAreThoseOfItsMicroBatchesSoFar) {
  Context context;
  Compute compute(context, 1);
  MoE layer(small({.balance = Balance::step}));
  test::set_up(layer, compute);
  const auto pass = [&](const char* name, std::int64_t micro_batch) {
    Frame frame(compute, {.seed = 1, .step = 0, .micro_batch = micro_batch});
    layer.forward(normal_tensor(context, {2, 8, 12}, name), frame);
    frame.clear();
    return layer.router.report().aux_loss;
  };
  const double a = pass("a", 0), b = pass("b", 1);
  EXPECT_NE(pass("b", 0), b);
  EXPECT_EQ(pass("a", 0), a);
  EXPECT_EQ(pass("b", 1), b);
}

TEST(MoE, RefusesSizesThatDoNotFit) {
  test::expect_error(ErrorCode::bad_argument, "moe: experts is 0; expected at least 1", [] {
    MoEConfig c = small();
    c.experts = 0;
    return MoE(c).path();
  });
  test::expect_error(ErrorCode::bad_argument, "router: top_k is 6; expected 1 to 5, the number of experts",
                     [] { return MoE(small({.top_k = 6})).path(); });
  test::expect_error(ErrorCode::bad_argument, "router: z_loss is -1; expected a finite number of 0 or more",
                     [] { return MoE(small({.z_loss = -1})).path(); });
  Context context;
  Compute compute(context, 1);
  MoE layer(small());
  test::set_up(layer, compute);
  Frame frame(compute);
  test::expect_error(ErrorCode::bad_argument, "\"\": x is (2, 3); expected (…, 12)", [&] {
    return layer.forward(Tensor(context, {2, 3}), frame);
  });
  frame.clear();
  const Tensor x = normal_tensor(context, {2, 3, 12}, "x");
  x.f32()[12 * 4 + 5] = std::nanf("");
  test::expect_error(ErrorCode::bad_argument, "\"router\": the logits of token 4 are not finite",
                     [&] { return layer.forward(x, frame); });
}

}  // namespace
}  // namespace weft::moe_test
