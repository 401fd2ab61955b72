// Activation checkpointing gives the bits of none, repeats the collectives of forward once and nothing that
// happens once, and keeps the bytes that are predicted.
#include "weft/train/activation_checkpointing.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <regex>
#include <string>
#include <utility>
#include <vector>

#include "support/counting_allocator.hpp"
#include "support/errors.hpp"
#include "support/run_ranks.hpp"
#include "weft/base/random.hpp"
#include "weft/domain/domain.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/models/trainer.hpp"
#include "weft/models/weather.hpp"
#include "weft/nn/conv.hpp"
#include "weft/nn/dropout.hpp"
#include "weft/nn/feed_forward.hpp"
#include "weft/nn/init.hpp"
#include "weft/nn/linear.hpp"
#include "weft/nn/loss.hpp"
#include "weft/nn/norm.hpp"
#include "weft/nn/residual.hpp"
#include "weft/nn/spectral_norm.hpp"
#include "weft/tp/own_plan.hpp"
#include "weft/train/gradients.hpp"

namespace weft::activation_checkpointing_test {
namespace {

using test::Rank;
using test::Ranks;

// The text of the error that `f` throws; empty: none.
template <class F>
std::string error_of(const F& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return {};
}

using Bits = std::vector<std::vector<float>>;

AcPolicy full(std::vector<std::string> blocks, int every = 1) {
  return {.mode = AcMode::full, .modules = std::move(blocks), .every = every, .check_state = true};
}
AcPolicy selective(std::vector<std::string> modules = {}) {
  return {.mode = AcMode::selective, .modules = std::move(modules), .check_state = true};
}

Tensor random(Context& context, const Shape& shape, const std::string& name) {
  Tensor t(context, shape);
  RandomStream(11, name).normal(0, t.count(), t.f32().data());
  return t;
}

// --- a transformer over meshes ---

constexpr std::int64_t kVocab = 32, kSequence = 8, kRows = 4;

TransformerConfig small(bool tied) {
  TransformerConfig c;
  c.dim = 16, c.layers = 3, c.heads = 4, c.kv_heads = 2, c.ffn_hidden = 24, c.vocab = kVocab, c.max_seq = 8;
  c.tied = tied;
  c.init_std = 0.1;
  return c;
}

struct Trained {
  Bits weights;
  std::vector<double> losses;
  bool operator==(const Trained&) const = default;
};

Trained train(Rank& rank, const MeshShape& shape, bool tied, const BuildOptions& options, int steps = 3) {
  Compute compute(rank.context);
  const DeviceMesh mesh(rank.group(), shape);
  ParallelModel model = build_parallel_model(small(tied), mesh, compute, options);
  Trainer trainer(model, compute, {});
  const std::int64_t rows = kRows / model.data.size(), first = rows * model.data.rank();
  Trained run;
  for (int step = 0; step < steps; ++step) {
    std::vector<std::int64_t> tokens, labels;
    for (std::int64_t r = first; r < first + rows; ++r)
      for (std::int64_t i = 0; i < kSequence; ++i) {
        tokens.push_back((step * 5 + r * 7 + i * i) % kVocab);
        labels.push_back((step * 5 + r * 7 + (i + 1) * (i + 1)) % kVocab);
      }
    const auto half = static_cast<std::size_t>(rows / 2 * kSequence);
    const TokenBatch batches[] = {// two micro-batches
                                  {tokens.data(), labels.data(), rows / 2, kSequence, 0},
                                  {tokens.data() + half, labels.data() + half, rows / 2, kSequence, 0}};
    run.losses.push_back(trainer.step(batches, 0.01).loss);
  }
  for (const Parameter* p : model.parameters())
    run.weights.emplace_back(p->master().f32().begin(), p->master().f32().end());
  return run;
}

TEST(ActivationCheckpointing, OfATransformerHasTheBitsOfNone) {
  struct Case {
    MeshShape shape;
    bool tied = false;
    DataForm data = DataForm::ddp;
    DType dtype = DType::f32;
    bool sequence = false;
    VocabSplit vocab = VocabSplit::whole;
    ReshardAfterForward reshard = true;
    std::optional<Float8Recipe> float8 = {};
  };
  const Case cases[] = {
      {{{"dp", 1}, {"tp", 1}}, true},
      {{{"dp", 2}, {"tp", 1}}, true, DataForm::ddp, DType::bf16},
      {{{"dp", 1}, {"tp", 2}}, false, DataForm::ddp, DType::bf16, true},
      {{{"dp", 2}, {"tp", 2}}, false, DataForm::ddp, DType::f32, true, VocabSplit::shard},
      {{{"dp", 2}, {"tp", 2}}, true, DataForm::fsdp, DType::f32, true, VocabSplit::shard},
      {{{"dp", 2}, {"tp", 1}}, false, DataForm::fsdp, DType::bf16},
      {{{"dp", 2}, {"tp", 1}}, false, DataForm::fsdp, DType::f32, false, VocabSplit::whole, false},
      {{{"dp", 2}, {"tp", 2}}, false, DataForm::fsdp, DType::bf16, true, VocabSplit::whole, 1},
      {{{"dp", 2}, {"tp", 2}},
       false,
       DataForm::fsdp,
       DType::bf16,
       true,
       VocabSplit::whole,
       true,
       Float8Recipe::tensorwise},
      {{{"dp", 1}, {"tp", 2}},
       false,
       DataForm::ddp,
       DType::bf16,
       true,
       VocabSplit::whole,
       true,
       Float8Recipe::rowwise},
  };
  for (const Case& c : cases)
    test::run_ranks(Ranks::threads, c.shape.size(), [&](Rank& rank) {
      SCOPED_TRACE(to_string(c.shape));
      BuildOptions options{.data = c.data, .seed = 3, .dtype = c.dtype};
      options.tensor = {.sequence_parallel = c.sequence, .vocab = c.vocab};
      options.sharding.reshard_after_forward = c.reshard;
      options.float8 = c.float8;
      const Trained none = train(rank, c.shape, c.tied, options);
      AcPolicy compared = full({"layers.*"});
      compared.compare_outputs = true;
      for (const AcPolicy& policy : {compared, full({"layers.*"}, 2), full({"layers"}), selective(),
                                     selective({"layers.*.mlp", "layers.*.*_norm"})}) {
        options.ac = policy;
        EXPECT_EQ(train(rank, c.shape, c.tied, options), none) << name(policy.mode);
      }
    });
}

TEST(ActivationCheckpointing, FiftyStepsOfATransformerHaveTheBitsOfNone) {
  const MeshShape shape{{"dp", 2}, {"tp", 2}};
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const DataForm form : {DataForm::ddp, DataForm::fsdp})
      test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
        BuildOptions options{.data = form, .seed = 3, .dtype = dtype, .activations = dtype};
        options.tensor = {.sequence_parallel = true, .vocab = VocabSplit::shard};
        const Trained none = train(rank, shape, false, options, 50);
        EXPECT_LT(none.losses.back(), none.losses.front()) << "it learns";
        options.ac = full({"layers.*"});
        EXPECT_EQ(train(rank, shape, false, options, 50), none) << name(dtype);
      });
}

