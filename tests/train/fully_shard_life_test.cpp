// Tests of a sharded model besides plain steps: errors in a pass, accumulation, frozen and unused
// parameters, precision, memory.
#include <atomic>
#include <cstdlib>

#include "support/errors.hpp"
#include "train/shard_net.hpp"
#include "weft/train/apply_ddp.hpp"
#include "weft/train/replicas.hpp"

namespace weft::fully_shard_life_test {
namespace {

using test::error_of;
using test::error_text;
using test::expect_close;
using test::Rank;
using test::Ranks;
using test::ShardRun;
using test::Tripwire;
using test::Values;

constexpr double kGradient = 64 * 0x1p-23;
const MeshShape kTwo{{"dp", 2}};

FullyShardOptions by_blocks(const ReshardAfterForward& reshard = true) {
  FullyShardOptions options;
  options.blocks = {"layers.*"};
  options.reshard_after_forward = reshard;
  return options;
}

void step_with_sgd(ShardRun& run, double lr = 1e-2) {
  SGD(run.compute, run.net->parameters(), {}).step(lr);
  run.zero();
}

void expect_idle(const FullySharded& sharded) {
  EXPECT_EQ(sharded.in_flight(), 0);
  EXPECT_EQ(sharded.gathered_blocks(), 0);
  EXPECT_EQ(sharded.memory().whole_now, 0);
}

// --- errors in the middle of a step ---

TEST(FullyShardLife, AnErrorOnAllRanksLeavesAModelThatGoesOn) {
  for (const ReshardAfterForward& reshard :
       {ReshardAfterForward(true), ReshardAfterForward(false), ReshardAfterForward(2)})
    test::run_ranks(Ranks::threads, 4, [&](Rank& rank) {
      ShardRun undisturbed(rank, {{"dp", 4}}, {"dp"}, {}, by_blocks(reshard));
      ShardRun run(rank, {{"dp", 4}}, {"dp"}, {}, by_blocks(reshard));
      for (int step = 0; step < 4; ++step) {
        auto& wire = dynamic_cast<Tripwire&>(run.net->get("layers.1.trip"));
        wire.forward_trips = step == 1;
        wire.backward_trips = step == 2 || step == 3;
        if (step > 0) {
          EXPECT_EQ(error_text([&] { run.pass(step); }),
                    step == 1 ? "system: tripped forward" : "system: tripped backward");
          expect_idle(*run.sharded);
          for (const Parameter* p : run.net->parameters()) EXPECT_FALSE(p->has_gradient()) << p->path();
        }
        wire.forward_trips = wire.backward_trips = false;
        run.pass(step);
        undisturbed.pass(step);
        EXPECT_EQ(run.gradients(), undisturbed.gradients());
        step_with_sgd(run);
        step_with_sgd(undisturbed);
      }
      EXPECT_EQ(run.masters(), undisturbed.masters());
    });
}

TEST(FullyShardLife, AnErrorBetweenPassesIsFollowedByDiscard) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    ShardRun run(rank, kTwo, {"dp"}, {}, by_blocks(false));
    run.pass(0);
    Frame frame(run.compute);
    run.net->forward(run.rows(1), frame);
    EXPECT_EQ(run.sharded->gathered_blocks(), 4);  // kept for a backward pass that will not come
    run.sharded->discard();
    expect_idle(*run.sharded);
    EXPECT_TRUE(run.gradients().empty());
    run.pass(1);
    expect_idle(*run.sharded);
  });
}

TEST(FullyShardLife, AnErrorOnOneRankIsToldToTheOthersByTheDeadline) {
  test::RankOptions options;
  options.deadline = std::chrono::seconds(1);
  test::run_ranks(
      Ranks::threads, 2,
      [](Rank& rank) {
        ShardRun run(rank, kTwo, {"dp"}, {}, by_blocks());
        run.pass(0);
        dynamic_cast<Tripwire&>(run.net->get("layers.0.trip")).forward_trips = rank.rank == 0;
        const Error e = error_of([&] { run.pass(1); });
        if (rank.rank == 0) {
          EXPECT_STREQ(e.what(), "tripped forward");
        } else {
          EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
          EXPECT_EQ(test::ranks_of(e), std::vector<int>{0});
        }
        EXPECT_EQ(run.sharded->in_flight(), 0);
        rank.meet("end");
      },
      options);
}

