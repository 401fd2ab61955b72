// Grids of ranks: arithmetic, sub-meshes, and the groups along axes.
#include "weft/mesh/mesh.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "support/errors.hpp"
#include "support/run_ranks.hpp"
#include "weft/mesh/spread_failure.hpp"

namespace weft::mesh_test {
namespace {

using test::error_text;
using test::expect_error;
using test::Rank;
using test::Ranks;
using test::run_ranks;
using ::testing::HasSubstr;
using RankList = std::vector<int>;

TEST(MeshShape, RanksAreRowMajorAndLastAxisIsNearest) {
  const MeshShape shape{{"dp", 2}, {"tp", 3}};
  EXPECT_EQ(shape.size(), 6);
  EXPECT_EQ(shape.coordinates(0), (RankList{0, 0}));
  EXPECT_EQ(shape.coordinates(1), (RankList{0, 1}));
  EXPECT_EQ(shape.coordinates(5), (RankList{1, 2}));
  for (int r = 0; r < shape.size(); ++r) EXPECT_EQ(shape.rank(shape.coordinates(r)), r);
  EXPECT_EQ(shape.coordinate(4, shape.index("tp")), 1);
  EXPECT_EQ(to_string(shape), "dp=2 x tp=3");
}

TEST(MeshShape, LeavesOneSizeToTheRanks) {
  EXPECT_EQ((MeshShape{{"dp", -1}, {"tp", 2}}.fit(6)), (MeshShape{{"dp", 3}, {"tp", 2}}));
  EXPECT_EQ((MeshShape{{"dp", -1}}.fit(5)), (MeshShape{{"dp", 5}}));
  EXPECT_EQ((MeshShape{{"dp", 2}, {"tp", 1}}.fit(2)), (MeshShape{{"dp", 2}, {"tp", 1}}));
}

TEST(MeshShape, ErrorsShowTheArithmetic) {
  const auto bad = ErrorCode::bad_argument;
  expect_error(bad, "mesh: 6 ranks do not divide into tensor=4 x domain=1", [] {
    (void)MeshShape{{"data", -1}, {"tensor", 4}, {"domain", 1}}.fit(6);
  });
  expect_error(bad, "mesh: dp=2 x tp=2 = 4 ranks; the group has 6", [] {
    (void)MeshShape{{"dp", 2}, {"tp", 2}}.fit(6);
  });
  expect_error(bad, "mesh: no axes", [] { (void)MeshShape().fit(1); });
  expect_error(bad, "mesh: axis \"tp\" has size 0; expected 1 or more, or -1 for the remaining ranks", [] {
    MeshShape{{"tp", 0}};
  });
  expect_error(bad, "mesh: two sizes are -1 in dp=-1 x tp=-1; expected at most one -1", [] {
    MeshShape{{"dp", -1}, {"tp", -1}};
  });
  expect_error(bad, "mesh: axis \"tp\" is given twice in tp=2 x tp=3", [] {
    MeshShape{{"tp", 2}, {"tp", 3}};
  });
  expect_error(bad, "mesh: an axis without a name in =2", [] { MeshShape{{"", 2}}; });
  expect_error(bad, "mesh: a=65536 x b=65536 is more than 2^31 - 1 ranks", [] {
    MeshShape{{"a", 65536}, {"b", 65536}};
  });
  const MeshShape shape{{"dp", 2}, {"tp", 2}};
  expect_error(bad, "mesh: no axis \"pp\" in dp=2 x tp=2", [&] { (void)shape.size("pp"); });
  for (const int axis : {5, 2, -1}) {
    const std::string text = "mesh: axis " + std::to_string(axis) + "; expected 0 to 1 (dp=2 x tp=2)";
    expect_error(bad, text, [&] { (void)shape.size(axis); });
    expect_error(bad, text, [&] { (void)shape.name(axis); });
    expect_error(bad, text, [&] { (void)shape.coordinate(0, axis); });
  }
  expect_error(bad, "mesh: axis 0; there are no axes", [] { (void)MeshShape().size(0); });
  for (const int ranks : {0, -3}) {
    const std::string text = "mesh: " + std::to_string(ranks) + " ranks for dp=-1 x tp=2; expected 1 or more";
    expect_error(bad, text, [&] { (void)MeshShape{{"dp", -1}, {"tp", 2}}.fit(ranks); });
  }
  expect_error(bad, "mesh: rank 4; expected 0 to 3 (dp=2 x tp=2)", [&] { (void)shape.coordinates(4); });
  expect_error(bad, "mesh: coordinate 2 on axis \"tp\"; expected 0 to 1", [&] {
    (void)shape.rank(RankList{0, 2});
  });
  expect_error(bad, "mesh: 1 coordinates; expected 2 (dp=2 x tp=2)", [&] { (void)shape.rank(RankList{0}); });
}

TEST(DeviceMesh, SubMeshesHoldTheRanksOfTheirAxesInTheOrderAskedFor) {
  Context context;
  // At (1, 0, 1).
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"dp", 2}, {"sp", 1}, {"tp", 3}}, 4);
  EXPECT_EQ(mesh.rank(), 4);
  EXPECT_EQ(mesh.coordinate("dp"), 1);
  EXPECT_EQ(mesh["tp"].ranks(), (RankList{3, 4, 5}));
  EXPECT_EQ(mesh["tp"].rank(), 1);
  EXPECT_EQ(mesh["dp"].ranks(), (RankList{1, 4}));
  EXPECT_EQ(mesh["sp"].ranks(), (RankList{4}));
  EXPECT_EQ((mesh[{"dp", "tp"}].ranks()), (RankList{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ((mesh[{"tp", "dp"}].ranks()), (RankList{0, 3, 1, 4, 2, 5}));
  EXPECT_EQ((mesh[{"tp", "dp"}].rank()), 3);
  EXPECT_EQ((mesh[{"tp", "dp"}].ranks()[3]), 4);
  EXPECT_EQ((mesh[{"tp", "dp"}]["dp"]), mesh["dp"]);
  EXPECT_EQ((mesh[{"tp", "dp"}].name()), "tp,dp");
  EXPECT_NE((mesh[{"tp", "dp"}]), (mesh[{"dp", "tp"}]));
}

TEST(DeviceMesh, PartsKnowTheirRoot) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"dp", 2}, {"tp", 3}}, 4);
  EXPECT_TRUE(mesh.is_root());
  EXPECT_FALSE(mesh["tp"].is_root());
  EXPECT_EQ(mesh["tp"].root(), mesh);
  const DeviceMesh flat = mesh[{"tp", "dp"}].flatten("all");
  EXPECT_EQ(flat.size("all"), 6);
  EXPECT_EQ(flat.rank(), 3);
  EXPECT_EQ(flat["all"], flat);
  EXPECT_EQ(flat.root(), mesh);
  EXPECT_EQ(flat.ranks(), (RankList{0, 3, 1, 4, 2, 5}));
}

