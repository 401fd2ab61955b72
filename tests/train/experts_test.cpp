// A mixture of experts over several ranks has the results of one rank: outputs, losses, and every gradient.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "ep/support.hpp"
#include "support/calls_made.hpp"
#include "support/errors.hpp"
#include "support/run_ranks.hpp"
#include "weft/ep/moe.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/tp/own_plan.hpp"

namespace weft::ep_ranks_test {
namespace {

using test::normal_tensor;
using test::Rank;
using test::Ranks;

MoEConfig config(std::int64_t experts, RouterOptions router = {.aux_loss = 0.3, .z_loss = 0.1}) {
  MoEConfig c;
  c.dim = 12, c.hidden = 16, c.experts = experts, c.shared_hidden = 8;
  c.router = router;
  c.init = c.down_init = Normal{0.4};
  return c;
}

// `tolerance`: of the largest number
void expect_close(const Tensor& got, const Tensor& expected, const std::string& what,
                  double tolerance = 1e-6) {
  ASSERT_EQ(got.shape(), expected.shape()) << what;
  double largest = 0, worst = 0;
  for (std::size_t i = 0; i < expected.f32().size(); ++i) {
    largest = std::max(largest, std::abs(static_cast<double>(expected.f32()[i])));
    worst =
        std::max(worst, std::abs(static_cast<double>(got.f32()[i]) - static_cast<double>(expected.f32()[i])));
  }
  EXPECT_LE(worst, tolerance * largest) << what;
}

// One layer on one rank and one over the mesh, with the same values.
struct Both {
  Both(Rank& rank, const MoEConfig& c, const MeshShape& shape)
      : compute(rank.context), mesh(rank.group(), shape), serial(c), parallel(c) {
    if (mesh.size("tp") > 1) parallelize(parallel, mesh["tp"]);
    apply_expert_parallel(parallel, mesh["ep"], {.uneven = true});
    replicate(parallel, mesh);
    test::set_up(serial, compute);
    test::set_up(parallel, compute);
  }
  Tensor part(const Tensor& t) const {
    return distribute(t, make_layout(mesh, {{"dp", Shard{0}}, {"ep", Shard{0}}}, t.shape()));
  }
  // Both passes of both layers, compared.
  void compare(Context& context, std::int64_t samples, const std::string& name) {
    const Tensor x = normal_tensor(context, {samples, 5, serial.config().dim}, "x" + name),
                 dy = normal_tensor(context, x.shape(), "dy" + name);
    for (Module* m : {static_cast<Module*>(&serial), static_cast<Module*>(&parallel)})
      for (Parameter* p : m->parameters()) p->zero_gradient();
    Frame plain(compute, {.seed = 1, .step = 0}), frame(compute, {.seed = 1, .step = 0});
    expect_close(full(parallel.forward(part(x), frame)[0]), serial.forward(x, plain)[0], "y");
    const RouterReport &got = parallel.router.report(), &expected = serial.router.report();
    EXPECT_EQ(got.counts, expected.counts);
    EXPECT_EQ(got.tokens, expected.tokens);
    EXPECT_EQ(got.dropped, expected.dropped);
    EXPECT_NEAR(got.aux_loss, expected.aux_loss, 1e-12 * (1 + expected.aux_loss));
    EXPECT_NEAR(got.z_loss, expected.z_loss, 1e-12 * (1 + expected.z_loss));
    expect_close(full(parallel.backward(part(dy), frame)[0]), serial.backward(dy, plain)[0], "dx");
    EXPECT_TRUE(frame.empty());
    for (Parameter* p : serial.parameters())
      expect_close(full(parallel.parameter(p->path())->gradient()), p->gradient(), p->path());
  }
  Compute compute;
  DeviceMesh mesh;
  MoE serial, parallel;
};

MeshShape mesh_of(int dp, int ep, int tp) { return {{"dp", dp}, {"ep", ep}, {"tp", tp}}; }

TEST(ExpertParallel, EveryMeshHasTheResultsOfOneRank) {
  for (const MeshShape& shape :
       {mesh_of(1, 1, 1), mesh_of(1, 2, 1), mesh_of(1, 4, 1), mesh_of(1, 8, 1), mesh_of(2, 2, 1),
        mesh_of(2, 2, 2), mesh_of(1, 2, 2), mesh_of(4, 2, 1), mesh_of(2, 4, 1)})
    test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
      SCOPED_TRACE(to_string(shape));
      Both both(rank, config(8), shape);
      EXPECT_EQ(both.parallel.experts.up_proj->local_shape()[0], 8 / shape.size("ep"));
      both.compare(rank.context, 8, "");
    });
}

