// Gradients over lists of axes, and over axes of any name: HSDP's replicate axis, data times domain, stages
// of a pipeline. Only the placement of a gradient on the axis decides what is done to it. Sizes are primes:
// shards are uneven.
#include <gtest/gtest.h>

#include <array>
#include <map>

#include "dp/vectors.hpp"
#include "support/calls_made.hpp"
#include "weft/dp/bucket_reducer.hpp"
#include "weft/dp/grad_norm.hpp"
#include "weft/dp/replicated.hpp"

namespace weft::axes_test {
namespace {

using test::error_of;
using test::Rank;
using test::Ranks;
using test::Vectors;

// The gradients of this rank after the reduction over the first of two axes, their layouts, norm and clipped
// values: one text for all of it.
using Report = std::map<std::string, std::vector<float>>;

Report reduced(Rank& rank, const std::array<std::string, 2>& names) {
  const DeviceMesh mesh(rank.group(), MeshShape{{names[0], 2}, {names[1], 2}});
  const auto coordinate = [&](int axis) {
    return static_cast<float>(mesh.coordinate(names[static_cast<std::size_t>(axis)]));
  };
  Vectors g;
  const auto put = [&](const char* name, const Placements& placements, float value) {
    g.put(name, make_layout(mesh, placements, {7}),
          [&](std::size_t i) { return value + static_cast<float>(i); });
  };
  put("sum", {Partial{}, Replicate{}}, 1 + coordinate(0));
  put("mean", {Partial{ReduceOp::avg}, Replicate{}}, 1 + coordinate(0));
  put("shard", {Shard{0}, Replicate{}}, 1 + coordinate(0));
  put("same", {Replicate{}, Replicate{}}, 5);
  put("shard and sum", {Partial{}, Shard{0}}, 1 + coordinate(0) + 10 * coordinate(1));
  sync_replicated_gradients(g.all(), mesh[names[0]]);
  Report report;
  for (const Gradient& gradient : g.all()) {
    const auto values = gradient.data.as<float>();
    report[std::string(gradient.name)] = {values.begin(), values.end()};
    EXPECT_FALSE(is_partial(gradient.layout->on(mesh[names[0]]))) << gradient.name;
  }
  report["norm"] = {static_cast<float>(grad_norm(g.all())), static_cast<float>(grad_norm(g.all(), 3))};
  report["clipped by"] = {static_cast<float>(clip_grad_norm(g.all(), 2.0))};
  report["norm then"] = {static_cast<float>(grad_norm(g.all()))};
  return report;
}

TEST(Axes, TheRuleIsThePlacementNeverTheName) {
  std::array<Report, 4> usual;  // by rank
  for (const std::array<std::string, 2>& names : {std::array<std::string, 2>{"dp", "tp"},
                                                  {"pp", "dp"},
                                                  {"domain", "pp"},
                                                  {"tp", "domain"},
                                                  {"ep", "cp"}})
    test::run_ranks(Ranks::threads, 4, [&](Rank& rank) {
      const Report report = reduced(rank, names);
      EXPECT_EQ(report.at("sum")[1], 5.0f) << "(1 + 1) + (2 + 1)";
      EXPECT_EQ(report.at("mean")[1], 2.5f);
      EXPECT_EQ(report.at("shard")[1], (rank.rank < 2 ? 2.0f : 3.0f)) << "left alone";
      EXPECT_EQ(report.at("same")[1], 6.0f) << "left alone";
      EXPECT_EQ(report.at("shard and sum")[1], (rank.rank % 2 == 0 ? 5.0f : 25.0f));
      EXPECT_NEAR(report.at("norm then")[0], 2, 1e-5);
      if (names[0] == "dp")
        usual[static_cast<std::size_t>(rank.rank)] = report;
      else
        EXPECT_EQ(report, usual[static_cast<std::size_t>(rank.rank)]) << names[0] << ", " << names[1];
    });
}

// HSDP: shards are summed over the replicate axis alone, with as many elements as each shard has.
TEST(Axes, ShardsAreReducedOverTheReplicateAxis) {
  test::run_ranks(Ranks::threads, 6, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp_replicate", 2}, {"dp_shard", 3}});
    const DeviceMesh replicate = mesh["dp_replicate"];
    const int copy = mesh.coordinate("dp_replicate"), part = mesh.coordinate("dp_shard");
    const auto value = [&](std::size_t i) {
      return static_cast<float>(100 * part + 10 * static_cast<int>(i) + copy);
    };
    const LayoutRef cut = make_layout(mesh, {Partial{}, Shard{0}}, {7}),
                    tiny = make_layout(mesh, {Partial{}, Shard{0}}, {2});
    Vectors g;
    std::vector<float>& w = g.put("w", cut, value);
    std::vector<float>& empty_somewhere = g.put("tiny", tiny, value);
    average_gradients(g.all(), replicate);
    EXPECT_EQ(g.at(0).layout, make_layout(mesh, {Replicate{}, Shard{0}}, {7}));
    EXPECT_EQ(w.size(), part == 0 ? 3u : 2u);
    EXPECT_EQ(empty_somewhere.size(), part == 2 ? 0u : 1u);
    const auto sum = [&](std::size_t i) { return 2 * value(i) + static_cast<float>(1 - 2 * copy); };
    for (std::size_t i = 0; i < w.size(); ++i) EXPECT_EQ(w[i], sum(i));

    BucketReducer reducer(replicate,
                          {{"w", cut->local_shape().count()}, {"tiny", tiny->local_shape().count()}});
    for (int step = 0; step < 2; ++step) {
      for (std::size_t k = 0; k < 2; ++k) {
        const auto slot = reducer.slot(k).as<float>();
        for (std::size_t i = 0; i < slot.size(); ++i) slot[i] = value(i);
        reducer.ready(k);
      }
      reducer.finish();
      for (std::size_t k = 0; k < 2; ++k)
        for (std::size_t i = 0; i < static_cast<std::size_t>(reducer.entry(k).count); ++i)
          EXPECT_EQ(reducer.slot(k).as<float>()[i], sum(i));
    }
  });
}

// Data times domain: one collective over both axes for gradients that are Partial on both, in whichever order
// the axes are listed.
TEST(Axes, DataTimesDomain) {
  test::run_ranks(Ranks::threads, 8, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 2}, {"domain", 2}});
    for (const DeviceMesh& axes : {mesh[{"dp", "domain"}], mesh[{"domain", "dp"}]}) {
      Vectors g;
      const auto mine = [&](std::size_t i) { return static_cast<float>(rank.rank) + static_cast<float>(i); };
      std::vector<float>& both =
          g.put("both", make_layout(mesh, {Partial{}, Replicate{}, Partial{}}, {5}), mine);
      std::vector<float>& mean = g.put(
          "mean", make_layout(mesh, {Partial{ReduceOp::avg}, Shard{0}, Partial{ReduceOp::avg}}, {5}), mine);
      axes.group();
      const std::size_t before = test::calls_made(axes.group());
      average_gradients(g.all(), axes);
      EXPECT_LE(test::calls_made(axes.group()) - before, 4u) << "a comparison and one reduction of each kind";
      const int tp = mesh.coordinate("tp");
      for (std::size_t i = 0; i < both.size(); ++i) {
        float sum = 0;
        for (const int r : {0, 1, 4, 5}) sum += static_cast<float>(r + 2 * tp) + static_cast<float>(i);
        EXPECT_EQ(both[i], sum);
        if (i < mean.size()) {
          EXPECT_EQ(mean[i], sum / 4);
        }
      }
      for (const Gradient& gradient : g.all())
        for (const DeviceMesh& axis : axes.each_axis()) EXPECT_TRUE(is_replicate(gradient.layout->on(axis)));
    }
  });
}

}  // namespace
}  // namespace weft::axes_test