// --- passes ---

TEST(FullyShardLife, ForwardWithoutBackwardDropsAllWeights) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    ShardRun run(rank, kTwo, {"dp"}, {}, by_blocks(false));
    Frame frame = Frame::inference(run.compute);
    const Tensor y = run.net->forward(run.rows(0), frame)[0];
    expect_idle(*run.sharded);
    // Between two passes of one training, too; and gradients stay.
    run.pass(0);
    const Values before = run.gradients();
    const Tensor again = run.net->forward(run.rows(0), frame)[0];
    EXPECT_TRUE(std::equal(y.f32().begin(), y.f32().end(), again.f32().begin()));
    EXPECT_EQ(run.gradients(), before);
  });
}

TEST(FullyShardLife, WeightsThatStayedAreGatheredAgainAfterTheOptimizersStep) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    for (const ReshardAfterForward& reshard : {ReshardAfterForward(false), ReshardAfterForward(1)}) {
      ShardRun run(rank, kTwo, {"dp"}, {}, by_blocks(reshard)), other(rank, kTwo, {"dp"}, {}, by_blocks());
      for (ShardRun* r : {&run, &other}) {
        r->pass(0);
        Frame left(r->compute);
        r->net->forward(r->rows(1), left);  // no backward follows
        step_with_sgd(*r);
      }
      run.pass(2);
      other.pass(2);
      EXPECT_EQ(run.gradients(), other.gradients());
    }
  });
}

TEST(FullyShardLife, TheNextBlockIsGatheredAheadAndReductionsComeBehind) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    ShardRun run(rank, kTwo, {"dp"}, {}, by_blocks());
    run.pass(0);
    // The first forward does not know the order of blocks. Its backward does: it gathers blocks 2, 1 and 0,
    // each when the block before it (for block 2: the root) begins. A forward then looks ahead for three
    // blocks, too.
    EXPECT_EQ(run.sharded->prefetched(), 3);
    int reducing = 0, gathering = 0;
    const HookHandle hook = run.net->get("layers.1.trip")
                                .add_hook(Module::HookPoint::pre_backward, [&](Module&, Tensors&, Frame&) {
                                  reducing = run.sharded->in_flight();
                                  gathering = run.sharded->gathered_blocks();
                                });
    run.zero();
    run.pass(1);
    EXPECT_EQ(run.sharded->prefetched(), 9);
    EXPECT_EQ(reducing, 2);   // block 2 is being reduced, and block 0 gathered
    EXPECT_EQ(gathering, 2);  // block 1 and the root
  });
}

TEST(FullyShardLife, AHelperThreadMayMakeTheProgress) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    ShardRun plain(rank, kTwo, {"dp"}, {}, by_blocks());
    plain.pass(0);
    Membership m = rank.membership("helped");
    m.progress = Progress::thread;
    ProcessGroup group = ProcessGroup::create(rank.context, "shm", m);
    auto net = test::shard_net();
    const auto sharded = fully_shard(*net, group, by_blocks());  // over a default mesh
    EXPECT_EQ(to_string(sharded->mesh().shape()), "dp=2");
    Compute compute(rank.context);
    materialise(*net, compute);
    initialise(*net, 7);
    Frame frame(compute);
    const Tensor x =
        distribute(full(plain.rows(0)), replicated_layout(sharded->mesh(), {12, 5})->with("dp", Shard{0}));
    const Tensor y = net->forward(x, frame)[0];
    Tensor dy(rank.context, y.shape());
    for (std::size_t i = 0; i < y.f32().size(); ++i)
      dy.f32()[i] = (y.f32()[i] - x.f32()[i / 3 * 5 + i % 3]) / static_cast<float>(ShardRun::kRows);
    net->backward(dy.with_layout(y.layout()), frame);
    const Values expected = plain.gradients();
    for (Parameter* p : net->parameters())
      EXPECT_EQ(ShardRun::floats(p->gradient()), expected.at(p->path())) << p->path();
  });
}

// --- accumulation ---