TEST(DeviceMesh, AnAxisCanBeSeenAsTwo) {
  Context context;
  const DeviceMesh whole = DeviceMesh::arithmetic(context, {{"dp", 2}, {"tp", 4}, {"sp", 1}}, 6);
  const DeviceMesh mesh = whole.unflatten("tp", {{"kv", 2}, {"rep", -1}});
  EXPECT_EQ(to_string(mesh.shape()), "dp=2 x kv=2 x rep=2 x sp=1");
  EXPECT_TRUE(mesh.is_root());
  EXPECT_NE(mesh, whole);
  EXPECT_EQ(mesh.rank(), 6);
  EXPECT_EQ(mesh["kv"].ranks(), (RankList{4, 6}));
  EXPECT_EQ(mesh["rep"].ranks(), (RankList{6, 7}));
  EXPECT_EQ(to_string(mesh["tp"].shape()), "tp=4") << "the old name is both";
  EXPECT_EQ(mesh["tp"].ranks(), whole["tp"].ranks());
  EXPECT_EQ(mesh["tp"].rank(), 2);
  EXPECT_EQ((mesh[{"tp", "dp"}].ranks()), (whole[{"tp", "dp"}].ranks()));
  EXPECT_EQ((mesh[{"dp", "kv", "rep"}]["tp"]), mesh["tp"]);
  ASSERT_EQ(mesh["tp"].each_axis().size(), 2U);
  EXPECT_EQ(mesh["tp"].each_axis()[1], mesh["rep"]);
  // Divides again: kv into two axes, and also dp. The names taken apart before still lead to all of their
  // axes.
  const DeviceMesh more = mesh.unflatten("kv", {{"k", 2}, {"v", 1}}).unflatten("dp", {{"r", 1}, {"s", 2}});
  EXPECT_EQ(to_string(more.shape()), "r=1 x s=2 x k=2 x v=1 x rep=2 x sp=1");
  EXPECT_EQ(more["tp"].ranks(), whole["tp"].ranks());
  EXPECT_EQ(more["dp"].ranks(), whole["dp"].ranks());
  EXPECT_EQ(more["kv"].ranks(), mesh["kv"].ranks());

  const auto bad = ErrorCode::bad_argument;
  expect_error(bad, "mesh: tp=4 cannot be divided into kv=3 x rep=2 = 6 ranks", [&] {
    (void)whole.unflatten("tp", {{"kv", 3}, {"rep", 2}});
  });
  expect_error(bad, "mesh: 4 ranks do not divide into kv=3", [&] {
    (void)whole.unflatten("tp", {{"kv", 3}, {"rep", -1}});
  });
  expect_error(bad, "mesh: axis \"dp\" is given twice in dp=2 x dp=2 x rep=2 x sp=1", [&] {
    (void)whole.unflatten("tp", {{"dp", 2}, {"rep", 2}});
  });
  expect_error(bad, "mesh: no axis \"pp\" in dp=2 x tp=4 x sp=1", [&] {
    (void)whole.unflatten("pp", {{"a", 1}});
  });
  expect_error(bad, "mesh: unflatten of tp=4, a part of dp=2 x tp=4 x sp=1; only a root can be divided anew",
               [&] {
                 (void)whole["tp"].unflatten("tp", {{"kv", 2}, {"rep", 2}});
               });
  expect_error(bad, "mesh: axis \"kv\" is requested twice: it is a part of another", [&] {
    (void)mesh[{"tp", "kv"}];
  });
  expect_error(bad, "mesh: no axis \"tp\" in kv=2", [&] { (void)mesh["kv"]["tp"]; });
}

