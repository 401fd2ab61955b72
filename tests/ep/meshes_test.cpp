// A layer whose experts are divided over ranks, for the routings at the edges: the bits of one rank, and the
// same calls on all ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ep/support.hpp"
#include "support/calls_made.hpp"
#include "support/errors.hpp"
#include "support/run_ranks.hpp"
#include "weft/base/error.hpp"
#include "weft/ep/moe.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/activation.hpp"
#include "weft/nn/dropout.hpp"
#include "weft/nn/norm.hpp"

namespace weft::ep_meshes_test {
namespace {

using test::normal_tensor;
using test::Rank;
using test::Ranks;

constexpr std::int64_t kDim = 12, kTokensOfSample = 5;

struct Routing {
  const char* name;
  std::int64_t experts, samples;
  int top_k;
  /// Added to the scores of these experts; -100: nobody chooses the expert.
  std::map<std::int64_t, float> bias;
};

const std::vector<Routing>& routings() {
  static const std::vector<Routing> all{
      {"any", 8, 4, 2, {}},
      {"all tokens to the first expert", 8, 4, 1, {{0, 100.0f}}},
      {"all tokens to the last expert", 8, 4, 1, {{7, 100.0f}}},
      {"the last rank gets nothing", 8, 4, 2, {{5, -100.0f}, {6, -100.0f}, {7, -100.0f}}},
      {"the first rank gets nothing", 8, 4, 2, {{0, -100.0f}, {1, -100.0f}, {2, -100.0f}, {3, -100.0f}}},
      {"a rank has no token and sends nothing", 8, 2, 2, {}},
      {"one token's sample", 8, 1, 3, {}},
      {"none anywhere", 8, 0, 2, {}},
      {"experts that ep does not divide", 5, 4, 2, {}},
      {"every expert", 5, 4, 5, {}}};
  return all;
}

constexpr std::int64_t kHidden = 16;

// An expert of a program: a norm, and a feed-forward network behind it.
class NormedExpert : public Module {
 public:
  NormedExpert() : norm(kDim, 1e-5), mlp(kDim, kHidden, Normal{0.4}, Normal{0.4}) {
    add("norm", norm);
    add("mlp", mlp);
  }
  RMSNorm norm;
  SwiGLU mlp;

