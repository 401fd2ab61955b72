// The usual meshes, from data, tensor and domain parallelism.
#include "weft/mesh/build_mesh.hpp"

#include <gtest/gtest.h>

#include "support/errors.hpp"
#include "support/run_ranks.hpp"

namespace weft::build_mesh_test {
namespace {

using test::expect_error;
using test::Rank;
using test::Ranks;
using test::run_ranks;

constexpr auto kBad = ErrorCode::bad_argument;

TEST(BuildDeviceMesh, DataTakesTheRanksThatOthersLeave) {
  run_ranks(Ranks::threads, 8, [](Rank& r) {
    ProcessGroup& group = r.group();
    const ParallelMesh built = build_device_mesh(group, {.data = "fsdp2", .tensor = 2, .domain = 2});
    EXPECT_EQ(to_string(built.mesh.shape()), "dp=2 x tp=2 x domain=2");
    EXPECT_EQ(built.mesh.coordinate("dp"), r.rank / 4);
    EXPECT_EQ(built.mesh.coordinate("tp"), r.rank / 2 % 2);
    EXPECT_EQ(built.mesh.coordinate("domain"), r.rank % 2);
    ASSERT_EQ(built.axes.size(), 3u);
    EXPECT_EQ(built.axes.at("tp"), built.mesh["tp"]);
    EXPECT_EQ(get_tp_mesh(built.mesh), built.mesh["tp"]);
    EXPECT_TRUE(has_dp_mesh(built.mesh));
    EXPECT_EQ(get_dp_mesh(built.mesh), built.mesh["dp"]);
  });
}

TEST(BuildDeviceMesh, AxesOfOneRankAreInTheMeshAndNotAmongTheSubmeshes) {
  run_ranks(Ranks::threads, 2, [](Rank& r) {
    ProcessGroup& group = r.group();
    for (const std::string data : {"none", "ddp", "fsdp2"}) {
      const ParallelMesh built = build_device_mesh(group, {.data = data, .tensor = 2});
      EXPECT_EQ(to_string(built.mesh.shape()), "dp=1 x tp=2 x domain=1");
      ASSERT_EQ(built.axes.size(), 1u);
      EXPECT_TRUE(built.axes.contains("tp"));
      EXPECT_FALSE(has_dp_mesh(built.mesh));
      EXPECT_EQ(get_dp_mesh(built.mesh).size(), 1);
    }
    const ParallelMesh data_only = build_device_mesh(group, {.data = "ddp"});
    EXPECT_EQ(get_tp_mesh(data_only.mesh), std::nullopt);
    EXPECT_TRUE(has_dp_mesh(data_only.mesh));
  });
}

TEST(BuildDeviceMesh, NothingIsParallelOnOneRank) {
  run_ranks(Ranks::threads, 1, [](Rank& r) {
    ProcessGroup& group = r.group();
    const ParallelMesh built = build_device_mesh(group, {.data = "fsdp2"});
    EXPECT_FALSE(built.mesh);
    EXPECT_TRUE(built.axes.empty());
    EXPECT_EQ(get_tp_mesh(built.mesh), std::nullopt);
    EXPECT_FALSE(has_dp_mesh(built.mesh));
    expect_error(kBad, "get_dp_mesh: mesh is an empty DeviceMesh, made by default or moved from",
                 [&] { (void)get_dp_mesh(built.mesh); });
  });
}

TEST(BuildDeviceMesh, WrongValuesAreNamed) {
  run_ranks(Ranks::threads, 6, [](Rank& r) {
    ProcessGroup& group = r.group();
    const auto refuses = [&](const std::string& text, const Parallelism& p, Device device = {}) {
      expect_error(kBad, text, [&] { (void)build_device_mesh(group, p, device); });
    };
    refuses("parallelism.data is \"zero\"; expected \"fsdp2\", \"ddp\" or \"none\"", {.data = "zero"});
    refuses("parallelism.data is \"\"; expected \"fsdp2\", \"ddp\" or \"none\"", {.data = ""});
    refuses("parallelism.tensor is 0; expected 1 or more", {.data = "ddp", .tensor = 0});
    refuses("parallelism.domain is -2; expected 1 or more", {.data = "ddp", .domain = -2});
    refuses("mesh: 6 ranks do not divide into tensor=4 x domain=1", {.data = "ddp", .tensor = 4});
    refuses("mesh: 6 ranks do not divide into tensor=2147483647 x domain=2147483647",
            {.data = "ddp", .tensor = 2147483647, .domain = 2147483647});
    refuses(
        "parallelism.data is \"none\", but of 6 ranks tensor=2 x domain=1 leave dp=3; expected \"fsdp2\" or "
        "\"ddp\", or 2 ranks",
        {.tensor = 2});
    refuses(
        "parallelism.data is \"none\", but of 6 ranks tensor=1 x domain=1 leave dp=6; expected \"fsdp2\" or "
        "\"ddp\", or 1 rank",
        {});
    refuses("device is cuda:1, but the group's transport, shm, moves memory of cpu", {.data = "ddp"},
            {DeviceKind::cuda, 1});
  });
}

TEST(GetDpMesh, IsOneOrTwoAxes) {
  Context context;
  const auto of = [&](const MeshShape& shape) { return DeviceMesh::arithmetic(context, shape, 0); };
  const DeviceMesh hybrid = of({{"dp_replicate", 2}, {"dp_shard", 2}, {"tp", 2}});
  EXPECT_EQ(get_dp_mesh(hybrid), (hybrid[{"dp_replicate", "dp_shard"}]));
  const DeviceMesh narrow = of({{"dp_replicate", 1}, {"dp_shard", 2}});
  EXPECT_EQ(get_dp_mesh(narrow).shape().axis_count(), 2);
  const DeviceMesh shard = of({{"dp_shard", 2}, {"tp", 2}});
  EXPECT_EQ(get_dp_mesh(shard), shard["dp_shard"]);
  const DeviceMesh replicate = of({{"dp_replicate", 2}});
  EXPECT_EQ(get_dp_mesh(replicate), replicate["dp_replicate"]);
  const DeviceMesh none = of({{"tp", 2}, {"pp", 2}});
  EXPECT_FALSE(has_dp_mesh(none));
  expect_error(kBad,
               "get_dp_mesh: tp=2 x pp=2 has none of the axes \"dp\", \"dp_replicate\" and \"dp_shard\"; "
               "call has_dp_mesh() first",
               [&] { (void)get_dp_mesh(none); });
}

}  // namespace
}  // namespace weft::build_mesh_test
