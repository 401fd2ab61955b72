// Layouts as pure arithmetic: no rank communicates here.
#include "weft/mesh/layout.hpp"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <map>
#include <thread>

#include "mesh/mesh_state.hpp"
#include "mesh/whole.hpp"
#include "support/errors.hpp"
#include "weft/mesh/redistribute.hpp"

namespace weft::layout_test {
namespace {

using test::every_list;
using test::expect_error;

/// Among the ranks that agree on all axes that do not shard, each element of the whole must lie in exactly
/// one part.
void expect_tiling(const Layout& layout) {
  const MeshShape& mesh = layout.mesh_shape();
  std::map<std::vector<int>, std::vector<int>>
      owners;  // by coordinates with those of sharding axes cleared: a count per element
  for (int rank = 0; rank < mesh.size(); ++rank) {
    std::vector<int> replica = mesh.coordinates(rank);
    for (std::size_t a = 0; a < replica.size(); ++a)
      if (is_shard(layout.placements[a])) replica[a] = 0;
    std::vector<int>& count = owners[replica];
    count.resize(static_cast<std::size_t>(layout.global.count()));
    for (const Box& box : layout.parts(rank))
      for (std::int64_t i = 0; i < box.shape[0]; ++i)
        for (std::int64_t j = 0; j < box.shape[1]; ++j)
          ++count.at(static_cast<std::size_t>((box.offset[0] + i) * layout.global[1] + box.offset[1] + j));
  }
  for (const auto& [replica, count] : owners)
    for (const int n : count) ASSERT_EQ(n, 1) << to_string(layout);
}

TEST(Layout, PartsTileTheWholeExactlyOnce) {
  Context context;
  const std::vector<MeshShape> meshes{{{"a", 1}},
                                      {{"a", 2}},
                                      {{"a", 3}},
                                      {{"a", 7}},
                                      {{"a", 2}, {"b", 2}},
                                      {{"a", 2}, {"b", 3}},
                                      {{"a", 4}, {"b", 1}},
                                      {{"a", 2}, {"b", 2}, {"c", 2}},
                                      {{"a", 3}, {"b", 1}, {"c", 2}}};
  int layouts = 0;
  for (const MeshShape& shape : meshes) {
    const DeviceMesh mesh = DeviceMesh::arithmetic(context, shape, 0);
    for (const Shape& global : {Shape{5, 7}, Shape{1, 3}, Shape{0, 4}, Shape{8, 4}, Shape{13, 2}})
      for (const Placements& p :
           every_list(shape.axis_count(), {Replicate{}, Shard{0}, Shard{1}, Partial{}})) {
        expect_tiling(*make_layout(mesh, p, global));
        ++layouts;
      }
  }
  EXPECT_EQ(layouts, 5 * (4 * 4 + 3 * 16 + 2 * 64));
}

TEST(Layout, FirstRanksHoldOneMore) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"tp", 4}}, 0);
  const LayoutRef layout = make_layout(mesh, {Shard{0}}, {10, 3});
  EXPECT_EQ(layout->local_shape(0), (Shape{3, 3}));
  EXPECT_EQ(layout->local_shape(1), (Shape{3, 3}));
  EXPECT_EQ(layout->local_shape(2), (Shape{2, 3}));
  EXPECT_EQ(layout->local_shape(3), (Shape{2, 3}));
  EXPECT_EQ(layout->parts(2), (std::vector<Box>{{{6, 0}, {2, 3}}}));
  EXPECT_EQ(layout->parts(3), (std::vector<Box>{{{8, 0}, {2, 3}}}));
}

TEST(Layout, FewerElementsThanRanksLeaveEmptyParts) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"tp", 4}}, 3);
  const LayoutRef layout = make_layout(mesh, {Shard{1}}, {2, 3});
  EXPECT_EQ(layout->local_shape(2), (Shape{2, 1}));
  EXPECT_EQ(layout->local_shape(), (Shape{2, 0}));
  EXPECT_EQ(layout->parts(), (std::vector<Box>{{{0, 3}, {2, 0}}}));
}