TEST(FullyShardLife, PassesAddUpWithAndWithoutReducingEachTime) {
  Values serial;
  test::run_ranks(Ranks::threads, 1, [&](Rank& rank) {
    ShardRun run(rank, {{"dp", 1}}, {"dp"}, {}, std::nullopt);
    for (int pass = 0; pass < 3; ++pass) run.pass(pass, 3 * ShardRun::kRows);
    serial = run.gradients();
  });
  for (const DType reduce : {DType::f32, DType::bf16})
    test::run_ranks(Ranks::threads, 3, [&](Rank& rank) {
      FullyShardOptions options = by_blocks();
      options.precision.reduce = reduce;
      const double tolerance = reduce == DType::f32 ? kGradient : 0x1p-6;
      ShardRun run(rank, {{"dp", 3}}, {"dp"}, {}, options);
      for (int step = 0; step < 2; ++step) {
        for (int pass = 0; pass < 3; ++pass) run.pass(pass, 3 * ShardRun::kRows);
        expect_close(run.gradients(), serial, tolerance, "each reduced ");
        run.zero();
        {
          const NoSync off = run.sharded->no_sync();
          for (int pass = 0; pass < 2; ++pass) run.pass(pass, 3 * ShardRun::kRows);
          EXPECT_TRUE(run.net->parameter("embed.weight")->gradient_layout()->partial());
          EXPECT_EQ(run.net->parameter("embed.weight")->gradient().shape(), (Shape{13, 5}));
          EXPECT_EQ(
              error_text([&] { run.sharded->finish(); }),
              "bad_argument: fully_shard: finish() inside no_sync(); end that scope before the last pass");
        }
        run.pass(2, 3 * ShardRun::kRows);
        expect_close(run.gradients(), serial, tolerance, "reduced once ");
        run.zero();
        {
          const NoSync off = run.sharded->no_sync();
          for (int pass = 0; pass < 3; ++pass) run.pass(pass, 3 * ShardRun::kRows);
        }
        run.sharded->finish();
        expect_close(run.gradients(), serial, tolerance, "by finish() ");
        EXPECT_EQ(
            error_text([&] { const NoSync off = run.sharded->no_sync(); }),
            "bad_argument: fully_shard: no_sync() while \"embed.weight\" has a reduced gradient; expected "
            "zero_gradient() first");
        run.zero();
        run.sharded->finish();  // nothing is left
        EXPECT_TRUE(run.gradients().empty());
      }
    });
}

// --- frozen and unused parameters ---

void freeze_first(ShardRun& run, bool trainable) {
  for (Parameter* p : run.net->get("layers.0").parameters()) run.sharded->set_trainable(*p, trainable);
}

TEST(FullyShardLife, AFrozenBlockThatIsTrainedLaterIsAsOneTrainedAtRateZeroUntilThen) {
  test::run_ranks(Ranks::threads, 3, [](Rank& rank) {
    ShardRun frozen(rank, {{"dp", 3}}, {"dp"}, {}, by_blocks()),
        slow(rank, {{"dp", 3}}, {"dp"}, {}, by_blocks());
    freeze_first(frozen, false);
    std::vector<Parameter*> first = slow.net->get("layers.0").parameters(), others;
    for (Parameter* p : slow.net->parameters())
      if (std::find(first.begin(), first.end(), p) == first.end()) others.push_back(p);
    const std::int64_t all = slow.sharded->reduce_bytes();
    EXPECT_LT(frozen.sharded->reduce_bytes(), all);
    EXPECT_EQ(frozen.sharded->gather_bytes(), slow.sharded->gather_bytes());
    for (int step = 0; step < 8; ++step) {
      if (step == 4) freeze_first(frozen, true);
      frozen.pass(step);
      slow.pass(step);
      if (step < 4) {
        for (Parameter* p : frozen.net->get("layers.0").parameters())
          EXPECT_FALSE(p->has_gradient()) << p->path();
      }
      step_with_sgd(frozen);
      SGD(slow.compute, others, {}).step(1e-2);
      SGD(slow.compute, first, {}).step(step < 4 ? 0 : 1e-2);
      slow.zero();
    }
    EXPECT_EQ(frozen.masters(), slow.masters());
    EXPECT_EQ(frozen.sharded->reduce_bytes(), all);
  });
}

// Its child takes part if an option says so.
class Optional : public Module {
 public:
  Optional() : inside_(13, 13, true) { add("inside", inside_); }
  bool used = true;

