// The Trainer on a pipeline: bits, norm, evaluation and checkpoints do not depend on the number of stages.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <random>

#include "support/errors.hpp"
#include "support/run_ranks.hpp"
#include "support/temporary_folder.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/models/from_json.hpp"
#include "weft/models/moe_transformer.hpp"
#include "weft/models/trainer.hpp"
#include "weft/train/checkpoint.hpp"

namespace weft::models_pipeline_test {
namespace {

using test::error_text;
using test::Rank;
using test::Ranks;
using ::testing::HasSubstr;

constexpr std::int64_t kSequence = 6, kVocab = 12;

TransformerConfig config() {
  return {.dim = 16, .layers = 4, .heads = 4, .kv_heads = 2, .ffn_hidden = 24, .vocab = kVocab, .max_seq = 8};
}

// Micro-batches of 4 rows over all data ranks, and a last one of 2; the same on every mesh.
class Data {
 public:
  Data(const ParallelModel& model, std::int64_t step, int micro_batches) {
    std::mt19937 random(static_cast<unsigned>(step + 1));
    const int data = model.data.size(), mine = model.data.rank();
    for (int m = 0; m < micro_batches; ++m) {
      const std::int64_t global = m > 0 && m + 1 == micro_batches ? 2 : 4, rows = global / data;
      std::vector<std::int64_t> numbers;
      for (std::int64_t i = 0; i < 2 * global * kSequence; ++i)
        numbers.push_back(static_cast<std::int64_t>(random() % kVocab));
      const auto begin = numbers.begin() + mine * rows * kSequence;
      tokens_.emplace_back(begin, begin + rows * kSequence);
      labels_.emplace_back(begin + global * kSequence, begin + (global + rows) * kSequence);
      if (mine == 0) labels_.back()[0] = CrossEntropy::kIgnore;
      rows_.push_back(rows);
    }
  }
  std::vector<TokenBatch> batches() const {
    std::vector<TokenBatch> all;
    for (std::size_t m = 0; m < rows_.size(); ++m)
      all.push_back({tokens_[m].data(), labels_[m].data(), rows_[m], kSequence});
    return all;
  }

 private:
  std::vector<std::vector<std::int64_t>> tokens_, labels_;
  std::vector<std::int64_t> rows_;
};

using Bits = std::map<std::string, std::vector<float>>;
struct Outcome {
  std::vector<double> losses, norms, evaluations;
  Bits gradients, parameters;  // of this rank
};

// A mesh pp x dp x ep x tp, and the schedule; without a kind the model is no pipeline, and pp is 1.
struct Form {
  int pp = 1, dp = 1, tp = 1;
  std::optional<PipelineKind> kind = {};
  int ep = 1;
  int ranks() const { return pp * dp * ep * tp; }
};

Recipe whole_recipe() { return transformer_recipe(config()); }

using Change = std::function<void(BuildOptions&)>;

struct TrainingRun {
  TrainingRun(Rank& rank, const Form& form, const Trainer::Options& options,
              const Recipe& of = whole_recipe(), const Change& change = {})
      : group(rank.group().split(rank.rank < form.ranks() ? 0 : 1)),
        compute(rank.context),
        mesh(group, {{"pp", form.pp}, {"dp", form.dp}, {"ep", form.ep}, {"tp", form.tp}}) {
    BuildOptions build{.seed = 3};
    if (form.kind) {
      build.pipeline_axis = "pp";
      build.pipeline.kind = *form.kind;
      if (*form.kind == PipelineKind::interleaved) build.pipeline.stages_per_rank = form.pp > 2 ? 2 : 3;
    }
    if (change) change(build);
    model.emplace(build_parallel_model(of, mesh, compute, build));
    trainer.emplace(*model, compute, options);
  }
  Outcome steps(int micro_batches, int count = 2) {
    Outcome o;
    for (int step = 0; step < count; ++step) {
      const Data data(*model, trainer->steps(), micro_batches);
      o.losses.push_back(trainer->backward(data.batches()).loss);
      o.gradients.clear();
      for (const Gradient& g : trainer->gradients()) {
        const auto* const at = reinterpret_cast<const float*>(g.data.data);
        o.gradients[std::string(g.name)].assign(at, at + g.data.count());
      }
      o.norms.push_back(trainer->update(0.1).grad_norm);
    }
    o.evaluations.push_back(trainer->evaluate(Data(*model, 99, 3).batches()).loss);
    for (const Parameter* p : model->parameters())
      o.parameters[p->path()].assign(p->master().f32().begin(), p->master().f32().end());
    return o;
  }