// Dropout inside blocks of features, in f32 and bf16, with parameters on each rank or divided.
TEST(ActivationCheckpointing, FiftyStepsWithDropoutHaveTheBitsOfNone) {
  Recipe recipe;
  recipe.name = "blocks with dropout";
  recipe.build = [] {
    auto model = std::make_unique<Sequential>(), layers = std::make_unique<Sequential>();
    for (int i = 0; i < 2; ++i) {
      auto block = std::make_unique<Sequential>();
      block->append("norm", std::make_unique<RMSNorm>(16, 1e-5));
      block->append("mlp", std::make_unique<SwiGLU>(16, 32, Normal{0.3}, Normal{0.3}));
      block->append("drop", std::make_unique<Dropout>(0.2));
      layers->append(std::make_unique<Residual>(std::move(block)));
    }
    model->append("in", std::make_unique<Linear>(8, 16, true, Normal{0.3}));
    model->append("layers", std::move(layers));
    model->append("out", std::make_unique<Linear>(16, 8, true, Normal{0.3}));
    return model;
  };
  recipe.blocks = {"layers.*"};
  recipe.loss = [] { return std::make_unique<MeanSquaredError>(); };
  const MeshShape shape{{"dp", 2}, {"tp", 2}};
  const auto fifty = [&](Rank& rank, const BuildOptions& options) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), shape);
    ParallelModel built = build_parallel_model(recipe, mesh, compute, options);
    Trainer trainer(built, compute, {.seed = 7});
    Trained run;
    for (int step = 0; step < 50; ++step) {
      const Chunk part = chunk_of(6, built.data.size(), built.data.rank());
      const Tensor x = random(rank.context, {part.size, 8}, fmt::format("{} {}", step, part.offset));
      const Batch batch{.inputs = {x}, .targets = {x}, .global_rows = 6};
      run.losses.push_back(trainer.step({&batch, 1}, 0.01).loss);
    }
    for (const Parameter* p : built.parameters())
      run.weights.emplace_back(p->master().f32().begin(), p->master().f32().end());
    return run;
  };
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const DataForm form : {DataForm::ddp, DataForm::fsdp})
      test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
        BuildOptions options{.data = form, .seed = 3, .dtype = dtype, .activations = dtype};
        const Trained none = fifty(rank, options);
        EXPECT_LT(none.losses.back(), none.losses.front()) << "it learns";
        options.ac = full({"layers.*"});
        EXPECT_EQ(fifty(rank, options), none) << name(dtype);
      });
}

