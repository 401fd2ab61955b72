// Exact mode: five steps of a transformer have the same bits of losses, gradients and parameters on every
// mesh.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "support/masked_backend.hpp"
#include "support/run_ranks.hpp"
#include "support/temporary_folder.hpp"
#include "weft/domain/loss.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/models/recipe.hpp"
#include "weft/models/trainer.hpp"
#include "weft/nn/exact.hpp"

namespace weft::exact_test {
namespace {

using test::error_of;
using test::Rank;
using test::Ranks;

constexpr std::int64_t kRows = 8, kSequence = 16, kVocab = 64;
constexpr int kSteps = 5;

struct Case {
  std::string name;
  MeshShape mesh;
  BuildOptions build = {};
  TransformerConfig model = {};
  int threads = 1, micro_batches = 1;
  Exact exact = Exact::yes;
  int first = 0, last = kSteps;
  std::optional<double> loss_scale = {};
  std::filesystem::path load = {}, save = {};  // before the first step, after the last
  test::RankOptions ranks = {};
};

TransformerConfig small(std::int64_t kv_heads = 4) {
  TransformerConfig c;
  c.dim = 48, c.layers = 2, c.heads = 8, c.kv_heads = kv_heads, c.head_size = 8, c.ffn_hidden = 88;
  c.vocab = kVocab, c.max_seq = kSequence, c.init_std = 0.1;
  return c;
}

Case on(int dp, int tp, bool sequence_parallel = false) {
  Case c{fmt::format("{}x{}{}", dp, tp, sequence_parallel ? " sp" : ""), {{"dp", dp}, {"tp", tp}}};
  c.build.tensor.sequence_parallel = sequence_parallel;
  c.model = small();
  return c;
}

// The bits of all values of a run, by name: "step 3: gradient of layers.0…".
using Bits = std::vector<std::pair<std::string, std::vector<std::uint64_t>>>;

template <class T>
std::vector<std::uint64_t> bits_of(std::span<const T> values) {
  std::vector<std::uint64_t> bits;
  for (const T v : values)
    if (std::isnan(v))
      bits.push_back(~std::uint64_t{0});  // the bits of a NaN say nothing
    else if constexpr (sizeof(T) == 8)
      bits.push_back(std::bit_cast<std::uint64_t>(v));
    else
      bits.push_back(std::bit_cast<std::uint32_t>(v));
  return bits;
}

std::vector<std::uint64_t> whole(const Tensor& t) {
  const Tensor all = full(t);
  return bits_of(std::span<const float>(all.f32().data(), static_cast<std::size_t>(all.count())));
}

// Rows [first, first + rows) of a step's batch; some labels do not count.
struct Rows {
  Rows(int step, std::int64_t first, std::int64_t rows, std::int64_t global) {
    for (std::int64_t r = first; r < first + rows; ++r)
      for (std::int64_t i = 0; i < kSequence; ++i) {
        tokens.push_back((step * 5 + r * 7 + i * i) % kVocab);
        labels.push_back((r + i) % 5 == 0 ? CrossEntropy::kIgnore
                                          : (step * 5 + r * 7 + (i + 1) * (i + 1)) % kVocab);
      }
    batch = {tokens.data(), labels.data(), rows, kSequence, global};
  }
  Rows(const Rows&) = delete;
  std::vector<std::int64_t> tokens, labels;
  TokenBatch batch;
};

Bits run(const Case& c, std::int64_t rows = kRows) {
  Bits bits;
  std::mutex mutex;
  test::run_ranks(
      Ranks::threads, c.mesh.size(),
      [&](Rank& rank) {
        Compute compute(rank.context, c.threads);
        const DeviceMesh mesh(rank.group(), c.mesh);
        BuildOptions options = c.build;
        options.exact = c.exact;
        options.seed = 3;
        ParallelModel model = build_parallel_model(c.model, mesh, compute, options);
        Trainer::Options training{.max_norm = 0.5};
        if (c.loss_scale) training.loss_scale = LossScaler::Options{.scale = *c.loss_scale};
        Trainer trainer(model, compute, training);
        Bits own;
        if (!c.load.empty()) trainer.load(c.load);
        for (int step = c.first; step < c.last; ++step) {
          const std::int64_t here = rows / model.data.size();
          std::vector<std::unique_ptr<Rows>> all;
          std::vector<TokenBatch> batches;
          for (int i = 0; i < c.micro_batches; ++i) {
            all.push_back(std::make_unique<Rows>(step, i * rows + here * model.data.rank(), here, rows));
            batches.push_back(all.back()->batch);
          }
          const Trainer::Result passes = trainer.backward(batches);
          const auto name = [&](std::string_view what) { return fmt::format("step {}: {}", step, what); };
          own.push_back({name("loss"), bits_of(std::span<const double>(&passes.loss, 1))});
          for (Parameter* p : model.parameters())
            own.push_back({name("gradient of " + p->path()), whole(p->gradient())});
          const Trainer::Result result = trainer.update(0.01);
          own.push_back({name("norm"), bits_of(std::span<const double>(&result.grad_norm, 1))});
          for (Parameter* p : model.parameters()) own.push_back({name(p->path()), whole(p->master())});
          const double held_out = trainer.evaluate(batches).loss;
          own.push_back({name("evaluation"), bits_of(std::span<const double>(&held_out, 1))});
        }
        if (!c.save.empty()) trainer.save(c.save);
        const std::lock_guard lock(mutex);
        if (bits.empty()) bits = own;
        EXPECT_TRUE(own == bits) << c.name << ", rank " << rank.rank << " has other bits than the first";
      },
      c.ranks);
  return bits;
}

// The first value that differs.
std::string difference(const Bits& a, const Bits& b) {
  if (a.size() != b.size()) return fmt::format("{} and {} values", a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;
    const auto& [name, values] = a[i];
    for (std::size_t k = 0; k < values.size(); ++k)
      if (values[k] != b[i].second[k])
        return fmt::format("{}: element {} of {}: {:x} and {:x}", name, k, values.size(), values[k],
                           b[i].second[k]);
    return name;
  }
  return "";
}

void expect_same_bits(const std::vector<Case>& cases, std::int64_t rows = kRows) {
  std::optional<Bits> first;
  for (const Case& c : cases) {
    const Bits bits = run(c, rows);
    if (!first) first = bits;
    EXPECT_EQ(difference(*first, bits), "") << cases[0].name << " and " << c.name;
  }
}

Case with(Case c, std::string_view what, const std::function<void(Case&)>& change) {
  c.name += fmt::format(" {}", what);
  change(c);
  return c;
}
Case fsdp(Case c) {
  return with(c, "fsdp", [](Case& x) { x.build.data = DataForm::fsdp; });
}
Case hsdp(int replicate, int shard, int tp) {
  Case c = fsdp(on(replicate * shard, tp));
  c.name = fmt::format("hsdp {}x{}x{}", replicate, shard, tp);
  c.mesh = {{"dp_replicate", replicate}, {"dp_shard", shard}, {"tp", tp}};
  c.build.replicate_axis = "dp_replicate", c.build.data_axis = "dp_shard";
  return c;
}
std::vector<Case> each(std::vector<Case> cases, std::string_view what,
                       const std::function<void(Case&)>& change) {
  for (Case& c : cases) c = with(c, what, change);
  return cases;
}

TEST(Exact, DataAndTensorAndSequenceParallel) {
  expect_same_bits(
      {on(1, 1), on(1, 2), on(1, 4), on(2, 1), on(2, 2), on(4, 1), on(1, 2, true), on(2, 2, true)});
}

// Otherwise the test above would say nothing.
TEST(Exact, WithoutItBitsDiffer) {
  const auto usual = [](Case& c) { c.exact = Exact::no; };
  const Bits one = run(with(on(1, 1), "not exact", usual));
  EXPECT_THAT(difference(one, run(with(on(1, 2), "not exact", usual))), testing::HasSubstr("step 0"));
  EXPECT_THAT(difference(one, run(with(on(2, 1), "not exact", usual))), testing::HasSubstr("step 0"));
  EXPECT_THAT(difference(one, run(on(1, 1))), testing::HasSubstr("step 0"));
}

TEST(Exact, EightRanks) { expect_same_bits({on(1, 1), on(1, 8), on(8, 1), on(2, 4, true), on(4, 2, true)}); }

TEST(Exact, ShardedParameters) {
  expect_same_bits({on(1, 1), fsdp(on(2, 1)), fsdp(on(4, 1)), hsdp(2, 2, 1), fsdp(on(2, 2)), hsdp(2, 2, 2)});
}

// The samples are divided over the replicas first, whatever the order of the axes in the mesh.
TEST(Exact, ReplicasInnermostInTheMesh) {
  Case inner = hsdp(2, 2, 1), ddp = hsdp(2, 2, 1), between = hsdp(2, 2, 2);
  inner.mesh = ddp.mesh = {{"dp_shard", 2}, {"dp_replicate", 2}, {"tp", 1}};
  between.mesh = {{"dp_shard", 2}, {"tp", 2}, {"dp_replicate", 2}};
  ddp.build.data = DataForm::ddp;
  inner.name = "dp_shard, dp_replicate", ddp.name += " ddp", between.name = "dp_shard, tp, dp_replicate";
  expect_same_bits({on(1, 1), inner, ddp, between});
}

TEST(Exact, SharedKeyAndValueHeads) {
  const auto two = [](Case& c) { c.model = small(2); };
  expect_same_bits(
      each({on(1, 1), on(1, 2), on(1, 4), on(2, 4), on(1, 8), on(1, 2, true)}, "2 kv heads", two));
}

TEST(Exact, Vocabulary) {
  const auto shard = [](Case& c) { c.build.tensor.vocab = VocabSplit::shard; };
  expect_same_bits({on(1, 1), with(on(1, 2), "vocab", shard), with(on(1, 4, true), "vocab", shard),
                    with(on(2, 4), "vocab", shard), with(on(1, 8), "vocab", shard)});
}

TEST(Exact, WeightsInBf16) {
  const auto narrow = [](Case& c) { c.build.dtype = DType::bf16; };
  expect_same_bits(
      each({on(1, 1), on(1, 2), on(2, 2, true), on(1, 8), fsdp(on(4, 1)), hsdp(2, 2, 2)}, "bf16", narrow));
}

// Codes are those of one rank, and scales are powers of two: a rescaled contribution to a sum loses nothing.
TEST(Exact, Float8Layers) {
  for (const Float8Recipe recipe : {Float8Recipe::rowwise, Float8Recipe::rowwise_gw_hp}) {
    const auto float8 = [&](Case& c) {
      c.build.float8 = recipe;
      c.build.float8_options.scales = Float8Scales::whole;
      c.model.ffn_hidden = 96;  // every layer except the head is converted
    };
    expect_same_bits(each({on(1, 1), on(1, 2), on(2, 2, true), on(4, 1), fsdp(on(2, 2)), on(1, 8)},
                          fmt::format("float8 {}", name(recipe)), float8));
  }
}

// Parts of gradients of weights overflow before they are added: on all meshes alike.
TEST(Exact, Float8LayersNearTheEndOfTheRange) {
  for (int power = 116; power < 126; ++power) {
    const auto float8 = [&](Case& c) {
      c.build.float8 = Float8Recipe::rowwise;
      c.build.float8_options.scales = Float8Scales::whole;
      c.model.ffn_hidden = 96;
      c.loss_scale = std::ldexp(1.0, power), c.last = 1;
    };
    expect_same_bits(each({on(1, 1), on(4, 1), fsdp(on(2, 1))}, fmt::format("scale 2^{}", power), float8));
  }
}

TEST(Exact, Threads) {
  expect_same_bits({on(1, 1), with(on(1, 1), "2 threads", [](Case& c) { c.threads = 2; }),
                    with(on(2, 2), "3 threads", [](Case& c) { c.threads = 3; })});
}

TEST(Exact, MicroBatches) {
  for (const int count : {2, 3, 4})
    expect_same_bits(each({on(1, 1), on(2, 1), on(2, 2), fsdp(on(4, 1)), hsdp(2, 2, 1)},
                          fmt::format("{} micro-batches", count), [&](Case& c) { c.micro_batches = count; }));
}

// A run that is stopped and resumed on another mesh.
TEST(Exact, Resumes) {
  const test::TemporaryFolder folder;
  const Bits whole = run(on(1, 1));
  const auto stop = [&](Case& c) { c.last = 3, c.save = folder.path() / "run"; };
  const auto go_on = [&](Case& c) { c.first = 3, c.load = folder.path() / "run"; };
  const Bits first = run(with(on(2, 2, true), "stopped", stop));
  for (const Case& c : {on(1, 4), fsdp(on(4, 1)), hsdp(2, 2, 1)}) {
    const Bits rest = run(with(c, "resumed", go_on));
    Bits all = first;
    all.insert(all.end(), rest.begin(), rest.end());
    EXPECT_EQ(difference(whole, all), "") << c.name;
  }
}

// Sizes that are no multiples of 8, and larger than a tile of a product.
TEST(Exact, OtherSizes) {
  const auto odd = [](Case& c) { c.model.dim = 52, c.model.ffn_hidden = 100, c.model.vocab = 68; };
  expect_same_bits(each({on(1, 1), on(1, 2), on(2, 4), on(4, 1)}, "odd", odd), 4);
  const auto large = [](Case& c) {
    c.model.dim = 264, c.model.ffn_hidden = 520, c.model.vocab = 296, c.model.layers = 1;
  };
  expect_same_bits(each({on(1, 1), on(1, 8), on(4, 2, true)}, "large", large));
}

// The text of the error of each rank, which must be the same.
std::string refusal(const Case& c, std::int64_t rows = kRows) {
  std::string text;
  std::mutex mutex;
  test::run_ranks(Ranks::threads, c.mesh.size(), [&](Rank& rank) {
    const std::string own = test::error_text([&] {
      Compute compute(rank.context, 1);
      const DeviceMesh mesh(rank.group(), c.mesh);
      BuildOptions options = c.build;
      options.exact = Exact::yes;
      ParallelModel model = build_parallel_model(c.model, mesh, compute, options);
      Trainer trainer(model, compute, {});
      const Chunk part = chunk_of(rows, model.data.size(), model.data.rank());
      const Rows batch(0, part.offset, part.size, rows);
      trainer.step({&batch.batch, 1}, 0.01);
    });
    const std::lock_guard lock(mutex);
    if (text.empty()) text = own;
    EXPECT_EQ(own, text);
  });
  return text;
}

TEST(Exact, RefusesWhatHasNoRule) {
  EXPECT_EQ(refusal(on(3, 1), 9), "bad_argument: exact: dp=3 does not divide 8 blocks");
  EXPECT_EQ(refusal(on(8, 1), 12),
            "bad_argument: exact: rows of a batch: 12 over 8 ranks (12 = 8 x 1 + 4); expected equal parts");
  EXPECT_EQ(refusal(with(on(1, 2), "tied", [](Case& c) { c.model.tied = true; })),
            "bad_argument: exact: \"token_embedding.embedding.weight\" is used by 2 modules, whose gradients "
            "are added before "
            "the ranks add theirs; there is no rule for that");
  EXPECT_EQ(refusal(with(on(1, 4), "vocab",
                         [](Case& c) { c.model.vocab = 66, c.build.tensor.vocab = VocabSplit::shard; })),
            "bad_argument: exact: \"token_embedding.embedding.weight\": dimension 0 over tp=4: 66 over 4 "
            "ranks (66 = 4 x 16 + "
            "2); expected equal parts");
  EXPECT_EQ(refusal(with(on(1, 4, true), "2 kv heads", [](Case& c) { c.model = small(2); })),
            "bad_argument: exact: sequence_parallel over the axes tp_kv=2 x tp_rep=2, which reduce one after "
            "the other; expected "
            "one tensor axis, or kv heads for each of its 4 ranks");
  EXPECT_EQ(refusal(with(on(1, 2), "float8", [](Case& c) { c.build.float8 = Float8Recipe::rowwise; })),
            "bad_argument: exact: \"layers.0.attention.q_proj\" is a float8 layer whose scales are of each "
            "rank's part; expected Float8Scales::whole");
  EXPECT_EQ(refusal(with(on(1, 2), "float8", [](Case& c) { c.build.float8 = Float8Recipe::tensorwise; })),
            "bad_argument: exact: \"layers.0.attention.q_proj\" is a float8 layer of the recipe tensorwise; "
            "expected rowwise or rowwise_gw_hp, whose scales are powers of two");
  EXPECT_EQ(refusal(with(fsdp(on(2, 1)), "reduce",
                         [](Case& c) { c.build.sharding.precision.reduce = DType::bf16; })),
            "bad_argument: exact: sharding.precision.reduce is bf16; expected f32");
  EXPECT_EQ(refusal(with(on(1, 2), "activations",
                         [](Case& c) { c.build.dtype = c.build.activations = DType::bf16; })),
            "bad_argument: exact: activations is bf16; expected f32");
}

TEST(Exact, NamesALayerWithoutARule) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", 2}});
    Sequential root;
    root.append("first", std::make_unique<Linear>(8, 8));
    root.append("second", std::make_unique<GroupNorm>(2, 8));
    EXPECT_EQ(test::error_text([&] { expect_exact(root, mesh); }),
              "bad_argument: exact: \"second\" is of kind GroupNorm, which has no rule for exact mode");
  });
}

