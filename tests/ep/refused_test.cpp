// The texts of errors of functions and modules of ep.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "ep/support.hpp"
#include "support/errors.hpp"
#include "support/run_ranks.hpp"
#include "weft/ep/dispatch.hpp"
#include "weft/ep/moe.hpp"
#include "weft/mesh/redistribute.hpp"

namespace weft::ep_refused_test {
namespace {

using test::Rank;
using test::Ranks;
using Numbers = std::vector<std::int64_t>;

std::string refused(const std::function<void()>& f, ErrorCode code = ErrorCode::bad_argument) {
  return test::error_text(code, [&] { return f(), 0; });
}

MoEConfig config(std::int64_t experts = 4, RouterOptions router = {}) {
  MoEConfig c;
  c.dim = 4, c.hidden = 8, c.experts = experts;
  c.router = router;
  return c;
}

struct EpRefused : ::testing::Test {
  Tensor floats(const Shape& shape) { return Tensor::zeros(context, shape); }
  Tensor ints(const Shape& shape) { return Tensor::zeros(context, shape, DType::i32); }
  Context context;
  Compute compute{context, 1};
};

TEST_F(EpRefused, ViewsOfTheRouter) {
  const Tensor logits = floats({3, 4}), experts = ints({3, 2}), weights = floats({3, 2});
  const auto route = [&](const ConstTensorView& l, const TensorView& e, const TensorView& w,
                         const RouterOptions& options = {}) {
    return refused([&] { route_tokens(l, {}, options, e, w); });
  };
  EXPECT_EQ(route(floats({3}), experts, weights), "route_tokens: logits is (3); expected two dimensions");
  EXPECT_EQ(route(ints({3, 4}), experts, weights), "route_tokens: logits is i32 (3, 4); expected f32 (3, 4)");
  EXPECT_EQ(route(logits, ints({3, 3}), weights), "route_tokens: experts is i32 (3, 3); expected i32 (3, 2)");
  EXPECT_EQ(route(logits, experts, floats({4, 2})),
            "route_tokens: weights is f32 (4, 2); expected f32 (3, 2)");
  EXPECT_EQ(route(logits, experts, weights, {.top_k = 5}),
            "route_tokens: top_k is 5; expected 1 to 4, the number of experts");
  EXPECT_EQ(route(logits, experts, weights, {.bias = RouterBias::selects}),
            "route_tokens: bias is f32 (); expected f32 (4), one for each expert");
  TensorView view = weights;
  view.device = {DeviceKind::cuda, 0};
  EXPECT_EQ(refused([&] { route_tokens(logits, {}, {}, experts, view); }, ErrorCode::unsupported),
            "route_tokens: weights is on cuda:0; expected memory of the host: mixtures of experts have no "
            "kernels for devices");
  view = weights;
  view.strides = {1, 3};
  EXPECT_EQ(route(logits, experts, view), "route_tokens: weights is not contiguous");
  view = weights;
  view.data = nullptr;
  EXPECT_EQ(route(logits, experts, view), "route_tokens: weights has no memory");
  const Tensor infinite = floats({3, 4});
  infinite.f32()[9] = INFINITY;
  EXPECT_EQ(route(infinite, experts, weights), "route_tokens: the logits of token 2 are not finite");
  for (const RouterBias kind : {RouterBias::selects, RouterBias::weighs}) {
    const Tensor bias = floats({4});
    bias.f32()[1] = -INFINITY;
    const RouterOptions options{.bias = kind};
    EXPECT_EQ(refused([&] { route_tokens(logits, bias, options, experts, weights); }),
              "route_tokens: bias[1] is -inf; expected finite numbers");
  }

  RouterSums sums;
  EXPECT_EQ(refused([&] {
              add_router_sums(logits, {}, ints({2, 2}), {}, sums);
            }),
            "add_router_sums: experts is i32 (2, 2); expected i32 (3, 2)");
  const Tensor none = ints({3, 2});
  none.as<std::int32_t>()[3] = 4;
  EXPECT_EQ(refused([&] { add_router_sums(logits, {}, none, {}, sums); }),
            "add_router_sums: choice 1 of token 1 is expert 4; there are 4");
  const auto backward = [&](const ConstTensorView& chosen, const ConstTensorView& dweights,
                            const TensorView& dlogits, const TensorView& dbias = {},
                            const RouterLossTerms& losses = {}) {
    return refused(
        [&] { route_tokens_backward(logits, {}, chosen, weights, dweights, {}, losses, dlogits, dbias); });
  };
  EXPECT_EQ(backward(none, weights, logits),
            "route_tokens_backward: choice 1 of token 1 is expert 4; there are 4");
  EXPECT_EQ(backward(experts, floats({1, 2}), logits),
            "route_tokens_backward: dweights is f32 (1, 2); expected f32 (3, 2)");
  EXPECT_EQ(backward(experts, weights, floats({3, 3})),
            "route_tokens_backward: dlogits is f32 (3, 3); expected f32 (3, 4), as logits");
  EXPECT_EQ(backward(experts, weights, logits, floats({3})),
            "route_tokens_backward: dbias is f32 (3); expected f32 (4)");
  const double shares[] = {1, 2};
  EXPECT_EQ(backward(experts, weights, logits, {}, {.shares = shares}),
            "route_tokens_backward: 2 shares; expected 4, one for each expert");
}

TEST_F(EpRefused, ChoicesAndRows) {
  const ExpertChoices two{ints({2}), floats({2}), {1, 1}};
  two.experts.as<std::int32_t>()[1] = 1;
  EXPECT_EQ(refused([&] {
              TokenRoutes(two, 0, 1, Numbers{0, 2});
            }),
            "token_routes: 2 first experts for rank 0 of 2 ranks; expected 3");
  EXPECT_EQ(refused([&] {
              TokenRoutes(two, 2, 1, Numbers{0, 1, 2});
            }),
            "token_routes: 3 first experts for rank 2 of 2 ranks; expected 3");
  EXPECT_EQ(refused([&] {
              TokenRoutes(two, 0, 1, Numbers{2, 3, 4});
            }),
            "token_routes: first experts are 2, 3, 4; expected numbers that rise from 0");
  EXPECT_EQ(refused([&] {
              TokenRoutes(two, 0, 1, Numbers{0, 3, 2});
            }),
            "token_routes: first experts are 0, 3, 2; expected numbers that rise from 0");
  const ExpertChoices unweighed{two.experts, floats({1}), {1, 1}};
  EXPECT_EQ(refused([&] {
              TokenRoutes(unweighed, 0, 1, Numbers{0, 1, 2});
            }),
            "token_routes: 1 weights; expected 2, as choices");
  const ExpertChoices alone{ints({1}), floats({1}), {1}};
  const TokenRoutes of_one(alone, 0, 1, Numbers{0, 1});
  const Tensor memory = floats({2, 4});
  const TensorView first = memory.slice_flat(0, {1, 4}).view(),
                   overlaps = memory.slice_flat(2, {1, 4}).view();
  EXPECT_EQ(refused([&] { of_one.start_dispatch(nullptr, first, overlaps).finish(); }),
            "dispatch: x and rows overlap; expected disjoint memory");
  EXPECT_EQ(refused([&] { of_one.start_combine(nullptr, first, overlaps).finish(); }),
            "combine: rows and results overlap; expected disjoint memory");
  const Tensor x = floats({1, 4});
  EXPECT_EQ(refused([&] {
              TokenRoutes(two, 0, 1, Numbers{0, 1, 2}).start_dispatch(compute, nullptr, x);
            }),
            "dispatch: group has 1 ranks; expected 2, as the choices");
  const ExpertChoices one{two.experts, two.weights, {2}};
  const TokenRoutes routes(one, 0, 1, Numbers{0, 2});
  EXPECT_EQ(refused([&] {
              routes.start_dispatch(compute, nullptr, floats({3, 4})).finish();
            }),
            "dispatch: x has 3 rows; expected 2");
  EXPECT_EQ(refused([&] { routes.start_dispatch(compute, nullptr, floats({2})).finish(); }),
            "dispatch: x is (2); expected two dimensions");
  EXPECT_EQ(refused([&] {
              routes.start_combine(compute, nullptr, floats({1, 4})).finish();
            }),
            "combine: rows has 1 rows; expected 2");
  const Tensor rows = floats({2, 4}), whole = ints({2, 4});
  EXPECT_EQ(refused([&] {
              routes.start_dispatch(nullptr, rows, floats({2, 3})).finish();
            }),
            "dispatch: rows is f32 (2, 3); expected f32 (2, 4)");
  EXPECT_EQ(refused([&] { routes.start_combine(nullptr, rows, whole).finish(); }),
            "combine: results is i32 (2, 4); expected f32 (2, 4)");
  EXPECT_EQ(refused([&] { routes.weighted_sum(whole, {}, rows); }),
            "weighted_sum: results is i32; expected f32 or bf16");
  EXPECT_EQ(refused([&] {
              routes.weighted_sum(rows, {}, floats({2, 3}));
            }),
            "weighted_sum: y is f32 (2, 3); expected f32 (2, 4)");
  EXPECT_EQ(refused([&] {
              routes.weighted_sum(rows, floats({2, 2}), rows);
            }),
            "weighted_sum: weights is f32 (2, 2); expected f32 (2, 1)");
  EXPECT_EQ(refused([&] {
              routes.row_products(rows, floats({2, 3}), floats({2, 1}));
            }),
            "row_products: dy is f32 (2, 3); expected f32 (2, 4)");
  EXPECT_EQ(refused([&] {
              routes.row_products(rows, rows, floats({2, 2}));
            }),
            "row_products: dweights is f32 (2, 2); expected f32 (2, 1)");
  EXPECT_EQ(refused([&] { to_float8_rows(compute, whole); }),
            "to_float8_rows: x is i32; expected f32 or bf16");
  EXPECT_EQ(refused([&] { from_float8_rows(compute, to_float8_rows(compute, rows), DType::f64); }),
            "from_float8_rows: the result is f64; expected f32 or bf16");
}

TEST_F(EpRefused, ViewsOfExperts) {
  const Tensor up = floats({2, 8, 4}), down = floats({2, 4, 8}), x = floats({3, 4}), hidden = floats({3, 8});
  const Numbers offsets{0, 1, 3};
  struct Given {
    ConstTensorView x, gate, up, down;
    TensorView kept_gate, kept_up, kept_hidden, y;
    Numbers offsets;
  };
  const Given good{x, up, up, down, hidden, hidden, hidden, x, offsets};
  const auto forward = [&](const std::function<void(Given&)>& change) {
    Given g = good;
    change(g);
    return refused([&] {
      experts_forward(kernels_of(compute), ExpertKind::swiglu, g.x, g.offsets, {g.gate, g.up, g.down},
                      {g.kept_gate, g.kept_up, g.kept_hidden}, g.y);
    });
  };
  const Tensor three = floats({3, 3}), narrow(context, {3, 4}, DType::bf16), flat = floats({2, 32});
  EXPECT_EQ(forward([&](Given& g) { g.up = flat; }),
            "experts_forward: up is (2, 32); expected (experts, hidden, dim)");
  const Tensor whole = ints({3, 4});
  EXPECT_EQ(forward([&](Given& g) { g.x = whole; }), "experts_forward: x is i32; expected f32 or bf16");
  EXPECT_EQ(forward([&](Given& g) { g.x = narrow; }),
            "experts_forward: x is bf16 and the weights f32; expected weights in bf16");
  EXPECT_EQ(forward([&](Given& g) { g.x = three; }),
            "experts_forward: x is f32 (3, 3); expected f32 (3, 4), as up");
  EXPECT_EQ(forward([&](Given& g) { g.down = up; }),
            "experts_forward: down is f32 (2, 8, 4); expected f32 (2, 4, 8), from up");
  EXPECT_EQ(forward([&](Given& g) { g.gate = down; }),
            "experts_forward: gate is f32 (2, 4, 8); expected f32 (2, 8, 4), as up");
  EXPECT_EQ(forward([&](Given& g) { g.kept_gate = x; }),
            "experts_forward: kept.gate is f32 (3, 4); expected f32 (3, 8)");
  EXPECT_EQ(forward([&](Given& g) { g.kept_up = x; }),
            "experts_forward: kept.up is f32 (3, 4); expected f32 (3, 8)");
  EXPECT_EQ(forward([&](Given& g) { g.kept_hidden = x; }),
            "experts_forward: kept.hidden is f32 (3, 4); expected f32 (3, 8)");
  EXPECT_EQ(forward([&](Given& g) { g.y = hidden; }),
            "experts_forward: y is f32 (3, 8); expected f32 (3, 4), as x");
  const std::string rise = " offsets up to ", expected = "; expected 3 that rise from 0 to 3 rows";
  EXPECT_EQ(forward([&](Given& g) { g.offsets = {0, 3}; }), "experts_forward: 2" + rise + "3" + expected);
  EXPECT_EQ(forward([&](Given& g) { g.offsets = {0, 4, 3}; }), "experts_forward: 3" + rise + "3" + expected);
  EXPECT_EQ(forward([&](Given& g) { g.offsets = {0, 1, 2}; }), "experts_forward: 3" + rise + "2" + expected);

  const auto backward = [&](const ConstTensorView& dy, const TensorView& dx, const ExactExperts& exact = {}) {
    return refused([&] {
      experts_backward(kernels_of(compute), ExpertKind::swiglu, dy, x, offsets, {up, up, down},
                       {hidden, hidden, hidden}, dx, exact);
    });
  };
  EXPECT_EQ(backward(hidden, x), "experts_backward: dy is f32 (3, 8); expected f32 (3, 4), as x");
  EXPECT_EQ(backward(x, hidden), "experts_backward: dx is f32 (3, 8); expected f32 (3, 4), as x");
  EXPECT_EQ(backward(x, x, {.hidden_blocks = 8, .dx_gate = hidden}),
            "experts_backward: exact.dx_gate is f32 (3, 8); expected f32 (3, 4), as x");
  const Tensor narrow_up(context, {2, 8, 4}, DType::bf16), narrow_down(context, {2, 4, 8}, DType::bf16),
      narrow_hidden(context, {3, 8}, DType::bf16);
  EXPECT_EQ(refused([&] {
              experts_forward(kernels_of(compute), ExpertKind::relu, narrow, offsets,
                              {{}, narrow_up, narrow_down}, {{}, narrow_hidden, narrow_hidden}, narrow,
                              {.hidden_blocks = 8});
            }),
            "experts_forward: x is bf16; expected f32 in exact mode");

  const auto gradients = [&](const ConstTensorView& dy, const ExpertGradients& to,
                             DType of_weights = DType::f32) {
    return refused([&] {
      experts_weight_gradients(kernels_of(compute), ExpertKind::swiglu, dy, x, offsets, of_weights,
                               {hidden, hidden, hidden}, to);
    });
  };
  EXPECT_EQ(gradients(hidden, {}), "experts_weight_gradients: dy is f32 (3, 8); expected f32 (3, 4), as x");
  EXPECT_EQ(gradients(x, {.up = down}),
            "experts_weight_gradients: gradients.up is f32 (2, 4, 8); expected f32 (2, 8, 4), as the weight");
  EXPECT_EQ(gradients(x, {}, DType::f64),
            "experts_weight_gradients: of_weights is f64; expected f32 or bf16");
  ExpertGradients in_blocks;
  in_blocks.block_offsets = offsets;
  in_blocks.blocks = 2;
  EXPECT_EQ(gradients(x, in_blocks),
            "experts_weight_gradients: 3 block offsets; expected 2 experts x (2 blocks + 1)");
}

TEST_F(EpRefused, OptionsOfModules) {
  for (const auto& [what, options] : {std::pair{"noise", RouterOptions{.noise = -1}},
                                      {"capacity_factor", RouterOptions{.capacity_factor = -1}},
                                      {"aux_loss", RouterOptions{.aux_loss = -1}}})
    EXPECT_EQ(refused([&, options = options] { MoE layer(config(4, options)); }),
              std::string("router: ") + what + " is -1; expected a finite number of 0 or more");
  EXPECT_EQ(refused([&] { MoE layer(config(4, {.capacity_factor = 1.25})); }),
            "router: capacity_factor is 1.25, but capacity is none; expected by_weight, by_position or "
            "per_choice_and_rank with it");
  for (const auto& [what, change] : std::vector<std::pair<std::string, std::function<void(MoEConfig&)>>>{
           {"dim is 0; expected at least 1", [](MoEConfig& c) { c.dim = 0; }},
           {"hidden is 0; expected at least 1", [](MoEConfig& c) { c.hidden = 0; }},
           {"shared_hidden is -1; expected at least 0", [](MoEConfig& c) { c.shared_hidden = -1; }}}) {
    MoEConfig c = config();
    change(c);
    EXPECT_EQ(refused([&] { c.check(); }), "moe: " + what);
  }
  MoE layer(config());
  test::set_up(layer, compute);
  Frame frame(compute, {.seed = 1, .step = 0});
  layer.forward(floats({2, 3, 4}), frame);
  EXPECT_EQ(refused([&] {
              layer.backward(floats({2, 2, 4}), frame);
            }),
            "\"\": dy is f32 (2, 2, 4); expected f32 (2, 3, 4), as x");
  frame.clear();
}

TEST(EpRefusedOnMeshes, Layouts) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), {{"ep", 2}, {"tp", 2}}),
        other(rank.group(), MeshShape{{"tp", 2}, {"ep", 2}});
    MoE two_meshes(config());
    two_meshes.experts.gate_proj->set_layout(make_layout(other, {{"tp", Shard{1}}}, {4, 8, 4}));
    EXPECT_EQ(
        refused([&] { apply_expert_parallel(two_meshes, mesh["ep"]); }),
        "apply_expert_parallel: \"experts.gate_proj\" lies over tp=2 x ep=2, the axis ep=2 belongs to ep=2 "
        "x tp=2: not the same DeviceMesh; use one for both");
    MoE cut(config());
    cut.experts.gate_proj->set_layout(make_layout(mesh, {{"ep", Shard{1}}}, {4, 8, 4}));
    EXPECT_EQ(refused([&] { apply_expert_parallel(cut, mesh["ep"]); }),
              "apply_expert_parallel: \"experts.gate_proj\" is Shard(1) on ep=2 already");
    MoE layer(config());
    replicate(layer, mesh);
    test::set_up(layer, compute);
    const Tensor x = test::normal_tensor(rank.context, {2, 4, 4}, "x");
    Frame frame(compute, {.seed = 1, .step = 0});
    EXPECT_EQ(
        refused(
            [&] {
              layer.forward(distribute(x, make_layout(mesh, {{"tp", Shard{1}}}, x.shape())), frame);
            },
            ErrorCode::layout),
        "\"router\": x is Shard(1) on tp=2; expected Replicate or Shard(0): tokens are routed with their "
        "whole samples on one rank");
    frame.clear();
  });
}