  ProcessGroup group;
  Compute compute;
  DeviceMesh mesh;
  std::optional<ParallelModel> model;
  std::optional<Trainer> trainer;
};

Trainer::Options sgd(double max_norm) {
  return {.optimizer = SGD::Options{.momentum = 0.5}, .max_norm = max_norm, .seed = 4};
}

// The tensors of this rank are those of the rank with the same coordinates on the other axes of a mesh
// without stages. `references`: by rank of that mesh.
void expect_same(const Outcome& got, const std::vector<Outcome>& references, const TrainingRun& run) {
  const auto tp = run.mesh.coordinate("tp"), ep = run.mesh.coordinate("ep"), dp = run.mesh.coordinate("dp");
  const Outcome& reference =
      references[static_cast<std::size_t>((dp * run.mesh.size("ep") + ep) * run.mesh.size("tp") + tp)];
  EXPECT_EQ(got.losses, reference.losses);
  EXPECT_EQ(got.norms, reference.norms);
  EXPECT_EQ(got.evaluations, reference.evaluations);
  for (const auto& [name, bits] : got.gradients) EXPECT_EQ(bits, reference.gradients.at(name)) << name;
  for (const auto& [name, bits] : got.parameters) EXPECT_EQ(bits, reference.parameters.at(name)) << name;
}

std::vector<Outcome> outcomes(const Form& form, double max_norm, int micro_batches,
                              const Recipe& of = whole_recipe(), const Change& change = {}) {
  std::vector<Outcome> all(static_cast<std::size_t>(form.ranks()));
  test::run_ranks(Ranks::threads, form.ranks(), [&](Rank& rank) {
    all[static_cast<std::size_t>(rank.rank)] =
        TrainingRun(rank, form, sgd(max_norm), of, change).steps(micro_batches);
  });
  return all;
}

constexpr PipelineKind kTraining[] = {PipelineKind::gpipe, PipelineKind::one_f_one_b,
                                      PipelineKind::interleaved, PipelineKind::zero_bubble};

// The bits of all numbers of stages and all schedules are those of one stage, on this mesh of the other axes.
void expect_bits_of_one_stage(int dp, int tp, int micro_batches, const Recipe& of = whole_recipe(),
                              const Change& change = {}, int ep = 1) {
  const std::vector<Outcome> one =
      outcomes({1, dp, tp, PipelineKind::one_f_one_b, ep}, 0.5, micro_batches, of, change);
  for (const int pp : {1, 2, 3, 4})
    for (const PipelineKind kind : kTraining) {
      const Form form{pp, dp, tp, kind, ep};
      if (form.ranks() > 8 || (kind == PipelineKind::interleaved && pp == 4)) continue;
      SCOPED_TRACE(fmt::format("{} x {} x {}, {}, {} micro-batches", pp, dp, tp, name(kind), micro_batches));
      test::run_ranks(Ranks::threads, form.ranks(), [&](Rank& rank) {
        TrainingRun run(rank, form, sgd(0.5), of, change);
        expect_same(run.steps(micro_batches), one, run);
      });
    }
}

// pp 1 to 4, with dp 1 and 2, tp 1 and 2, up to 8 ranks, 1 to 8 micro-batches (fewer than stages, too, and an
// uneven last one), all schedules. Norm and clip included: the pipeline of one stage is the reference.
TEST(ModelsPipeline, EveryMeshHasTheBitsOfOneStage) {
  for (const auto& [dp, tp] : {std::pair{1, 1}, {2, 1}, {1, 2}, {2, 2}})
    for (int micro_batches = 1; micro_batches <= 8; ++micro_batches)
      expect_bits_of_one_stage(dp, tp, micro_batches);
}

Recipe tied_recipe() {
  TransformerConfig c = config();
  c.tied = true;
  return transformer_recipe(c);
}

// The gradients of the two uses of a tied weight are two sums, also on one stage; norm and clip count the
// weight once.
TEST(ModelsPipeline, TiedWeightsHaveTheBitsOfOneStage) {
  for (const auto& [dp, tp] : {std::pair{1, 1}, {2, 1}, {1, 2}})
    for (const int micro_batches : {1, 3}) expect_bits_of_one_stage(dp, tp, micro_batches, tied_recipe());
  expect_bits_of_one_stage(1, 2, 3, tied_recipe(),
                           [](BuildOptions& o) { o.tensor.vocab = VocabSplit::shard; });
}

// A model that is no pipeline adds the gradients of both uses into one sum, in another order.
TEST(ModelsPipeline, TiedWeightsAreThoseOfATrainerWithoutAPipeline) {
  const Outcome plain = outcomes({1, 1, 1}, 0.5, 3, tied_recipe())[0];
  test::run_ranks(Ranks::threads, 3, [&](Rank& rank) {
    const Form form{3, 1, 1, PipelineKind::one_f_one_b};
    TrainingRun run(rank, form, sgd(0.5), tied_recipe());
    const Outcome got = run.steps(3);
    const std::string weight = "token_embedding.embedding.weight";
    EXPECT_EQ(got.parameters.count(weight), rank.rank == 1 ? 0u : 1u);
    EXPECT_EQ(got.parameters.count("output_head.proj.weight"), 0u);
    EXPECT_EQ(got.losses[0], plain.losses[0]);
    EXPECT_NEAR(got.losses[1], plain.losses[1], 1e-6 * plain.losses[1]);
    EXPECT_NEAR(got.norms[0], plain.norms[0], 1e-6 * plain.norms[0]);
    for (const auto& [name, values] : got.parameters)
      for (std::size_t i = 0; i < values.size(); ++i)
        ASSERT_NEAR(values[i], plain.parameters.at(name)[i], 1e-6) << name;
  });
}

// Inside of stages tensors are cut along the sequence, and whole where they cross.
TEST(ModelsPipeline, SequenceParallelIsInsideOfStages) {
  const Change change = [](BuildOptions& o) { o.tensor.sequence_parallel = true; };
  expect_bits_of_one_stage(1, 2, 3, whole_recipe(), change);
  expect_bits_of_one_stage(2, 2, 1, whole_recipe(), change);
  expect_bits_of_one_stage(1, 2, 2, tied_recipe(), change);
  const std::vector<Outcome> whole = outcomes({1, 1, 2, PipelineKind::gpipe}, 0.5, 3);
  const std::vector<Outcome> cut = outcomes({1, 1, 2, PipelineKind::gpipe}, 0.5, 3, whole_recipe(), change);
  for (std::size_t i = 0; i < 2; ++i) EXPECT_NEAR(cut[0].losses[i], whole[0].losses[i], 1e-6);
}

// With and without keeping the weights, over data and tensor ranks, and in copies.
TEST(ModelsPipeline, StagesAreShardedOverDataRanks) {
  for (const bool keep : {true, false}) {
    const Change change = [&](BuildOptions& o) {
      o.data = DataForm::fsdp;
      o.pipeline.keep_weights = keep;
    };
    expect_bits_of_one_stage(2, 1, 3, whole_recipe(), change);
    expect_bits_of_one_stage(2, 2, 2, whole_recipe(), change);
    expect_bits_of_one_stage(2, 1, 2, tied_recipe(), change);
    const std::vector<Outcome> copies = outcomes({1, 2, 1, PipelineKind::gpipe}, 0.5, 3),
                               parts =
                                   outcomes({1, 2, 1, PipelineKind::gpipe}, 0.5, 3, whole_recipe(), change);
    for (std::size_t i = 0; i < 2; ++i) {
      EXPECT_NEAR(parts[0].losses[i], copies[0].losses[i], 1e-6);
      EXPECT_NEAR(parts[0].norms[i], copies[0].norms[i], 1e-6);
    }
  }
}

// A stage is gathered once in a step, or for each pass; between steps nothing is.
TEST(ModelsPipeline, AStageIsGatheredOnceInAStep) {
  for (const bool keep : {true, false})
    test::run_ranks(Ranks::threads, 4, [&](Rank& rank) {
      TrainingRun run(rank, {2, 2, 1, PipelineKind::gpipe}, sgd(0.5), whole_recipe(), [&](BuildOptions& o) {
        o.data = DataForm::fsdp;
        o.pipeline.keep_weights = keep;
      });
      const auto stage = static_cast<std::size_t>(run.mesh.coordinate("pp"));
      const std::vector<std::string>& modules = run.model->stage_paths[stage];
      std::vector<int> gathered;
      const HookHandle hook = run.model->model->get(modules[0])
                                  .add_hook(Module::HookPoint::pre_forward, [&](Module&, Tensors&, Frame&) {
                                    gathered.push_back(run.model->sharded->gathered_blocks());
                                  });
      const Data data(*run.model, 0, 3);
      run.trainer->step(data.batches(), 0.1);
      const int all = static_cast<int>(modules.size());
      EXPECT_THAT(gathered, ::testing::ElementsAre(1, keep ? all : 1, keep ? all : 1));
      EXPECT_EQ(run.model->sharded->gathered_blocks(), 0);
      const Data other(*run.model, 1, 2);
      run.trainer->evaluate(other.batches());
      EXPECT_EQ(run.model->sharded->gathered_blocks(), 0);
    });
}

// Experts are divided over an axis inside of stages, and each stage's routers count for themselves; the
// reports are those of all stages, on all ranks.
TEST(ModelsPipeline, ExpertsAreInsideOfStages) {
  MoETransformerConfig c;
  c.transformer = config();
  c.experts = 4;
  c.expert_hidden = 8;
  c.every = 2;
  c.router.top_k = 2;
  c.router.aux_loss = 0.01;
  c.router.bias = RouterBias::selects;
  const Recipe of = moe_recipe(c);
  const Change experts = [](BuildOptions& o) { o.expert_axis = "ep"; };
  expect_bits_of_one_stage(1, 1, 3, of);
  expect_bits_of_one_stage(1, 1, 3, of, experts, 2);
  expect_bits_of_one_stage(
      1, 1, 2, of,
      [&](BuildOptions& o) {
        experts(o);
        o.data = DataForm::fsdp;
      },
      2);
  std::vector<LayerBalance> one;
  for (const Form& form :
       {Form{1, 1, 1, PipelineKind::gpipe, 2}, Form{3, 1, 1, PipelineKind::zero_bubble, 2}})
    test::run_ranks(Ranks::threads, form.ranks(), [&](Rank& rank) {
      TrainingRun run(rank, form, sgd(0.5), of, experts);
      run.steps(3, 1);
      const std::vector<LayerBalance> all = expert_balance(*run.model);
      if (form.pp == 1 && rank.rank == 0) one = all;
      ASSERT_EQ(all.size(), 2U);
      EXPECT_EQ(all[1].path, "layers.3.mlp");
      for (std::size_t i = 0; form.pp > 1 && i < all.size(); ++i) {
        EXPECT_EQ(all[i].path, one[i].path);
        EXPECT_EQ(all[i].report.counts, one[i].report.counts);
        EXPECT_EQ(all[i].report.assignments, one[i].report.assignments);
        EXPECT_EQ(all[i].report.aux_loss, one[i].report.aux_loss);
        EXPECT_GT(all[i].report.aux_loss, 0);
      }
    });
}

// The layers of each stage, with scales of the whole weights; a stage may have none.
TEST(ModelsPipeline, Float8IsInsideOfStages) {
  TransformerConfig c = config();
  c.ffn_hidden = 32;
  const Recipe of = transformer_recipe(c);
  for (const Float8Recipe recipe : {Float8Recipe::tensorwise, Float8Recipe::rowwise}) {
    const Change change = [&](BuildOptions& o) {
      o.float8 = recipe;
      o.float8_options.filter.least_elements = 0;
    };
    expect_bits_of_one_stage(1, 2, 3, of, change);
    expect_bits_of_one_stage(2, 1, 2, of, [&](BuildOptions& o) {
      change(o);
      o.data = DataForm::fsdp;
    });
    const Form two{2, 1, 1, PipelineKind::zero_bubble};
    const std::vector<Outcome> plain = outcomes({1, 1, 1}, 0, 3, of, change),
                               wide = outcomes({1, 1, 1}, 0, 3, of);
    EXPECT_NE(plain[0].losses, wide[0].losses);
    test::run_ranks(Ranks::threads, two.ranks(), [&](Rank& rank) {
      const Outcome got = TrainingRun(rank, two, sgd(0), of, change).steps(3);
      EXPECT_EQ(got.losses, plain[0].losses);
      for (const auto& [name, bits] : got.parameters) EXPECT_EQ(bits, plain[0].parameters.at(name)) << name;
    });
  }
}

// Float8 layers name no tensor in a pipeline: the norm names the ranks.
TEST(ModelsPipeline, ValuesOfFloat8LayersThatAreNotFiniteAreFoundByTheNorm) {
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    TransformerConfig c = config();
    c.ffn_hidden = 32;
    TrainingRun run(rank, {2, 1, 1, PipelineKind::gpipe}, sgd(0.5), transformer_recipe(c),
                    [](BuildOptions& o) {
                      o.float8 = Float8Recipe::rowwise;
                      o.float8_options.filter.least_elements = 0;
                    });
    if (rank.rank == 1)
      run.model->model->parameter("layers.3.mlp.up_proj.weight")->write_master().f32()[0] =
          std::numeric_limits<float>::infinity();
    const Data data(*run.model, 0, 2);
    const Error e = test::error_of([&] { run.trainer->step(data.batches(), 0.1); });
    EXPECT_THAT(e.what(), HasSubstr("gradients are not finite on rank"));
  });
}