TEST(Layout, AxesNestInTheOrderOfTheMesh) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"dp", 2}, {"tp", 2}}, 0);
  const LayoutRef layout = make_layout(mesh, {Shard{0}, Shard{0}}, {7});
  const std::int64_t sizes[] = {2, 2, 2, 1}, offsets[] = {0, 2, 4, 6};
  for (int r = 0; r < 4; ++r) {
    EXPECT_EQ(layout->local_shape(r), Shape{sizes[r]});
    EXPECT_EQ(layout->parts(r).at(0).offset, Dims{offsets[r]});
  }
}

// A weight that is cut for tensor parallelism and then into data shards: each data shard is a part of the
// tensor-parallel one.
TEST(Layout, AnAxisCanNestInsideOneRightOfIt) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"dp_shard", 2}, {"tp", 2}}, 0);
  const LayoutRef tp = make_layout(mesh, {{"tp", Shard{0}}}, {7});
  const LayoutRef layout = tp->shard_inside(mesh["dp_shard"], 0);
  // tp cuts 7 into 4 + 3; dp_shard these into 2 + 2 and 2 + 1. Ranks: (dp_shard, tp).
  const std::int64_t sizes[] = {2, 2, 2, 1}, offsets[] = {0, 4, 2, 6};
  for (int r = 0; r < 4; ++r)
    EXPECT_EQ(layout->parts(r), (std::vector<Box>{{Dims{offsets[r]}, Shape{sizes[r]}}})) << r;
  EXPECT_EQ(layout->nesting, (std::vector<int>{1, 0}));
  EXPECT_EQ(to_string(*layout), "(7) as [dp_shard: Shard(0), tp: Shard(0)] nested tp, dp_shard");
  EXPECT_EQ(layout, make_layout(mesh, {Shard{0}, Shard{0}}, {7})->nested({"tp", "dp_shard"}));
  EXPECT_EQ(layout,
            make_layout(mesh, {Replicate{}, Replicate{}}, {7})->with(mesh[{"tp", "dp_shard"}], Shard{0}));
  EXPECT_NE(layout, make_layout(mesh, {Shard{0}, Shard{0}}, {7}));
  EXPECT_EQ(layout->with("dp_shard", Replicate{}), tp) << "the nesting of what shares no dimension is one";
  EXPECT_EQ(layout->nested({"dp_shard", "tp"}), make_layout(mesh, {Shard{0}, Shard{0}}, {7}));
  EXPECT_EQ(tp->nested({"tp", "dp_shard"}), tp);
  const DeviceMesh other = DeviceMesh::arithmetic(context, {{"dp_shard", 2}, {"tp", 1}}, 0);
  EXPECT_EQ(make_layout(other, {Shard{0}, Shard{0}}, {7})->nested({"tp", "dp_shard"}),
            make_layout(other, {Shard{0}, Shard{0}}, {7}))
      << "an axis of one rank cuts nothing";
  expect_error(ErrorCode::layout, "layout: axis \"tp\" is given twice in a nesting", [&] {
    (void)layout->nested({"tp", "tp"});
  });
}

TEST(Layout, EveryNestingTilesTheWhole) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"a", 2}, {"b", 3}, {"c", 2}}, 0);
  for (const Shape& global : {Shape{17, 3}, Shape{5, 2}, Shape{0, 1}})
    for (const Placements& p : every_list(3, {Replicate{}, Shard{0}, Shard{1}}))
      for (const auto& order :
           {std::array{"a", "b", "c"}, std::array{"c", "b", "a"}, std::array{"b", "a", "c"}})
        expect_tiling(*make_layout(mesh, p, global)->nested({order[0], order[1], order[2]}));
}