// Maps cut in space, heads cut over tp, samples over dp, and dropout: the same after 50 steps.
TEST(ActivationCheckpointing, FiftyStepsOnMapsHaveTheBitsOfNone) {
  const Recipe stage = weather_recipe({.dim = 8,
                                       .depth = 2,
                                       .head_dim = 4,
                                       .local_window = 2,
                                       .global_window = 2,
                                       .mult = 2,
                                       .dropout = 0.2,
                                       .init_std = 0.2,
                                       .attention_dropout = 0.1});
  const auto fifty = [&](Rank& rank, const MeshShape& shape, const BuildOptions& options) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), shape);
    ParallelModel built = build_parallel_model(stage, mesh, compute, options);
    Trainer trainer(built, compute, {.seed = 7});
    Trained run;
    for (int step = 0; step < 50; ++step) {
      const Chunk part = chunk_of(2, built.data.size(), built.data.rank());
      const Tensor x = random(rank.context, {part.size, 8, 4, 4}, fmt::format("{} {}", step, part.offset));
      const Batch batch{.inputs = {x}, .targets = {x}, .global_rows = 2};
      run.losses.push_back(trainer.step({&batch, 1}, 0.01).loss);
    }
    for (const Parameter* p : built.parameters())
      run.weights.emplace_back(p->master().f32().begin(), p->master().f32().end());
    return run;
  };
  for (const MeshShape& shape :
       {MeshShape{{"dp", 2}, {"tp", 1}, {"h", 2}}, MeshShape{{"dp", 1}, {"tp", 2}, {"h", 2}}})
    for (const auto& [form, dtype] :
         {std::pair{DataForm::ddp, DType::f32}, std::pair{DataForm::fsdp, DType::f32},
          std::pair{DataForm::ddp, DType::bf16}, std::pair{DataForm::fsdp, DType::bf16}}) {
      // bf16: one form on each mesh, and all with tools/test.sh --full
      if (dtype == DType::bf16 && (form == DataForm::fsdp) == (shape.size("tp") > 1) &&
          std::getenv("WEFT_TEST_FULL") == nullptr)
        continue;
      test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
        BuildOptions options{
            .data = form, .domain_axes = {"h"}, .seed = 3, .dtype = dtype, .activations = dtype};
        const Trained none = fifty(rank, shape, options);
        EXPECT_LT(none.losses.back(), none.losses.front()) << "it learns";
        options.ac = full({"layers.*"});
        EXPECT_EQ(fifty(rank, shape, options), none) << to_string(shape);
        options.ac = selective();
        EXPECT_EQ(fifty(rank, shape, options), none) << to_string(shape);
      });
    }
}

