#include "weft/train/fully_shard.hpp"

#include "train/shard_net.hpp"

namespace weft::fully_shard_test {
namespace {

using test::expect_close;
using test::Rank;
using test::Ranks;
using test::ShardRun;
using test::Values;

FullyShardOptions by_blocks() { return {.blocks = {"layers.*"}}; }

struct Serial {
  std::vector<double> losses;
  Values gradients, masters;  // of the first pass; after all steps
};
constexpr int kSteps = 50;

Serial train(ShardRun& run, int steps = kSteps, double lr = 1e-2) {
  Serial result;
  AdamW adamw(run.compute, run.net->parameters(), {});
  for (int step = 0; step < steps; ++step) {
    result.losses.push_back(run.whole_pass(step));
    if (step == 0) result.gradients = run.gradients();
    clip_grad_norm(run.net->parameters(), 1.0);
    adamw.step(lr);
    adamw.zero_gradients();
  }
  result.masters = run.masters();
  return result;
}

const Serial& serial() {
  static const Serial one = [] {
    Serial s;
    test::run_ranks(Ranks::threads, 1, [&](Rank& rank) {
      ShardRun run(rank, {{"dp", 1}}, {"dp"}, {}, std::nullopt);
      s = train(run);
    });
    return s;
  }();
  return one;
}

// Sums of 12 rows, and of the products inside, are cut and rounded otherwise; 50 steps of AdamW amplify that.
constexpr double kGradient = 64 * 0x1p-23, kTrained = 2e-4;

struct Case {
  MeshShape shape;
  std::vector<std::string> shard, replicate = {};
};

void expect_serial(const Case& c, const FullyShardOptions& options, Ranks kind = Ranks::threads) {
  const Serial& expected = serial();
  test::run_ranks(kind, c.shape.size(), [&](Rank& rank) {
    SCOPED_TRACE(to_string(c.shape));
    ShardRun run(rank, c.shape, c.shard, c.replicate, options);
    const Serial got = train(run);
    expect_close(got.gradients, expected.gradients, kGradient, "gradient of ");
    expect_close(got.masters, expected.masters, kTrained, "trained ");
    for (int i = 0; i < kSteps; ++i) {
      const auto at = static_cast<std::size_t>(i);
      EXPECT_NEAR(got.losses[at], expected.losses[at], 1e-5 * expected.losses[at]) << "step " << i;
    }
    EXPECT_EQ(run.sharded->in_flight(), 0);
    EXPECT_EQ(run.sharded->gathered_blocks(), 0);
  });
}

TEST(FullyShard, GradientsAndFiftyStepsAreThoseOfOneRank) {
  ASSERT_LT(serial().losses.back(), 0.5 * serial().losses.front()) << "nothing was learnt";
  for (const int ranks : {1, 2, 3, 4}) expect_serial({{{"dp", ranks}}, {"dp"}}, by_blocks());
  expect_serial({{{"dp", 2}}, {"dp"}}, by_blocks(), Ranks::processes);
}

TEST(FullyShard, WithOneBlockWithNestedBlocksAndWithoutPrefetch) {
  expect_serial({{{"dp", 3}}, {"dp"}}, {});
  expect_serial({{{"dp", 2}}, {"dp"}}, {.blocks = {"layers", "layers.*", "layers.1.up"}});
  FullyShardOptions plain = by_blocks();
  plain.prefetch = false;
  expect_serial({{{"dp", 2}}, {"dp"}}, plain);
}

TEST(FullyShard, WeightsMayStayAfterForwardOrBeKeptByNeighbours) {
  FullyShardOptions options = by_blocks();
  options.reshard_after_forward = false;
  expect_serial({{{"dp", 3}}, {"dp"}}, options);
  for (const int n : {1, 2, 4}) {
    options.reshard_after_forward = n;
    expect_serial({{{"dp", 4}}, {"dp"}}, options);
  }
}

TEST(FullyShard, ReplicatedShards) {
  expect_serial({{{"dp_replicate", 2}, {"dp_shard", 2}}, {"dp_shard"}, {"dp_replicate"}}, by_blocks());
  expect_serial({{{"dp_replicate", 3}, {"dp_shard", 1}}, {"dp_shard"}, {"dp_replicate"}}, by_blocks());
}

TEST(FullyShard, InsideTensorParallelCutsAndOverSeveralAxes) {
  expect_serial({{{"dp", 2}, {"tp", 2}}, {"dp"}}, by_blocks());
  expect_serial({{{"dp", 2}, {"domain", 2}}, {"dp", "domain"}}, by_blocks());
  expect_serial({{{"dp_replicate", 2}, {"dp_shard", 2}, {"tp", 2}}, {"dp_shard"}, {"dp_replicate"}},
                by_blocks());
}

TEST(FullyShard, MastersAndGradientsAreShardsInsideTheTensorParallelCut) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    ShardRun run(rank, {{"dp", 2}, {"tp", 2}}, {"dp"});
    run.pass(0);
    run.sync();
    const ParameterRef up = run.net->parameter("layers.0.up.weight"),
                       down = run.net->parameter("layers.0.down.weight");
    // 30 rows: 15 for each tp rank, of which 8 and 7 for the data ranks.
    EXPECT_EQ(to_string(*up->layout()), "(30, 13) as [dp: Shard(0), tp: Shard(0)] nested tp, dp");
    EXPECT_EQ(up->master().shape(), (Shape{run.mesh.coordinate("dp") == 0 ? 8 : 7, 13}));
    EXPECT_EQ(to_string(*down->layout()), "(13, 30) as [dp: Shard(0), tp: Shard(1)]");
    for (const Parameter* p : run.net->parameters())
      EXPECT_EQ(p->gradient_layout(), p->layout()) << p->path();
  });
}

}  // namespace
}  // namespace weft::fully_shard_test