// The rows of a fused [q|k|v] weight: every rank has a part of q, one of k and one of v.
TEST(Layout, SegmentsAreCutOneByOne) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"dp_shard", 2}, {"tp", 2}}, 2);
  const LayoutRef layout = make_layout(mesh, {{"tp", Shard{0}}}, {8, 3})->segmented(0, {4, 2, 2});
  EXPECT_EQ(layout->parts(0), (std::vector<Box>{{{0, 0}, {2, 3}}, {{4, 0}, {1, 3}}, {{6, 0}, {1, 3}}}));
  EXPECT_EQ(layout->parts(1), (std::vector<Box>{{{2, 0}, {2, 3}}, {{5, 0}, {1, 3}}, {{7, 0}, {1, 3}}}));
  EXPECT_EQ(layout->local_shape(0), (Shape{4, 3}));
  EXPECT_EQ(to_string(*layout),
            "(8, 3) as [dp_shard: Replicate, tp: Shard(0)] in segments 4, 2, 2 of dimension 0");
  const LayoutRef both = layout->shard_inside(mesh["dp_shard"], 0);
  EXPECT_EQ(both->parts(2), (std::vector<Box>{{{1, 0}, {1, 3}}, {{5, 0}, {0, 3}}, {{7, 0}, {0, 3}}}));
  EXPECT_EQ(both->local_shape(), (Shape{1, 3}));
  expect_tiling(*both);
  expect_tiling(*layout->with("tp", Shard{1}));
  EXPECT_EQ(layout->with("tp", Replicate{})->with("tp", Shard{0}), layout) << "they stay with the tensor";
  EXPECT_EQ(layout->segmented(0, {8}), make_layout(mesh, {{"tp", Shard{0}}}, {8, 3}))
      << "one segment is none";
  EXPECT_NE(layout, layout->segmented(0, {2, 4, 2}));
  EXPECT_EQ(layout->with_global({8, 5})->segments, layout->segments);

  const auto code = ErrorCode::layout;
  expect_error(code, "layout: segments 4, 3 add up to 7; dimension 0 of (8, 3) has 8", [&] {
    (void)layout->segmented(0, {4, 3});
  });
  expect_error(code, "layout: segments 9, -1: a size below 0", [&] { (void)layout->segmented(0, {9, -1}); });
  expect_error(code, "layout: segments 4, 4 of dimension 2; the tensor is (8, 3)", [&] {
    (void)layout->segmented(2, {4, 4});
  });
  expect_error(
      code,
      "layout: (8, 3) as [dp_shard: Replicate, tp: Shard(0)] in segments 4, 2, 2 of dimension 0 becomes "
      "(9, 3), which would remove its segments",
      [&] {
        (void)layout->with_global({9, 3});
      });
}

TEST(Layout, AListOfAxesIsTakenAsOne) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"dp", 2}, {"kv", 2}, {"rep", 2}}, 5);
  const DeviceMesh tp = mesh[{"kv", "rep"}];
  const LayoutRef layout = make_layout(mesh, {}, {8})->with(tp, Shard{0});
  EXPECT_EQ(layout, make_layout(mesh, {Replicate{}, Shard{0}, Shard{0}}, {8}));
  EXPECT_EQ(layout->on(tp), Placement(Shard{0}));
  EXPECT_EQ(layout->parts(5).at(0).offset, Dims{2});
  EXPECT_NO_THROW(expect_layout(layout, tp, Shard{0}, "x"));
  const auto code = ErrorCode::layout;
  const LayoutRef mixed = layout->with("rep", Replicate{});
  expect_error(code, "layout: Shard(0) on kv=2 and Replicate on rep=2; expected one placement on kv,rep",
               [&] { (void)mixed->on(tp); });
  expect_error(code, "x is Shard(0) on kv=2 and Replicate on rep=2; expected Shard(0)",
               [&] { expect_layout(mixed, tp, Shard{0}, "x"); });
  expect_error(code,
               "x is (8) as [dp: Replicate, kv: Shard(0), rep: Shard(0)], whose axes nest in another order "
               "than rep,kv",
               [&] {
                 expect_layout(layout, mesh[{"rep", "kv"}], Shard{0}, "x");
               });
}

// The placement on an axis of one rank does not matter, alone or in a list with other axes.
TEST(Layout, AnAxisOfOneRankInAListIsNotLookedAt) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"dp", 2}, {"kv", 1}, {"rep", 2}}, 3);
  const DeviceMesh tp = mesh[{"kv", "rep"}];
  for (const Placement& p : {Placement(Partial{}), Placement(Replicate{})})
    for (const Placement& of_one : {Placement(Partial{}), Placement(Replicate{}), Placement(Shard{0})}) {
      const LayoutRef layout = make_layout(mesh, {Replicate{}, of_one, p}, {8});
      EXPECT_EQ(layout->on(tp), p);
      EXPECT_NO_THROW(expect_layout(layout, tp, p, "x")) << to_string(*layout);
    }
}