 private:
  Tensors do_forward(Inputs x, Frame& f) override { return used ? inside_.forward(x, f) : Tensors{x[0]}; }
  Tensors do_backward(Inputs dy, Frame& f) override {
    return used ? inside_.backward(dy, f) : Tensors{dy[0]};
  }
  Linear inside_;
};

TEST(FullyShardLife, UnusedParametersAreNamedOrCountAsZeros) {
  for (const Unused unused : {Unused::error, Unused::zeros})
    test::run_ranks(Ranks::threads, 2, [unused](Rank& rank) {
      DeviceMesh mesh(rank.group(), kTwo);
      Compute compute(rank.context);
      Sequential net;
      auto& optional = dynamic_cast<Optional&>(net.append("maybe", std::make_unique<Optional>()));
      net.append("end", std::make_unique<Linear>(13, 2));
      FullyShardOptions options;
      options.unused = unused;
      const auto sharded = fully_shard(net, mesh["dp"], options);
      materialise(net, compute);
      initialise(net, 3);
      const auto pass = [&] {
        Frame frame(compute);
        Tensor x(rank.context, {4, 13});
        std::fill(x.f32().begin(), x.f32().end(), 1.0F);
        const Tensor y = net.forward(distribute(x, make_layout(mesh, {Shard{0}}, x.shape())), frame)[0];
        Tensor dy(rank.context, y.shape());
        std::fill(dy.f32().begin(), dy.f32().end(), 1.0F);
        net.backward(dy.with_layout(y.layout()), frame);
      };
      pass();
      for (Parameter* p : net.parameters()) p->zero_gradient();
      optional.used = rank.rank == 0;
      if (unused == Unused::error) {
        const Error e = error_of(pass);
        EXPECT_EQ(e.code(), ErrorCode::bad_argument);
        EXPECT_STREQ(
            e.what(),
            "fully_shard: no backward pass used \"maybe.inside.weight\", \"maybe.inside.bias\" on dp rank 1; "
            "FullyShardOptions::unused = zeros lets such ranks contribute zeros");
        optional.used = true;
        pass();
        EXPECT_TRUE(net.parameter("maybe.inside.bias")->has_gradient());
        return;
      }
      pass();
      // Rank 0's two rows: each contributes to the bias what the next layer's weights sum up to.
      const std::vector<float> one = ShardRun::floats(net.parameter("maybe.inside.bias")->gradient());
      for (Parameter* p : net.parameters()) p->zero_gradient();
      optional.used = true;
      pass();
      const std::vector<float> both = ShardRun::floats(net.parameter("maybe.inside.bias")->gradient());
      for (std::size_t i = 0; i < one.size(); ++i) EXPECT_FLOAT_EQ(2 * one[i], both[i]);
      for (Parameter* p : net.parameters()) p->zero_gradient();
      optional.used = false;  // on no rank
      pass();
      for (const float v : ShardRun::floats(net.parameter("maybe.inside.weight")->gradient()))
        EXPECT_EQ(v, 0.0F);
    });
}

TEST(FullyShardLife, AWeightThatTwoBlocksShareIsGatheredWithTheRoot) {
  const auto make = [] {
    auto net = std::make_unique<Sequential>();
    auto& a =
        dynamic_cast<Linear&>(net->append("a", std::make_unique<Linear>(5, 5, true, Normal{.std = 0.3})));
    auto& b =
        dynamic_cast<Linear&>(net->append("b", std::make_unique<Linear>(5, 5, true, Normal{.std = 0.3})));
    b.tie_weight(a.weight);
    return net;
  };
  const auto gradients = [&](Rank& rank, bool sharded) {
    const DeviceMesh mesh(rank.group(), {{"dp", rank.size}});
    Compute compute(rank.context);
    const auto net = make();
    replicate(*net, mesh);
    std::unique_ptr<FullySharded> handle;
    if (sharded) handle = fully_shard(*net, mesh["dp"], {.blocks = {"*"}});
    materialise(*net, compute);
    initialise(*net, 3);
    Frame frame(compute);
    Tensor x(rank.context, {6, 5});
    RandomStream(3, "x").normal(0, 30, x.f32().data());
    const Tensor y = net->forward(distribute(x, make_layout(mesh, {Shard{0}}, x.shape())), frame)[0];
    net->backward(y, frame);
    Values all;
    for (Parameter* p : net->parameters()) all[p->path()] = ShardRun::floats(p->gradient());
    return all;
  };
  Values serial;
  test::run_ranks(Ranks::threads, 1, [&](Rank& rank) { serial = gradients(rank, false); });
  test::run_ranks(Ranks::threads, 3,
                  [&](Rank& rank) { expect_close(gradients(rank, true), serial, kGradient); });
}

