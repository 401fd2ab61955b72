#include "weft/train/fully_shard.hpp"

#include <regex>

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
    // 40 rows: 20 for each tp rank, of which 10 for each data rank. 13 rows: 7 and 6.
    EXPECT_EQ(to_string(*up->layout()), "(40, 13) as [dp: Shard(0), tp: Shard(0)] nested tp, dp");
    EXPECT_EQ(up->master().shape(), (Shape{10, 13}));
    EXPECT_EQ(to_string(*down->layout()), "(13, 40) as [dp: Shard(0), tp: Shard(1)]");
    for (const Parameter* p : run.net->parameters())
      EXPECT_EQ(p->gradient_layout(), p->layout()) << p->path();
  });
}

// Every way to divide eight ranks; a norm and the clipped gradients are those of one rank.
TEST(FullyShard, TheNormIsTheSameForEveryFactorisationOfEightRanks) {
  double norm = 0;
  Values clipped;
  test::run_ranks(Ranks::threads, 1, [&](Rank& rank) {
    ShardRun run(rank, {{"dp", 1}}, {"dp"}, {}, std::nullopt);
    run.pass(0);
    norm = clip_grad_norm(run.net->parameters(), 0.5);
    clipped = run.gradients();
  });
  for (const auto& [replicate, shard, tp] : {std::tuple{1, 8, 1},
                                             {8, 1, 1},
                                             {2, 4, 1},
                                             {4, 2, 1},
                                             {1, 4, 2},
                                             {4, 1, 2},
                                             {2, 2, 2},
                                             {1, 2, 4},
                                             {2, 1, 4},
                                             {1, 1, 8}}) {
    const MeshShape shape{{"dp_replicate", replicate}, {"dp_shard", shard}, {"tp", tp}};
    test::run_ranks(Ranks::threads, 8, [&](Rank& rank) {
      SCOPED_TRACE(to_string(shape));
      // 12 rows for up to 8 data ranks; 40 hidden features for up to 8 tensor ranks.
      ShardRun run(rank, shape, {"dp_shard"}, {"dp_replicate"}, by_blocks());
      run.pass(0);
      run.sync();
      EXPECT_NEAR(clip_grad_norm(run.net->parameters(), 0.5), norm, 1e-6 * norm);
      expect_close(run.gradients(), clipped, kGradient);
    });
  }
}

// The bytes that a step sends, as the flight recorder has them: the bytes of wholes, gathered twice except
// the root's, and of gradients once. Nothing is padded. A rank receives all of these (and sends of gradients
// all) except its own part: gather_bytes() and reduce_bytes().
TEST(FullyShard, AStepSendsTheTheoreticalBytes) {
  test::run_ranks(Ranks::threads, 3, [](Rank& rank) {
    ShardRun run(rank, {{"dp", 3}}, {"dp"}, {}, by_blocks());
    const auto sent = [&](const char* op) {
      const std::string trace = run.mesh["dp"].group().trace_json();
      const std::regex call(std::string("\"op\": ?\"") + op +
                            "(_v)?\"[^}]*?\"dtype\": ?\"(u8|f32)\"[^}]*?\"count\": ?([0-9]+)");
      std::int64_t bytes = 0;
      for (std::sregex_iterator at(trace.begin(), trace.end(), call), end; at != end; ++at)
        bytes += std::stoll((*at)[3]) * ((*at)[2] == "f32" ? 4 : 1);
      return bytes;
    };
    run.pass(0);
    run.zero();
    const std::int64_t gathered = sent("all_gather"), reduced = sent("reduce_scatter");
    run.pass(1);
    std::int64_t root = 0, blocks = 0;
    for (const Parameter* p : run.net->parameters())
      (p->path().starts_with("layers") ? blocks : root) += 4 * p->global_shape().count();
    EXPECT_EQ(sent("all_gather") - gathered, 2 * blocks + root);
    EXPECT_EQ(sent("reduce_scatter") - reduced, blocks + root);
    std::int64_t own = 0;
    for (const Parameter* p : run.net->parameters()) own += 4 * p->master().count();
    EXPECT_EQ(run.sharded->gather_bytes(), blocks + root - own);
    EXPECT_EQ(run.sharded->reduce_bytes(), blocks + root - own);
  });
}

}  // namespace
}  // namespace weft::fully_shard_test