TEST(Layout, GoesWithItsLastUserAndKeepsItsMesh) {
  Context context;
  LayoutRef kept;
  {
    const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"tp", 2}}, 1);
    const LayoutTable& table = detail::MeshAccess::state(mesh).layouts();
    for (std::int64_t i = 0; i < 1000; ++i) (void)make_layout(mesh, {Shard{0}}, {i, 3});
    EXPECT_EQ(table.size(), 0U);
    const LayoutRef held = make_layout(mesh, {Shard{0}}, {4, 3});
    EXPECT_EQ(make_layout(mesh, {Shard{0}}, {4, 3}), held);
    EXPECT_EQ(table.size(), 1U);
    kept = held->with("tp", Replicate{});
  }
  EXPECT_EQ(kept->mesh().size(), 2);
  EXPECT_EQ(kept->with("tp", Shard{1})->local_shape(), (Shape{4, 1}));
}

// Several threads make and drop layouts at once. A thread finds a layout equal to its request, and a layout
// that is held is one object.
TEST(Layout, ThreadsFindWhatOthersLetGo) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"tp", 2}}, 0);
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      std::vector<LayoutRef> held(8);
      for (int i = 0; i < 20000; ++i) {
        const std::int64_t rows = (i * 7 + t) % 13;
        LayoutRef found = make_layout(mesh, {Shard{0}}, {rows, 3});
        if (found->global[0] != rows) ++wrong;
        for (const LayoutRef& other : held)
          if (other != nullptr && (other->global[0] == rows) != (other == found)) ++wrong;
        held[static_cast<std::size_t>(i) % held.size()] = std::move(found);
      }
    });
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(detail::MeshAccess::state(mesh).layouts().size(), 0U);
}

TEST(Layout, PartialAndReplicateHoldTheWhole) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"dp", 2}, {"tp", 2}}, 3);
  const LayoutRef layout = make_layout(mesh, {Partial{}, Replicate{}}, {5, 2});
  EXPECT_EQ(layout->local_shape(), (Shape{5, 2}));
  EXPECT_EQ(layout->parts().at(0).offset, (Dims{0, 0}));
  EXPECT_TRUE(layout->partial());
  EXPECT_FALSE(layout->replicated());
}

TEST(Layout, EqualLayoutsAreOneObject) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"dp", 2}, {"tp", 2}}, 0);
  const LayoutRef a = make_layout(mesh, {Shard{0}, Replicate{}}, {4, 4});
  EXPECT_EQ(a, make_layout(mesh, {Shard{0}, Replicate{}}, {4, 4}));
  EXPECT_EQ(a, make_layout(mesh["tp"], {{"dp", Shard{0}}}, {4, 4})) << "by name, from a part of the mesh";
  EXPECT_EQ(a, make_layout(mesh.root(), {Shard{0}, Partial{}}, {4, 4})->with("tp", Replicate{}));
  EXPECT_EQ(a, a->with(mesh["dp"], Shard{1})->with(mesh["dp"], Shard{0}));
  EXPECT_EQ(a, a->with_global({8, 4})->with_global({4, 4}));
  EXPECT_NE(a, make_layout(mesh, {Shard{1}, Replicate{}}, {4, 4}));
  EXPECT_NE(a, make_layout(mesh, {Replicate{}, Shard{0}}, {4, 4}));
  EXPECT_NE(a, make_layout(mesh, {Shard{0}, Replicate{}}, {4, 5}));
  EXPECT_NE(a, make_layout(mesh, {Shard{0}, Replicate{}}, {4, 4, 1}));
  EXPECT_NE(make_layout(mesh, {Partial{}, Replicate{}}, {4}),
            make_layout(mesh, {Partial{ReduceOp::max}, Replicate{}}, {4}));
  const DeviceMesh other = DeviceMesh::arithmetic(context, {{"dp", 2}, {"tp", 2}}, 0);
  EXPECT_NE(a, make_layout(other, {Shard{0}, Replicate{}}, {4, 4})) << "another root";
  EXPECT_EQ(replicated_layout(mesh, {3}), make_layout(mesh, {Replicate{}, Replicate{}}, {3}));
}