// --- precision ---

TEST(FullyShardLife, MixedPrecisionTrainsCloseToF32) {
  EXPECT_EQ(default_mp_policy().param, DType::bf16);
  EXPECT_EQ(default_mp_policy().reduce, DType::f32);
  EXPECT_TRUE(default_mp_policy().cast_inputs);
  const auto losses = [](Rank& rank, const MixedPrecision& precision) {
    FullyShardOptions options = by_blocks();
    options.precision = precision;
    ShardRun run(rank, {{"dp", rank.size}}, {"dp"}, {}, options);
    const bool half = precision.param == DType::bf16;
    bool rounded = true;
    const HookHandle hook =
        run.net->get("layers.1").add_hook(Module::HookPoint::pre_forward, [&](Module&, Tensors& x, Frame&) {
          for (const float v : x[0].f32()) rounded = rounded && static_cast<float>(bf16(v)) == v;
          EXPECT_EQ(run.net->parameter("layers.1.up.weight")->weight().dtype(),
                    half ? DType::bf16 : DType::f32);
        });
    AdamW adamw(run.compute, run.net->parameters(), {});
    std::vector<double> all;
    for (int step = 0; step < 50; ++step) {
      all.push_back(run.whole_pass(step));
      adamw.step(1e-2);
      adamw.zero_gradients();
    }
    EXPECT_EQ(rounded, half);
    EXPECT_EQ(run.net->parameter("layers.1.up.weight")->master().dtype(), DType::f32);
    return all;
  };
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    const std::vector<double> full = losses(rank, {}), half = losses(rank, default_mp_policy()),
                              all_half = losses(rank, {.param = DType::bf16, .reduce = DType::bf16});
    for (std::size_t i = 0; i < full.size(); ++i) {
      EXPECT_NEAR(half[i], full[i], 0.05 * full[i] + 0.02) << i;
      EXPECT_NEAR(all_half[i], full[i], 0.05 * full[i] + 0.02) << i;
    }
    EXPECT_LT(half.back(), 0.3 * half.front());
  });
}

// --- memory ---

TEST(FullyShardLife, EachRankKeepsItsPartAndGathersABlockAtATime) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    constexpr int kLayers = 12;
    ShardRun run(rank, {{"dp", 4}}, {"dp"}, {}, by_blocks(), kLayers);
    AdamW adamw(run.compute, run.net->parameters(), {});
    run.pass(0);
    const ShardMemory m = run.sharded->memory();
    std::int64_t state = 0, count = 0;
    adamw.visit_state([&](const std::string&, std::string_view name, const Tensor& t) {
      if (name != "step") state += t.bytes();
    });
    for (const Parameter* p : run.net->parameters()) count += p->global_shape().count();
    EXPECT_EQ(m.whole_model, 4 * count);
    // Each rank holds a quarter, and at most one row more of each tensor whose size does not divide.
    EXPECT_LT(static_cast<double>(m.masters), 0.25 * static_cast<double>(m.whole_model) * 1.2);
    EXPECT_EQ(m.gradients, m.masters);
    EXPECT_EQ(state, 2 * m.masters);
    EXPECT_EQ(m.whole_now, 0);
    // Two blocks of twelve are gathered at once, and two have gradients; beside them the root's.
    EXPECT_LT(static_cast<double>(m.whole_peak), 5.0 / kLayers * static_cast<double>(m.whole_model));
    EXPECT_GT(m.whole_peak, 0);
    std::printf("rank %d: model %ld bytes, masters %ld, gradients %ld, states %ld, gathered at most %ld\n",
                rank.rank, static_cast<long>(m.whole_model), static_cast<long>(m.masters),
                static_cast<long>(m.gradients), static_cast<long>(state), static_cast<long>(m.whole_peak));
  });
}