// --- maps, dropout and spectral norms ---

std::unique_ptr<Sequential> weather() {
  auto model = std::make_unique<Sequential>();
  model->append("embed",
                std::make_unique<Conv2d>(Conv2dConfig{.in = 3, .out = 16, .kernel = 3, .padding = 1}));
  model->append("stage", std::make_unique<WeatherStage>(WeatherStageConfig{.dim = 16,
                                                                           .depth = 2,
                                                                           .head_dim = 4,
                                                                           .local_window = 2,
                                                                           .global_window = 2,
                                                                           .mult = 2,
                                                                           .dropout = 0.2,
                                                                           .attention_dropout = 0.1}));
  model->append("out", std::make_unique<Conv2d>(Conv2dConfig{.in = 16, .out = 2, .kernel = 3, .padding = 1}));
  return model;
}

void set_up(Module& model, Compute& compute) {
  for (Parameter* p : model.parameters())
    if (p->global_shape().rank() > 1) p->set_init(Normal{0.2});
  materialise(model, compute);
  initialise(model, 5);
}

Bits state_of(const Module& model) {
  Bits all;
  for (const Parameter* p : model.parameters()) {
    all.emplace_back(p->master().f32().begin(), p->master().f32().end());
    if (p->has_gradient()) all.emplace_back(p->gradient().f32().begin(), p->gradient().f32().end());
  }
  for (const ModuleBuffer* b : model.buffers())
    all.emplace_back(b->tensor().f32().begin(), b->tensor().f32().end());
  return all;
}

// Steps of two micro-batches, both forwards before both backwards: a spectral norm has then moved on.
Bits steps_on_maps(Rank& rank, const MeshShape& shape, bool spectral, const AcPolicy& policy, bool halves,
                   bool training) {
  Compute compute(rank.context, 1);
  const DeviceMesh mesh(rank.group(), shape);
  const std::unique_ptr<Sequential> model = weather();
  if (spectral) add_spectral_norm(model->get("stage"));
  parallelize(*model, mesh["tp"]);
  DomainOptions domain;
  domain.data = mesh["dp"];
  const DomainManager manager = apply_domain_parallel(*model, mesh[{"h", "w"}], domain);
  replicate(*model, mesh);
  apply_ac(*model, policy);
  set_up(*model, compute);
  SGD optimizer(compute, model->parameters(), {.momentum = 0.9});
  for (int step = 0; step < 2; ++step) {
    std::vector<Frame> frames;
    Tensors dy;
    for (int i = 0; i < 2; ++i) {
      const std::string name = std::to_string(2 * step + i);
      frames.emplace_back(compute, Pass{.seed = 1, .step = step, .micro_batch = i, .training = training});
      const Tensor x = random(rank.context, {2, 3, 8, 8}, "x" + name);
      const Tensor y = model->forward(distribute(x, manager.layout(x.shape())), frames.back())[0];
      dy.push_back(distribute(random(rank.context, y.layout()->global, "dy" + name), y.layout()));
    }
    for (std::size_t i = 0; i < 2; ++i) {
      LeftOver left_over;
      if (halves)
        model->backward(dy[i], frames[i], left_over);
      else
        model->backward(dy[i], frames[i]);
      left_over.run();
      EXPECT_TRUE(frames[i].empty());
    }
    sync_replicated_gradients(model->parameters(), mesh);
    if (step == 0) optimizer.step(0.05), optimizer.zero_gradients();
  }
  return state_of(*model);
}

