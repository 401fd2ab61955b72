// A transformer with mixtures of experts: the numbers of another implementation, and on every mesh those of
// one rank, in losses, gradients, training and checkpoints.
#include "weft/models/moe_transformer.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>

#include "support/errors.hpp"
#include "support/golden_case.hpp"
#include "support/run_ranks.hpp"
#include "support/temporary_folder.hpp"
#include "weft/base/chunk.hpp"
#include "weft/base/random.hpp"
#include "weft/dp/sampler.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/models/trainer.hpp"
#include "weft/nn/activation.hpp"
#include "weft/nn/linear.hpp"
#include "weft/nn/loss.hpp"
#include "weft/nn/norm.hpp"
#include "weft/nn/residual.hpp"
#include "weft/train/gradients.hpp"

namespace weft::moe_model_test {
namespace {

using test::Golden;
using test::Rank;
using test::Ranks;

MoETransformerConfig config_of(Golden& golden) {
  const nlohmann::json& c = golden.config();
  MoETransformerConfig config;
  config.transformer = golden.model();
  config.experts = c.at("num_experts");
  config.expert_hidden = c.at("expert_hidden");
  config.every = c.at("moe_frequency");
  config.router.top_k = c.at("moe_top_k");
  config.router.aux_loss = c.at("moe_aux_loss_weight");
  return config;
}

// The file names each expert's matrices; the model has one tensor for all experts.
std::string name_in_file(const std::string& path, std::int64_t expert) {
  const std::string of = ".experts.";
  const std::size_t at = path.find(of) + of.size();
  return path.substr(0, at) + std::to_string(expert) + "." + path.substr(at) + ".weight";
}
template <class Visit>
void each_tensor(Golden&, const Parameter& p, const Visit& visit) {
  if (p.path().find(".experts.") == std::string::npos) return visit(p.path(), 0, p.global_shape().count());
  const std::int64_t each = p.global_shape()[1] * p.global_shape()[2];
  for (std::int64_t e = 0; e < p.global_shape()[0]; ++e) visit(name_in_file(p.path(), e), e * each, each);
}

class GoldenMoEModel : public ::testing::TestWithParam<std::filesystem::path> {};

TEST_P(GoldenMoEModel, LogitsLossesChoicesAndAllGradients) {
  Golden golden(GetParam());
  MoETransformer model(config_of(golden));
  materialise(model, golden.compute);
  std::size_t tensors = 0;
  for (Parameter* p : model.parameters())
    each_tensor(golden, *p, [&](const std::string& name, std::int64_t first, std::int64_t count) {
      const Tensor from = golden.tensor("param." + name);
      ASSERT_EQ(from.count(), count) << name;
      std::ranges::copy(from.f32(), p->write_master().f32().begin() + first);
      ++tensors;
    });
  EXPECT_EQ(golden.names("param.").size(), tensors);
  auto rope = std::make_shared<RopeTables>();
  const Tensor cosine = golden.tensor("aux.rope_cos"), sine = golden.tensor("aux.rope_sin");
  rope->cos.assign(cosine.f32().begin(), cosine.f32().end());
  rope->sin.assign(sine.f32().begin(), sine.f32().end());
  rope->positions = cosine.size(0), rope->half = cosine.size(1);
  model.set_rope(rope);

  Frame frame(golden.compute, {.seed = 1, .step = 0});
  CrossEntropy cross_entropy;
  const Tensor labels = golden.tensor("in.labels");
  const Tensor logits = model.forward(golden.tensor("in.tokens"), frame)[0];
  const Tensor loss =
      cross_entropy.forward({logits, labels, scalar(golden.context, count_valid(labels))}, frame)[0];
  golden.compare("out.logits", logits.f32());
  golden.within("out.ce_loss", std::abs(loss.as<double>()[0] - golden.values("out.ce_loss")[0]));
  double aux = 0, z = 0;
  const std::vector<LayerBalance> balance = expert_balance(model);
  for (std::size_t i = 0; i < balance.size(); ++i) {
    aux += balance[i].report.aux_loss;
    z += balance[i].report.z_loss;
    const Tensor counts = golden.tensor("out.router." + std::to_string(i) + ".expert_counts");
    EXPECT_TRUE(std::ranges::equal(balance[i].report.counts, counts.as<std::int64_t>())) << balance[i].path;
  }
  golden.within("out.aux_loss", std::abs(aux - golden.values("out.aux_loss")[0]));
  golden.within("out.router_z_loss", std::abs(z - golden.values("out.router_z_loss")[0]));
  model.backward(cross_entropy.backward({}, frame), frame);
  for (const Parameter* p : model.parameters())
    each_tensor(golden, *p, [&](const std::string& name, std::int64_t first, std::int64_t count) {
      golden.compare("grad.param." + name, p->gradient().f32().subspan(static_cast<std::size_t>(first),
                                                                       static_cast<std::size_t>(count)));
    });
  RecordProperty("most_of_the_limit_used", std::to_string(golden.most_used()));
}

std::string file_name(const ::testing::TestParamInfo<std::filesystem::path>& info) {
  return info.param.stem().string();
}
INSTANTIATE_TEST_SUITE_P(Golden, GoldenMoEModel, ::testing::ValuesIn(test::golden_files("kf_moe_tiny")),
                         file_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GoldenMoEModel);
TEST(GoldenMoEModelFiles, ArePresent) { test::expect_golden({"kf_moe_tiny"}); }

// ---- meshes ----

constexpr std::int64_t kBatch = 8, kSequence = 12;

MoETransformerConfig small(std::int64_t experts = 4) {
  MoETransformerConfig c;
  c.transformer = {
      .dim = 32, .layers = 2, .heads = 4, .kv_heads = 2, .ffn_hidden = 48, .vocab = 64, .max_seq = 16};
  c.transformer.init_std = 0.1;
  c.experts = experts;
  c.expert_hidden = 24;
  c.shared_hidden = 16;
  c.router = {.scores = RouterScores::sigmoid, .bias = RouterBias::selects, .aux_loss = 0.05, .z_loss = 0.01};
  return c;
}

struct Mesh {
  const char* name;
  MeshShape shape;
  DataForm data = DataForm::ddp;
  bool hsdp = false;
  AcMode ac = AcMode::none;
  DType dtype = DType::f32;  // of weights and activations
  Exact exact = Exact::no;
};

BuildOptions options_of(const Mesh& mesh) {
  BuildOptions options;
  options.seed = 17;
  options.expert_axis = "ep";
  options.experts.uneven = true;
  options.data = mesh.data;
  if (mesh.hsdp) options.replicate_axis = "replicate";
  options.ac.mode = mesh.ac;
  options.dtype = options.activations = mesh.dtype;
  options.exact = mesh.exact;
  return options;
}

using Values = std::map<std::string, std::vector<float>>;

struct Steps {
  std::vector<double> losses, norms;
  Values gradients, parameters;
  std::vector<std::vector<std::int64_t>> loads;  // of the experts of each layer, in the first step
};

std::vector<std::int64_t> numbers_of(std::span<const std::int64_t> samples, std::int64_t shift) {
  std::vector<std::int64_t> all;
  for (const std::int64_t s : samples)
    for (std::int64_t k = 0; k < kSequence; ++k) all.push_back((s * 31 + (k + shift) * (s % 7 + 1)) % 64);
  return all;
}

struct Training {
  Training(Rank& rank, const Mesh& how, const MoETransformerConfig& config)
      : compute(rank.context),
        mesh(rank.group(), how.shape),
        built(build_parallel_model(moe_recipe(config), mesh, compute, options_of(how))),
        trainer(built, compute, {.optimizer = AdamW::Options{}, .max_norm = 0.5}),
        sampler(built.data, 1000, kBatch, 5) {}
  // `micro`: how many micro-batches each rank's rows are cut into
  Trainer::Result backward(std::int64_t micro = 1) {
    const std::vector<std::int64_t> samples = sampler.local_batch(trainer.steps());
    tokens = numbers_of(samples, 0), labels = numbers_of(samples, 1);
    std::vector<TokenBatch> batches;
    const auto rows = static_cast<std::int64_t>(samples.size()) / micro;
    for (std::int64_t i = 0; i < micro; ++i)
      batches.push_back({&tokens[static_cast<std::size_t>(i * rows * kSequence)],
                         &labels[static_cast<std::size_t>(i * rows * kSequence)], rows, kSequence,
                         kBatch / micro});
    return trainer.backward(batches);
  }
  Values whole_parameters() const {
    Values all;
    for (Parameter* p : built.parameters()) {
      const Tensor t = full(p->master());
      all[p->path()].assign(t.f32().begin(), t.f32().end());
    }
    for (ModuleBuffer* b : built.model->buffers())
      all[b->path()].assign(b->tensor().f32().begin(), b->tensor().f32().end());
    return all;
  }
  Compute compute;
  DeviceMesh mesh;
  ParallelModel built;
  Trainer trainer;
  Sampler sampler;
  std::vector<std::int64_t> tokens, labels;
};

Steps steps_of(Rank& rank, const Mesh& how, const MoETransformerConfig& config, int steps,
               std::int64_t micro = 1) {
  Training t(rank, how, config);
  Steps run;
  for (int step = 0; step < steps; ++step) {
    const Trainer::Result result = t.backward(micro);
    if (step == 0)
      for (Parameter* p : t.built.parameters()) {
        const Tensor whole = full(p->gradient());
        run.gradients[p->path()].assign(whole.f32().begin(), whole.f32().end());
      }
    if (step == 0)
      for (const LayerBalance& layer : expert_balance(t.built)) run.loads.push_back(layer.report.counts);
    run.losses.push_back(result.loss);
    run.norms.push_back(t.trainer.update(2e-3).grad_norm);
  }
  run.parameters = t.whole_parameters();
  return run;
}

// `tolerance`: of the largest number of each tensor
void expect_close(const Values& got, const Values& expected, double tolerance) {
  ASSERT_EQ(got.size(), expected.size());
  for (const auto& [name, numbers] : expected) {
    ASSERT_EQ(got.at(name).size(), numbers.size()) << name;
    double largest = 0, worst = 0;
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      largest = std::max(largest, std::abs(static_cast<double>(numbers[i])));
      worst =
          std::max(worst, std::abs(static_cast<double>(got.at(name)[i]) - static_cast<double>(numbers[i])));
    }
    EXPECT_LE(worst, tolerance * largest) << name;
  }
}

Steps serial_run(const MoETransformerConfig& config, int steps) {
  Steps run;
  test::run_ranks(Ranks::threads, 1, [&](Rank& rank) {
    run = steps_of(rank, {"one", {{"dp", 1}, {"ep", 1}, {"tp", 1}}}, config, steps);
  });
  return run;
}

MeshShape mesh_of(int dp, int ep, int tp) { return {{"dp", dp}, {"ep", ep}, {"tp", tp}}; }

// Each mesh has the losses, the routing, the gradients and the steps of one rank.
void expect_steps_of_one_rank(const MoETransformerConfig& config, const std::vector<Mesh>& meshes) {
  const Steps expected = serial_run(config, 3);
  for (const Mesh& how : meshes)
    test::run_ranks(Ranks::threads, how.shape.size(), [&](Rank& rank) {
      SCOPED_TRACE(std::string(how.name) + " " + to_string(how.shape));
      const Steps got = steps_of(rank, how, config, 3);
      for (std::size_t i = 0; i < expected.losses.size(); ++i) {
        EXPECT_NEAR(got.losses[i], expected.losses[i], 1e-6 * expected.losses[i]) << i;
        EXPECT_NEAR(got.norms[i], expected.norms[i], 2e-5 * expected.norms[i]) << i;
      }
      EXPECT_EQ(got.loads, expected.loads);
      expect_close(got.gradients, expected.gradients, 5e-6);
      expect_close(got.parameters, expected.parameters, 1e-3);  // AdamW divides small gradients
    });
}

TEST(MoEModel, EveryMeshHasTheLossesGradientsAndStepsOfOneRank) {
  expect_steps_of_one_rank(
      small(), {{"ep 2", mesh_of(1, 2, 1)},
                {"ep 4", mesh_of(1, 4, 1)},
                {"dp 2 ep 2", mesh_of(2, 2, 1)},
                {"dp 2 ep 2 tp 2", mesh_of(2, 2, 2)},
                {"tp 4 ep 2", mesh_of(1, 2, 4)},  // ranks share kv heads
                {"recomputed", mesh_of(2, 2, 1), DataForm::ddp, false, AcMode::full},
                {"fsdp ep 2", mesh_of(1, 2, 1), DataForm::fsdp},
                {"fsdp dp 2 ep 2", mesh_of(2, 2, 1), DataForm::fsdp},
                {"fsdp dp 2 ep 2 tp 2", mesh_of(2, 2, 2), DataForm::fsdp},
                {"fsdp recomputed", mesh_of(2, 2, 1), DataForm::fsdp, false, AcMode::full},
                {"hsdp", {{"replicate", 2}, {"dp", 2}, {"ep", 2}, {"tp", 1}}, DataForm::fsdp, true}});
}
// The rest of ep 1, 2, 4, 8 x dp x tp x fsdp up to 8 ranks.
TEST(MoEModel, EightExpertsOnEveryMeshOfUpToEightRanks) {
  std::vector<Mesh> meshes;
  for (const DataForm data : {DataForm::ddp, DataForm::fsdp})
    for (const MeshShape& shape : {mesh_of(1, 8, 1), mesh_of(2, 4, 1), mesh_of(4, 2, 1), mesh_of(8, 1, 1),
                                   mesh_of(1, 4, 2), mesh_of(1, 2, 2), mesh_of(2, 1, 2), mesh_of(4, 1, 2)})
      meshes.push_back({data == DataForm::ddp ? "ddp" : "fsdp", shape, data});
  meshes.push_back({"recomputed", mesh_of(1, 8, 1), DataForm::fsdp, false, AcMode::full});
  expect_steps_of_one_rank(small(8), meshes);
}

TEST(MoEModel, MicroBatchesAndUnevenExperts) {
  MoETransformerConfig config = small(5);
  config.router.aux_loss = 0;  // a product of shares and scores of a micro-batch
  config.router.z_loss = 0.05;
  const Steps expected = serial_run(config, 1);
  for (const Mesh& how : std::vector<Mesh>{{"ep 2", mesh_of(1, 2, 1)},
                                           {"ep 3", mesh_of(1, 3, 1)},
                                           {"fsdp dp 2 ep 2", mesh_of(2, 2, 1), DataForm::fsdp}})
    test::run_ranks(Ranks::threads, how.shape.size(), [&](Rank& rank) {
      SCOPED_TRACE(how.name);
      const Steps got = steps_of(rank, how, config, 1, how.shape.size("ep") == 2 ? 2 : 1);
      EXPECT_NEAR(got.losses[0], expected.losses[0], 2e-6 * expected.losses[0]);
      expect_close(got.gradients, expected.gradients, 5e-6);
    });
}

// Rows travel in bf16; scores, sums and losses are f32.
TEST(MoEModel, Bf16) {
  const MeshShape one = mesh_of(1, 1, 1);
  Steps expected, rounded;
  test::run_ranks(Ranks::threads, 1, [&](Rank& rank) {
    expected = steps_of(rank, {"f32", one}, small(), 1);
    rounded = steps_of(rank, {"bf16", one, DataForm::ddp, false, AcMode::none, DType::bf16}, small(), 1);
  });
  EXPECT_NE(rounded.losses, expected.losses);
  EXPECT_NEAR(rounded.losses[0], expected.losses[0], 1e-3 * expected.losses[0]);
  for (const DataForm data : {DataForm::ddp, DataForm::fsdp})
    test::run_ranks(Ranks::threads, 4, [&](Rank& rank) {
      const Steps got =
          steps_of(rank, {"bf16", mesh_of(2, 2, 1), data, false, AcMode::none, DType::bf16}, small(), 1);
      EXPECT_NEAR(got.losses[0], rounded.losses[0], 1e-5 * rounded.losses[0]);
      expect_close(got.gradients, rounded.gradients, 2e-2);  // a dx may round to the other side
    });
}

TEST(MoEModel, CheckpointsLoadOnOtherMeshes) {
  const test::TemporaryFolder folder;
  Values saved;
  double next_loss = 0;
  test::run_ranks(Ranks::threads, 4, [&](Rank& rank) {
    Training t(rank, {"saved", mesh_of(2, 2, 1), DataForm::fsdp}, small());
    for (int step = 0; step < 2; ++step) t.backward(), t.trainer.update(2e-3);
    t.trainer.save(folder.path());
    const Values all = t.whole_parameters();
    const double loss = t.backward().loss;
    if (rank.rank == 0) saved = all, next_loss = loss;
  });
  for (const Mesh& how : std::vector<Mesh>{{"ep 1", mesh_of(1, 1, 1)},
                                           {"ep 3", mesh_of(1, 3, 1)},
                                           {"ep 4", mesh_of(1, 4, 1)},
                                           {"fsdp ep 4", mesh_of(1, 4, 1), DataForm::fsdp},
                                           {"dp 2 tp 2", mesh_of(2, 1, 2)}})
    test::run_ranks(Ranks::threads, how.shape.size(), [&](Rank& rank) {
      SCOPED_TRACE(how.name);
      Training t(rank, how, small());
      t.trainer.load(folder.path());
      EXPECT_EQ(t.trainer.steps(), 2);
      EXPECT_EQ(t.whole_parameters(), saved);  // the same bits, biases of routers too
      EXPECT_NEAR(t.backward().loss, next_loss, 2e-6 * next_loss);
    });
}

TEST(MoEModel, ExpertsAreInitialisedByTheirGlobalNumber) {
  Values expected;
  test::run_ranks(Ranks::threads, 1, [&](Rank& rank) {
    expected = Training(rank, {"one", mesh_of(1, 1, 1)}, small()).whole_parameters();
  });
  test::run_ranks(Ranks::threads, 4, [&](Rank& rank) {
    Training t(rank, {"four", mesh_of(1, 4, 1)}, small());
    EXPECT_EQ(t.built.model->parameter("layers.0.mlp.experts.up_proj")->master().shape(), (Shape{1, 24, 32}));
    EXPECT_EQ(t.whole_parameters(), expected);
  });
}

// Losses, norms and parameters have the same bits after 50 steps, whatever the number of data and expert
// ranks.
TEST(MoEModel, ExactModeHasTheSameBitsOnEveryMesh) {
  MoETransformerConfig config = small(8);
  config.router.top_k = 3;  // a sum of two has one order
  config.router.capacity = Capacity::by_weight;
  config.router.capacity_factor = 1.1;
  constexpr int kSteps = 50;
  std::optional<Steps> expected;
  for (const Mesh& how : std::vector<Mesh>{{"one", mesh_of(1, 1, 1)},
                                           {"ep 2", mesh_of(1, 2, 1)},
                                           {"ep 4", mesh_of(1, 4, 1)},
                                           {"ep 8", mesh_of(1, 8, 1)},
                                           {"dp 2 ep 2", mesh_of(2, 2, 1)},
                                           {"dp 4 ep 2", mesh_of(4, 2, 1)},
                                           {"dp 4", mesh_of(4, 1, 1)},
                                           {"tp 2", mesh_of(1, 1, 2)},
                                           {"dp 2 ep 2 tp 2", mesh_of(2, 2, 2)},
                                           {"ep 2 tp 4", mesh_of(1, 2, 4)},
                                           {"fsdp dp 2 ep 2", mesh_of(2, 2, 1), DataForm::fsdp}}) {
    Mesh exact = how;
    exact.exact = Exact::yes;
    Steps first;
    test::run_ranks(Ranks::threads, how.shape.size(), [&](Rank& rank) {
      SCOPED_TRACE(how.name);
      const Steps got = steps_of(rank, exact, config, kSteps);
      if (rank.rank == 0) first = got;
      if (!expected) return;
      EXPECT_EQ(got.losses, expected->losses);
      EXPECT_EQ(got.norms, expected->norms);
      EXPECT_EQ(got.gradients, expected->gradients);
      EXPECT_EQ(got.parameters, expected->parameters);
    });
    if (!expected) expected = first;
  }
  EXPECT_LT(expected->losses.back(), expected->losses.front());
  // Without exact mode a bit differs: the comparison can fail.
  test::run_ranks(Ranks::threads, 4, [&](Rank& rank) {
    EXPECT_NE(steps_of(rank, {"dp 2 ep 2", mesh_of(2, 2, 1)}, config, 3).parameters, expected->parameters);
  });
}

// The rules of experts in exact mode, each on the mesh that needs it (exact_mutants_test.cpp).
TEST(MoEModel, ExactRulesOfExperts) {
  MoETransformerConfig config = small(8);
  config.router.top_k = 3;
  std::optional<Steps> expected;
  for (const Mesh& how : std::vector<Mesh>{{"one", mesh_of(1, 1, 1)},
                                           {"ep 2", mesh_of(1, 2, 1)},
                                           {"dp 2", mesh_of(2, 1, 1)},
                                           {"tp 2", mesh_of(1, 1, 2)}}) {
    Mesh exact = how;
    exact.exact = Exact::yes;
    Steps first;
    test::run_ranks(Ranks::threads, how.shape.size(), [&](Rank& rank) {
      const Steps got = steps_of(rank, exact, config, 2);
      if (rank.rank == 0) first = got;
      if (expected) {
        EXPECT_TRUE(got.losses == expected->losses && got.gradients == expected->gradients)
            << how.name << " has other bits";
      }
    });
    if (!expected) expected = first;
  }
}

// Ranks of other experts read rows of x and of dy where they lie, in every layer; with float8 the codes of x.
TEST(MoEModel, RowsAreReadInPlace) {
  const auto memories = [](Rank& rank, const Mesh& how, bool float8 = false) {
    MoETransformerConfig config = small();
    config.transformer.layers = 3;
    config.float8_dispatch = float8;
    Training t(rank, how, config);
    std::vector<Memory> of_x, of_dy;
    std::vector<HookHandle> hooks;
    const auto record = [&](Module& layer, Module::HookPoint point, std::vector<Memory>& to) {
      hooks.push_back(layer.add_hook(point, [&to](Module&, Tensors& tensors, Frame&) {
        to.push_back(tensors.at(0).storage().memory());
      }));
    };
    for (int i = 0; i < 3; ++i) {
      Module& layer = t.built.model->get("layers." + std::to_string(i) + ".mlp");
      record(layer, Module::HookPoint::pre_forward, of_x);
      record(layer, Module::HookPoint::pre_backward, of_dy);
    }
    t.backward();
    of_x.insert(of_x.end(), of_dy.begin(), of_dy.end());
    return of_x;
  };
  const auto all = [](std::size_t x, std::size_t dy, Memory memory_of_x, Memory memory_of_dy) {
    std::vector<Memory> expected(x, memory_of_x);
    expected.insert(expected.end(), dy, memory_of_dy);
    return expected;
  };
  const Memory shared = Memory::shared, local = Memory::local;
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    EXPECT_EQ(memories(rank, {"ep 2", mesh_of(1, 2, 1)}), all(3, 3, shared, shared));
    EXPECT_EQ(memories(rank, {"fsdp ep 2", mesh_of(1, 2, 1), DataForm::fsdp}), all(3, 3, shared, shared));
    EXPECT_EQ(memories(rank, {"bf16", mesh_of(1, 2, 1), DataForm::ddp, false, AcMode::none, DType::bf16}),
              all(3, 3, shared, shared));
    // a block runs again in backward
    EXPECT_EQ(memories(rank, {"recomputed", mesh_of(1, 2, 1), DataForm::ddp, false, AcMode::full}),
              all(6, 3, shared, shared));
    EXPECT_EQ(memories(rank, {"float8", mesh_of(1, 2, 1)}, true), all(3, 3, local, shared));
    EXPECT_EQ(memories(rank, {"dp 2", mesh_of(2, 1, 1)}), all(3, 3, local, local));
  });
}