// An allocator that takes memory of the C library, up to a limit.
struct Capped {
  std::atomic<std::size_t> now{0}, peak{0};
  std::size_t limit = 0;
  Allocator functions() {
    return {[](void* self, std::size_t bytes, std::size_t alignment) -> void* {
              auto& c = *static_cast<Capped*>(self);
              const std::size_t sum = c.now += bytes;
              if (sum > c.limit) {
                c.now -= bytes;
                return nullptr;
              }
              if (sum > c.peak) c.peak = sum;
              return std::aligned_alloc(alignment, bytes);
            },
            [](void* self, void* memory, std::size_t bytes, std::size_t) {
              static_cast<Capped*>(self)->now -= bytes;
              std::free(memory);
            },
            this};
  }
};

TEST(FullyShardLife, AModelLargerThanARanksMemoryIsBuiltAndTrained) {
  constexpr int kLayers = 24;
  constexpr std::int64_t kWidth = 64, kHidden = 256;
  const std::size_t model =
      4u * static_cast<std::size_t>(kLayers * (2 * kWidth * kHidden + 2 * kWidth + kHidden) + 5 * kWidth +
                                    kWidth + 3 * kWidth + 3);
  Capped capped;
  capped.limit = model * 3 / 4;
  test::RankOptions options;
  options.context.allocator = capped.functions();
  test::run_ranks(
      Ranks::processes, 8,
      [&](Rank& rank) {
        const DeviceMesh mesh(rank.group(), {{"dp", rank.size}});
        Compute compute(rank.context);
        {
          const auto whole = test::shard_net(kLayers, kWidth, kHidden);
          EXPECT_EQ(error_of([&] { materialise(*whole, compute); }).code(), ErrorCode::system);
        }
        const std::size_t before = capped.now;
        capped.peak = before;
        const auto net = test::shard_net(kLayers, kWidth, kHidden);
        const auto sharded = fully_shard(*net, mesh["dp"], by_blocks());
        EXPECT_EQ(capped.now, before);  // shapes alone
        materialise(*net, compute);
        initialise(*net, 7);
        AdamW adamw(compute, net->parameters(), {});
        std::vector<double> losses;
        Tensor x(rank.context, {16, 5});
        RandomStream(3, "x").normal(0, x.count(), x.f32().data());
        for (int step = 0; step < 5; ++step) {
          Frame frame(compute);
          const Tensor y = net->forward(distribute(x, make_layout(mesh, {Shard{0}}, x.shape())), frame)[0];
          double loss = 0;
          Tensor dy(rank.context, y.shape());
          for (std::size_t i = 0; i < y.f32().size(); ++i) {
            dy.f32()[i] = y.f32()[i] / 16;
            loss += static_cast<double>(y.f32()[i]) * static_cast<double>(y.f32()[i]) / 32;
          }
          rank.group().all_reduce(loss).wait();
          losses.push_back(loss);
          net->backward(dy.with_layout(y.layout()), frame);
          adamw.step(1e-3);
          adamw.zero_gradients();
        }
        EXPECT_LT(losses.back(), losses.front());
        const auto gathered = static_cast<std::size_t>(sharded->memory().whole_peak);
        EXPECT_LT(capped.peak + gathered, model);
        if (rank.rank == 0)
          std::printf("model %zu bytes; a rank allocated at most %zu, and gathered at most %zu\n", model,
                      capped.peak.load(), gathered);
      },
      options);
}

// --- models that have values already ---

TEST(FullyShardLife, AModelWithValuesKeepsThemAndReplicasAreCompared) {
  test::run_ranks(Ranks::threads, 3, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", 3}});
    Compute compute(rank.context);
    const auto net = test::shard_net();
    materialise(*net, compute);
    initialise(*net, 7);
    Values before;
    for (Parameter* p : net->parameters()) before[p->path()] = ShardRun::floats(p->master());
    const auto sharded = fully_shard(*net, mesh["dp"], by_blocks());
    for (Parameter* p : net->parameters()) {
      EXPECT_EQ(p->master().shape(), p->layout()->local_shape());
      EXPECT_EQ(ShardRun::floats(p->master()), before[p->path()]);
    }
    // Each rank sets its own seed before the model is built: the order of construction in this library
    // prevents different weights.
    const auto drifted = test::shard_net();
    materialise(*drifted, compute);
    initialise(*drifted, 7 + static_cast<std::uint64_t>(rank.rank == 1));
    const Error e = error_of([&] { fully_shard(*drifted, mesh["dp"], by_blocks()); });
    EXPECT_EQ(e.code(), ErrorCode::mismatch);
    EXPECT_TRUE(std::string_view(e.what()).starts_with(
        "check_replicas: \"embed.weight\" is Replicate on dp=3, but on dp rank 1 it has other bits; "))
        << e.what();
    EXPECT_EQ(drifted->parameter("embed.weight")->layout(), nullptr);  // nothing has changed
  });
}