TEST(ActivationCheckpointing, OfMapsHasTheBitsOfNone) {
  for (const MeshShape& shape : {MeshShape{{"dp", 1}, {"tp", 1}, {"h", 1}, {"w", 1}},
                                 MeshShape{{"dp", 1}, {"tp", 2}, {"h", 2}, {"w", 1}},
                                 MeshShape{{"dp", 2}, {"tp", 1}, {"h", 1}, {"w", 2}}})
    for (const bool spectral : {false, true}) {
      if (spectral && shape.size() > 1 && shape.size("tp") == 1) continue;
      test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
        SCOPED_TRACE(to_string(shape));
        const Bits none = steps_on_maps(rank, shape, spectral, {}, false, true);
        AcPolicy compared = full({"stage.layers.*"});
        compared.compare_outputs = true;
        for (const AcPolicy& policy : {compared, selective(), full({"stage"}), full({"*"})})
          for (const bool halves : {false, true})
            EXPECT_EQ(steps_on_maps(rank, shape, spectral, policy, halves, true), none) << name(policy.mode);
        EXPECT_EQ(steps_on_maps(rank, shape, spectral, full({"stage.layers.*"}), false, false),
                  steps_on_maps(rank, shape, spectral, {}, false, false))
            << "eval mode";
      });
    }
}

// --- the collectives ---

// The recorder's calls of a group: all_reduces, and other operations.
std::int64_t calls(ProcessGroup& group) {
  const std::string trace = group.trace_json();
  const std::regex call("\"op\": ?\"(all_reduce|all_gather|reduce_scatter)");
  return std::distance(std::sregex_iterator(trace.begin(), trace.end(), call), std::sregex_iterator());
}

TEST(ActivationCheckpointing, RepeatsTheCollectivesOfForwardOnce) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    for (const bool sequence : {false, true}) {
      const auto counted = [&](const AcPolicy& policy) {
        Compute compute(rank.context, 1);
        const DeviceMesh mesh(rank.group(), MeshShape{{"dp", 1}, {"tp", 2}});
        BuildOptions options{.ac = policy};
        options.tensor.sequence_parallel = sequence;
        ParallelModel built = build_parallel_model(small(false), mesh, compute, options);
        Frame frame(compute);
        Tensor tokens(rank.context, {1, kSequence}, DType::i64);
        std::ranges::fill(tokens.as<std::int64_t>(), 1);
        const Tensor y = built.model->forward({built.place(tokens, 1)}, frame)[0];
        const Tensor dy = random(rank.context, y.shape(), "dy").with_layout(y.layout());
        const std::int64_t before = calls(mesh["tp"].group());
        built.model->backward(dy, frame);
        return calls(mesh["tp"].group()) - before;
      };
      const std::int64_t none = counted({});
      // One boundary after the attention and one after the mlp; with sequence parallel one before each, too.
      const std::int64_t each = sequence ? 2 : 1;
      EXPECT_EQ(counted(full({"layers.*"})), none + 3 * 2 * each);
      EXPECT_EQ(counted(full({"layers.*"}, 2)), none + 2 * 2 * each);
      EXPECT_EQ(counted(selective()), none + 3 * each);
      EXPECT_EQ(counted(selective({"layers.*.*_norm"})), none);
    }
  });
}

TEST(ActivationCheckpointing, GathersNoBlockAgain) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    const auto counted = [&](const AcPolicy& policy) {
      BuildOptions options{.data = DataForm::fsdp, .ac = policy};
      train(rank, {{"dp", 2}, {"tp", 1}}, false, options, 1);
      return calls(rank.group());
    };
    const std::int64_t start = calls(rank.group());
    const std::int64_t none = counted({}) - start;
    EXPECT_EQ(counted(full({"layers.*"})) - start, 2 * none);
  });
}

// --- errors ---