// Choices that differ from rank to rank: the exchange of rows fails on both ranks, and names them.
TEST(EpRefusedOnMeshes, ChoicesThatDiffer) {
  test::RankOptions options;
  options.deadline = std::chrono::seconds(5);
  test::run_ranks(
      Ranks::threads, 2,
      [](Rank& rank) {
        Compute compute(rank.context, 1);
        // Rank 0 says that both of its tokens go to rank 1, which awaits one.
        const ExpertChoices choices{
            Tensor::zeros(rank.context, {2}, DType::i32), Tensor::zeros(rank.context, {2}), {2, 0}};
        for (int i = 0; i < (rank.rank == 0 ? 2 : 1); ++i)
          choices.experts.as<std::int32_t>()[static_cast<std::size_t>(i)] = 1;
        const TokenRoutes routes(choices, rank.rank, 1, Numbers{0, 1, 2});
        const Tensor x = Tensor::zeros(rank.context, {rank.rank == 0 ? 2 : 0, 3});
        // A sender of few bytes does not wait: it learns it in its next call.
        const Error e = test::error_of([&] {
          routes.start_dispatch(compute, &rank.group(), x).finish();
          rank.group().barrier().wait();
          return 0;
        });
        EXPECT_EQ(e.code(), ErrorCode::mismatch) << e.what();
        EXPECT_NE(
            std::string(e.what()).find("rank 0 gave 1 field: f32, 24 bytes of boxes (2, 3), and rank 1 1 "
                                       "field: f32, 12 bytes of boxes (1, 3); expected the same on all "
                                       "ranks"),
            std::string::npos)
            << e.what();
      },
      options);
}

}  // namespace
}  // namespace weft::ep_refused_test