TEST(FullyShardLife, MistakesAreNamedBeforeAnythingChanges) {
  test::run_ranks(Ranks::threads, 1, [](Rank& rank) {
    const DeviceMesh mesh = DeviceMesh::arithmetic(rank.context, {{"dp", 4}, {"tp", 2}}, 0);
    const auto net = test::shard_net();
    const auto told = [&](const ShardAxes& axes, const FullyShardOptions& options) {
      return error_text([&] { fully_shard(*net, axes, options); });
    };
    FullyShardOptions options;
    EXPECT_EQ(told(DeviceMesh(), {}),
              "bad_argument: fully_shard: axes.shard is an empty DeviceMesh, made by default or moved from");
    EXPECT_EQ(
        told({mesh["dp"], mesh["dp"]}, {}),
        "bad_argument: fully_shard: axes.replicate is dp, of which dp is to be cut; expected other axes");
    const DeviceMesh other = DeviceMesh::arithmetic(rank.context, {{"r", 2}}, 0);
    EXPECT_EQ(told({mesh["dp"], other["r"]}, {}),
              "bad_argument: fully_shard: axes.replicate is r of another mesh than dp");
    EXPECT_EQ(told(mesh["dp"], {.blocks = {"layer.*"}}),
              "bad_argument: fully_shard: options.blocks: \"layer.*\" matches no module below the root");
    EXPECT_EQ(told(mesh["dp"], by_blocks(3)),
              "bad_argument: fully_shard: options.reshard_after_forward is 3; expected true, false, or a "
              "number that divides "
              "the 4 ranks that share the parameters");
    EXPECT_EQ(told(mesh["dp"], by_blocks(0)),
              "bad_argument: fully_shard: options.reshard_after_forward is 0; expected true, false, or a "
              "number that divides "
              "the 4 ranks that share the parameters");
    options.precision.param = DType::f16;
    EXPECT_EQ(told(mesh["dp"], options),
              "bad_argument: fully_shard: options.precision.param is f16; expected f32 or bf16");
    options.precision = {.reduce = DType::f64};
    EXPECT_EQ(told(mesh["dp"], options),
              "bad_argument: fully_shard: options.precision.reduce is f64; expected f32 or bf16");
    for (Parameter* p : net->parameters()) EXPECT_EQ(p->layout(), nullptr);

    net->parameter("head.bias")->set_layout(replicated_layout(mesh, {3})->with("dp", Shard{0}));
    EXPECT_EQ(told(mesh["dp"], {}),
              "layout: fully_shard: \"head.bias\" is Shard(0) on dp=4; expected Replicate");
    net->parameter("head.bias")->set_layout(replicated_layout(other, {3}));
    EXPECT_EQ(told(mesh["dp"], {}),
              "layout: fully_shard: \"head.bias\" lies over r=2, the axes dp belong to dp=4 x tp=2: not the "
              "same DeviceMesh; use one for both");
    net->parameter("head.bias")->set_layout(nullptr);

    struct Scalar : Module {
      Scalar() { add("s", std::make_shared<Parameter>(Shape{})); }
      Tensors do_forward(Inputs, Frame&) override { return {}; }
      Tensors do_backward(Inputs, Frame&) override { return {}; }
    } scalar;
    EXPECT_EQ(error_text([&] { fully_shard(scalar, mesh["dp"]); }),
              "bad_argument: fully_shard: \"s\" is a scalar; it has no dimension to cut");

    // One gradient, two reducers.
    {
      const GradientReducer reducer(net->parameters(), mesh["dp"]);
      EXPECT_EQ(told(mesh["dp"], {}),
                "bad_argument: parameter \"embed.weight\": its gradient belongs to another reducer already; "
                "one reducer reduces over several axes");
    }
    const auto sharded = fully_shard(*net, mesh["dp"]);
    EXPECT_EQ(error_text([&] { GradientReducer(net->parameters(), mesh["dp"]); }),
              "bad_argument: parameter \"embed.weight\": its gradient belongs to another reducer already; "
              "one reducer reduces over several axes");
    EXPECT_EQ(told(mesh["dp"], {}),
              "layout: fully_shard: \"embed.weight\" is Shard(0) on dp=4; expected Replicate");
    EXPECT_EQ(error_text([&] {
                parallelize(*net, mesh["tp"], Plan{{"layers.*.up", Style::column}});
              }),
              "bad_argument: parallelize: \"layers.0.up.weight\" was laid out by fully_shard already; "
              "parallelize comes before "
              "that");
    EXPECT_EQ(error_text([&] { net->parameter("head.bias")->set_layout(nullptr); }),
              "bad_argument: parameter \"head.bias\": set_layout after fully_shard; expected before");
    Parameter stranger(Shape{2});
    EXPECT_EQ(error_text([&] { sharded->set_trainable(stranger, false); }),
              "bad_argument: fully_shard: set_trainable: \"\" is not of this model");

    const auto late = test::shard_net();
    Compute compute(rank.context);
    materialise(*late, compute);
    options.precision = default_mp_policy();
    const DeviceMesh one(rank.group(), {{"dp", 1}});
    EXPECT_EQ(error_text([&] { fully_shard(*late, one["dp"], options); }),
              "bad_argument: fully_shard: \"embed.weight\" has memory as f32; precision.param is bf16");
    late->parameter("embed.weight")->accumulate(compute.zeros({13, 5}));
    EXPECT_EQ(error_text([&] { fully_shard(*late, one["dp"]); }),
              "bad_argument: fully_shard: \"embed.weight\" has a gradient; expected none yet");
  });
}