// Parts of a model, whose root is not run.
TEST(ModelsPipeline, WhatIsShardedAloneIsABlock) {
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", 2}});
    Transformer model(config());
    EXPECT_EQ(error_text([&] {
                fully_shard(model, mesh, {.blocks = {"layers.*"}, .only = {"layers.1", "norm"}});
              }),
              "bad_argument: fully_shard: options.only: \"norm.weight\" is in no block, and the root is not "
              "run");
    const auto parts =
        fully_shard(model, mesh, {.blocks = {"layers.*", "norm"}, .only = {"layers.1", "norm"}});
    EXPECT_TRUE(is_shard(model.parameter("layers.1.mlp.up_proj.weight")->layout()->placements[0]));
    EXPECT_EQ(model.parameter("layers.0.mlp.up_proj.weight")->layout(), nullptr);
  });
}

TEST(ModelsPipeline, BlocksThatRunAgainHaveTheBitsOfThoseThatDoNot) {
  const std::vector<Outcome> one = outcomes({1, 1, 2, PipelineKind::one_f_one_b}, 0.5, 3);
  for (const AcMode mode : {AcMode::full, AcMode::selective})
    for (const PipelineKind kind : kTraining) {
      const Form form{2, 1, 2, kind};
      test::run_ranks(Ranks::threads, form.ranks(), [&](Rank& rank) {
        TrainingRun run(rank, form, sgd(0.5), whole_recipe(), [&](BuildOptions& o) { o.ac.mode = mode; });
        expect_same(run.steps(3), one, run);
      });
    }
}