TEST(DeviceMesh, ErrorsNameTheAxis) {
  Context context;
  const auto bad = ErrorCode::bad_argument;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"dp", 2}, {"tp", 3}}, 0);
  expect_error(bad, "mesh: no axis \"pp\" in dp=2 x tp=3", [&] { (void)mesh["pp"]; });
  expect_error(bad, "mesh: no axis \"dp\" in tp=3", [&] { (void)mesh["tp"]["dp"]; });
  expect_error(bad, "mesh: axis \"tp\" is requested twice", [&] { (void)mesh[{"tp", "tp"}]; });
  expect_error(bad, "mesh: a sub-mesh without axes was requested, of dp=2 x tp=3",
               [&] { (void)mesh.submesh({}); });
  expect_error(bad, "mesh: axis \"dp\" has no size, and there is no group from which to compute it", [&] {
    (void)DeviceMesh::arithmetic(context, {{"dp", -1}}, 0);
  });
  expect_error(bad, "mesh: rank 6; expected 0 to 5 (dp=2 x tp=3)", [&] {
    (void)DeviceMesh::arithmetic(context, {{"dp", 2}, {"tp", 3}}, 6);
  });
  expect_error(ErrorCode::unsupported,
               "mesh: dp=2 x tp=3 is arithmetic only; without a process group it cannot communicate",
               [&] { (void)mesh["tp"].group(); });
}