TEST(FullyShardLife, DdpBesideIt) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    ShardRun run(rank, kTwo, {"dp"}, {}, by_blocks());
    run.pass(0);
    const Values expected = run.gradients();
    run.sharded.reset();
    run.net = test::shard_net();
    const auto reducer = apply_ddp(*run.net, run.mesh["dp"]);
    materialise(*run.net, run.compute);
    initialise(*run.net, 7);
    run.pass(0);
    reducer->finish();
    EXPECT_EQ(run.gradients(), expected);

    const auto drifted = test::shard_net();
    materialise(*drifted, run.compute);
    initialise(*drifted, 7 + static_cast<std::uint64_t>(rank.rank));
    EXPECT_EQ(error_of([&] { apply_ddp(*drifted, run.mesh["dp"]); }).code(), ErrorCode::mismatch);
    initialise(*drifted, 7);
    apply_ddp(*drifted, run.mesh["dp"]);
    EXPECT_EQ(drifted->parameter("head.bias")->layout(), replicated_layout(run.mesh, {3}));
    EXPECT_EQ(error_text([&] { apply_ddp(*drifted, {}); }),
              "bad_argument: apply_ddp: axes is an empty DeviceMesh, made by default or moved from");
  });
}

TEST(FullyShardLife, AGradientThatIsNotASumIsRefused) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    ShardRun run(rank, kTwo, {"dp"}, {}, by_blocks());
    Frame frame(run.compute);
    // The same on all ranks.
    const Tensor x = full(run.rows(0)).with_layout(replicated_layout(run.mesh, {12, 5}));
    const Tensor y = run.net->forward(x, frame)[0];
    EXPECT_EQ(error_text([&] { run.net->backward(y, frame); }),
              "layout: fully_shard: the gradient of \"layers.2.norm.weight\" is Replicate on dp=2; expected "
              "Partial(sum), or "
              "Partial(avg): there is nothing to reduce");
    expect_idle(*run.sharded);
  });
}

TEST(FullyShardLife, AfterItsEndTheModelHasShards) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    ShardRun run(rank, kTwo, {"dp"}, {}, by_blocks());
    run.pass(0);
    run.sharded.reset();
    Frame frame(run.compute);
    EXPECT_EQ(error_of([&] { run.net->forward(run.rows(0), frame); }).code(), ErrorCode::layout);
    const GradientReducer reducer(run.net->parameters(),
                                  run.mesh["dp"]);  // nobody claims gradients any more
  });
}

}  // namespace
}  // namespace weft::fully_shard_life_test