TEST(Exact, RefusesALossWithoutARule) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 1}});
    Recipe recipe;
    recipe.name = "line";
    recipe.build = [] { return std::make_unique<Linear>(8, 8); };
    recipe.split = [](Module&, const DeviceMesh&, const BuildOptions&) {};
    recipe.loss = [] { return std::make_unique<MapSquaredError>(); };
    BuildOptions options;
    options.exact = Exact::yes;
    EXPECT_EQ(
        test::error_text([&] { build_parallel_model(recipe, mesh, compute, options); }),
        "bad_argument: exact: the loss of the recipe has no rule for exact mode; expected a CrossEntropy, a "
        "MeanSquaredError or a BinaryCrossEntropy");
  });
}

TEST(Exact, OverOtherTransports) {
  const auto messages = [](Case& c) {
    c.ranks.factory = test::masked(test::messages_only());
    c.ranks.order = Order::canonical;
  };
  expect_same_bits(
      {on(1, 1), with(on(2, 2), "by messages", messages), with(fsdp(on(4, 1)), "by messages", messages)});
}

TEST(Exact, OverGloo) {
  if (!WEFT_HAVE_GLOO) GTEST_SKIP() << "the build found no Gloo";
  const auto gloo = [](Case& c) { c.ranks.backend = "gloo", c.ranks.order = Order::canonical; };
  expect_same_bits({on(1, 1), with(on(2, 2, true), "gloo", gloo), with(fsdp(on(4, 1)), "gloo", gloo)});
}