 private:
  Tensors do_forward(Inputs x, Frame& frame) override { return mlp.forward(norm.forward(x, frame), frame); }
  Tensors do_backward(Inputs dy, Frame& frame) override {
    return norm.backward(mlp.backward(dy, frame), frame);
  }
};

enum class Of { packed, modules };

MoEConfig config_of(const Routing& r) {
  MoEConfig c;
  c.dim = kDim, c.hidden = kHidden, c.experts = r.experts, c.shared_hidden = 8;
  c.router = {.top_k = r.top_k,
              .scores = RouterScores::sigmoid,
              .bias = RouterBias::selects,
              .aux_loss = 0.3,
              .z_loss = 0.1};
  c.init = c.down_init = Normal{0.4};
  return c;
}

std::unique_ptr<MoE> layer_of(const Routing& r, Of experts) {
  MoEConfig config = config_of(r);
  if (experts == Of::packed) return std::make_unique<MoE>(config);
  config.hidden = 0;
  return std::make_unique<MoE>(config, [] { return std::make_unique<NormedExpert>(); });
}

struct Pass {
  std::map<std::string, std::vector<float>> values;  // y, dx and gradients, whole
  std::vector<std::int64_t> loads;
  std::size_t calls = 0;
};

// `change`: of this rank's rows of x
Pass pass_of(Rank& rank, const Routing& r, Of experts = Of::packed,
             const std::function<void(const Tensor&)>& change = {}) {
  Compute compute(rank.context, 1);
  const DeviceMesh mesh(rank.group(), MeshShape{{"ep", -1}});
  const std::unique_ptr<MoE> made = layer_of(r, experts);
  MoE& layer = *made;
  apply_expert_parallel(layer, mesh, {.uneven = true});
  replicate(layer, mesh);
  test::set_up(layer, compute);
  for (const auto& [expert, bias] : r.bias)
    layer.router.bias_buffer->tensor().f32()[static_cast<std::size_t>(expert)] = bias;
  const Shape whole{r.samples, kTokensOfSample, kDim};
  const LayoutRef cut = make_layout(mesh, {{"ep", Shard{0}}}, whole);
  const Tensor x = distribute(normal_tensor(rank.context, whole, "x"), cut),
               dy = distribute(normal_tensor(rank.context, whole, "dy"), cut);
  if (change) change(x);
  Frame frame(compute, {.seed = 1, .step = 0});
  const std::size_t before = test::calls_made(mesh.group());
  const Tensor y = layer.forward(x, frame)[0], dx = layer.backward(dy, frame)[0];
  Pass pass;
  pass.calls = test::calls_made(mesh.group()) - before;
  pass.loads = layer.router.report().counts;
  const auto add = [&](const std::string& name, const Tensor& t) {
    const Tensor all = full(t);
    pass.values[name].assign(all.f32().begin(), all.f32().end());
  };
  add("y", y);
  add("dx", dx);
  for (const Parameter* p : layer.parameters()) add(p->path(), p->gradient());
  return pass;
}

void expect_pass(const Pass& got, const Pass& expected) {
  EXPECT_EQ(got.loads, expected.loads);
  ASSERT_EQ(got.values.size(), expected.values.size());
  for (const auto& [name, numbers] : expected.values) {
    // Ranks add their contributions to these gradients; all else has one order of sums.
    const bool is_sum = name.starts_with("router") || name.starts_with("shared");
    const std::vector<float>& of = got.values.at(name);
    ASSERT_EQ(of.size(), numbers.size()) << name;
    if (!is_sum) {
      EXPECT_EQ(of, numbers) << name;
      continue;
    }
    double largest = 0;
    for (const float n : numbers) largest = std::max(largest, std::abs(static_cast<double>(n)));
    for (std::size_t i = 0; i < numbers.size(); ++i) ASSERT_NEAR(of[i], numbers[i], 1e-6 * largest) << name;
  }
}

TEST(ExpertsOverRanks, EachRoutingHasTheBitsOfOneRank) {
  for (const Of experts : {Of::packed, Of::modules})
    for (const Routing& r : routings()) {
      SCOPED_TRACE(std::string(r.name) + (experts == Of::packed ? ", packed" : ", modules"));
      Pass expected;
      test::run_ranks(Ranks::threads, 1, [&](Rank& rank) { expected = pass_of(rank, r, experts); });
      for (const int ranks : {2, 3, 4})
        test::run_ranks(Ranks::threads, ranks, [&](Rank& rank) {
          SCOPED_TRACE("ep " + std::to_string(ranks));
          const Pass got = pass_of(rank, r, experts);
          expect_pass(got, expected);
          // all-gathers of counts and of choices, and four exchanges
          EXPECT_EQ(got.calls, 6U);
        });
    }
}

// Experts that are a SwiGLU each have the numbers of packed experts with the same weights; gradients of two
// passes add up, those of frozen weights are not made.
TEST(ExpertModules, ASwiGLUEachIsThePackedExperts) {
  Context context;
  Compute compute(context, 1);
  const Routing& r = routings().front();
  MoEConfig config = config_of(r);
  MoE packed(config);
  config.hidden = 0;
  MoE modules(config, [] { return std::make_unique<SwiGLU>(kDim, kHidden); });
  for (MoE* layer : {&packed, &modules}) test::set_up(*layer, compute);
  for (Parameter* p : modules.parameters()) {
    std::string name = p->path();
    if (name.starts_with("experts.")) name.resize(name.size() - std::string(".weight").size());
    const Tensor& from = packed.parameter(name)->master();
    ASSERT_EQ(from.shape(), p->master().shape()) << name;
    std::ranges::copy(from.f32(), p->write_master().f32().begin());
  }
  modules.parameter("experts.up_proj.weight")->set_trainable(false);
  const Tensor x = normal_tensor(context, {3, kTokensOfSample, kDim}, "x"),
               dy = normal_tensor(context, x.shape(), "dy");
  for (int pass = 0; pass < 2; ++pass) {
    std::vector<std::vector<float>> results;
    for (MoE* layer : {&packed, &modules}) {
      Frame frame(compute, {.seed = 1, .step = 0});
      const Tensor y = layer->forward(x, frame)[0];
      LeftOver left_over;
      const Tensor dx = pass == 0 ? layer->backward(dy, frame)[0] : layer->backward(dy, frame, left_over)[0];
      left_over.run();
      EXPECT_TRUE(frame.empty());
      results.emplace_back(y.f32().begin(), y.f32().end());
      results.emplace_back(dx.f32().begin(), dx.f32().end());
    }
    for (std::size_t k = 0; k < 2; ++k)
      for (std::size_t i = 0; i < results[k].size(); ++i)
        ASSERT_NEAR(results[k + 2][i], results[k][i], 1e-5) << k << " " << i;
    EXPECT_FALSE(modules.parameter("experts.up_proj.weight")->has_gradient());
    for (const char* name : {"experts.gate_proj", "experts.down_proj"}) {
      const auto expected = packed.parameter(name)->gradient().f32(),
                 got = modules.parameter(std::string(name) + ".weight")->gradient().f32();
      for (std::size_t i = 0; i < expected.size(); ++i) ASSERT_NEAR(got[i], expected[i], 2e-5) << name;
    }
  }
}

TEST(ExpertModules, RefusesByName) {
  const auto refused = [](std::int64_t hidden, const MakeExpert& make) {
    MoEConfig config = config_of(routings().front());
    config.hidden = hidden;
    return test::error_text(ErrorCode::bad_argument, [&] { return MoE(config, make).path(); });
  };
  const MakeExpert good = [] { return std::make_unique<SwiGLU>(kDim, kHidden); };
  EXPECT_EQ(refused(4, good), "moe: hidden is 4 with make_expert; expected 0: the modules know their sizes");
  EXPECT_EQ(refused(0, nullptr), "moe: make_expert is empty; expected a function");
  EXPECT_EQ(refused(0, [] { return nullptr; }), "moe: make_expert gives null; expected a module");
  EXPECT_EQ(refused(0, [] { return std::make_unique<BatchNorm>(kDim); }),
            "moe: make_expert gives a module with the buffer \"running_mean\"; expected parameters alone");
  EXPECT_EQ(
      refused(0, [] { return std::make_unique<Dropout>(0.5); }),
      "moe: make_expert gives a module with the Dropout \"\", whose numbers would depend on the rows of a "
      "rank; expected none");
  Context context;
  Compute compute(context, 1);
  const auto pass_refused = [&](const MakeExpert& make) {
    MoEConfig config = config_of(routings().front());
    config.hidden = 0;
    MoE layer(config, make);
    test::set_up(layer, compute);
    Frame frame(compute, {.seed = 1, .step = 0});
    return test::error_text(ErrorCode::bad_argument, [&] {
      return layer.forward(normal_tensor(context, {2, 4, kDim}, "x"), frame).size();
    });
  };
  EXPECT_THAT(
      pass_refused([] { return std::make_unique<Linear>(kDim, kDim + 1); }),
      ::testing::MatchesRegex("\"experts\": an expert made f32 \\(., 13\\) of its rows, f32 \\(., 12\\); "
                              "expected one output, as its rows"));
  int made = 0;
  EXPECT_EQ(pass_refused([&made] { return std::make_unique<Linear>(kDim, kDim, made++ > 0); }),
            "moe: make_expert gives a module with 2 parameters; expected 1, as before");
}

TEST(ExpertsOverRanks, ALogitThatIsNotFiniteIsAnErrorOfAllRanks) {
  test::run_ranks(Ranks::threads, 3, [&](Rank& rank) {
    test::expect_error(ErrorCode::bad_argument,
                       "\"router\": the logits of token 6 on ep rank 1 are not finite", [&] {
                         return pass_of(rank, {"", 8, 6, 2, {}}, Of::packed,
                                        [&](const Tensor& x) {
                                          if (rank.rank == 1) x.f32()[6 * kDim + 3] = std::nanf("");
                                        })
                             .calls;
                       });
  });
}

// The rows of x and dy that a layer takes from its neighbours' memory; a layer alone takes any memory.
TEST(ExpertsOverRanks, NeighboursWriteToSharedMemory) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), MeshShape{{"ep", -1}});
    Linear before(kDim, kDim), after(kDim, kDim);
    MoE layer(config_of(routings().front()));
    layer.set_neighbours(&before, &after);
    apply_expert_parallel(layer, mesh);
    for (Module* m :
         {static_cast<Module*>(&before), static_cast<Module*>(&layer), static_cast<Module*>(&after)}) {
      replicate(*m, mesh);
      test::set_up(*m, compute);
    }
    const Shape whole{4, kTokensOfSample, kDim};
    const LayoutRef cut = make_layout(mesh, {{"ep", Shard{0}}}, whole);
    Frame frame(compute, {.seed = 1, .step = 0});
    const Tensor x = before.forward(distribute(normal_tensor(rank.context, whole, "x"), cut), frame)[0];
    EXPECT_EQ(x.storage().memory(), Memory::shared);
    after.forward(layer.forward(x, frame), frame);
    const Tensor dy = after.backward(distribute(normal_tensor(rank.context, whole, "dy"), cut), frame)[0];
    EXPECT_EQ(dy.storage().memory(), Memory::shared);
    before.backward(layer.backward(dy, frame), frame);
    EXPECT_TRUE(frame.empty());
  });
}

}  // namespace
}  // namespace weft::ep_meshes_test
