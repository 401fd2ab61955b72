// Layer norms over maps that are cut in space, with one gain per pixel, sharded like the maps; compared with
// one rank.
#include <gtest/gtest.h>

#include "domain/as_serial.hpp"
#include "weft/nn/norm.hpp"

namespace weft::domain_norm_test {
namespace {

using test::error_text;
using test::expect_as_serial;
using test::MakeModule;
using test::Rank;

MakeModule norm_over(const Shape& dims) {
  return [=] { return std::make_unique<LayerNorm>(dims); };
}

// Uneven parts. With 3 rows on 4 ranks, one rank has no row.
TEST(DomainLayerNorm, OverChannelsHeightAndWidth) {
  for (const Shape& x : {Shape{2, 3, 7, 5}, Shape{1, 4, 4, 3}, Shape{3, 1, 12, 8}})
    expect_as_serial(norm_over({x[1], x[2], x[3]}), x, {.maps = 1e-6, .weights = 1e-6});
}

TEST(DomainLayerNorm, OverHeightAndWidth) {
  for (const Shape& x : {Shape{2, 3, 7, 5}, Shape{1, 4, 4, 3}})
    expect_as_serial(norm_over({x[2], x[3]}), x, {.maps = 1e-6, .weights = 1e-6});
}

// A mean far from 0 leaves the variance its digits.
TEST(DomainLayerNorm, OfValuesFarFromZero) {
  for (const int n : {2, 3})
    test::run_ranks(test::Ranks::threads, n, [](Rank& rank) {
      Compute compute(rank.context, 1);
      const DeviceMesh mesh(rank.group(), {{"h", -1}});
      const std::unique_ptr<Module> norm = norm_over({2, 9, 6})();
      const DomainManager manager = apply_domain_parallel(*norm, mesh);
      replicate(*norm, mesh);
      materialise(*norm, compute);
      initialise(*norm, 1);
      const Tensor x = test::random_map(rank.context, {1, 2, 9, 6}, "x");
      Frame frame = Frame::inference(compute);
      const Tensor want = full(norm->forward(shard_spatial(x, manager), frame)[0]);
      for (float& f : x.f32()) f += 256;  // its digits below 2^-15 are lost
      EXPECT_LE(test::difference(full(norm->forward(shard_spatial(x, manager), frame)[0]), want), 2e-5);
    });
}

// The gain is cut like the maps. Names and whole shapes are those of one rank. The whole tensor that a
// program gathers is that of one rank, too.
TEST(DomainLayerNorm, TheGainIsCutAndKeepsItsNameAndValues) {
  test::run_ranks(test::Ranks::threads, 4, [](Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), {{"h", 2}, {"w", 2}});
    const auto make = [] { return std::make_unique<LayerNorm>(Shape{2, 5, 7}); };
    const std::unique_ptr<LayerNorm> serial = make(), split = make();
    test::set_up(*serial, compute);
    const DomainManager manager = apply_domain_parallel(*split, mesh);
    replicate(*split, mesh);
    EXPECT_EQ(split->weight->layout(), make_layout(mesh, {{"h", Shard{1}}, {"w", Shard{2}}}, {2, 5, 7}));
    test::set_up(*split, compute);
    EXPECT_EQ(split->weight->path(), "weight");
    const Shape part = manager.layout({1, 2, 5, 7})->local_shape();
    EXPECT_EQ(split->weight->master().shape(), Shape({2, part[2], part[3]}));
    EXPECT_TRUE(test::same_bits(full(split->weight->master()), serial->weight->master()));
    EXPECT_TRUE(test::same_bits(full(split->bias->master()), serial->bias->master()));
  });
}

TEST(DomainLayerNorm, SaysWhatDoesNotFit) {
  test::run_ranks(test::Ranks::threads, 2, [](Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), {{"h", 2}});
    EXPECT_EQ(error_text([] { LayerNorm none(Shape{}); }),
              "bad_argument: layer norm: dims is (); expected at least one dimension");
    LayerNorm serial(Shape{2, 4, 3}), split(Shape{2, 4, 3});
    const DomainManager manager = apply_domain_parallel(split, mesh);
    for (LayerNorm* norm : {&serial, &split}) {
      replicate(*norm, mesh);
      test::set_up(*norm, compute);
    }
    Frame frame = Frame::inference(compute);
    const Tensor x = shard_spatial(Tensor::zeros(rank.context, {1, 2, 4, 3}), manager);
    EXPECT_EQ(error_text([&] { serial.forward(x, frame); }),
              "layout: \"\": x is Shard(2) on h=2; a norm over (2, 4, 3) needs it whole there: "
              "apply_domain_parallel() makes one of a map that is cut in space");
    EXPECT_EQ(
        error_text([&] { split.forward(gather_spatial(x, manager), frame); }),
        "layout: \"\": x is Replicate on h=2, and the weight (2, 4, 3) is Shard(1); expected Replicate, cut "
        "as x is");
    EXPECT_EQ(error_text([&] {
                split.forward(shard_spatial(Tensor::zeros(rank.context, {1, 2, 5, 3}), manager), frame);
              }),
              "bad_argument: \"\": x is (1, 2, 5, 3); expected last dimensions of (2, 4, 3) (the weight's)");
    LayerNorm late(Shape{2, 4, 3});
    replicate(late, mesh);
    materialise(late, compute);
    EXPECT_EQ(
        error_text([&] { apply_domain_parallel(late, mesh); }),
        "bad_argument: apply_domain_parallel: \"weight\" is cut as the maps are, and it has memory already; "
        "expected before");
    EXPECT_EQ(late.passes(), nullptr);
  });
}

// The last dimension alone is that of features. If an axis cuts it, that is an error.
TEST(DomainLayerNorm, OverTheLastDimensionIsOfEachPixel) {
  test::run_ranks(test::Ranks::threads, 2, [](Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), {{"h", 1}, {"w", 2}});
    LayerNorm norm(4);
    const DomainManager manager = apply_domain_parallel(norm, mesh);
    replicate(norm, mesh);
    test::set_up(norm, compute);
    Frame frame = Frame::inference(compute);
    EXPECT_EQ(error_text([&] {
                norm.forward(shard_spatial(Tensor::zeros(rank.context, {1, 2, 3, 4}), manager), frame);
              }),
              "layout: \"\": x is Shard(3) on w=2; a norm needs its last dimension whole: a boundary must "
              "gather it first");
  });
}

}  // namespace
}  // namespace weft::domain_norm_test