TEST(Exact, RefusesAGroupWithAnOrderOfItsOwn) {
  test::RankOptions masked;
  masked.factory = test::masked(test::some());
  const auto body = [](Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 1}});
    BuildOptions options;
    options.exact = Exact::yes;
    EXPECT_EQ(test::error_text([&] { build_parallel_model(small(), mesh, compute, options); }),
              "bad_argument: exact: group \"world\" adds in the order of its transport, masked; expected "
              "a group whose Membership has order = canonical");
  };
  test::run_ranks(Ranks::threads, 2, body, masked);
}

// An error of one data rank in a micro-batch before the last: all ranks throw, and the next step is as on one
// rank.
TEST(Exact, GoesOnAfterAnErrorInAnEarlierMicroBatch) {
  const auto losses = [](const MeshShape& shape, bool fails) {
    double loss = 0;
    test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
      Compute compute(rank.context);
      const DeviceMesh mesh(rank.group(), shape);
      ParallelModel model = build_parallel_model(small(), mesh, compute, {.seed = 3, .exact = Exact::yes});
      Trainer trainer(model, compute, {});
      bool throws = fails && rank.rank == 1;
      const HookHandle hook = model.model->get("layers.1.mlp")
                                  .add_hook(Module::HookPoint::pre_forward, [&](Module&, Tensors&, Frame&) {
                                    if (std::exchange(throws, false))
                                      throw Error(ErrorCode::bad_argument, "mine");
                                  });
      const std::int64_t here = kRows / model.data.size();
      const Rows one(0, here * model.data.rank(), here, kRows), two(1, here * model.data.rank(), here, kRows);
      const TokenBatch both[] = {one.batch, two.batch};
      if (fails) {
        EXPECT_NE(std::string(error_of([&] { trainer.step(both, 0.01); }).what()), "no error was thrown");
      }
      const double found = trainer.step(both, 0.01).loss;
      if (rank.rank == 0) loss = found;
    });
    return loss;
  };
  EXPECT_EQ(losses({{"dp", 2}, {"tp", 1}}, true), losses({{"dp", 1}, {"tp", 1}}, false));
}

TEST(Exact, BatchOfTwelve) { expect_same_bits({on(1, 1), on(2, 1), on(4, 1), on(2, 2)}, 12); }

}  // namespace
}  // namespace weft::exact_test