/// The ranks of `group` in the root's numbering, gathered by the group's own all_gather.
RankList members(ProcessGroup& group, int root_rank) {
  std::vector<std::int32_t> mine{root_rank}, all(static_cast<std::size_t>(group.size()));
  group.all_gather(view(mine), view(all)).wait();
  return RankList(all.begin(), all.end());
}

TEST(DeviceMesh, GroupsJoinTheRanksOfASubMeshInItsOrder) {
  run_ranks(test::Ranks::threads, 6, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"dp", 2}, {"one", 1}, {"tp", -1}});
    for (const DeviceMesh& part : {mesh, mesh["dp"], mesh["tp"], mesh["one"], mesh[{"tp", "dp"}],
                                   mesh[{"one", "tp"}], mesh[{"dp", "tp"}].flatten("all")}) {
      EXPECT_EQ(part.group().size(), part.size());
      EXPECT_EQ(part.group().rank(), part.rank());
      EXPECT_EQ(members(part.group(), r.rank), part.ranks());
    }
  });
}

TEST(DeviceMesh, EachListOfAxesHasOneGroup) {
  run_ranks(test::Ranks::threads, 4, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"dp", 2}, {"one", 1}, {"tp", 2}});
    EXPECT_EQ(&mesh["tp"].group(), &mesh["tp"].group());
    EXPECT_EQ(&mesh["tp"].group(), &(mesh[{"one", "tp"}].group())) << "an axis of one rank changes nothing";
    EXPECT_EQ(&mesh.group(), &r.group()) << "all ranks in their own order need no new group";
    EXPECT_EQ((&mesh[{"dp", "tp"}].group()), &r.group());
    EXPECT_NE(&mesh["tp"].group(), &mesh["dp"].group());
  });
}

TEST(DeviceMesh, OnlyTheRanksOfASubMeshNeedAskForItsGroup) {
  run_ranks(test::Ranks::threads, 4, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"dp", 2}, {"tp", 2}});
    if (mesh.coordinate("dp") == 1) {
      EXPECT_EQ(members(mesh["tp"].group(), r.rank), (RankList{2, 3}));
    }
  });
}

// By the groups along the axes a failure reaches ranks that are in no group of the failed rank.
TEST(DeviceMesh, AFailureSpreadsOverItsGroups) {
  run_ranks(Ranks::threads, 4, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"a", 2}, {"b", 2}});
    ProcessGroup &a = mesh["a"].group(), &b = mesh["b"].group();
    spread_failure(mesh);  // there is none
    a.barrier().wait();
    b.barrier().wait();
    rank.group().barrier().wait();
    if (rank.rank == 0) a.abort("the reason");
    if (rank.rank == 0) spread_failure(mesh);
    const std::string text = error_text([&] { (rank.rank == 2 ? a : b).barrier().wait(); });
    EXPECT_THAT(text, HasSubstr("aborted by rank 0: the reason"));
    if (rank.rank != 2) {
      EXPECT_THAT(text, HasSubstr("mesh: a failure of rank 0 of a=2 x b=2: "));
    }
    spread_failure(mesh);
    EXPECT_TRUE(a.failed() && b.failed());
    rank.group().barrier().wait();  // the root group serves no axis
  });
}

TEST(DeviceMesh, TakesOverAGroup) {
  run_ranks(test::Ranks::threads, 2, [](Rank& r) {
    const DeviceMesh mesh(std::move(r.group()), {{"dp", 2}});
    EXPECT_EQ(members(mesh["dp"].group(), r.rank), (RankList{0, 1}));
  });
}

TEST(DeviceMesh, RefusesAGroupOfAnotherSize) {
  run_ranks(test::Ranks::threads, 3, [](Rank& r) {
    expect_error(ErrorCode::bad_argument, "mesh: dp=2 x tp=2 = 4 ranks; the group has 3", [&] {
      DeviceMesh(r.group(), {{"dp", 2}, {"tp", 2}});
    });
  });
}

}  // namespace
}  // namespace weft::mesh_test
