// The run of train_data.h by the parts of the C++ API.
#include <algorithm>
#include <thread>
#include <vector>

#include "train_data.h"
#include "weft/mesh/redistribute.hpp"
#include "weft/models/build.hpp"
#include "weft/models/moe_transformer.hpp"
#include "weft/models/trainer.hpp"
#include "weft/nn/loss.hpp"
#include "weft/nn/optimizer.hpp"
#include "weft/store/store.hpp"
#include "weft/train/gradients.hpp"

namespace {

using namespace weft;

void run_rank(Context& context, const std::shared_ptr<Store>& store, int rank, int dp, int tp, bool split,
              double* losses) {
  Membership m;
  m.rank = rank;
  m.size = dp * tp;
  m.store = store;
  ProcessGroup group = ProcessGroup::create(context, "shm", m);
  const DeviceMesh mesh(group, {{"dp", dp}, {"tp", tp}});
  Compute compute(context, 2);
  TransformerConfig config;
  config.dim = TRAIN_DIM;
  config.layers = TRAIN_LAYERS;
  config.heads = TRAIN_HEADS;
  config.kv_heads = TRAIN_KV_HEADS;
  config.ffn_hidden = TRAIN_HIDDEN;
  config.vocab = TRAIN_VOCAB;
  config.max_seq = TRAIN_SEQUENCE;
  config.init_std = TRAIN_INIT_STD;
  BuildOptions options{.seed = TRAIN_SEED};
  options.tensor.sequence_parallel = split;
  options.tensor.vocab = split ? VocabSplit::shard : VocabSplit::whole;
  const ParallelModel built = build_parallel_model(config, mesh, compute, options);
  AdamW optimizer(compute, built.parameters(), {});
  CrossEntropy cross_entropy;
  const int rows = TRAIN_ROWS / dp;
  for (int step = 0; step < TRAIN_STEPS; ++step) {
    Tensor tokens(context, {rows, TRAIN_SEQUENCE}, DType::i64),
        labels(context, {rows, TRAIN_SEQUENCE}, DType::i64);
    train_batch(step, rows * built.data.rank(), rows, tokens.as<std::int64_t>().data(),
                labels.as<std::int64_t>().data());
    tokens = built.place(tokens, TRAIN_ROWS);
    labels = built.place(labels, TRAIN_ROWS);
    Frame frame(compute, {.step = step});
    const Tensor logits = built.model->forward({tokens}, frame)[0];
    const Tensor loss = cross_entropy.forward({logits, labels, global_valid(context, labels)}, frame)[0];
    built.model->backward(cross_entropy.backward({}, frame), frame);
    built.reducer->finish();
    if (tp > 1) sync_replicated_gradients(optimizer.parameters(), built.tensor);
    clip_grad_norm(optimizer.parameters(), TRAIN_MAX_NORM);
    optimizer.step(TRAIN_RATE);
    optimizer.zero_gradients();
    const double mean = full(loss).as<double>()[0];
    if (rank == 0) losses[step] = mean;
  }
}

void run_rank_with_experts(Context& context, const std::shared_ptr<Store>& store, int rank, int dp, int ep,
                           double* losses) {
  Membership m;
  m.rank = rank;
  m.size = dp * ep;
  m.store = store;
  ProcessGroup group = ProcessGroup::create(context, "shm", m);
  const DeviceMesh mesh(group, {{"dp", dp}, {"ep", ep}, {"tp", 1}});
  Compute compute(context, 2);
  MoETransformerConfig config;
  config.transformer = {.dim = TRAIN_DIM,
                        .layers = TRAIN_LAYERS,
                        .heads = TRAIN_HEADS,
                        .kv_heads = TRAIN_KV_HEADS,
                        .ffn_hidden = TRAIN_HIDDEN,
                        .vocab = TRAIN_VOCAB,
                        .max_seq = TRAIN_SEQUENCE,
                        .init_std = TRAIN_INIT_STD};
  config.experts = TRAIN_EXPERTS;
  config.expert_hidden = TRAIN_EXPERT_HIDDEN;
  config.router = {.bias = RouterBias::selects, .aux_loss = 0.05};
  ParallelModel built = build_parallel_model(
      moe_recipe(config), mesh, compute, {.expert_axis = "ep", .data = DataForm::fsdp, .seed = TRAIN_SEED});
  Trainer trainer(built, compute, {.max_norm = TRAIN_MAX_NORM});
  const int rows = TRAIN_ROWS / (dp * ep);
  for (int step = 0; step < TRAIN_STEPS; ++step) {
    std::vector<std::int64_t> tokens(static_cast<std::size_t>(rows) * TRAIN_SEQUENCE), labels = tokens;
    train_batch(step, rows * built.data.rank(), rows, tokens.data(), labels.data());
    const TokenBatch batch{tokens.data(), labels.data(), rows, TRAIN_SEQUENCE, TRAIN_ROWS};
    const double loss = trainer.step({&batch, 1}, TRAIN_RATE).loss;
    if (rank == 0) losses[step] = loss;
  }
}

}  // namespace

void train_experts_in_cpp(int dp, int ep, double losses[TRAIN_STEPS]) {
  Context context;
  const std::shared_ptr<Store> store = make_local_store();
  std::vector<std::thread> ranks;
  for (int r = 0; r < dp * ep; ++r)
    ranks.emplace_back([&, r] { run_rank_with_experts(context, store, r, dp, ep, losses); });
  for (std::thread& rank : ranks) rank.join();
}

void train_in_cpp(int dp, int tp, bool split, double losses[TRAIN_STEPS]) {
  Context context;
  const std::shared_ptr<Store> store = make_local_store();
  std::vector<std::thread> ranks;
  for (int r = 0; r < dp * tp; ++r)
    ranks.emplace_back([&, r] { run_rank(context, store, r, dp, tp, split, losses); });
  for (std::thread& rank : ranks) rank.join();
}