TEST(ActivationCheckpointing, RefusesPoliciesThatDoNotFit) {
  Transformer model(small(false));
  const auto text = [&](const AcPolicy& policy) { return error_of([&] { apply_ac(model, policy); }); };
  EXPECT_EQ(text(full({"layers.*", "blocks.*"})), "apply_ac: \"blocks.*\" matches no module below the root");
  EXPECT_EQ(text(full({})), "apply_ac: mode full needs patterns of the blocks; modules is empty");
  EXPECT_EQ(text(full({"layers.*"}, 0)), "apply_ac: every is 0; expected 1 or more");
  AcPolicy wrong = selective();
  wrong.every = 2;
  EXPECT_EQ(text(wrong), "apply_ac: every is 2 with mode selective; it is for mode full");
  EXPECT_EQ(
      text(full({"layers.*", "layers.*.mlp"})),
      "apply_ac: \"layers.0.mlp\" is inside \"layers.0\", which runs again as a whole; expected one of them");
  EXPECT_EQ(text({.mode = static_cast<AcMode>(7), .modules = {"layers.*"}}),
            "apply_ac: mode is 7; expected none, full or selective");
  EXPECT_EQ(text({.mode = AcMode::none, .modules = {"nothing"}}),
            "apply_ac: \"nothing\" matches no module below the root");
  EXPECT_EQ(error_of([] { ac_mode_of("some"); }),
            "apply_ac: mode is \"some\"; expected none, full or selective");
  EXPECT_EQ(ac_mode_of("selective"), AcMode::selective);
  model.visit([](const Module& m) { EXPECT_FALSE(m.recompute()) << "before anything changes"; });
  EXPECT_EQ(apply_ac(model, full({"layers.*"}, 2)), (std::vector<std::string>{"layers.0", "layers.2"}));
  EXPECT_EQ(text(selective()), "apply_ac: \"layers.0\" runs again already; apply_ac() is called once");
  Sequential plain;
  plain.append("a", std::make_unique<Linear>(2, 2));
  EXPECT_EQ(error_of([&] { apply_ac(plain, selective()); }),
            "apply_ac: mode selective found no attention; expected one, or patterns of paths in modules");
}

// A second call for a part of a module that runs again.
TEST(ActivationCheckpointing, RefusesAModuleThatRunsAgainInsideAnother) {
  Context context;
  Compute compute(context, 1);
  auto inner = std::make_unique<Sequential>();
  inner->append("first", std::make_unique<Linear>(4, 4));
  auto block = std::make_unique<Sequential>();
  block->append("inner", std::move(inner));
  Sequential model;
  model.append("block", std::move(block));
  apply_ac(model, full({"block"}));
  EXPECT_EQ(error_of([&] { apply_ac(model.get("block"), full({"inner"})); }),
            "apply_ac: \"block\" runs again already; apply_ac() is called once");
  apply_ac(model.get("block.inner"), full({"first"}));
  set_up(model, compute);
  Frame frame(compute);
  EXPECT_EQ(error_of([&] {
              model.forward(random(context, {3, 4}, "x"), frame);
            }),
            "activation checkpointing: \"block.inner.first\" runs again by itself, and inside a module that "
            "runs again as a whole; expected one of them (one apply_ac() of the root)");
  Frame alone = Frame::inference(compute);  // nothing runs again
  EXPECT_EQ(model.forward(random(context, {3, 4}, "x"), alone).size(), 1U);
}

// Counts its passes in a buffer, as running statistics would.
class Counting : public Module {
 public:
  enum class How { once, always, differently };
  explicit Counting(How how) : how_(how) { passes = add("passes", std::make_shared<ModuleBuffer>(Shape{1})); }
  ModuleBufferRef passes;

 private:
  Tensors do_forward(Inputs x, Frame& frame) override {
    const auto count = [this]() -> Tensors {
      passes->tensor().f32()[0] += 1;
      return {};
    };
    if (how_ == How::once) frame.once(path(), count);
    if (how_ == How::always) count();
    Tensor y = x[0].clone(frame.compute().context());
    if (how_ == How::differently && frame.recomputing()) y.f32()[0] += 1;
    return {y};
  }
  Tensors do_backward(Inputs dy, Frame&) override { return {dy[0]}; }
  const How how_;
};

