// Layers that are split over several axes, by one call or by one call per axis, have the results of one rank,
// or are refused with a text that shows the sizes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "support/near.hpp"
#include "support/run_ranks.hpp"
#include "weft/base/random.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/attention.hpp"
#include "weft/nn/init.hpp"
#include "weft/nn/linear.hpp"
#include "weft/tp/parallelize.hpp"

namespace weft::several_axes_test {
namespace {

using test::error_of;
using test::expect_near;
using test::random_tensor;
using test::Rank;
using test::Ranks;

struct Call {
  std::vector<std::string> axes;
  Style style;
};

// A Linear of three segments, as [q|k|v], split by these calls over a=2 x b=2, computes what it computes on
// one rank. `y`: the placements of its output.
void expect_as_serial(const std::vector<Call>& calls, const Placements& y) {
  test::run_ranks(Ranks::threads, 4, [&](Rank& rank) {
    Compute compute(rank.context);
    const auto make = [] {
      auto layer = std::make_unique<Linear>(8, 32, true, Normal{0.5});
      layer->bias->set_init(Normal{1});
      layer->set_segments({16, 8, 8});
      return layer;
    };
    const Tensor x = random_tensor(rank.context, {2, 3, 8}, "x"),
                 dy = random_tensor(rank.context, {2, 3, 32}, "dy");
    const auto serial = make(), parallel = make();
    materialise(*serial, compute);
    initialise(*serial, 3);
    Frame plain(compute);
    const Tensor expected_y = serial->forward(x, plain)[0], expected_dx = serial->backward(dy, plain)[0];

    const DeviceMesh mesh(rank.group(), {{"a", 2}, {"b", 2}});
    for (const Call& call : calls) parallelize(*parallel, mesh.submesh(call.axes), {{"", call.style}});
    replicate(*parallel, mesh);
    materialise(*parallel, compute);
    initialise(*parallel, 3);
    Frame frame(compute);
    const Tensor got = parallel->forward(as_layout(x, replicated_layout(mesh, x.shape())), frame)[0];
    EXPECT_EQ(got.layout()->placements, y) << to_string(*got.layout());
    expect_near(full(got), expected_y, "y");
    const Tensor dx = parallel->backward(distribute(dy, got.layout()), frame)[0];
    expect_near(full(dx), expected_dx, "dx");
    for (Parameter* p : serial->parameters())
      expect_near(full(parallel->parameter(p->path())->gradient()), p->gradient(), p->path());
  });
}

TEST(SeveralAxes, AGatheredOutputInSegmentsByOneCall) {
  expect_as_serial({{{"a", "b"}, Style::column_gathered}}, {Replicate{}, Replicate{}});
  expect_as_serial({{{"b", "a"}, Style::column_gathered}}, {Replicate{}, Replicate{}});
}

TEST(SeveralAxes, AGatheredOutputInSegmentsThatIsCutAgain) {
  const Style fed{.name = "fed", .split = Split::column};
  expect_as_serial({{{"a"}, Style::column_gathered}, {{"b"}, fed}}, {Replicate{}, Shard{2}});
  expect_as_serial({{{"b"}, fed}, {{"a"}, Style::column_gathered}}, {Replicate{}, Shard{2}});
  expect_as_serial({{{"b"}, Style::column_gathered}, {{"a"}, fed}}, {Shard{2}, Replicate{}});
}

// One call per axis is checked like one call for all axes.
TEST(SeveralAxes, UnitsDivideIntoAllRanksHoweverManyCallsThereAre) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"a", 2}, {"b", 2}}, 0);
  const Plan heads{{"", Style::enter},
                   {"q_proj", Style::column},
                   {"k_proj", Style::column},
                   {"v_proj", Style::column},
                   {"o_proj", Style::row}};
  const Style fed{.name = "fed", .split = Split::column}, feeding{.name = "feeding", .split = Split::row};
  const Plan again{{"q_proj", fed}, {"k_proj", fed}, {"v_proj", fed}, {"o_proj", feeding}};
  const auto attention = [](std::int64_t count) {
    return std::make_unique<Attention>(AttentionConfig{24, count, count, 4}, RopeTables::make(4, 4, 1e4));
  };
  const auto text = [&](Module& module, const DeviceMesh& axis, const Plan& plan) {
    return std::string(error_of([&] { parallelize(module, axis, plan); }).what());
  };
  EXPECT_EQ(text(*attention(6), mesh[{"a", "b"}], heads),
            "parallelize: \"\" has 6 heads; they do not divide into a,b=4 (6 = 4 x 1 + 2)");
  const auto six = attention(6);
  parallelize(*six, mesh["a"], heads);
  EXPECT_EQ(text(*six, mesh["b"], again),
            "parallelize: \"\" has 6 heads, in 2 parts already; they do not divide into b=2 (6 = 4 x 1 + 2)");
  const auto two = attention(2);
  parallelize(*two, mesh["a"], heads);
  EXPECT_EQ(text(*two, mesh["b"], again),
            "parallelize: \"\" has 2 heads, in 2 parts already; b=2 needs at least one for each rank (2 = 4 "
            "x 0 + 2)");
  const auto eight = attention(8), at_once = attention(8);
  parallelize(*eight, mesh["a"], heads);
  parallelize(*eight, mesh["b"], again);
  parallelize(*at_once, mesh[{"a", "b"}], heads);
  for (const Parameter* p : eight->parameters())
    EXPECT_EQ(p->layout(), at_once->parameter(p->path())->layout());
  Linear six_features(4, 6);
  parallelize(six_features, mesh["a"], Plan{{"", Style::column}});
  EXPECT_EQ(text(six_features, mesh["b"], Plan{{"", fed}}),
            "parallelize: \"\" has 6 output features, in 2 parts already; they do not divide into b=2 (6 = 4 "
            "x 1 + 2)");
  // Another dimension than that which is cut is no part of it.
  EXPECT_NO_THROW(parallelize(six_features, mesh["b"], Plan{{"", feeding}}));
}

TEST(SeveralAxes, WhatIsLeftWholeIsNotAskedForItsUnits) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"tp", 2}}, 0);
  Attention three({24, 3, 3, 4}, RopeTables::make(4, 4, 1e4));
  EXPECT_STREQ(error_of([&] {
                 parallelize(three, mesh, Plan{{"o_proj", Style::column_gathered}});
               }).what(),
               "parallelize: \"\" has 3 heads; they do not divide into tp=2 (3 = 2 x 1 + 1)");
  Plan elsewhere{{"o_proj", Style::column_gathered}};
  EXPECT_STREQ(error_of([&] { parallelize(three, mesh, Plan(elsewhere).leave_whole("heads")); }).what(),
               "parallelize: \"heads\" matches no module; the root has q_proj, k_proj, v_proj, o_proj");
  parallelize(three, mesh, elsewhere.leave_whole(""));
  EXPECT_EQ(to_string(three.o_proj.weight->layout()->on("tp")), "Shard(0)");
}

}  // namespace
}  // namespace weft::several_axes_test
