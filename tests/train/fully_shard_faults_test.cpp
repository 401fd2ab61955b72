// Faults that a sharded model must not hide: go on after a caught error, forget a gradient that nobody made,
// or mix sums and averages; and ranks that keep nothing of a block.
#include "support/errors.hpp"
#include "train/shard_net.hpp"

namespace weft::fully_shard_faults_test {
namespace {

using test::error_text;
using test::Rank;
using test::Ranks;
using test::ShardRun;
using test::Tripwire;
using test::Values;

const MeshShape kTwo{{"dp", 2}};

std::unique_ptr<Linear> linear() { return std::make_unique<Linear>(5, 5, true, Normal{.std = 0.3}); }

// Owns a model, shards it, and runs passes of eight rows of ones, cut over all ranks.
template <class Net>
struct Sharded {
  Sharded(Rank& rank, const FullyShardOptions& options)
      : compute(rank.context), mesh(rank.group(), {{"dp", rank.size}}) {
    replicate(net, mesh);
    sharded = fully_shard(net, mesh["dp"], options);
    materialise(net, compute);
    initialise(net, 1);
  }
  void pass() {
    Frame frame(compute);
    const Tensor y = net.forward(ones(), frame)[0];
    Tensor dy(compute.context(), y.shape());
    std::fill(dy.f32().begin(), dy.f32().end(), 1.0F);
    net.backward(dy.with_layout(y.layout()), frame);
  }
  Tensor ones() const {
    Tensor x(compute.context(), {8, 5});
    std::fill(x.f32().begin(), x.f32().end(), 1.0F);
    return distribute(x, replicated_layout(mesh, x.shape())->with(mesh, Shard{0}));
  }
  void zero() {
    for (Parameter* p : net.parameters()) p->zero_gradient();
  }
  Values gradients() {
    Values all;
    for (Parameter* p : net.parameters())
      if (p->has_gradient()) all[p->path()] = ShardRun::floats(p->gradient());
    return all;
  }
  void expect_discarded() {
    EXPECT_TRUE(gradients().empty());
    EXPECT_EQ(sharded->in_flight(), 0);
    EXPECT_EQ(sharded->gathered_blocks(), 0);
    EXPECT_EQ(sharded->memory().whole_now, 0);
  }

  Compute compute;
  DeviceMesh mesh;
  Net net;
  std::unique_ptr<FullySharded> sharded;
};

// --- parameters that no pass uses ---

class Skips : public Module {
 public:
  Skips() {
    add("used", *used_);
    add("idle", *idle_);
  }
  bool takes_all = false;

 private:
  Tensors do_forward(Inputs x, Frame& f) override {
    Tensors y = used_->forward(x, f);
    return takes_all ? idle_->forward(y, f) : y;
  }
  Tensors do_backward(Inputs dy, Frame& f) override {
    return used_->backward(takes_all ? idle_->backward(dy, f) : Tensors(dy.begin(), dy.end()), f);
  }
  std::unique_ptr<Linear> used_ = linear(), idle_ = linear();
};

TEST(FullyShardFaults, FinishNamesWhatNoPassUsed) {
  for (const int ranks : {1, 2})
    for (const std::vector<std::string>& blocks :
         {std::vector<std::string>{}, std::vector<std::string>{"used", "idle"}})
      test::run_ranks(Ranks::threads, ranks, [&](Rank& rank) {
        Sharded<Skips> run(rank, {.blocks = blocks});
        const auto by_finish = [&] {
          {
            const NoSync off = run.sharded->no_sync();
            run.pass();
            run.pass();
          }
          run.sharded->finish();
        };
        const std::string direct = error_text([&] { run.pass(); });
        const std::string names = "\"idle.weight\", \"idle.bias\" on dp rank ";
        EXPECT_EQ(direct, "bad_argument: fully_shard: no backward pass used " + names + "0" +
                              (ranks == 2 ? "; " + names + "1" : "") +
                              "; FullyShardOptions::unused = zeros lets such ranks contribute zeros");
        EXPECT_EQ(error_text(by_finish), direct);
        run.expect_discarded();
        run.net.takes_all = true;
        by_finish();
        EXPECT_EQ(run.gradients().size(), 4U);
      });
}

TEST(FullyShardFaults, FinishGivesZerosWhereNoPassUsedAParameter) {
  for (const std::vector<std::string>& blocks :
       {std::vector<std::string>{}, std::vector<std::string>{"used", "idle"}})
    test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
      FullyShardOptions options;
      options.blocks = blocks;
      options.unused = Unused::zeros;
      Sharded<Skips> run(rank, options);
      {
        const NoSync off = run.sharded->no_sync();
        run.pass();
      }
      run.sharded->finish();
      const Values got = run.gradients();
      ASSERT_EQ(got.size(), 4U);
      EXPECT_EQ(got.at("idle.weight"), std::vector<float>(25));
      EXPECT_EQ(got.at("used.bias"), std::vector<float>(5, 8.0F));
      AdamW(run.compute, run.net.parameters(), {}).step(1e-3);
    });
}