// ---- experts that are modules of the program ----

Recipe recipe_of_modules() {
  Recipe recipe;
  recipe.name = "experts of a program";
  recipe.build = [] {
    auto model = std::make_unique<Sequential>();
    for (const char* name : {"0", "1"}) {
      MoEConfig config;
      config.dim = 12, config.experts = 5;
      config.router = {.top_k = 2, .aux_loss = 0.05};
      config.init = Normal{0.3};
      model->append(name, std::make_unique<Residual>(std::make_unique<MoE>(config, [] {
                      auto expert = std::make_unique<Sequential>();
                      expert->append("norm", std::make_unique<LayerNorm>(12));
                      expert->append("up", std::make_unique<Linear>(12, 16, true, Normal{0.3}));
                      expert->append("act", std::make_unique<GELU>());
                      expert->append("down", std::make_unique<Linear>(16, 12, false, Normal{0.3}));
                      return expert;
                    })));
    }
    return model;
  };
  recipe.loss = [] { return std::make_unique<MeanSquaredError>(); };
  recipe.blocks = {"*"};
  return recipe;
}

struct TrainingOfModules {
  TrainingOfModules(Rank& rank, const Mesh& how)
      : compute(rank.context),
        mesh(rank.group(), how.shape),
        built(build_parallel_model(recipe_of_modules(), mesh, compute, options_of(how))),
        trainer(built, compute, {.max_norm = 0.5}) {}
  double step() {
    const auto [first, own] = chunk_of(kBatch, built.data.size(), built.data.rank());
    const Tensor x(compute.context(), {own, 3, 12}), y(compute.context(), {own, 3, 12});
    const auto from = static_cast<std::uint64_t>((trainer.steps() * kBatch + first) * 36);
    RandomStream(5, "x").normal(from, x.count(), x.f32().data());
    for (std::size_t i = 0; i < y.f32().size(); ++i) y.f32()[i] = std::sin(2 * x.f32()[i]);
    const Batch batch{.inputs = {x}, .targets = {y}, .global_rows = kBatch};
    return trainer.step({&batch, 1}, 5e-3).loss;
  }
  Compute compute;
  DeviceMesh mesh;
  ParallelModel built;
  Trainer trainer;
};