// In exact mode the bits are those of one rank without a pipeline, on every mesh.
TEST(ModelsPipeline, ExactModeHasTheBitsOfOneRank) {
  const Change change = [](BuildOptions& o) { o.exact = Exact::yes; };
  const auto whole_of = [&](Rank& rank, const Form& form, int micro_batches, bool sequence) {
    TrainingRun run(rank, form, sgd(0.5), whole_recipe(), [&](BuildOptions& o) {
      change(o);
      o.tensor.sequence_parallel = sequence;
    });
    Outcome o;
    for (int step = 0; step < 2; ++step) {
      const Data data(*run.model, step, micro_batches + 1);
      std::vector<TokenBatch> batches = data.batches();
      batches.pop_back();  // of 2 rows
      const Trainer::Result r = run.trainer->step(batches, 0.1);
      o.losses.push_back(r.loss);
      o.norms.push_back(r.grad_norm);
    }
    for (const Parameter* p : run.model->parameters()) {
      const Tensor whole = form.ranks() == 1 ? p->master() : full(p->master());
      o.parameters[p->path()].assign(whole.f32().begin(), whole.f32().end());
    }
    return o;
  };
  for (const int micro_batches : {1, 2, 4}) {
    Outcome one;
    test::run_ranks(Ranks::threads, 1, [&](Rank& rank) {
      one = whole_of(rank, {1, 1, 1}, micro_batches, false);
    });
    for (const Form& form :
         {Form{1, 1, 1, PipelineKind::gpipe}, Form{3, 1, 1, PipelineKind::interleaved},
          Form{2, 2, 1, PipelineKind::zero_bubble}, Form{3, 1, 2, PipelineKind::one_f_one_b},
          Form{2, 2, 2, PipelineKind::one_f_one_b}})
      test::run_ranks(Ranks::threads, form.ranks(), [&](Rank& rank) {
        SCOPED_TRACE(fmt::format("{} x {} x {}, {} micro-batches", form.pp, form.dp, form.tp, micro_batches));
        const Outcome got = whole_of(rank, form, micro_batches, form.tp > 1 && form.dp == 1);
        EXPECT_EQ(got.losses, one.losses);
        EXPECT_EQ(got.norms, one.norms);
        for (const auto& [name, bits] : got.parameters) EXPECT_EQ(bits, one.parameters.at(name)) << name;
      });
  }
}

// Without clip a model that is no pipeline has the same bits; its norm is summed in another way.
TEST(ModelsPipeline, HasTheBitsOfATrainerWithoutAPipeline) {
  for (const auto& [dp, tp] : {std::pair{1, 1}, {2, 2}}) {
    std::vector<Outcome> plain = outcomes({1, dp, tp}, 0, 3);
    const Form form{2, dp, tp, PipelineKind::zero_bubble};
    test::run_ranks(Ranks::threads, form.ranks(), [&](Rank& rank) {
      TrainingRun run(rank, form, sgd(0));
      Outcome got = run.steps(3);
      for (std::size_t i = 0; i < got.norms.size(); ++i)
        EXPECT_NEAR(got.norms[i], plain[0].norms[i], 1e-6 * plain[0].norms[i]);
      std::vector<Outcome> references = plain;
      for (Outcome& o : references) o.norms = got.norms;
      expect_same(got, references, run);
    });
  }
}

// --- checkpoints ---

// Saved on the pipeline after two steps, and loaded on other meshes, which then continue with the same
// bits: other numbers of stages, and no pipeline at all; also in the opposite direction.
TEST(ModelsPipeline, CheckpointsAreThoseOfAnyMesh) {
  const test::TemporaryFolder folder;
  const auto adamw = [] {
    return Trainer::Options{.max_norm = 0, .seed = 4, .ema = Ema::Options{.decay = 0.9}};
  };
  const Form four{4, 1, 1, PipelineKind::zero_bubble}, plain{1, 1, 1};
  Outcome after;
  test::run_ranks(Ranks::threads, 1, [&](Rank& rank) {
    TrainingRun run(rank, plain, adamw());
    run.steps(3);
    run.trainer->save(folder / "plain");
    after = run.steps(3);
  });
  const auto expect_after = [&](Outcome got) {
    EXPECT_EQ(got.losses, after.losses);
    EXPECT_EQ(got.evaluations, after.evaluations);
    for (const auto& [name, bits] : got.parameters) EXPECT_EQ(bits, after.parameters.at(name)) << name;
  };
  test::run_ranks(Ranks::threads, 4, [&](Rank& rank) {
    TrainingRun run(rank, four, adamw());
    run.steps(3);
    run.trainer->save(folder / "four", {{"note", "four stages"}});
    expect_after(run.steps(3));
  });
  for (const char* saved : {"plain", "four"})
    for (const Form& form : {plain, four, Form{1, 1, 1, PipelineKind::gpipe},
                             Form{2, 1, 1, PipelineKind::gpipe}, Form{3, 1, 1, PipelineKind::interleaved}}) {
      SCOPED_TRACE(fmt::format("{}, loaded on {} stages", saved, form.pp));
      test::run_ranks(Ranks::threads, form.ranks(), [&](Rank& rank) {
        TrainingRun run(rank, form, adamw());
        const CheckpointInfo info = run.trainer->load(folder / saved);
        EXPECT_EQ(info.step, 2);
        EXPECT_EQ(info.extra.count("note"), saved == std::string("four") ? 1u : 0u);
        EXPECT_EQ(run.trainer->steps(), 2);
        expect_after(run.steps(3));
      });
    }
}