// Gradients that were zeroed before finish() are as lost as those that no pass made.
TEST(FullyShardFaults, FinishAfterZeroGradientIsAnError) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Sharded<Skips> run(rank, {});
    run.net.takes_all = true;
    {
      const NoSync off = run.sharded->no_sync();
      run.pass();
    }
    run.zero();
    const std::string names = "\"used.weight\", \"used.bias\", \"idle.weight\", \"idle.bias\" on dp rank ";
    EXPECT_EQ(error_text([&] { run.sharded->finish(); }),
              "bad_argument: fully_shard: no backward pass used " + names + "0; " + names +
                  "1; FullyShardOptions::unused = zeros lets such ranks contribute zeros");
    run.expect_discarded();
  });
}

// --- sums and averages ---

// Its gradient is one for each rank that uses it: the average of them, as the layout says.
class Averaged : public Module {
 public:
  Averaged() { w_ = add("w", std::make_shared<Parameter>(Shape{7})); }
  bool used = true;

 private:
  Tensors do_forward(Inputs x, Frame&) override { return {x[0]}; }
  Tensors do_backward(Inputs dy, Frame&) override {
    const DeviceMesh& mesh = dy[0].layout()->mesh();
    if (used)
      w_->accumulate(replicated_layout(mesh, {7})->with(mesh, Partial{ReduceOp::avg}),
                     [&](const Tensor& into, bool add) {
                       for (float& v : into.f32()) v = (add ? v : 0) + static_cast<float>(mesh.rank() + 1);
                     });
    return {dy[0]};
  }
  ParameterRef w_;
};

TEST(FullyShardFaults, ARankWithoutGradientsContributesZerosToAnAverage) {
  for (const DType reduce : {DType::f32, DType::bf16})
    test::run_ranks(Ranks::threads, 4, [reduce](Rank& rank) {
      FullyShardOptions options;
      options.unused = Unused::zeros;
      options.precision.reduce = reduce;
      Sharded<Averaged> run(rank, options);
      run.pass();
      EXPECT_EQ(run.gradients().at("w"), std::vector<float>(7, 2.5F));
      run.zero();
      run.net.used = rank.rank == 1;
      run.pass();
      EXPECT_EQ(run.gradients().at("w"), std::vector<float>(7, 0.5F));
    });
}

// --- errors that a pass survives ---

// Catches what its child throws, and goes on: forward with another try, backward with zeros.
class Catches : public Module {
 public:
  Catches() {
    child_.append("linear", linear());
    trip = dynamic_cast<Tripwire*>(&child_.append("trip", std::make_unique<Tripwire>()));
    add("child", child_);
  }
  Tripwire* trip;