class State : public testing::Test {
 protected:
  std::string error(Counting::How how, const AcPolicy& policy) {
    auto block = std::make_unique<Sequential>();
    block->append("first", std::make_unique<Linear>(4, 4));
    Module& added = block->append("count", std::make_unique<Counting>(how));
    block->append("last", std::make_unique<Linear>(4, 4));
    Sequential model;
    model.append("block", std::move(block));
    apply_ac(model, policy);
    set_up(model, compute);
    Frame frame(compute);
    model.forward(random(context, {3, 4}, "x"), frame);
    const std::string text = error_of([&] { model.backward(random(context, {3, 4}, "dy"), frame); });
    passes = dynamic_cast<Counting&>(added).passes->tensor().f32()[0];
    return text;
  }
  Context context;
  Compute compute{context, 1};
  float passes = 0;
};

TEST_F(State, ChangesOnceInAPass) {
  EXPECT_EQ(error(Counting::How::once, full({"block"})), "");
  EXPECT_EQ(passes, 1);
}

// Every layer of weft that has state: its buffers are those of a run without checkpointing, over some steps.
TEST(ActivationCheckpointing, LeavesRunningStatisticsAsTheyAreWithout) {
  Context context;
  Compute compute(context, 1);
  const auto run = [&](const AcPolicy& policy) {
    auto block = std::make_unique<Sequential>();
    block->append("norm", std::make_unique<BatchNorm>(4));
    block->append("relu", std::make_unique<ReLU>());
    Sequential model;
    model.append("block", std::move(block));
    apply_ac(model, policy);
    set_up(model, compute);
    std::vector<std::vector<float>> states;
    for (int step = 0; step < 3; ++step) {
      Frame frame(compute, {.seed = 1, .step = step});
      const Tensor x = random(context, {3, 4, 2, 5}, "x" + std::to_string(step));
      const Tensor y = model.forward(x, frame)[0];
      const Tensor dx = model.backward(random(context, {3, 4, 2, 5}, "dy"), frame)[0];
      for (const Tensor& t : {y, dx}) states.emplace_back(t.f32().begin(), t.f32().end());
      for (const ModuleBuffer* b : model.buffers())
        if (b->tensor().dtype() == DType::f32)
          states.emplace_back(b->tensor().f32().begin(), b->tensor().f32().end());
        else
          states.push_back({static_cast<float>(b->tensor().as<std::int64_t>()[0])});
    }
    return states;
  };
  EXPECT_EQ(run(full({"block"})), run({}));
}

TEST_F(State, ThatChangesAgainIsAnError) {
  EXPECT_EQ(
      error(Counting::How::always, full({"block"})),
      "activation checkpointing: \"block.count.passes\" changed while the forward of \"block\" ran again; a "
      "module that changes state does so in Frame::once()");
}

TEST_F(State, TheFirstModuleThatDiffersIsNamed) {
  AcPolicy policy = full({"block"});
  EXPECT_EQ(error(Counting::How::differently, policy), "") << "it is not compared";
  policy.compare_outputs = true;
  EXPECT_EQ(
      error(Counting::How::differently, policy),
      "activation checkpointing: \"block.count\" returned other values when its forward ran again; expected "
      "the bits of the first run");
}

// A weight that two modules share is final after both, in whichever pass their uses were counted.
TEST(ActivationCheckpointing, ASharedWeightIsFinalOnce) {
  Context context;
  Compute compute(context, 1);
  struct Twice : Module {
    Twice() : first(4, 4), second(4, 4) {
      add("first", first), add("second", second);
      second.tie_weight(first.weight);
    }
    Linear first, second;
    Tensors do_forward(Inputs x, Frame& f) override { return second.forward(first.forward(x, f), f); }
    Tensors do_backward(Inputs dy, Frame& f) override { return first.backward(second.backward(dy, f), f); }
  } model;
  apply_ac(model, full({"*"}));
  set_up(model, compute);
  int final = 0;
  model.first.weight->listen([&](Parameter&) { ++final; });
  Frame frame(compute);
  model.forward(random(context, {3, 4}, "x"), frame);
  model.backward(random(context, {3, 4}, "dy"), frame);
  EXPECT_EQ(final, 1);
}