Values whole_parameters(const ParallelModel& built) {
  Values all;
  for (Parameter* p : built.parameters()) {
    const Tensor t = full(p->master());
    all[p->path()].assign(t.f32().begin(), t.f32().end());
  }
  return all;
}

// The losses of one rank on every mesh, ddp and fsdp, recomputed or not, for five experts on two and three
// ranks; and a checkpoint of one mesh on the others.
TEST(MoEModel, ExpertsThatAreModules) {
  const test::TemporaryFolder folder;
  std::vector<double> expected;
  Values saved;
  test::run_ranks(Ranks::threads, 1, [&](Rank& rank) {
    TrainingOfModules t(rank, {"one", mesh_of(1, 1, 1)});
    EXPECT_EQ(t.built.model->parameter("1.branch.experts.up.weight")->global_shape(), (Shape{5, 16, 12}));
    for (int i = 0; i < 4; ++i) expected.push_back(t.step());
  });
  EXPECT_LT(expected.back(), expected.front());
  const std::vector<Mesh> meshes{{"ep 2", mesh_of(1, 2, 1)},
                                 {"ep 3", mesh_of(1, 3, 1)},
                                 {"dp 2 ep 2", mesh_of(2, 2, 1)},
                                 {"recomputed", mesh_of(1, 2, 1), DataForm::ddp, false, AcMode::full},
                                 {"fsdp ep 2", mesh_of(1, 2, 1), DataForm::fsdp},
                                 {"fsdp dp 2 ep 2", mesh_of(2, 2, 1), DataForm::fsdp, false, AcMode::full}};
  for (const Mesh& how : meshes)
    test::run_ranks(Ranks::threads, how.shape.size(), [&](Rank& rank) {
      SCOPED_TRACE(how.name);
      TrainingOfModules t(rank, how);
      for (int i = 0; i < 2; ++i) EXPECT_NEAR(t.step(), expected[static_cast<std::size_t>(i)], 1e-5) << i;
      if (how.data != DataForm::fsdp || how.shape.size() != 4) return;
      t.trainer.save(folder.path());
      const Values all = whole_parameters(t.built);
      if (rank.rank == 0) saved = all;
    });
  for (const Mesh& how : {Mesh{"one", mesh_of(1, 1, 1)}, meshes[1], meshes[4]})
    test::run_ranks(Ranks::threads, how.shape.size(), [&](Rank& rank) {
      SCOPED_TRACE(how.name);
      TrainingOfModules t(rank, how);
      t.trainer.load(folder.path());
      EXPECT_EQ(whole_parameters(t.built), saved);
      for (std::size_t i = 2; i < 4; ++i) EXPECT_NEAR(t.step(), expected[i], 1e-5) << i;
    });
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    Compute compute(rank.context);
    const auto refused = [&](const Mesh& how) {
      const DeviceMesh mesh(rank.group(), how.shape);
      Recipe recipe = recipe_of_modules();
      recipe.loss = [] { return std::make_unique<CrossEntropy>(); };
      return test::error_text(ErrorCode::bad_argument, [&] {
        return build_parallel_model(recipe, mesh, compute, options_of(how)).exact;
      });
    };
    Mesh exact{"exact", mesh_of(1, 2, 1)};
    exact.exact = Exact::yes;
    EXPECT_THAT(refused(exact), ::testing::HasSubstr("exact: \"0.branch.experts\" is of kind"));
  });
}