// The file has the weight once, and every stage that uses it is given it.
TEST(ModelsPipeline, CheckpointsHaveATiedWeightOnce) {
  const test::TemporaryFolder folder;
  const auto adamw = [] { return Trainer::Options{.seed = 4, .ema = Ema::Options{.decay = 0.9}}; };
  const Form four{4, 1, 1, PipelineKind::zero_bubble};
  Outcome loaded, after;
  test::run_ranks(Ranks::threads, 1, [&](Rank& rank) {
    TrainingRun run(rank, {1, 1, 1, PipelineKind::gpipe}, adamw(), tied_recipe());
    loaded = run.steps(3);
    after = run.steps(3);
  });
  test::run_ranks(Ranks::threads, 4, [&](Rank& rank) {
    TrainingRun run(rank, four, adamw(), tied_recipe());
    run.steps(3);
    run.trainer->save(folder / "four");
  });
  for (const Form& form :
       {Form{1, 1, 1}, Form{1, 1, 1, PipelineKind::gpipe}, Form{1, 2, 2}, Form{2, 1, 1, PipelineKind::gpipe},
        Form{3, 1, 1, PipelineKind::interleaved}, four, Form{2, 2, 2, PipelineKind::one_f_one_b}})
    test::run_ranks(Ranks::threads, form.ranks(), [&](Rank& rank) {
      SCOPED_TRACE(fmt::format("loaded on {} x {} x {}", form.pp, form.dp, form.tp));
      TrainingRun run(rank, form, adamw(), tied_recipe());
      run.trainer->load(folder / "four");
      for (const Parameter* p : run.model->parameters()) {
        const Tensor whole = form.ranks() == 1 ? p->master() : full(p->master());
        EXPECT_THAT(whole.f32(), ::testing::ElementsAreArray(loaded.parameters.at(p->path()))) << p->path();
      }
      if (!form.kind || form.dp > 1) return;
      const Outcome got = run.steps(3);
      EXPECT_EQ(got.losses, after.losses);
      EXPECT_EQ(got.evaluations, after.evaluations);
      for (const auto& [name, bits] : got.parameters) EXPECT_EQ(bits, after.parameters.at(name)) << name;
    });
}

// Written while the training goes on; of stages that are divided over data ranks, too.
TEST(ModelsPipeline, SavesInTheBackground) {
  for (const DataForm data : {DataForm::ddp, DataForm::fsdp}) {
    const test::TemporaryFolder folder;
    const Change change = [&](BuildOptions& o) { o.data = data; };
    std::map<std::string, std::vector<float>> saved;
    std::mutex mutex;
    test::run_ranks(Ranks::threads, 4, [&](Rank& rank) {
      TrainingRun run(rank, {2, 2, 1, PipelineKind::one_f_one_b}, {.seed = 4}, tied_recipe(), change);
      run.steps(2, 1);
      AsyncCheckpoint saves(run.mesh);
      EXPECT_TRUE(run.trainer->save(saves, folder / "run"));
      for (const Parameter* p : run.model->parameters()) {
        const Tensor whole = full(p->master());
        const std::lock_guard lock(mutex);
        saved[p->path()].assign(whole.f32().begin(), whole.f32().end());
      }
      run.steps(2, 1);
      saves.wait();
    });
    test::run_ranks(Ranks::threads, 1, [&](Rank& rank) {
      TrainingRun run(rank, {1, 1, 1}, {.seed = 4}, tied_recipe());
      run.trainer->load(folder / "run");
      EXPECT_EQ(run.trainer->steps(), 1);
      for (const Parameter* p : run.model->parameters())
        EXPECT_THAT(p->master().f32(), ::testing::ElementsAreArray(saved.at(p->path()))) << p->path();
    });
  }
}

// An error of one rank alone, which may come before the ranks list the tensors of all stages together.
TEST(ModelsPipeline, AnErrorOfACheckpointOnOneRankIsToldToAll) {
  const test::TemporaryFolder folder;
  const Form form{3, 1, 2, PipelineKind::one_f_one_b};
  test::run_ranks(Ranks::threads, form.ranks(), [&](Rank& rank) {
    const bool alone = rank.rank == 2;  // of the second stage
    TrainingRun run(rank, form, {.seed = 4});
    run.steps(2, 1);
    run.trainer->save(folder / "run");
    const auto expect_told = [&](const std::string& text, const std::function<void()>& action) {
      const auto began = Clock::now();
      const std::string got = error_text(action);
      EXPECT_LT(Clock::now() - began, std::chrono::seconds(10));
      EXPECT_THAT(got, HasSubstr(text));
      EXPECT_EQ(got.find("rank 2 failed") == std::string::npos, alone) << got;
    };
    expect_told("is no checkpoint on this rank",
                [&] { run.trainer->load(alone ? folder / "none" / "run" : folder / "run"); });
    AsyncCheckpoint saves(run.mesh);
    const std::filesystem::path of_rank = alone ? std::filesystem::path() : folder / "again";
    expect_told("directory is empty", [&] { run.trainer->save(of_rank); });
    expect_told("directory is empty", [&] { run.trainer->save(saves, of_rank); });
    std::vector<Parameter*> parameters = run.model->parameters();
    if (alone) parameters.push_back(parameters[0]);
    const DeviceMesh stages = run.mesh["pp"];
    expect_told("two parameters have the path",
                [&] { save_stages(folder / "again", stages, 1, parameters, {}, {}); });
    expect_told("two parameters have the path",
                [&] { start_save_stages(saves, folder / "again", stages, 1, parameters, {}, {}); });
    expect_told("two parameters have the path",
                [&] { load_stages(folder / "run", stages, parameters, {}, {}); });
    run.trainer->save(saves, folder / "again");  // nothing waits any more
    saves.wait();
    EXPECT_EQ(run.trainer->load(folder / "again").step, 1);
  });
}