// --- bytes ---

struct Bytes {
  std::int64_t kept, peak;
};
Bytes measured(const AcPolicy& policy, ActivationBytes* predicted) {
  test::CountingAllocator memory;
  ContextOptions options;
  options.allocator = memory.functions();
  Context context(options);
  Compute compute(context, 1);
  TransformerConfig c;
  c.dim = 32, c.layers = 24, c.heads = 4, c.kv_heads = 2, c.ffn_hidden = 96, c.vocab = 8, c.max_seq = 64;
  Transformer model(c);
  materialise(model, compute);
  initialise(model, 1);
  Tensor tokens(context, {2, 64}, DType::i64);
  std::ranges::fill(tokens.as<std::int64_t>(), 1);
  {  // gradients have memory from here on
    Frame frame(compute);
    const Tensor y = model.forward(tokens, frame)[0];
    model.backward(y, frame);
  }
  for (Parameter* p : model.parameters()) p->zero_gradient();
  Frame frame(compute);
  if (predicted != nullptr) *predicted = ActivationProfile(model, tokens, frame).predict(policy);
  apply_ac(model, policy);
  const auto base = static_cast<std::int64_t>(memory.bytes());
  Tensor y = model.forward(tokens, frame)[0];
  Bytes bytes{};
  const Tensor dy = std::move(y);
  bytes.kept = static_cast<std::int64_t>(memory.bytes()) - base - dy.bytes();
  EXPECT_EQ(kept_bytes(frame), predicted == nullptr ? kept_bytes(frame) : predicted->kept);
  memory.take_peak();
  model.backward(dy, frame);
  bytes.peak = static_cast<std::int64_t>(memory.take_peak()) - base - dy.bytes();
  return bytes;
}

TEST(ActivationProfile, PredictsTheBytesOfTheAllocator) {
  for (const AcPolicy& policy :
       {AcPolicy{}, full({"layers.*"}), full({"layers.*"}, 2), selective(), selective({"layers.*.mlp"})}) {
    ActivationBytes predicted;
    const Bytes found = measured(policy, &predicted);
    const auto near = [&](std::int64_t got, std::int64_t expected) {
      return std::abs(static_cast<double>(got - expected)) / static_cast<double>(expected);
    };
    EXPECT_LE(near(predicted.kept, found.kept), 0.05)
        << name(policy.mode) << predicted.kept << " " << found.kept;
    EXPECT_LE(near(predicted.peak, found.peak), 0.05)
        << name(policy.mode) << predicted.peak << " " << found.peak;
  }
}

TEST(ActivationProfile, LeavesTheStateOfModulesAsItIs) {
  Context context;
  Compute compute(context, 1);
  Sequential model;
  model.append("norm", std::make_unique<BatchNorm>(4));
  set_up(model, compute);
  std::vector<std::vector<std::byte>> states;
  for (int time = 0; time < 2; ++time) {
    for (const ModuleBuffer* b : model.buffers()) {
      const auto* const bytes = reinterpret_cast<const std::byte*>(b->tensor().view().data);
      states.emplace_back(bytes, bytes + b->tensor().bytes());
    }
    Frame frame(compute);
    if (time == 0) ActivationProfile(model, random(context, {3, 4, 2, 5}, "x"), frame);
  }
  EXPECT_EQ(std::vector(states.begin(), states.begin() + 3), std::vector(states.begin() + 3, states.end()));
}

}  // namespace
}  // namespace weft::activation_checkpointing_test