TEST(MoEModel, RefusesByName) {
  const auto check = [](auto change) {
    MoETransformerConfig c = small();
    change(c);
    return test::error_text(ErrorCode::bad_argument, [&] { return c.check(), 0; });
  };
  EXPECT_EQ(check([](auto& c) { c.every = 3; }), "moe: every is 3; expected 1 to 2 (layers)");
  EXPECT_EQ(check([](auto& c) { c.experts = 0; }), "moe: experts is 0; expected at least 1");
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    Compute compute(rank.context);
    const DeviceMesh mesh(rank.group(), mesh_of(1, 2, 1));
    const auto build = [&](auto change, std::int64_t experts = 4) {
      BuildOptions options = options_of({"", mesh_of(1, 2, 1)});
      change(options);
      return test::error_text(ErrorCode::bad_argument, [&] {
        return build_parallel_model(moe_recipe(small(experts)), mesh, compute, options).exact;
      });
    };
    EXPECT_EQ(build([](auto& o) { o.tensor.sequence_parallel = true; }),
              "build_parallel_model: sequence_parallel with a mixture of experts; expected false: tokens are "
              "routed "
              "with their whole samples on one rank");
    EXPECT_EQ(build([](auto& o) { o.experts.uneven = false; }, 5),
              "apply_expert_parallel: \"layers.0.mlp\" has 5 experts; they do not divide into ep=2 (5 = 2 x "
              "2 + 1); "
              "uneven = true allows that");
    BuildOptions dense = options_of({"", mesh_of(1, 2, 1)});
    EXPECT_EQ(test::error_text(
                  ErrorCode::bad_argument,
                  [&] { return build_parallel_model(small().transformer, mesh, compute, dense).exact; }),
              "apply_expert_parallel: the model has no mixture of experts");
    dense.expert_axis = {};
    EXPECT_EQ(
        test::error_text(
            ErrorCode::bad_argument,
            [&] { return build_parallel_model(moe_recipe(small()), mesh, compute, dense).exact; }),
        "build_parallel_model: experts.uneven is true, but expert_axis names no axis; expected both, or "
        "neither");
    MoETransformer model(small());
    apply_expert_parallel(model, mesh["ep"]);
    EXPECT_EQ(test::error_text(ErrorCode::bad_argument,
                               [&] { return fully_shard(model, mesh["dp"], {.cut_already = mesh["ep"]}); }),
              "fully_shard: options.cut_already is ep; expected one of several axes of axes.shard, dp");
    EXPECT_EQ(test::error_text(ErrorCode::layout,
                               [&] {
                                 return fully_shard(model, mesh[{"dp", "ep"}]);
                               }),
              "fully_shard: \"layers.0.mlp.experts.gate_proj\" is Shard(0) on ep=2; expected Replicate");
  });
}

}  // namespace
}  // namespace weft::moe_model_test