TEST(ExpertParallel, EveryOptionHasTheResultsOfOneRank) {
  std::vector<MoEConfig> configs;
  for (const RouterOptions& router : std::vector<RouterOptions>{
           {.top_k = 1, .normalise = false},
           {.top_k = 8},
           {.scores = RouterScores::sigmoid, .bias = RouterBias::weighs, .aux_loss = 0.5},
           {.scores = RouterScores::sigmoid, .bias = RouterBias::selects},
           {.noise = 1},
           {.capacity = Capacity::by_position, .capacity_factor = 0.6},
           {.capacity = Capacity::by_weight, .capacity_factor = 0.6},
           {.balance = Balance::sequence, .aux_loss = 0.5, .z_loss = 0.5}})
    configs.push_back(config(8, router));
  configs.push_back(config(8));
  configs.back().scale_outputs_by_load = true;
  configs.push_back(config(8));
  configs.back().kind = ExpertKind::gelu;
  configs.back().shared_hidden = 0;
  configs.push_back(config(8));
  configs.back().float8_dispatch = true;
  for (const MeshShape& shape : {mesh_of(2, 2, 1), mesh_of(1, 2, 2)})
    test::run_ranks(Ranks::threads, 4, [&](Rank& rank) {
      for (std::size_t i = 0; i < configs.size(); ++i) {
        SCOPED_TRACE(to_string(shape) + ", options " + std::to_string(i));
        Both(rank, configs[i], shape).compare(rank.context, 8, "");
      }
    });
}

TEST(ExpertParallel, UnevenExpertsAndSamples) {
  for (const MeshShape& shape : {mesh_of(1, 3, 1), mesh_of(1, 4, 1), mesh_of(2, 2, 1)})
    test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
      SCOPED_TRACE(to_string(shape));
      Both both(rank, config(5), shape);
      for (const std::int64_t samples : {7, 5, 3, 1, 0})  // fewer than ranks: some have no token
        both.compare(rank.context, samples, std::to_string(samples));
    });
}

// The bias decides: where all tokens go, and which ranks get nothing.
TEST(ExpertParallel, AllTokensToOneExpertAndRanksWithoutAny) {
  for (const MeshShape& shape : {mesh_of(1, 4, 1), mesh_of(2, 2, 1)})
    test::run_ranks(Ranks::threads, 4, [&](Rank& rank) {
      Both both(rank, config(8, {.top_k = 1, .bias = RouterBias::selects, .aux_loss = 0.1}), shape);
      for (int expert = 0; expert < 8; ++expert) {
        for (MoE* layer : {&both.serial, &both.parallel})
          for (int e = 0; e < 8; ++e)
            layer->router.bias_buffer->tensor().f32()[static_cast<std::size_t>(e)] =
                e == expert ? 100.0f : 0.0f;
        both.compare(rank.context, 8, std::to_string(expert));
        EXPECT_EQ(both.parallel.router.report().counts[static_cast<std::size_t>(expert)], 40);
        EXPECT_EQ(both.parallel.router.report().imbalance(), 8);
      }
    });
}

// Capacity of each rank's own tokens: the report has the dropped choices of all ranks.
TEST(ExpertParallel, DroppedChoicesAreCountedOnAllRanks) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    Both both(rank, config(8, {.capacity = Capacity::per_choice_and_rank, .capacity_factor = 0.5}),
              mesh_of(2, 2, 1));
    const Tensor x = normal_tensor(rank.context, {8, 5, 12}, "x");
    std::int64_t dropped = 0;
    for (std::int64_t part = 0; part < 4; ++part) {
      Frame frame(both.compute, {.seed = 1, .step = 0});
      both.serial.forward(x.slice_flat(part * 2 * 5 * 12, {2, 5, 12}), frame);
      dropped += both.serial.router.report().dropped;
      frame.clear();
    }
    EXPECT_GT(dropped, 0);
    Frame frame(both.compute, {.seed = 1, .step = 0});
    both.parallel.forward(both.part(x), frame);
    EXPECT_EQ(both.parallel.router.report().dropped, dropped);
    frame.clear();
  });
}