// Stages that are cut over tensor ranks, and copied over data ranks.
TEST(ModelsPipeline, CheckpointsOfCutStagesLoadOnOtherMeshes) {
  const test::TemporaryFolder folder;
  const Form saved{2, 2, 2, PipelineKind::one_f_one_b};
  std::map<std::string, std::vector<float>> wholes;
  test::run_ranks(Ranks::threads, saved.ranks(), [&](Rank& rank) {
    TrainingRun run(rank, saved, {.seed = 4});
    run.steps(3);
    run.trainer->save(folder / "run");
  });
  for (const Form& form : {Form{1, 1, 1}, Form{1, 2, 2}, Form{4, 1, 2, PipelineKind::gpipe}, saved})
    test::run_ranks(Ranks::threads, form.ranks(), [&](Rank& rank) {
      TrainingRun run(rank, form, {.seed = 4});
      run.trainer->load(folder / "run");
      for (const Parameter* p : run.model->parameters()) {
        const Tensor whole = form.ranks() == 1 ? p->master() : full(p->master());
        const std::vector<float> values(whole.f32().begin(), whole.f32().end());
        if (form.ranks() == 1)
          wholes[p->path()] = values;
        else
          EXPECT_EQ(values, wholes.at(p->path())) << p->path();
      }
    });
}

// --- faults ---

TEST(ModelsPipeline, NormsThatAreNotFiniteAreDecidedByAllStages) {
  for (const NonFinite non_finite : {NonFinite::skip, NonFinite::error})
    test::run_ranks(Ranks::threads, 3, [&](Rank& rank) {
      Trainer::Options options = sgd(0.5);
      options.non_finite = non_finite;
      TrainingRun run(rank, {3, 1, 1, PipelineKind::one_f_one_b}, options);
      const Data data(*run.model, 0, 3);
      run.trainer->backward(data.batches());
      if (rank.rank == 1) {
        const Gradient g = run.trainer->gradients()[0];
        reinterpret_cast<float*>(g.data.data)[0] = std::numeric_limits<float>::infinity();
      }
      std::vector<float> before, after;
      const auto values = [&] {
        std::vector<float> all;
        for (const Parameter* p : run.model->parameters())
          all.insert(all.end(), p->master().f32().begin(), p->master().f32().end());
        return all;
      };
      before = values();
      if (non_finite == NonFinite::skip) {
        EXPECT_TRUE(run.trainer->update(0.1).skipped);
      } else {
        const Error e = test::error_of([&] { run.trainer->update(0.1); });
        EXPECT_EQ(std::string(e.what()), "pipeline_grad_norm: gradients are not finite on rank 1");
        EXPECT_THAT(e.ranks(), ::testing::ElementsAre(1));
      }
      EXPECT_EQ(values(), before);
    });
}

TEST(ModelsPipeline, DifferentBatchesAndRatesAreRefusedByAll) {
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    TrainingRun run(rank, {2, 1, 1, PipelineKind::gpipe}, sgd(0.5));
    const Data data(*run.model, rank.rank, 2), same(*run.model, 0, 2);
    EXPECT_EQ(
        error_text([&] { run.trainer->step(data.batches(), 0.1); }),
        "bad_argument: trainer: the ranks of pp=2 were given different batches; expected the same, as they "
        "share the work on each");
    EXPECT_THAT(error_text([&] { run.trainer->step(same.batches(), rank.rank == 0 ? 0.1 : 0.2); }),
                HasSubstr("trainer: the learning rate is 0."));
    run.trainer->step(same.batches(), 0.1);
  });
}

// A pass that throws on one rank: the ranks of its pipeline get the error. Data and tensor ranks of all
// stages wait in groups of their own, with and without sharded parameters; they get it too, and soon.
TEST(ModelsPipeline, AnErrorOfAPassReachesAllRanks) {
  struct Case {
    Form form;
    DataForm data;
    int failing;
    bool keep = true;
  };
  const PipelineKind kind = PipelineKind::one_f_one_b;
  const std::vector<Case> cases = {
      {{2, 2, 1, kind}, DataForm::ddp, 0},         {{2, 2, 1, kind}, DataForm::ddp, 3},
      {{2, 2, 1, kind}, DataForm::fsdp, 0},        {{2, 2, 1, kind}, DataForm::fsdp, 3},
      {{2, 2, 1, kind}, DataForm::fsdp, 1, false}, {{2, 2, 2, kind}, DataForm::fsdp, 5},
      {{2, 1, 2, kind}, DataForm::ddp, 1},         {{1, 2, 1, kind}, DataForm::fsdp, 1}};
  for (const Case& c : cases)
    for (const bool forward : {true, false})
      test::run_ranks(Ranks::threads, c.form.ranks(), [&](Rank& rank) {
        SCOPED_TRACE(fmt::format("{} x {} x {}, {}, rank {} of them fails", c.form.pp, c.form.dp, c.form.tp,
                                 c.data == DataForm::ddp ? "ddp" : "fsdp", c.failing));
        TrainingRun run(rank, c.form, sgd(0.5), whole_recipe(), [&](BuildOptions& o) {
          o.data = c.data;
          o.pipeline.keep_weights = c.keep;
        });
        run.steps(3, 1);
        HookHandle hook;
        if (rank.rank == c.failing)
          hook = run.model->model->get(run.mesh.coordinate("pp") == 0 ? "layers.0" : "norm")
                     .add_hook(forward ? Module::HookPoint::pre_forward : Module::HookPoint::pre_backward,
                               [](Module&, Tensors&, Frame&) {
                                 throw Error(ErrorCode::bad_argument, "a bad layer");
                               });
        const Data data(*run.model, 0, 3);
        const auto began = Clock::now();
        const std::string text = error_text([&] { run.trainer->step(data.batches(), 0.1); });
        EXPECT_LT(Clock::now() - began, std::chrono::seconds(10));
        EXPECT_THAT(text, HasSubstr("a bad layer"));
        const std::string of_rank = fmt::format("a failure of rank {} of pp={}", c.failing, c.form.pp);
        const bool of_its_pipeline =
            rank.rank % (c.form.dp * c.form.tp) == c.failing % (c.form.dp * c.form.tp);
        if (!of_its_pipeline) {
          EXPECT_THAT(text, HasSubstr(of_rank));
        }
      });
}