TEST(Layout, ThreadsInternTheSameObjects) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"tp", 2}}, 0);
  constexpr int kThreads = 4, kShapes = 200;
  std::vector<std::vector<LayoutRef>> found(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < kShapes; ++i)
        found[static_cast<std::size_t>(t)].push_back(make_layout(mesh, {Shard{0}}, {i, 3}));
    });
  for (std::thread& t : threads) t.join();
  for (int t = 1; t < kThreads; ++t) EXPECT_EQ(found[static_cast<std::size_t>(t)], found[0]);
}

TEST(Layout, KnowsItsMeshAndPlacementByAxis) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"dp", 2}, {"tp", 2}}, 1);
  const LayoutRef layout = make_layout(mesh, {Shard{0}, Partial{}}, {4, 4});
  EXPECT_EQ(layout->mesh(), mesh);
  EXPECT_EQ(layout->on("dp"), Placement(Shard{0}));
  EXPECT_EQ(layout->on(mesh["tp"]), Placement(Partial{}));
  EXPECT_EQ(to_string(*layout), "(4, 4) as [dp: Shard(0), tp: Partial(sum)]");
  EXPECT_EQ(to_string(layout->placements), "[Shard(0), Partial(sum)]");
}

TEST(Layout, ErrorsSayWhatDoesNotFit) {
  Context context;
  const auto code = ErrorCode::layout;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"dp", 2}, {"tp", 2}}, 1);
  expect_error(code, "layout: 1 placements [Shard(0)]; expected one for each axis of dp=2 x tp=2",
               [&] { (void)make_layout(mesh, Placements{Shard{0}}, {4}); });
  expect_error(code, "layout: Shard(2) on tp; the tensor (4, 4) has dimensions 0 to 1", [&] {
    (void)make_layout(mesh, {Replicate{}, Shard{2}}, {4, 4});
  });
  expect_error(code, "layout: Shard(-1) on dp; the tensor (4, 4) has dimensions 0 to 1", [&] {
    (void)make_layout(mesh, {Shard{-1}, Replicate{}}, {4, 4});
  });
  expect_error(code, "layout: Shard(0) on dp; the tensor () is a scalar", [&] {
    (void)make_layout(mesh, {{"dp", Shard{0}}}, {});
  });
  expect_error(
      code,
      "layout: Partial(sum) on dp and Partial(max) on tp do not commute: the value would depend on which is "
      "reduced first",
      [&] {
        (void)make_layout(mesh, {Partial{}, Partial{ReduceOp::max}}, {4});
      });
  expect_error(code, "layout: the mesh tp=2 is a part of dp=2 x tp=2; a layout spans the root",
               [&] { (void)make_layout(mesh["tp"], Placements{Shard{0}}, {4}); });
  expect_error(code, "layout: the shape (4, -1) has a negative size", [&] {
    (void)replicated_layout(mesh, {4, -1});
  });
  const DeviceMesh other = DeviceMesh::arithmetic(context, {{"tp", 2}}, 1);
  expect_error(code, "layout: axis tp=2 belongs to another mesh than (4) as [dp: Shard(0), tp: Replicate]",
               [&] {
                 (void)make_layout(mesh, {{"dp", Shard{0}}}, {4})->on(other["tp"]);
               });
  expect_error(ErrorCode::bad_argument, "mesh: no axis \"pp\" in dp=2 x tp=2", [&] {
    (void)make_layout(mesh["tp"], {{"pp", Shard{0}}}, {4});
  });
}

TEST(Layout, AStatementIsCheckedAgainstTheLocalShape) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"dp", 3}}, 1);
  const LayoutRef layout = make_layout(mesh, {Shard{0}}, {7, 4});
  EXPECT_EQ(as_layout(Tensor::zeros(context, {2, 4}), layout).layout(), layout);
  expect_error(ErrorCode::layout,
               "as_layout: the tensor is (3, 4); rank 1 of (7, 4) as [dp: Shard(0)] holds (2, 4)", [&] {
                 (void)as_layout(Tensor::zeros(context, {3, 4}), layout);
               });
}

