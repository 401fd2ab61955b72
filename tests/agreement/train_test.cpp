// Models: values of parameters, and options of a training.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <vector>

#include "agreement/row.hpp"
#include "train/bag.hpp"
#include "train/shard_net.hpp"
#include "weft/domain/domain.hpp"
#include "weft/ep/dispatch.hpp"
#include "weft/models/generate.hpp"
#include "weft/models/outputs.hpp"
#include "weft/models/training.hpp"
#include "weft/pp/grad_norm.hpp"
#include "weft/pp/pipeline.hpp"
#include "weft/tp/conv.hpp"
#include "weft/tp/linear.hpp"
#include "weft/tp/vocab.hpp"
#include "weft/train/apply_ddp.hpp"
#include "weft/train/checkpoint.hpp"
#include "weft/train/fully_shard.hpp"
#include "weft/train/gradient_reducer.hpp"
#include "weft/train/loss_scaler.hpp"
#include "weft/train/muon.hpp"

namespace weft::agreement {
namespace train_test {
namespace {

using test::Rank;

Rows values() {
  return {
      {"GradientReducer::finish", "values of parameters", "in the first exchange of the gradients' order",
       ErrorCode::mismatch,
       "gradient_reducer: \"w\" is Replicate on dp=3, but on dp rank 1 it has other bits",
       [](Rank& r) {
         const DeviceMesh mesh(r.group(), {{"dp", r.size}});
         test::Bag bag;
         Parameter& w = bag.put(r.context, "w", {4}, replicated_layout(mesh, {4}));
         for (float& v : w.write_master().f32()) v = r.rank == 1 ? 2.0f : 1.0f;
         GradientReducer reducer({&w}, mesh["dp"]);
         test::use(w, make_layout(mesh, {Partial{}}, {4}), [](std::size_t) { return 1.0f; });
         reducer.finish();
       },
       3},
      {"GradientReducer::finish", "values of frozen parameters",
       "in the first exchange of the gradients' order", ErrorCode::mismatch,
       "gradient_reducer: \"frozen\" is Replicate on dp=3, but on dp rank 1 it has other bits",
       [](Rank& r) {
         const DeviceMesh mesh(r.group(), {{"dp", r.size}});
         test::Bag bag;
         Parameter& frozen = bag.put(r.context, "frozen", {4}, replicated_layout(mesh, {4}));
         frozen.set_trainable(false);
         for (float& v : frozen.write_master().f32()) v = r.rank == 1 ? 2.0f : 1.0f;
         Parameter& w = bag.put(r.context, "w", {4}, replicated_layout(mesh, {4}));
         GradientReducer reducer({&frozen, &w}, mesh["dp"]);
         test::use(w, make_layout(mesh, {Partial{}}, {4}), [](std::size_t) { return 1.0f; });
         reducer.finish();
       },
       3},
  };
}

// Two steps over replicas, in which rank 1 has other options or another learning rate.
template <class Optimizer>
Row of_optimizer(const std::string& function, const std::string& value, double rate,
                 const typename Optimizer::Options& odd) {
  return {function,
          value,
          "in the next step, with the reductions of `GradientReducer`",
          ErrorCode::mismatch,
          "bucket_reducer: ranks took the last step of their optimizers with other options, another learning "
          "rate or another number; expected the same on all: …all_reduce f32 x",
          [=](Rank& r) {
            Compute compute(r.context);
            const DeviceMesh mesh(r.group(), {{"dp", r.size}});
            test::Bag bag;
            Parameter& w = bag.put(r.context, "w", {4}, replicated_layout(mesh, {4}));
            for (float& v : w.write_master().f32()) v = 1;
            GradientReducer reducer({&w}, mesh["dp"]);
            Optimizer optimizer(compute, {&w}, r.rank == 1 ? odd : typename Optimizer::Options{});
            for (int step = 0; step < 2; ++step) {
              w.zero_gradient();
              test::use(w, make_layout(mesh, {Partial{}}, {4}), [](std::size_t) { return 1.0f; });
              reducer.finish();
              optimizer.step(r.rank == 1 ? rate : 0.01);
            }
          }};
}

Rows optimizers() {
  return {
      of_optimizer<AdamW>("AdamW", "options", 0.01, {.beta2 = 0.9}),
      of_optimizer<AdamW>("AdamW", "lr", 0.02, {}),
      of_optimizer<SGD>("SGD", "options", 0.01, {.momentum = 0.5}),
      of_optimizer<SGD>("SGD", "lr", 0.02, {}),
      of_optimizer<Lion>("Lion", "options", 0.01, {.beta2 = 0.9}),
      of_optimizer<ScheduleFreeAdamW>("ScheduleFreeAdamW", "options", 0.01, {.beta2 = 0.9}),
      of_optimizer<Muon>("Muon", "options", 0.01, {.momentum = 0.5}),
      {"Muon", "the list of matrices", "before the first step of a matrix", ErrorCode::mismatch,
       "muon: matrix 0 is \"v\" (f32 (2, 2) as [dp: Replicate]) on dp rank 0, but \"w\" (f32 (2, 2) as [dp: "
       "Replicate]) on dp rank 1",
       [](Rank& r) {
         const DeviceMesh mesh(r.group(), {{"dp", r.size}});
         test::Bag bag;
         Parameter& w = bag.put(r.context, r.rank == 1 ? "w" : "v", {2, 2}, replicated_layout(mesh, {2, 2}));
         for (float& v : w.write_master().f32()) v = 1;
         test::use(w, w.layout(), [](std::size_t) { return 1.0f; });
         Muon muon(bag.compute(), {&w}, {});
         muon.step(0.01);
       }},
      {"AdamW", "lr, of a sharded model", "in the next step, with the gathers of `fully_shard`",
       ErrorCode::mismatch,
       "sharded_parameters: ranks took the last step of their optimizers with other options, another "
       "learning rate or another number; expected the same on all: …all_gather",
       [](Rank& r) {
         test::ShardRun run(r, {{"dp", 2}}, {"dp"});
         initialise(*run.net, 7);
         AdamW optimizer(run.compute, run.net->parameters(), {});
         for (int step = 0; step < 2; ++step) {
           optimizer.zero_gradients();
           run.pass(step);
           optimizer.step(r.rank == 1 ? 0.02 : 0.01);
         }
       }},
  };
}

Rows reducers() {
  const std::string where = "in the first exchange of the gradients' order";
  return {
      {"GradientReducer::finish", "list of parameters", where, ErrorCode::mismatch,
       "gradient_reducer: parameter 0 is \"v\" (x4) on dp rank 0, but \"w\" (x4) on dp rank 1",
       [](Rank& r) {
         const DeviceMesh mesh(r.group(), {{"dp", r.size}});
         test::Bag bag;
         Parameter& w = bag.put(r.context, r.rank == 1 ? "w" : "v", {4}, replicated_layout(mesh, {4}));
         GradientReducer reducer({&w}, mesh["dp"]);
         test::use(w, make_layout(mesh, {Partial{}}, {4}), [](std::size_t) { return 1.0f; });
         reducer.finish();
       }},
      {"GradientReducer::finish", "options, as of `BucketReducer`", where, ErrorCode::mismatch,
       "bucket_reducer: the reducer is …bucket_bytes 4, …bucket_bytes 8, ",
       [](Rank& r) {
         const DeviceMesh mesh(r.group(), {{"dp", r.size}});
         test::Bag bag;
         Parameter& w = bag.put(r.context, "w", {4}, replicated_layout(mesh, {4}));
         GradientReducer reducer({&w}, mesh["dp"], {.bucket_bytes = r.rank == 1 ? 8 : 4});
         test::use(w, make_layout(mesh, {Partial{}}, {4}), [](std::size_t) { return 1.0f; });
         reducer.finish();
       }},
      {"LossScaler::unscale", "scale", "in the exchange of what is finite", ErrorCode::mismatch,
       "loss_scaler: the scale is 65536 after 0 good steps on dp rank 0, but 32768 after 0 on dp rank 1",
       [](Rank& r) {
         const DeviceMesh mesh(r.group(), {{"dp", r.size}});
         std::vector<float> v(4, 1.0f);
         const std::vector<Gradient> list{make_gradient("w", v.data(), replicated_layout(mesh, {4}))};
         LossScaler scaler;
         if (r.rank == 1) scaler.set_state({32768, 0});
         scaler.unscale(list, mesh);
       }},
  };
}

// A model with values; rank 1 has another seed.
std::unique_ptr<Sequential> seeded(Rank& r, Compute& compute) {
  auto net = test::shard_net();
  materialise(*net, compute);
  initialise(*net, r.rank == 1 ? 8 : 7);
  return net;
}

Rows seeds() {
  const std::string differs = "check_replicas: \"embed.weight\" is Replicate on ";
  return {
      {"apply_ddp", "values of parameters", "when it is called, where there are values", ErrorCode::mismatch,
       differs + "dp=2, but on …it has other bits",
       [](Rank& r) {
         Compute compute(r.context);
         const DeviceMesh mesh(r.group(), {{"dp", r.size}});
         const auto net = seeded(r, compute);
         apply_ddp(*net, mesh["dp"]);
       }},
      {"fully_shard", "values of parameters", "when it is called, where there are values",
       ErrorCode::mismatch, differs + "dp=2, but on …it has other bits",
       [](Rank& r) {
         Compute compute(r.context);
         const DeviceMesh mesh(r.group(), {{"dp", r.size}});
         const auto net = seeded(r, compute);
         fully_shard(*net, mesh["dp"]);
       }},
      {"fully_shard", "values of parameters, along axes that replicate", "in the first pass",
       ErrorCode::mismatch, differs + "rep=2, but on …it has other bits",
       [](Rank& r) {
         test::ShardRun run(r, {{"rep", 2}, {"dp", 1}}, {"dp"}, {"rep"});
         initialise(*run.net, r.rank == 1 ? 8 : 7);
         run.pass(0);
       }},
      {"fully_shard", "seed of `initialise()`, of parts of one parameter", "in the first pass",
       ErrorCode::mismatch,
       "sharded_parameters: the parts of \"…\"… were initialised differently on dp rank 0 and dp rank 1; "
       "expected one seed",
       [](Rank& r) {
         test::ShardRun run(r, {{"dp", 2}}, {"dp"});
         initialise(*run.net, r.rank == 1 ? 8 : 7);
         run.pass(0);
       }},
  };
}

// A small model and its trainer.
struct Trained {
  Trained(Rank& r, const MeshShape& shape, const Trainer::Options& options,
          const BuildOptions& build = {.seed = 3})
      : compute(r.context),
        mesh(r.group(), shape),
        model(build_parallel_model(config(), mesh, compute, build)),
        trainer(model, compute, options) {}
  static TransformerConfig config() {
    TransformerConfig c;
    c.dim = 16, c.layers = 1, c.heads = 2, c.kv_heads = 2, c.ffn_hidden = 16, c.vocab = 6, c.max_seq = 4;
    return c;
  }
  static TokenBatch batch(const std::vector<std::int64_t>& tokens) {
    return {tokens.data(), tokens.data(), 1, 4, 0};
  }
  void step(double lr = 0.01) {
    const std::vector<std::int64_t> tokens{0, 1, 2, 3};
    const TokenBatch b = batch(tokens);
    trainer.step({&b, 1}, lr);
  }
  Compute compute;
  DeviceMesh mesh;
  ParallelModel model;
  Trainer trainer;
};

Row of_trainer(const std::string& name, const std::function<void(Trainer::Options&)>& change) {
  return {"Trainer::step",
          name,
          "in the exchange of the numbers of labels",
          ErrorCode::bad_argument,
          "trainer: " + name + " is not the same on all ranks of dp=2 x tp=1; expected the same",
          [change](Rank& r) {
            Trainer::Options options;
            if (r.rank == 1) change(options);
            Trained(r, {{"dp", 2}, {"tp", 1}}, options).step();
          }};
}

// `both`: what both ranks have.
Row of_build(
    const std::string& name, const std::function<void(BuildOptions&)>& change,
    const std::function<void(BuildOptions&)>& both = [](BuildOptions&) {}) {
  return {"Trainer::step",
          name,
          "in the exchange of the numbers of labels",
          ErrorCode::bad_argument,
          "trainer: " + name + " is not the same on all ranks of dp=2 x tp=1; expected the same",
          [change, both](Rank& r) {
            BuildOptions options{.seed = 3};
            both(options);
            if (r.rank == 1) change(options);
            Trained(r, {{"dp", 2}, {"tp", 1}}, {}, options).step();
          }};
}
Row of_float8(const std::string& name, const std::function<void(BuildOptions&)>& change) {
  return of_build(name, change, [](BuildOptions& o) { o.float8 = Float8Recipe::rowwise; });
}

Row of_apply_float8(const std::string& name, const std::string& text, Float8Recipe recipe,
                    const Float8Options& options) {
  return {"apply_float8",
          name,
          "when it is called, if parameters have a layout",
          ErrorCode::mismatch,
          "apply_float8: " + text,
          [recipe, options](Rank& r) {
            const DeviceMesh mesh(r.group(), {{"dp", 2}});
            Linear layer(16, 16);
            replicate(layer, mesh);
            const bool other = r.rank == 1;
            apply_float8(layer, other ? recipe : Float8Recipe::rowwise, other ? options : Float8Options{});
          }};
}

Rows float8() {
  const Float8Recipe same = Float8Recipe::rowwise;
  return {
      of_apply_float8("recipe", "the recipe is rowwise on dp rank 0, but tensorwise on dp rank 1",
                      Float8Recipe::tensorwise, {}),
      of_apply_float8("options.filter", "options.filter.least_elements is 0 on dp rank 0, but 9 on dp rank 1",
                      same, {.filter = {.least_elements = 9}}),
      of_apply_float8("options.scales", "options.scales is own on dp rank 0, but whole on dp rank 1", same,
                      {.scales = Float8Scales::whole}),
      of_apply_float8("options.not_finite",
                      "options.not_finite is error on dp rank 0, but propagate on dp rank 1", same,
                      {.not_finite = Float8NotFinite::propagate}),
  };
}

Rows trainers() {
  const std::string where = "in the exchange of the numbers of labels";
  using Options = Trainer::Options;
  return {
      of_trainer("options.optimizer", [](Options& o) { o.optimizer = AdamW::Options{.beta1 = 0.8}; }),
      of_trainer("options.max_norm", [](Options& o) { o.max_norm = 2; }),
      of_trainer("options.non_finite", [](Options& o) { o.non_finite = NonFinite::skip; }),
      of_trainer("options.seed", [](Options& o) { o.seed = 1; }),
      of_trainer("options.loss_scale", [](Options& o) { o.loss_scale = LossScaler::Options{}; }),
      of_trainer("options.label_smoothing", [](Options& o) { o.label_smoothing = 0.1; }),
      of_trainer("options.z_loss", [](Options& o) { o.z_loss = 1e-4; }),
      of_trainer("options.freeze",
                 [](Options& o) {
                   o.freeze = FreezeSchedule({{9, "layers.0", true}});
                 }),
      of_trainer("options.ema", [](Options& o) { o.ema = Ema::Options{}; }),
      of_trainer("options.identity", [](Options& o) { o.identity = "another text"; }),
      {"Trainer::step", "the model", where, ErrorCode::bad_argument,
       "trainer: the model (its recipe, or the paths and shapes of its parameters) is not the same on all "
       "ranks "
       "of dp=2 x tp=1; expected the same",
       [](Rank& r) {
         Compute compute(r.context);
         const DeviceMesh mesh(r.group(), {{"dp", 2}, {"tp", 1}});
         TransformerConfig config = Trained::config();
         if (r.rank == 1) config.norm_eps = 1e-3;
         ParallelModel model = build_parallel_model(config, mesh, compute, {.seed = 3});
         Trainer trainer(model, compute, {});
         const std::vector<std::int64_t> tokens{0, 1, 2, 3};
         const TokenBatch b = Trained::batch(tokens);
         trainer.step({&b, 1}, 0.01);
       }},
      {"Trainer::step", "the shape of a sample, for a model with a BatchNorm", where, ErrorCode::bad_argument,
       "trainer: the shape of a sample, for a model with a BatchNorm, is not the same on all ranks of dp=2 x "
       "tp=1; expected the same",
       [](Rank& r) {
         Compute compute(r.context);
         const DeviceMesh mesh(r.group(), {{"dp", 2}, {"tp", 1}});
         Recipe recipe;
         recipe.build = [] { return std::make_unique<BatchNorm>(2); };
         recipe.loss = [] { return std::make_unique<MeanSquaredError>(); };
         ParallelModel model = build_parallel_model(recipe, mesh, compute, {});
         Trainer trainer(model, compute, {});
         const Tensor x(r.context, {1, 2, 3, 4 + r.rank});
         std::fill_n(x.f32().data(), x.count(), 1.0f);
         const Batch b{.inputs = {x}, .targets = {x}};
         trainer.step({&b, 1}, 0.01);
       }},
      of_build("BuildOptions::exact", [](BuildOptions& o) { o.exact = Exact::yes; }),
      of_build(
          "BuildOptions::activations", [](BuildOptions& o) { o.activations = DType::bf16; },
          [](BuildOptions& o) { o.dtype = DType::bf16; }),
      of_build("BuildOptions::data", [](BuildOptions& o) { o.data = DataForm::fsdp; }),
      of_build("BuildOptions::loss_chunk", [](BuildOptions& o) { o.loss_chunk = 2; }),
      of_build("BuildOptions::frozen", [](BuildOptions& o) { o.frozen = {"layers.0"}; }),
      of_build("BuildOptions::tensor.sequence_parallel",
               [](BuildOptions& o) { o.tensor.sequence_parallel = true; }),
      of_build("BuildOptions::tensor.vocab", [](BuildOptions& o) { o.tensor.vocab = VocabSplit::shard; }),
      of_float8("BuildOptions::float8", [](BuildOptions& o) { o.float8.reset(); }),
      of_float8("BuildOptions::float8_options.filter",
                [](BuildOptions& o) { o.float8_options.filter.only = {"layers.0.mlp"}; }),
      of_float8("BuildOptions::float8_options.scales",
                [](BuildOptions& o) { o.float8_options.scales = Float8Scales::whole; }),
      of_float8("BuildOptions::float8_options.not_finite",
                [](BuildOptions& o) { o.float8_options.not_finite = Float8NotFinite::propagate; }),
      of_float8("BuildOptions::dtype", [](BuildOptions& o) { o.dtype = DType::bf16; }),
      {"Trainer::step", "global_rows of the batches", where, ErrorCode::bad_argument,
       "trainer: global_rows of the batches is not the same on all ranks of dp=2 x tp=1; expected the same",
       [](Rank& r) {
         Trained t(r, {{"dp", 2}, {"tp", 1}}, {});
         const std::vector<std::int64_t> tokens{0, 1, 2, 3};
         TokenBatch b = Trained::batch(tokens);
         b.global_rows = r.rank == 1 ? 3 : 2;  // the second rank has one row of both
         t.trainer.step({&b, 1}, 0.01);
       }},
      {"Trainer::step", "lr", where, ErrorCode::bad_argument,
       "trainer: the learning rate is 0.…, and 0.01 to 0.02 on the ranks of dp=2 x tp=1; expected the same "
       "on all",
       [](Rank& r) {
         Trained(r, {{"dp", 2}, {"tp", 1}}, {}).step(r.rank == 1 ? 0.02 : 0.01);
       }},
      {"Trainer::step", "values of parameters", "in the first step, as `GradientReducer::finish`",
       ErrorCode::mismatch, "gradient_reducer: \"…\" is Replicate on dp=2, but on …it has other bits",
       [](Rank& r) {
         Trained t(r, {{"dp", 2}, {"tp", 1}}, {});
         for (Parameter* p : t.model.model->parameters())
           p->write_master().f32()[0] = static_cast<float>(r.rank);
         t.step();
       }},
      {"Trainer::step", "seed of the first values, of parts of one parameter",
       "in the first exchange of the numbers of labels", ErrorCode::bad_argument,
       "trainer: what the parameters were initialised with (the seed) is not the same on all ranks of dp=1 x "
       "tp=2; expected the same",
       [](Rank& r) {
         Trained t(r, {{"dp", 1}, {"tp", 2}}, {});
         initialise(*t.model.model, r.rank == 1 ? 8 : 7);
         t.step();
       }},
      {"Trainer::backward", "options, as of `Trainer::step`", where, ErrorCode::bad_argument,
       "trainer: options.seed is not the same on all ranks of dp=2 x tp=1; expected the same",
       [](Rank& r) {
         Trained t(r, {{"dp", 2}, {"tp", 1}}, {.seed = r.rank == 1 ? 8U : 7U});
         const std::vector<std::int64_t> tokens{0, 1, 2, 3};
         const TokenBatch b = Trained::batch(tokens);
         t.trainer.backward({&b, 1});
       }},
      {"Trainer::update", "lr", "in an exchange of its own", ErrorCode::bad_argument,
       "trainer: the learning rate is 0.…, and 0.01 to 0.02 on the ranks of dp=2 x tp=1; expected the same "
       "on all",
       [](Rank& r) {
         Trained t(r, {{"dp", 2}, {"tp", 1}}, {});
         const std::vector<std::int64_t> tokens{0, 1, 2, 3};
         const TokenBatch b = Trained::batch(tokens);
         t.trainer.backward({&b, 1});
         t.trainer.update(r.rank == 1 ? 0.02 : 0.01);
       }},
      {"train", "the plan", "in an exchange of its own", ErrorCode::bad_argument,
       "train: the plan is not the same on all ranks of dp=2 x tp=1; expected the same steps, evaluations "
       "and "
       "checkpoints",
       [](Rank& r) {
         Trained t(r, {{"dp", 2}, {"tp", 1}}, {});
         const TrainingPlan plan{.steps = r.rank == 1 ? 2 : 1,
                                 .step = [](std::int64_t) { return Trainer::Result{}; }};
         train(t.trainer, plan);
       }},
      {"compute_logits", "tokens of the tensor axis", "in an exchange of its own", ErrorCode::bad_argument,
       "compute_logits: …tp=2",
       [](Rank& r) {
         Trained t(r, {{"dp", 1}, {"tp", 2}}, {});
         const std::vector<std::int64_t> tokens{0, 1, 2, r.rank == 1 ? 4 : 3};
         compute_logits(t.model, t.compute, Trained::batch(tokens));
       }},
      {"compute_outputs", "inputs of the tensor axis", "in an exchange of its own", ErrorCode::bad_argument,
       "compute_outputs: …tp=2",
       [](Rank& r) {
         Trained t(r, {{"dp", 1}, {"tp", 2}}, {});
         const Tensor tokens = Tensor::zeros(r.context, {1, 4}, DType::i64);
         tokens.as<std::int64_t>()[3] = r.rank;
         compute_outputs(t.model, t.compute, {.inputs = {tokens}});
       }},
      {"gather_choices", "top_k", "in an exchange of its own", ErrorCode::mismatch, "gather_choices: …",
       [](Rank& r) {
         Compute compute(r.context);
         const std::int64_t top_k = 1 + r.rank;
         const Tensor experts = Tensor::zeros(r.context, {2, top_k}, DType::i32),
                      weights = Tensor::zeros(r.context, {2, top_k});
         gather_choices(compute, r.group(), experts.view(), weights.view());
       }},
      {"generate", "prompts, options", "in an exchange of its own", ErrorCode::bad_argument,
       "generate: ranks were given different prompts or options; expected the same on all ranks",
       [](Rank& r) {
         Trained t(r, {{"dp", 2}, {"tp", 1}}, {});
         const std::vector<TokenList> prompts{{0, r.rank == 1 ? 2 : 3}};
         generate(t.model, t.compute, prompts, {.new_tokens = 1});
       }},
  };
}

// Views of f32 or i64 for functions of a split layer.
template <class T>
TensorView of(std::vector<T>& v, const Shape& shape) {
  return view(v.data(), shape);
}
using Floats = std::vector<float>;
using Numbers = std::vector<std::int64_t>;

Rows split_layers() {
  const std::string with = "with the call", words = "in an exchange of 128 bytes before";
  // The sequence is divided along dimension 0 on rank 0, and along 1 on rank 1: (4, 4, 2) is (2, 4, 2) or (4,
  // 2, 2) there.
  const auto part = [](int dim) { return dim == 0 ? Shape{2, 4, 2} : Shape{4, 2, 2}; };
  return {
      {"column_linear_forward", "options.sequence_dim", with, ErrorCode::mismatch,
       "redistribute: (4, 4, 2) as …all_gather f32 x…their layouts differ",
       [part](Rank& r) {
         Compute compute(r.context);
         const DeviceMesh mesh(r.group(), {{"tp", 2}});
         Floats x(16, 1.0f), w(6, 1.0f), y(48);
         column_linear_forward(compute, mesh, of(x, part(r.rank)), of(w, {3, 2}), {}, of(y, {4, 4, 3}),
                               {.sequence_dim = r.rank});
       }},
      {"column_linear_backward", "options.sequence_dim", with, ErrorCode::mismatch,
       "redistribute: (4, 4, 2) as …f32 x…their layouts differ",
       [part](Rank& r) {
         Compute compute(r.context);
         const DeviceMesh mesh(r.group(), {{"tp", 2}});
         Floats x(16, 1.0f), w(6, 1.0f), dy(48, 1.0f), dx(16), dw(6);
         column_linear_backward(compute, mesh, of(dy, {4, 4, 3}), of(x, part(r.rank)), of(w, {3, 2}),
                                {.dx = of(dx, part(r.rank)), .dw = of(dw, {3, 2})}, {.sequence_dim = r.rank});
       }},
      {"row_linear_forward", "options.sequence_dim", with, ErrorCode::mismatch,
       "redistribute: (4, 4, 2) as …reduce_scatter f32 x…their layouts differ",
       [part](Rank& r) {
         Compute compute(r.context);
         const DeviceMesh mesh(r.group(), {{"tp", 2}});
         Floats x(48, 1.0f), w(6, 1.0f), y(16);
         row_linear_forward(compute, mesh, of(x, {4, 4, 3}), of(w, {2, 3}), {}, of(y, part(r.rank)),
                            {.sequence_dim = r.rank});
       }},
      {"row_linear_backward", "options.sequence_dim", with, ErrorCode::mismatch,
       "redistribute: (4, 4, 2) as …all_gather f32 x…their layouts differ",
       [part](Rank& r) {
         Compute compute(r.context);
         const DeviceMesh mesh(r.group(), {{"tp", 2}});
         Floats x(48, 1.0f), w(6, 1.0f), dy(16, 1.0f), dx(48), dw(6);
         row_linear_backward(compute, mesh, of(dy, part(r.rank)), of(x, {4, 4, 3}), of(w, {2, 3}),
                             {.dx = of(dx, {4, 4, 3}), .dw = of(dw, {2, 3})}, {.sequence_dim = r.rank});
       }},
      {"vocab_parallel_embedding_forward", "tokens", words, ErrorCode::mismatch,
       "vocab_parallel_embedding_forward: argument 1 is 4 tokens with digest ",
       [](Rank& r) {
         Compute compute(r.context);
         const DeviceMesh mesh(r.group(), {{"tp", 2}});
         Numbers tokens{0, 1, 2, r.rank == 1 ? 4 : 3};
         Floats w(6, 1.0f), y(8);
         vocab_parallel_embedding_forward(compute, mesh, 6, of(tokens, {4}), of(w, {3, 2}), of(y, {4, 2}));
       }},
      {"vocab_parallel_cross_entropy", "options.valid", words, ErrorCode::mismatch,
       "vocab_parallel_cross_entropy: argument 1 is valid 4 on tp rank 0, but valid 3 on tp rank 1",
       [](Rank& r) {
         Compute compute(r.context);
         const DeviceMesh mesh(r.group(), {{"tp", 2}});
         Numbers labels{0, 1, 2, 3};
         Floats logits(12, 1.0f);
         vocab_parallel_cross_entropy(compute, mesh, of(logits, {4, 3}), of(labels, {4}),
                                      {.vocab = 6, .valid = r.rank == 1 ? 3 : 4});
       }},
      {"vocab_parallel_cross_entropy", "labels", words, ErrorCode::mismatch,
       "vocab_parallel_cross_entropy: argument 4 is 4 labels with digest ",
       [](Rank& r) {
         Compute compute(r.context);
         const DeviceMesh mesh(r.group(), {{"tp", 2}});
         Numbers labels{0, 1, 2, r.rank == 1 ? 4 : 3};
         Floats logits(12, 1.0f);
         vocab_parallel_cross_entropy(compute, mesh, of(logits, {4, 3}), of(labels, {4}),
                                      {.vocab = 6, .valid = 4});
       }},
      {"vocab_parallel_linear_cross_entropy", "chunk", words, ErrorCode::mismatch,
       "vocab_parallel_linear_cross_entropy: argument 6 is chunk 2 on tp rank 0, but chunk 3 on tp rank 1",
       [](Rank& r) {
         Compute compute(r.context);
         const DeviceMesh mesh(r.group(), {{"tp", 2}});
         Numbers labels{0, 1, 2, 3};
         Floats x(8, 1.0f), w(6, 1.0f);
         vocab_parallel_linear_cross_entropy(compute, mesh, of(x, {4, 2}), of(w, {3, 2}), of(labels, {4}),
                                             {.vocab = 6, .valid = 4}, {}, 2 + r.rank);
       }},
  };
}

// 1x1 convolutions, whose maps are divided along their rows on rank 0 and along their columns on rank 1: (1,
// 2, 2, 4) or (1, 2, 4, 2) of (1, 2, 4, 4).
Rows convolutions() {
  const std::string with = "with the call";
  const auto part = [](int rank) { return rank == 0 ? Shape{1, 2, 2, 4} : Shape{1, 2, 4, 2}; };
  const Shape cut{1, 1, 4, 4};
  return {
      {"column_conv2d_forward", "options.sequence_dim", with, ErrorCode::mismatch,
       "redistribute: (1, 2, 4, 4) as …all_gather f32 x…their layouts differ",
       [=](Rank& r) {
         Compute compute(r.context);
         const DeviceMesh mesh(r.group(), {{"tp", 2}});
         Floats x(16, 1.0f), w(2, 1.0f), y(16);
         column_conv2d_forward(compute, mesh, of(x, part(r.rank)), of(w, {1, 2, 1, 1}), {}, of(y, cut),
                               {.sequence_dim = 2 + r.rank});
       }},
      {"column_conv2d_backward", "options.sequence_dim", with, ErrorCode::mismatch,
       "redistribute: (1, 2, 4, 4) as …f32 x…their layouts differ",
       [=](Rank& r) {
         Compute compute(r.context);
         const DeviceMesh mesh(r.group(), {{"tp", 2}});
         Floats x(16, 1.0f), w(2, 1.0f), dy(16, 1.0f), dx(16), dw(2);
         column_conv2d_backward(compute, mesh, of(dy, cut), of(x, part(r.rank)), of(w, {1, 2, 1, 1}),
                                {.dx = of(dx, part(r.rank)), .dw = of(dw, {1, 2, 1, 1})},
                                {.sequence_dim = 2 + r.rank});
       }},
      {"row_conv2d_forward", "options.sequence_dim", with, ErrorCode::mismatch,
       "redistribute: (1, 2, 4, 4) as …reduce_scatter f32 x…their layouts differ",
       [=](Rank& r) {
         Compute compute(r.context);
         const DeviceMesh mesh(r.group(), {{"tp", 2}});
         Floats x(16, 1.0f), w(2, 1.0f), y(16);
         row_conv2d_forward(compute, mesh, of(x, cut), of(w, {2, 1, 1, 1}), {}, of(y, part(r.rank)),
                            {.sequence_dim = 2 + r.rank});
       }},
      {"row_conv2d_backward", "options.sequence_dim", with, ErrorCode::mismatch,
       "redistribute: (1, 2, 4, 4) as …all_gather f32 x…their layouts differ",
       [=](Rank& r) {
         Compute compute(r.context);
         const DeviceMesh mesh(r.group(), {{"tp", 2}});
         Floats x(16, 1.0f), w(2, 1.0f), dy(16, 1.0f), dx(16), dw(2);
         row_conv2d_backward(compute, mesh, of(dy, part(r.rank)), of(x, cut), of(w, {2, 1, 1, 1}),
                             {.dx = of(dx, cut), .dw = of(dw, {2, 1, 1, 1})}, {.sequence_dim = 2 + r.rank});
       }},
  };
}

Rows maps() {
  return {
      {"gather_spatial", "layout of the maps", "with the call", ErrorCode::mismatch,
       "redistribute: (1, 1, …all_gather f32 x16 …their layouts differ",
       [](Rank& r) {
         const DeviceMesh mesh(r.group(), {{"y", 2}});
         const LayoutRef layout =
             make_layout(mesh, {Shard{2}}, r.rank == 1 ? Shape{1, 1, 8, 4} : Shape{1, 1, 4, 8});
         const Tensor maps = Tensor::zeros(r.context, layout->local_shape());
         gather_spatial(maps.with_layout(layout), DomainManager(mesh["y"], {}));
       }},
      {"shard_spatial", "sizes of the maps, numbers of samples", "in an exchange along options.data",
       ErrorCode::bad_argument, "shard_spatial: x has 1, 3 samples on the ranks of dp=2; expected 2, 2, ",
       [](Rank& r) {
         const DeviceMesh mesh(r.group(), {{"dp", 2}, {"y", 1}});
         const Tensor x = Tensor::zeros(r.context, {r.rank == 1 ? 3 : 1, 1, 2, 8});
         shard_spatial(x, DomainManager(mesh["y"], {.data = mesh["dp"]}));
       }},
      {"crop_padding", "padding", "in the first exchange of a plan", ErrorCode::mismatch,
       "window: …expected the same on all ranks",
       [](Rank& r) {
         const DeviceMesh mesh(r.group(), {{"y", 2}});
         const LayoutRef layout = make_layout(mesh, {Shard{2}}, {1, 1, 5, 8});
         const Tensor maps = Tensor::zeros(r.context, layout->local_shape());
         const SpatialPadding padding = r.rank == 1 ? SpatialPadding{.top = 1} : SpatialPadding{.bottom = 1};
         crop_padding(maps.with_layout(layout), padding, DomainManager(mesh["y"], {}), 4, 8);
       }},
  };
}

}  // namespace
}  // namespace train_test

namespace train_test {
namespace {

// A pipeline of two ranks; `differs`: the value that is another one on rank 1.
Row of_pipeline(const std::string& differs, const std::string& text) {
  return {
      "Pipeline::run", differs, "in the exchange at its start", ErrorCode::mismatch, text, [=](Rank& r) {
        const auto odd = [&](const char* value) { return r.rank == 1 && differs == value; };
        Compute compute(r.context);
        Sequential net;
        for (int i = 0; i < 3; ++i) net.append(std::make_unique<Linear>(2, 2));
        MeanSquaredError loss;
        PipelineOptions options{
            make_pipeline_schedule(odd("schedule") ? PipelineKind::one_f_one_b : PipelineKind::gpipe, 2, 2),
            {{"0", "1"}, {"2"}},
            [&](int, const Tensors& x) {
              return PipelineBorder{x[0].shape(), odd("shapes at the borders") ? DType::bf16 : DType::f32};
            }};
        if (odd("stages")) options.stages = {{"0"}, {"1", "2"}};
        Pipeline pipeline(net, &loss, r.group(), compute, options);
        pipeline.materialise(1);
        const Tensor x = Tensor::zeros(r.context, {1, 2});
        const PipelineMicroBatch batch{{x}, {x, scalar(r.context, 4)}};
        pipeline.run(std::vector<PipelineMicroBatch>{batch, batch}, {.seed = 1, .step = odd("step") ? 1 : 0});
      }};
}

Rows pipelines() {
  const auto mesh_of = [](Rank& r) { return DeviceMesh(r.group(), {{"pp", r.size}}); };
  return {
      of_pipeline("schedule", "pipeline: rank 1 has another schedule than rank 0"),
      of_pipeline("stages", "pipeline: rank 1 has another list of stages than rank 0"),
      of_pipeline("shapes at the borders", "pipeline: rank 1 has another list of shapes than rank 0"),
      of_pipeline("step", "pipeline: rank 1 has another step than rank 0"),
      {"clip_pipeline_grad_norm", "max_norm, non_finite", "in the exchange of the norms", ErrorCode::mismatch,
       "pipeline_grad_norm: max_norm or non_finite is another one on rank ",
       [=](Rank& r) {
         const DeviceMesh mesh = mesh_of(r);
         std::vector<float> g{1, 2};
         const Gradient gradient{"w", view(g)};
         clip_pipeline_grad_norm({&gradient, 1}, mesh, r.rank == 1 ? 2 : 1);
       }},
      {"save_stages", "as `save_checkpoint`", "with its arguments", ErrorCode::mismatch,
       "save_checkpoint: argument 0 is step 1…step 2",
       [=](Rank& r) {
         const DeviceMesh mesh = mesh_of(r);
         test::Bag bag;
         Parameter& w = bag.put(r.context, "w" + std::to_string(r.rank), {4}, replicated_layout(mesh, {4}));
         for (float& v : w.write_master().f32()) v = 1;
         Parameter* const own[] = {&w};
         save_stages(std::filesystem::temp_directory_path() / "weft-agreement-stages", mesh["pp"],
                     r.rank == 1 ? 2 : 1, own, {}, {});
       }},
  };
}

}  // namespace
}  // namespace train_test

Rows train_rows() {
  using namespace train_test;
  Rows rows;
  for (const Rows& some : {values(), reducers(), optimizers(), seeds(), float8(), trainers(), split_layers(),
                           convolutions(), maps(), pipelines()})
    rows.insert(rows.end(), some.begin(), some.end());
  return rows;
}

TEST(AgreementOfTraining, EachRankIsTold) { expect_told(train_rows()); }

// Each rank steps with a part of the parameters, at rates of its own, and the others take their values.
TEST(AgreementOfTraining, RanksMayStepWithPartsOfTheParameters) {
  test::run_ranks(test::Ranks::threads, 2, [](test::Rank& r) {
    Compute compute(r.context);
    const DeviceMesh mesh(r.group(), {{"dp", r.size}});
    test::Bag bag;
    std::vector<Parameter*> all;
    for (const char* const name : {"a", "b"}) {
      all.push_back(&bag.put(r.context, name, {4}, replicated_layout(mesh, {4})));
      for (float& v : all.back()->write_master().f32()) v = 1;
    }
    GradientReducer reducer(all, mesh["dp"]);
    SGD own(compute, {all[static_cast<std::size_t>(r.rank)]}, {});
    for (int step = 0; step < 3; ++step) {
      for (Parameter* p : all) {
        p->zero_gradient();
        test::use(*p, make_layout(mesh, {Partial{}}, {4}), [](std::size_t) { return 1.0f; });
      }
      reducer.finish();
      own.step(r.rank == 1 ? 0.02 : 0.01);
      for (int owner = 0; owner < 2; ++owner) {
        const Tensor& values = all[static_cast<std::size_t>(owner)]->write_master();
        r.group().broadcast(values, values, owner).wait();
      }
    }
    EXPECT_FLOAT_EQ(all[1]->master().f32()[0], 1 - 3 * 2 * 0.02F);
  });
}

// One rank steps, and declares the origin of the values that it sends unknown.
TEST(AgreementOfTraining, AHistoryMayBeTakenBack) {
  test::run_ranks(test::Ranks::threads, 2, [](test::Rank& r) {
    Compute compute(r.context);
    const DeviceMesh mesh(r.group(), {{"dp", r.size}});
    test::Bag bag;
    Parameter& w = bag.put(r.context, "w", {4}, replicated_layout(mesh, {4}));
    for (float& v : w.write_master().f32()) v = 1;
    GradientReducer reducer({&w}, mesh["dp"]);
    SGD sgd(compute, {&w}, {});
    for (int step = 0; step < 3; ++step) {
      w.zero_gradient();
      test::use(w, make_layout(mesh, {Partial{}}, {4}), [](std::size_t) { return 1.0f; });
      reducer.finish();
      if (r.rank == 0) sgd.step(0.01);
      forget_history(w);
      const Tensor& values = w.write_master();
      r.group().broadcast(values, values, 0).wait();
    }
    EXPECT_FLOAT_EQ(w.master().f32()[0], 1 - 3 * 2 * 0.01F);
  });
}

// The seeds of the ranks differ, but then all ranks write values of the same origin, as load_checkpoint()
// does.
TEST(AgreementOfTraining, SeedsOfValuesThatWereReplacedDoNotCount) {
  test::run_ranks(test::Ranks::threads, 2, [](test::Rank& r) {
    test::ShardRun run(r, {{"dp", 2}}, {"dp"});
    initialise(*run.net, r.rank == 1 ? 8 : 7);
    for (Parameter* p : run.net->parameters())
      for (float& v : p->write_master().f32()) v = 0.1F;
    for (int step = 0; step < 2; ++step) run.pass(step);
  });
}

}  // namespace weft::agreement