TEST(ModelsPipeline, AnErrorOfAnEvaluationReachesTensorRanks) {
  const Form form{2, 1, 2, PipelineKind::one_f_one_b};
  for (int failing = 0; failing < form.ranks(); ++failing)
    test::run_ranks(Ranks::threads, form.ranks(), [&](Rank& rank) {
      TrainingRun run(rank, form, sgd(0.5));
      run.steps(2, 1);
      HookHandle hook;
      if (rank.rank == failing)
        hook = run.model->model->get(failing < 2 ? "layers.0" : "layers.3")
                   .add_hook(Module::HookPoint::pre_forward, [](Module&, Tensors&, Frame&) {
                     throw Error(ErrorCode::bad_argument, "a bad layer");
                   });
      const Data data(*run.model, 0, 3);
      const auto began = Clock::now();
      EXPECT_THAT(error_text([&] { run.trainer->evaluate(data.batches()); }), HasSubstr("a bad layer"));
      EXPECT_LT(Clock::now() - began, std::chrono::seconds(10));
    });
}

TEST(ModelsPipeline, UnsupportedOptionsAreNamed) {
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    Compute compute(rank.context);
    const DeviceMesh mesh(rank.group(), {{"pp", 2}, {"dp", 1}, {"tp", 1}, {"y", 1}});
    const auto text = [&](const std::function<void(BuildOptions&, TransformerConfig&)>& change) {
      BuildOptions options{.seed = 3};
      options.pipeline_axis = "pp";
      TransformerConfig of = config();
      change(options, of);
      return error_text([&] { build_parallel_model(of, mesh, compute, options); });
    };
    const std::string with = "bad_argument: build_parallel_model: pipeline_axis: a pipeline with ";
    EXPECT_EQ(text([](auto& o, auto&) {
                o.data = DataForm::fsdp;
                o.exact = Exact::yes;
              }),
              with + "DataForm::fsdp and exact mode is not supported");
    EXPECT_EQ(text([](auto& o, auto&) {
                o.data = DataForm::fsdp;
                o.sharding.blocks = {"layers.*"};
              }),
              with + "sharding.blocks is not supported");
    EXPECT_EQ(text([](auto& o, auto&) { o.domain_axes = {"y"}; }),
              with + "domain_axes is not supported: a border has no cut of a map in space");
    EXPECT_EQ(
        text([](auto& o, auto&) { o.data_axis = "pp"; }),
        "bad_argument: build_parallel_model: pipeline_axis: \"pp\" is a data or tensor axis of pp=2 x dp=1 x "
        "tp=1 x y=1; expected another");
    EXPECT_EQ(
        text([](auto& o, auto&) { o.pipeline.schedule = make_pipeline_schedule(PipelineKind::gpipe, 3, 2); }),
        "bad_argument: build_parallel_model: pipeline_axis: schedule \"gpipe\" is for 3 ranks; pp=2");
    EXPECT_EQ(text([](auto& o, auto&) { o.pipeline.stages_per_rank = 2; }),
              "bad_argument: schedule \"1f1b\": 2 stages a rank; expected 1");
    Recipe recipe = transformer_recipe(config());
    recipe.pipeline.clear();
    BuildOptions options;
    options.pipeline_axis = "pp";
    EXPECT_EQ(
        error_text([&] { build_parallel_model(recipe, mesh, compute, options); }),
        "bad_argument: build_parallel_model: pipeline_axis: recipe \"transformer\" has no pipeline or no "
        "border; expected both");
  });
}

// Frozen parts and loss scaling: a step whose gradients are not finite is skipped by all stages.
TEST(ModelsPipeline, FreezesAndScalesTheLossOnAllStages) {
  const auto options = [] {
    Trainer::Options o = sgd(0.5);
    o.freeze = FreezeSchedule::from_text("0:frozen:token_embedding,0:frozen:layers.3,1:trained:layers.3");
    o.loss_scale = LossScaler::Options{.scale = 1e38, .backoff = 1e-30, .interval = 1};
    return o;
  };
  const auto run = [&](Rank& rank, int pp) {
    TrainingRun of(rank, {pp, 1, 1, PipelineKind::one_f_one_b}, options());
    Outcome o;
    for (int step = 0; step < 3; ++step) {
      const Trainer::Result r = of.trainer->step(Data(*of.model, step, 3).batches(), 0.1);
      o.losses.insert(o.losses.end(), {r.loss, r.skipped ? 1.0 : 0.0, r.loss_scale});
      o.norms.push_back(r.grad_norm);
    }
    for (const Parameter* p : of.model->parameters())
      o.parameters[p->path()].assign(p->master().f32().begin(), p->master().f32().end());
    return o;
  };
  Outcome one;
  test::run_ranks(Ranks::threads, 1, [&](Rank& rank) { one = run(rank, 1); });
  EXPECT_EQ(one.losses[1], 1);  // skipped
  EXPECT_EQ(one.losses[7], 0);
  test::run_ranks(Ranks::threads, 3, [&](Rank& rank) {
    const Outcome got = run(rank, 3);
    EXPECT_EQ(got.losses, one.losses);
    EXPECT_EQ(got.norms, one.norms);
    for (const auto& [name, bits] : got.parameters) EXPECT_EQ(bits, one.parameters.at(name)) << name;
  });
}

// Groups, and patterns of Muon, that match parameters of some stages alone.
TEST(ModelsPipeline, OptimizersHaveTheGroupsOfTheWholeModel) {
  const ParameterGroup head{{"output_head", "norm"}, 0.5, 0.1}, layer{{"layers.1", "token_embedding"}, 2};
  for (const bool muon : {false, true}) {
    Trainer::Options options{.groups = {layer, head}, .max_norm = 0.5, .seed = 4};
    if (muon) options.optimizer = Muon::Options{.adamw_for = {"token_embedding", "output_head"}};
    Outcome one;
    test::run_ranks(Ranks::threads, 1, [&](Rank& rank) {
      one = TrainingRun(rank, {1, 1, 1, PipelineKind::gpipe}, options).steps(2);
    });
    test::run_ranks(Ranks::threads, 3, [&](Rank& rank) {
      const Outcome got = TrainingRun(rank, {3, 1, 1, PipelineKind::one_f_one_b}, options).steps(2);
      EXPECT_EQ(got.losses, one.losses);
      for (const auto& [name, bits] : got.parameters) EXPECT_EQ(bits, one.parameters.at(name)) << name;
      const auto text = [&](const Trainer::Options& wrong) {
        return error_text([&] { TrainingRun(rank, {3, 1, 1, PipelineKind::one_f_one_b}, wrong); });
      };
      Trainer::Options wrong = options;
      wrong.groups.push_back({{"decoder"}});
      EXPECT_EQ(text(wrong),
                "bad_argument: optimizer: a group has the pattern \"decoder\", which matches no "
                "parameter");
      wrong = options;
      wrong.groups[0].rate = rank.rank == 1 ? 3 : 2;  // of a group without parameters on rank 2
      TrainingRun run(rank, {3, 1, 1, PipelineKind::one_f_one_b}, wrong);
      const Data data(*run.model, 0, 2);
      EXPECT_THAT(error_text([&] { run.trainer->step(data.batches(), 0.1); }),
                  HasSubstr("options.groups is not the same on all ranks"));
    });
  }
}