TEST(Layout, ExpectationsNameTensorAndAxis) {
  Context context;
  const auto code = ErrorCode::layout;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"one", 1}, {"tp", 2}}, 1);
  const DeviceMesh tp = mesh["tp"];
  const Tensor plain = Tensor::zeros(context, {4, 4});
  const Tensor replicated = as_layout(plain, replicated_layout(mesh, {4, 4}));
  EXPECT_NO_THROW(expect_layout(replicated, tp, Replicate{}, "x"));
  expect_error(code, "layers.0.down: x is Replicate on tp=2; expected Shard(1)",
               [&] { expect_layout(replicated, tp, Shard{1}, "layers.0.down: x"); });
  expect_error(code,
               "layers.0.down: x is a plain tensor; on tp=2 it needs a layout, which says what part of the "
               "whole it is",
               [&] { expect_layout(plain, tp, Shard{1}, "layers.0.down: x"); });
  EXPECT_NO_THROW(expect_layout(plain, mesh["one"], Shard{1}, "x"))
      << "on an axis of one rank everything is the same";
  EXPECT_NO_THROW(expect_layout(replicated, mesh["one"], Shard{1}, "x"));
  EXPECT_EQ(placement_on(plain, mesh["one"], "x"), Placement(Replicate{}));
  EXPECT_EQ(placement_on(replicated, tp, "x"), Placement(Replicate{}));
}

TEST(Layout, SegmentsMayNotOverflow) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"tp", 2}}, 0);
  expect_error(ErrorCode::layout,
               "layout: segments 9223372036854775807, 9223372036854775807, 6: their sum does not fit 64 bits",
               [&] {
                 (void)replicated_layout(mesh, {4, 3})->segmented(0, {INT64_MAX, INT64_MAX, 6});
               });
}

TEST(Layout, ExpectationsKnowTheirMesh) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"tp", 2}}, 0),
                   other = DeviceMesh::arithmetic(context, {{"pp", 1}, {"tp", 2}}, 0),
                   equal = DeviceMesh::arithmetic(context, {{"tp", 2}}, 0);
  const LayoutRef layout = make_layout(mesh, {{"tp", Shard{0}}}, {4, 3});
  expect_error(
      ErrorCode::layout,
      "x lies over tp=2, axis tp=2 belongs to pp=1 x tp=2: not the same DeviceMesh; use one for both",
      [&] { expect_layout(layout, other["tp"], Shard{0}, "x"); });
  expect_error(ErrorCode::layout,
               "x lies over tp=2, axis tp=2 belongs to tp=2: not the same DeviceMesh; use one for both",
               [&] { expect_layout(layout, equal["tp"], Shard{0}, "x"); });
}

TEST(Layout, AStatementNeedsMemory) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"tp", 2}}, 0);
  Tensor given(context, {4, 3});
  const Tensor taken = std::move(given);
  expect_error(ErrorCode::bad_argument,
               "as_layout: the tensor (4, 3) has no memory: it is empty or was moved from", [&] {
                 (void)as_layout(given, replicated_layout(mesh, {4, 3}));
               });
}

TEST(Layout, SlicesNeedNoGroup) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"dp", 2}, {"tp", 2}}, 2);  // at (1, 0)
  Tensor whole(context, {3, 5}, DType::i32);
  for (int i = 0; i < 15; ++i) whole.as<std::int32_t>()[static_cast<std::size_t>(i)] = i;
  const Tensor part = distribute(whole, make_layout(mesh, {Shard{0}, Shard{1}}, {3, 5}));
  ASSERT_EQ(part.shape(), (Shape{1, 3}));
  EXPECT_EQ(part.as<std::int32_t>()[0], 10);
  EXPECT_EQ(part.as<std::int32_t>()[2], 12);
  expect_error(
      ErrorCode::layout,
      "distribute: the tensor is (3, 5); expected the whole of (3, 6) as [dp: Replicate, tp: Shard(1)]", [&] {
        (void)distribute(whole, make_layout(mesh, {{"tp", Shard{1}}}, {3, 6}));
      });
}

}  // namespace
}  // namespace weft::layout_test
