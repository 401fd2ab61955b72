// Layouts as pure arithmetic: no rank communicates here.
#include "weft/mesh/layout.hpp"

#include <gtest/gtest.h>

#include <map>
#include <thread>

#include "mesh/whole.hpp"
#include "support/errors.hpp"
#include "weft/mesh/redistribute.hpp"

namespace weft {
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
    const Shape part = layout.local_shape(rank);
    const Dims offset = layout.local_offsets(rank);
    for (std::int64_t i = 0; i < part[0]; ++i)
      for (std::int64_t j = 0; j < part[1]; ++j)
        ++count.at(static_cast<std::size_t>((offset[0] + i) * layout.global[1] + offset[1] + j));
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
  EXPECT_EQ(layout->local_offsets(2), (Dims{6, 0}));
  EXPECT_EQ(layout->local_offsets(3), (Dims{8, 0}));
}

TEST(Layout, FewerElementsThanRanksLeaveEmptyParts) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"tp", 4}}, 3);
  const LayoutRef layout = make_layout(mesh, {Shard{1}}, {2, 3});
  EXPECT_EQ(layout->local_shape(2), (Shape{2, 1}));
  EXPECT_EQ(layout->local_shape(), (Shape{2, 0}));
  EXPECT_EQ(layout->local_offsets(), (Dims{0, 3}));
}

TEST(Layout, AxesNestInTheOrderOfTheMesh) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"dp", 2}, {"tp", 2}}, 0);
  const LayoutRef layout = make_layout(mesh, {Shard{0}, Shard{0}}, {7});
  const std::int64_t sizes[] = {2, 2, 2, 1}, offsets[] = {0, 2, 4, 6};
  for (int r = 0; r < 4; ++r) {
    EXPECT_EQ(layout->local_shape(r), Shape{sizes[r]});
    EXPECT_EQ(layout->local_offsets(r), Dims{offsets[r]});
  }
}

TEST(Layout, PartialAndReplicateHoldTheWhole) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"dp", 2}, {"tp", 2}}, 3);
  const LayoutRef layout = make_layout(mesh, {Partial{}, Replicate{}}, {5, 2});
  EXPECT_EQ(layout->local_shape(), (Shape{5, 2}));
  EXPECT_EQ(layout->local_offsets(), (Dims{0, 0}));
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
  expect_error(code, "layers.0.down: x is a plain tensor; on tp=2 it needs a layout",
               [&] { expect_layout(plain, tp, Shard{1}, "layers.0.down: x"); });
  EXPECT_NO_THROW(expect_layout(plain, mesh["one"], Shard{1}, "x"))
      << "on an axis of one rank everything is the same";
  EXPECT_NO_THROW(expect_layout(replicated, mesh["one"], Shard{1}, "x"));
  EXPECT_EQ(placement_on(plain, mesh["one"], "x"), Placement(Replicate{}));
  EXPECT_EQ(placement_on(replicated, tp, "x"), Placement(Replicate{}));
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
}  // namespace weft