// A schedule from a file, by the JSON of build options; the file of a built-in one has its bits.
TEST(ModelsPipeline, TakesAScheduleFromAFile) {
  const test::TemporaryFolder folder;
  const auto write = [&](const char* name, const std::string& text) {
    std::ofstream(folder / name) << text;
    return (folder / name).string();
  };
  const auto of_file = [](const std::string& file) {
    return build_options_from_json(
        fmt::format(R"({{"seed": 3, "pipeline_axis": "pp", "pipeline_file": "{}"}})", file));
  };
  const std::string good = write("good", to_string(make_pipeline_schedule(PipelineKind::zero_bubble, 2, 3))),
                    three = write("three", to_string(make_pipeline_schedule(PipelineKind::gpipe, 3, 3))),
                    forward =
                        write("forward", to_string(make_pipeline_schedule(PipelineKind::forward_only, 2, 3))),
                    wrong = write("wrong", "schedule wrong\nranks two\n");
  std::string late = to_string(make_pipeline_schedule(PipelineKind::gpipe, 2, 2));
  late.replace(late.find("1RECV_F0 "), std::string("1RECV_F0 ").size(), "");
  EXPECT_THAT(error_text([&] { of_file((folder / "none").string()); }),
              HasSubstr((folder / "none").string()));
  EXPECT_THAT(error_text([&] { of_file(wrong); }), HasSubstr("ranks"));
  const std::string lost = write("lost", late);
  const std::vector<Outcome> one = outcomes({1, 1, 1, PipelineKind::one_f_one_b}, 0.5, 3),
                             built_in = outcomes({2, 1, 1, PipelineKind::zero_bubble}, 0.5, 3);
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    Compute compute(rank.context);
    const DeviceMesh mesh(rank.group(), {{"pp", 2}, {"dp", 1}, {"tp", 1}});
    const auto text = [&](const std::string& file) {
      return error_text([&] { build_parallel_model(config(), mesh, compute, of_file(file)); });
    };
    EXPECT_THAT(text(lost), HasSubstr("0SEND_F0"));
    EXPECT_THAT(text(three), HasSubstr("schedule \"gpipe\" is for 3 ranks; pp=2"));
    EXPECT_THAT(text(forward), HasSubstr("schedule \"forward\" has no backward passes"));
    ParallelModel model = build_parallel_model(config(), mesh, compute, of_file(good));
    Trainer trainer(model, compute, sgd(0.5));
    const Data two(model, 0, 2);
    EXPECT_THAT(error_text([&] { trainer.step(two.batches(), 0.1); }),
                HasSubstr("pipeline: 2 micro-batches; schedule \"zero-bubble\" is for 3"));
    for (std::size_t step = 0; step < 2; ++step) {
      const Trainer::Result r = trainer.step(Data(model, static_cast<int>(step), 3).batches(), 0.1);
      EXPECT_EQ(r.loss, one[0].losses[step]);
      EXPECT_EQ(r.loss, built_in[0].losses[step]);
      EXPECT_EQ(r.grad_norm, built_in[0].norms[step]);
    }
    for (const Parameter* p : model.parameters())
      EXPECT_THAT(p->master().f32(), ::testing::ElementsAreArray(one[0].parameters.at(p->path())))
          << p->path();
  });
}

TEST(ModelsPipeline, KeepingWeightsIsComparedBetweenRanks) {
  test::run_ranks(Ranks::threads, 4, [&](Rank& rank) {
    TrainingRun run(rank, {2, 2, 1, PipelineKind::gpipe}, sgd(0.5), whole_recipe(), [&](BuildOptions& o) {
      o.data = DataForm::fsdp;
      o.pipeline.keep_weights = rank.rank != 3;
    });
    const Data data(*run.model, 0, 2);
    EXPECT_THAT(error_text([&] { run.trainer->step(data.batches(), 0.1); }),
                HasSubstr("BuildOptions::pipeline.keep_weights is not the same on all ranks of pp=2"));
  });
}

// A schedule of one's own, with the stages on the ranks in another order; and activation checkpointing.
TEST(ModelsPipeline, TakesAScheduleOfOnesOwn) {
  const std::vector<Outcome> one = outcomes({1, 1, 1, PipelineKind::one_f_one_b}, 0.5, 2);
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    Compute compute(rank.context);
    const DeviceMesh mesh(rank.group(), {{"pp", 2}, {"dp", 1}, {"tp", 1}});
    PipelineSchedule s = make_pipeline_schedule(PipelineKind::zero_bubble, 2, 2);
    std::swap(s.actions[0], s.actions[1]);
    std::swap(s.memory[0], s.memory[1]);
    s.rank_of_stage = {1, 0};
    BuildOptions options{.seed = 3};
    options.pipeline_axis = "pp";
    options.pipeline.schedule = s;
    options.ac.mode = AcMode::full;
    ParallelModel model = build_parallel_model(config(), mesh, compute, options);
    Trainer trainer(model, compute, sgd(0.5));
    for (int step = 0; step < 2; ++step) {
      const Trainer::Result r = trainer.step(Data(model, step, 2).batches(), 0.1);
      EXPECT_EQ(r.loss, one[0].losses[static_cast<std::size_t>(step)]);
      EXPECT_EQ(r.grad_norm, one[0].norms[static_cast<std::size_t>(step)]);
    }
    EXPECT_EQ(trainer.evaluate(Data(model, 99, 3).batches()).loss, one[0].evaluations[0]);
    EXPECT_EQ(model.is_own("token_embedding.embedding.weight"), rank.rank == 1);
    const Data three(model, 5, 3);
    EXPECT_THAT(error_text([&] { trainer.step(three.batches(), 0.1); }),
                HasSubstr("pipeline: 3 micro-batches; schedule \"zero-bubble\" is for 2"));
  });
}

}  // namespace
}  // namespace weft::models_pipeline_test