// The second run of a layer keeps the choice of the first: nothing is routed, counted or gathered again, and
// results have the same bits.
TEST(ExpertParallel, ActivationCheckpointingKeepsTheRouting) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    std::vector<std::vector<float>> results[2];
    std::size_t calls[2];
    for (const bool again : {false, true}) {
      Both both(rank, config(8, {.bias = RouterBias::selects, .noise = 1, .aux_loss = 0.5}),
                mesh_of(1, 2, 1));
      if (again) both.parallel.set_recompute(Module::Recompute{.compare_outputs = true, .check_state = true});
      Frame frame(both.compute, {.seed = 1, .step = 0});
      const Tensor x = both.part(normal_tensor(rank.context, {4, 5, 12}, "x")),
                   dy = both.part(normal_tensor(rank.context, {4, 5, 12}, "dy"));
      const ProcessGroup& group = both.mesh["ep"].group();
      const std::size_t before = test::calls_made(group);
      const Tensor y = both.parallel.forward(x, frame)[0];
      // Between the two runs the bias moves, as it does if another micro-batch ends a step.
      RandomStream(9, "moved").normal(0, 8, both.parallel.router.bias_buffer->tensor().f32().data());
      const Tensor dx = both.parallel.backward(dy, frame)[0];
      calls[again ? 1 : 0] = test::calls_made(group) - before;
      std::vector<std::vector<float>>& all = results[again ? 1 : 0];
      for (const Tensor& t : {y, dx}) all.emplace_back(t.f32().begin(), t.f32().end());
      for (Parameter* p : both.parallel.parameters())
        all.emplace_back(p->gradient().f32().begin(), p->gradient().f32().end());
      EXPECT_EQ(std::accumulate(both.parallel.router.counts_since_update().begin(),
                                both.parallel.router.counts_since_update().end(), std::int64_t{0}),
                4 * 5 * 2);
    }
    EXPECT_EQ(results[0], results[1]);
    EXPECT_EQ(calls[0], 6u);  // sums, choices, two ways forward and two backward
    EXPECT_EQ(calls[1], 8u);  // the two ways of the second run
  });
}

TEST(ExpertParallel, LogitsThatAreNotFiniteAreAnErrorOnAllRanks) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    Both both(rank, config(8), mesh_of(2, 2, 1));
    const Tensor x = normal_tensor(rank.context, {8, 5, 12}, "x");
    x.f32()[(5 * 5 + 3) * 12] = std::nanf("");  // sample 5 is the second of rank 2
    Frame frame(both.compute, {.seed = 1, .step = 0});
    EXPECT_EQ(
        test::error_text(ErrorCode::bad_argument, [&] { return both.parallel.forward(both.part(x), frame); }),
        "\"router\": the logits of token 8 on dp,ep rank 2 are not finite");
    frame.clear();
    both.compare(rank.context, 8, "after");  // nothing is lost
  });
}

TEST(ExpertParallel, RefusesByName) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"ep", 2}, {"tp", 1}});
    const auto refused = [&](const std::function<void()>& f) {
      return test::error_text(ErrorCode::bad_argument, [&] { return f(), 0; });
    };
    MoE odd(config(5)), one(config(1, {.top_k = 1})), even(config(4));
    EXPECT_EQ(refused([&] { apply_expert_parallel(odd, mesh["ep"]); }),
              "apply_expert_parallel: \"\" has 5 experts; they do not divide into ep=2 (5 = 2 x 2 + 1); "
              "uneven = true "
              "allows that");
    EXPECT_EQ(refused([&] { apply_expert_parallel(one, mesh["ep"], {.uneven = true}); }),
              "apply_expert_parallel: \"\" has 1 experts; ep=2 needs at least one for each rank");
    EXPECT_EQ(refused([&] { apply_expert_parallel(*even.shared_expert, mesh["ep"]); }),
              "apply_expert_parallel: the model has no mixture of experts");
    EXPECT_EQ(refused([&] { apply_expert_parallel(even, mesh); }),
              "apply_expert_parallel: axis is ep=2 x tp=1; expected one axis");
    apply_expert_parallel(even, mesh["ep"]);
    EXPECT_EQ(refused([&] { apply_expert_parallel(even, mesh["ep"]); }),
              "apply_expert_parallel: \"\" is expert parallel already");
    Compute compute(rank.context);
    replicate(even, mesh);
    test::set_up(even, compute);
    MoE late(config(4));
    test::set_up(late, compute);
    EXPECT_EQ(refused([&] { apply_expert_parallel(late, mesh["ep"]); }),
              "apply_expert_parallel: \"experts.gate_proj\" has memory already; expected a call before data "
              "parallel and "
              "materialise()");
    // The same batch on all expert ranks: each expert would compute it twice, and double its gradient.
    const Tensor x = normal_tensor(rank.context, {2, 3, 12}, "x");
    Frame frame(compute, {.seed = 1, .step = 0});
    EXPECT_EQ(test::error_text(
                  ErrorCode::layout,
                  [&] { return even.forward(x.with_layout(replicated_layout(mesh, x.shape())), frame); }),
              "\"\": x, whose samples the expert ranks divide, is Replicate on ep=2; expected Shard(0)");
    frame.clear();
    const Tensor part = distribute(x, make_layout(mesh, {{"ep", Shard{1}}}, x.shape()));
    EXPECT_EQ(test::error_text(ErrorCode::layout, [&] { return even.forward(part, frame); }),
              "\"\": x, whose samples the expert ranks divide, is Shard(1) on ep=2; expected Shard(0)");
  });
}

}  // namespace
}  // namespace weft::ep_ranks_test