 private:
  Tensors do_forward(Inputs x, Frame& f) override {
    if (trip->forward_trips) {
      try {
        Frame attempt(f.compute());
        child_.forward(x, attempt);
      } catch (const Error&) {
        trip->forward_trips = false;
      }
    }
    return child_.forward(x, f);
  }
  Tensors do_backward(Inputs dy, Frame& f) override {
    try {
      return child_.backward(dy, f);
    } catch (const Error&) {
      return {f.compute().zeros(dy[0].shape()).with_layout(dy[0].layout())};
    }
  }
  Sequential child_;
};

TEST(FullyShardFaults, ACaughtErrorDoesNotLoseGradientsSilently) {
  for (const bool forward : {true, false})
    test::run_ranks(Ranks::threads, 2, [forward](Rank& rank) {
      Sharded<Catches> run(rank, {.blocks = {"child"}});
      run.pass();
      (forward ? run.net.trip->forward_trips : run.net.trip->backward_trips) = true;
      EXPECT_EQ(
          error_text([&] { run.pass(); }),
          "unsupported: fully_shard: an error in the pass of \"child\" was caught by a module above it, "
          "which went on; expected it to end the outermost pass. All gradients were discarded");
      run.expect_discarded();
      run.net.trip->backward_trips = false;
      run.pass();
      run.pass();
      EXPECT_EQ(run.gradients().at("child.linear.bias"), std::vector<float>(5, 16.0F));
    });
}

// Hooks that were set before fully_shard() run before its own, and later ones behind it.
TEST(FullyShardFaults, AHookThatThrowsBehindOthersLeavesNoGradients) {
  for (const Module::HookPoint point : {Module::HookPoint::post_forward, Module::HookPoint::post_backward})
    for (const char* const path : {"used", ""})
      test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
        Sharded<Skips> run(rank, {.blocks = {"used", "idle"}});
        run.net.takes_all = true;
        run.pass();
        {
          Module& module = *path == '\0' ? static_cast<Module&>(run.net) : run.net.get(path);
          const HookHandle hook = module.add_hook(
              point, [](Module&, Tensors&, Frame&) { throw Error(ErrorCode::system, "late"); });
          EXPECT_EQ(error_text([&] { run.pass(); }), "system: late");
          run.expect_discarded();
        }
        {
          const Module::Around around{{}, [](Module&, Frame&) { throw Error(ErrorCode::system, "leave"); }};
          const HookHandle hook = point == Module::HookPoint::post_forward ? run.net.around_forward(around)
                                                                           : run.net.around_backward(around);
          EXPECT_EQ(error_text([&] { run.pass(); }), "system: leave");
          run.expect_discarded();
        }
        run.pass();
        EXPECT_EQ(run.gradients().at("idle.bias"), std::vector<float>(5, 8.0F));
      });
}

// --- ranks that keep nothing of a block ---

TEST(FullyShardFaults, HybridShardingReducesInBf16WhereARankKeepsNothing) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"replicate", 2}, {"shard", 2}});
    Compute compute(rank.context);
    Sequential net;
    net.append("a", std::make_unique<Linear>(4, 5, true));
    net.append("b", std::make_unique<Linear>(5, 1, true));  // one row: a rank of two has none
    replicate(net, mesh);
    FullyShardOptions options{.blocks = {"b"}};
    options.precision.reduce = DType::bf16;
    const auto sharded = fully_shard(net, {mesh["shard"], mesh["replicate"]}, options);
    materialise(net, compute);
    initialise(net, 1);
    Frame frame(compute);
    Tensor x(rank.context, {8, 4});
    std::fill(x.f32().begin(), x.f32().end(), 1.0F);
    const Tensor y =
        net.forward(distribute(x, replicated_layout(mesh, x.shape())->with(mesh, Shard{0})), frame)[0];
    Tensor dy(rank.context, y.shape());
    std::fill(dy.f32().begin(), dy.f32().end(), 1.0F);
    net.backward(dy.with_layout(y.layout()), frame);
    EXPECT_EQ(ShardRun::floats(net.parameter("b.bias")->gradient()), std::vector<float>{8.0F});
  });
}

}  // namespace
}  // namespace weft::fully_shard_faults_test
