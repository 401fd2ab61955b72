#include "weft/train/replicas.hpp"

#include <gtest/gtest.h>

#include "support/errors.hpp"
#include "train/bag.hpp"

namespace weft::replicas_test {
namespace {

TEST(CheckReplicasOfParameters, ComparesValuesAndNamesPaths) {
  test::run_ranks(test::Ranks::threads, 4, [](test::Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 2}});
    test::Bag bag;
    Parameter& norm = bag.put(rank.context, "norm", {3}, replicated_layout(mesh, {3}));
    Parameter& cut = bag.put(rank.context, "cut", {2}, make_layout(mesh, {{"tp", Shard{0}}}, {2}));
    for (float& x : norm.master().f32()) x = 1;
    cut.master().f32()[0] = static_cast<float>(mesh.coordinate("tp"));
    check_replicas(bag.parameters(), mesh);
    if (rank.rank == 2) cut.master().f32()[0] = 5;
    EXPECT_EQ(
        test::error_text([&] { check_replicas(bag.parameters(), mesh); }),
        "mismatch: check_replicas: \"cut\" is Replicate on dp=2, but on dp,tp ranks 0, 2 it has other bits");
    check_replicas(bag.parameters(), mesh["tp"]);
    Parameter bare({2});
    Parameter* const list[] = {&bare};
    EXPECT_EQ(test::error_text([&] { check_replicas(list, mesh["tp"]); }),
              "bad_argument: parameter \"\": used before materialise");
  });
}

}  // namespace
}  // namespace weft::replicas_test
