#include "weft/dp/sharded_parameters.hpp"

#include <gtest/gtest.h>

#include <numeric>

#include "support/errors.hpp"
#include "support/run_ranks.hpp"
#include "weft/mesh/redistribute.hpp"

namespace weft::test::sharded_parameters_test {
namespace {

// A global tensor whose elements encode the tensor and the index; the values are exact in bf16.
template <class T>
void fill_whole(const Tensor& t, std::size_t tensor) {
  std::int64_t at = 0;
  for (T& x : t.as<T>()) x = T(static_cast<float>((at++ * 7 + static_cast<std::int64_t>(tensor) * 31) % 127));
}

Tensor whole_of(Rank& rank, const ShardEntry& entry, std::size_t tensor) {
  Tensor t(rank.context, entry.layout->local_shape(), entry.dtype);
  if (entry.dtype == DType::bf16)
    fill_whole<bf16>(t, tensor);
  else
    fill_whole<float>(t, tensor);
  return t;
}

bool same_bytes(const ConstTensorView& a, const ConstTensorView& b) {
  return a.bytes() == b.bytes() && std::equal(a.data, a.data + a.bytes(), b.data);
}

// Tensors whose rows do not divide, that have fewer rows than ranks, or none. Small tensors, which are
// packed, and large tensors.
std::vector<ShardEntry> entries_over(const DeviceMesh& mesh) {
  const auto entry = [&](const char* name, const Shape& shape, DType dtype = DType::f32) {
    return ShardEntry{name, replicated_layout(mesh, shape), dtype};
  };
  return {entry("big", {53, 37}),
          entry("one", {1}),
          entry("none", {0, 3}),
          entry("prime", {7, 5}),
          entry("half", {11, 3}, DType::bf16),
          entry("big_half", {97, 16}, DType::bf16),
          {"fused", replicated_layout(mesh, {12, 100})->segmented(0, {7, 5}), DType::f32},
          entry("two_rows", {2, 3, 2})};
}

struct Bench {
  Bench(Rank& rank_in, const DeviceMesh& shard, std::vector<ShardEntry> entries,
        ShardedParametersOptions options = {})
      : rank(rank_in), shards(shard, std::move(entries), with_small(options)) {
    for (std::size_t i = 0; i < shards.size(); ++i) {
      wholes.push_back(whole_of(rank, shards.entry(i), i));
      own.emplace_back(rank.context, shards.shard_layout(i)->local_shape(), shards.entry(i).dtype);
    }
    shards.reshard(views<ConstTensorView>(wholes), views<TensorView>(own));
  }
  static ShardedParametersOptions with_small(ShardedParametersOptions o) {
    o.alone_bytes = 2000;  // so that both ways are used
    return o;
  }
  template <class View>
  static std::vector<View> views(const std::vector<Tensor>& tensors) {
    return {tensors.begin(), tensors.end()};
  }
  void expect_unsharded(const Tensor& buffer) const {
    for (std::size_t i = 0; i < wholes.size(); ++i) {
      EXPECT_TRUE(same_bytes(shards.whole(i, buffer).view(), wholes[i].view())) << shards.entry(i).name;
      EXPECT_EQ(shards.whole(i, buffer).layout(), shards.whole_layout(i));
    }
  }

  Rank& rank;
  ShardedParameters shards;
  std::vector<Tensor> wholes, own;
};

constexpr int kRanks[] = {1, 2, 3, 4, 7};

TEST(ShardedParameters, WholesComeBackFromTheShardsOfAllRanks) {
  for (const Ranks kind : {Ranks::threads, Ranks::processes})
    for (const int ranks : kRanks)
      run_ranks(kind, ranks, [](Rank& rank) {
        const DeviceMesh mesh(rank.group(), {{"dp", rank.size}});
        Bench bench(rank, mesh["dp"], entries_over(mesh));
        bench.expect_unsharded(bench.shards.unshard(Bench::views<ConstTensorView>(bench.own)));
        // Several transfers at once, also into memory that was used before.
        Transfer first = bench.shards.start_unshard(Bench::views<ConstTensorView>(bench.own));
        Tensor used = bench.shards.make_whole();
        std::fill_n(used.data(), used.bytes(), std::byte{0xff});
        Transfer second = bench.shards.start_unshard(Bench::views<ConstTensorView>(bench.own), used);
        bench.expect_unsharded(second.finish());
        bench.expect_unsharded(first.finish());
      });
}

TEST(ShardedParameters, GatherIntoTheCallersMemory) {
  run_ranks(Ranks::processes, 3, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", rank.size}});
    Bench bench(rank, mesh["dp"], entries_over(mesh));
    std::vector<Tensor> to;
    for (const Tensor& t : bench.wholes) to.emplace_back(rank.context, t.shape(), t.dtype());
    EXPECT_FALSE(
        bench.shards.start_unshard(Bench::views<ConstTensorView>(bench.own), Bench::views<TensorView>(to))
            .finish());
    for (std::size_t i = 0; i < to.size(); ++i)
      EXPECT_TRUE(same_bytes(to[i].view(), bench.wholes[i].view())) << bench.shards.entry(i).name;
  });
}

TEST(ShardedParameters, RangesAreThoseOfTheLayoutAndCoverEachElementOnce) {
  run_ranks(Ranks::threads, 1, [](Rank& rank) {
    for (const int ranks : kRanks)
      for (int r = 0; r < ranks; ++r) {
        const DeviceMesh mesh = DeviceMesh::arithmetic(rank.context, {{"dp", ranks}}, r);
        const ShardedParameters shards(mesh["dp"], entries_over(mesh));
        std::int64_t received = 0;
        for (std::size_t i = 0; i < shards.size(); ++i) {
          const std::int64_t count = shards.whole_layout(i)->global.count();
          std::vector<int> seen(static_cast<std::size_t>(count));
          for (int q = 0; q < ranks; ++q)
            for (const Chunk& c : shards.ranges(i, q))
              for (std::int64_t k = c.offset; k < c.offset + c.size; ++k) ++seen[static_cast<std::size_t>(k)];
          EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), count) << shards.entry(i).name;
          EXPECT_EQ(shards.shard_count(i, r), shards.shard_layout(i)->local_shape().count());
          received += (count - shards.shard_count(i, r)) * size_bytes(shards.entry(i).dtype);
        }
        EXPECT_EQ(shards.unshard_bytes(), received);
      }
    // Fewer rows than ranks: the last ranks have nothing.
    const DeviceMesh mesh = DeviceMesh::arithmetic(rank.context, {{"dp", 4}}, 0);
    const ShardedParameters shards(mesh["dp"], {{"w", replicated_layout(mesh, {2, 3})}});
    EXPECT_EQ(shards.shard_count(0, 1), 3);
    EXPECT_EQ(shards.shard_count(0, 2), 0);
  });
}

// Rank r contributes r + 1 times the whole: sums of small integers.
template <class T>
std::vector<Tensor> contributions(const Bench& bench, DType dtype, int rank) {
  std::vector<Tensor> gradients;
  for (std::size_t i = 0; i < bench.wholes.size(); ++i) {
    Tensor g(bench.rank.context, bench.wholes[i].shape(), dtype);
    std::int64_t at = 0;
    for (T& x : g.as<T>())
      x = T(static_cast<float>((at++ * 5 + static_cast<std::int64_t>(i)) % 19 * (rank + 1)));
    gradients.push_back(g);
  }
  return gradients;
}

void expect_reduced(const Bench& bench, const Tensor& reduced, int ranks, double factor) {
  const std::vector<Tensor> one = contributions<float>(bench, DType::f32, 0);
  const auto r = bench.shards.size() == 0 ? 0 : bench.shards.shard_layout(0)->mesh().rank();
  for (std::size_t i = 0; i < one.size(); ++i) {
    const Tensor got = bench.shards.shard_gradient(i, reduced);
    const Tensor expected = distribute(one[i], bench.shards.shard_layout(i));
    ASSERT_EQ(got.shape(), expected.shape());
    for (std::size_t k = 0; k < got.f32().size(); ++k)
      ASSERT_EQ(got.f32()[k], expected.f32()[k] * static_cast<float>(factor * ranks * (ranks + 1) / 2))
          << bench.shards.entry(i).name << " rank " << r << " at " << k;
  }
}

TEST(ShardedParameters, GradientsAreCombinedAndScattered) {
  for (const Ranks kind : {Ranks::threads, Ranks::processes})
    for (const int ranks : kRanks)
      run_ranks(kind, ranks, [](Rank& rank) {
        const DeviceMesh mesh(rank.group(), {{"dp", rank.size}});
        Bench bench(rank, mesh["dp"], entries_over(mesh));
        const std::vector<Tensor> mine = contributions<float>(bench, DType::f32, rank.rank);
        // In the list's own memory, if nothing is copied, and in the caller's.
        const Tensor buffer = bench.shards.make_gradients();
        for (std::size_t i = 0; i < mine.size(); ++i)
          std::copy_n(mine[i].data(), mine[i].bytes(), bench.shards.gradient(i, buffer).data());
        expect_reduced(bench, bench.shards.reduce_scatter(buffer), rank.size, 1);
        expect_reduced(bench, bench.shards.start_reduce_scatter(Bench::views<ConstTensorView>(mine)).finish(),
                       rank.size, 1);
        EXPECT_EQ(mine[0].f32()[1],
                  static_cast<float>(5 * (rank.rank + 1)));  // the caller's stay as they are
        // Results in the caller's memory, too.
        std::vector<Tensor> results;
        for (std::size_t i = 0; i < mine.size(); ++i)
          results.emplace_back(rank.context, bench.shards.shard_layout(i)->local_shape());
        const Tensor reduced =
            bench.shards.start_reduce_scatter(Bench::views<ConstTensorView>(mine)).finish();
        EXPECT_FALSE(
            bench.shards
                .start_reduce_scatter(Bench::views<ConstTensorView>(mine), Bench::views<TensorView>(results))
                .finish());
        for (std::size_t i = 0; i < results.size(); ++i)
          EXPECT_TRUE(same_bytes(results[i].view(), bench.shards.shard_gradient(i, reduced).view()));
      });
}

TEST(ShardedParameters, AveragesWhereAsked) {
  run_ranks(Ranks::threads, 4, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", rank.size}});
    Bench bench(rank, mesh["dp"], entries_over(mesh));
    const std::vector<Tensor> mine = contributions<float>(bench, DType::f32, rank.rank);
    expect_reduced(
        bench, bench.shards.start_reduce_scatter(Bench::views<ConstTensorView>(mine), ReduceOp::avg).finish(),
        rank.size, 0.25);
  });
}

TEST(ShardedParameters, HalfPrecisionGradientsAreSummedInF32) {
  run_ranks(Ranks::threads, 3, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", rank.size}});
    // 256 + 1 + 1 is 258 in f32; in bf16, whose neighbours of 256 are 2 apart, 256 + 1 stays 256.
    ShardedParameters shards(mesh["dp"], {{"w", replicated_layout(mesh, {5})}}, {.gradient = DType::bf16});
    Tensor mine(rank.context, {5}, DType::bf16);
    for (bf16& x : mine.as<bf16>()) x = bf16(rank.rank == 0 ? 256.0F : 1.0F);
    const Tensor reduced = shards.start_reduce_scatter(std::vector<ConstTensorView>{mine}).finish();
    for (const bf16 x : shards.shard_gradient(0, reduced).as<bf16>())
      EXPECT_EQ(static_cast<float>(x), 258.0F);
  });
}

TEST(ShardedParameters, WireMayBeNarrowerThanGradients) {
  run_ranks(Ranks::processes, 2, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", rank.size}});
    Bench bench(rank, mesh["dp"], entries_over(mesh), {.reduce = DType::bf16});
    EXPECT_EQ(bench.shards.reduce_bytes() * 2,
              ShardedParameters(mesh["dp"], entries_over(mesh)).reduce_bytes());
    const std::vector<Tensor> mine = contributions<float>(bench, DType::f32, rank.rank);  // up to 36: exact
    expect_reduced(bench, bench.shards.start_reduce_scatter(Bench::views<ConstTensorView>(mine)).finish(),
                   rank.size, 1);
  });
}

TEST(ShardedParameters, ReplicatedAxesAreSummedAfterwards) {
  for (const DType reduce : {DType::f32, DType::bf16})
    run_ranks(Ranks::threads, 6, [reduce](Rank& rank) {
      const DeviceMesh mesh(rank.group(), {{"replicate", 2}, {"shard", 3}});
      Bench bench(rank, mesh["shard"], entries_over(mesh),
                  {.replicate = mesh["replicate"], .reduce = reduce});
      bench.expect_unsharded(bench.shards.unshard(Bench::views<ConstTensorView>(bench.own)));
      const std::vector<Tensor> mine = contributions<float>(bench, DType::f32, rank.rank % 2);
      const Tensor reduced = bench.shards.start_reduce_scatter(Bench::views<ConstTensorView>(mine)).finish();
      // Ranks 0, 2, 4 contribute 1 and the others 2: as 9 / 3 times ranks 0 and 1 do.
      expect_reduced(bench, reduced, 2, 3);
    });
}

// The last ranks keep nothing, and get an empty gradient of the dtype that all get.
TEST(ShardedParameters, ReplicatedAxesGiveEmptyShardsTheDtypeOfGradients) {
  run_ranks(Ranks::threads, 6, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"replicate", 2}, {"shard", 3}});
    Bench bench(rank, mesh["shard"], {{"w", replicated_layout(mesh, {2, 3}), DType::f32}},
                {.replicate = mesh["replicate"], .reduce = DType::bf16});
    const std::vector<Tensor> mine = contributions<float>(bench, DType::f32, rank.rank % 2);
    const Tensor reduced = bench.shards.start_reduce_scatter(Bench::views<ConstTensorView>(mine)).finish();
    EXPECT_EQ(reduced.dtype(), DType::f32);
    expect_reduced(bench, reduced, 2, 3);
  });
}

TEST(ShardedParameters, InsideTensorParallelCutsAndOverSeveralAxes) {
  run_ranks(Ranks::threads, 8, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", 2}, {"domain", 2}, {"tp", 2}});
    std::vector<ShardEntry> entries{
        {"column", make_layout(mesh, {{"tp", Shard{0}}}, {31, 40})},
        {"row", make_layout(mesh, {{"tp", Shard{1}}}, {31, 41})},
        {"qkv", make_layout(mesh, {{"tp", Shard{0}}}, {24, 50})->segmented(0, {14, 6, 4})},
        {"norm", replicated_layout(mesh, {13})}};
    Bench bench(rank, mesh[{"dp", "domain"}], entries);
    bench.expect_unsharded(bench.shards.unshard(Bench::views<ConstTensorView>(bench.own)));
    for (std::size_t i = 0; i < bench.shards.size(); ++i) {
      // Gathering the data axes gives the tensor-parallel part: what redistribute makes of the shard.
      const Tensor gathered =
          redistribute(bench.own[i].with_layout(bench.shards.shard_layout(i)), bench.shards.whole_layout(i));
      EXPECT_TRUE(same_bytes(gathered.view(), bench.wholes[i].view())) << bench.shards.entry(i).name;
    }
    const std::vector<Tensor> mine = contributions<float>(bench, DType::f32, mesh[{"dp", "domain"}].rank());
    const Tensor reduced = bench.shards.start_reduce_scatter(Bench::views<ConstTensorView>(mine)).finish();
    const std::vector<Tensor> one = contributions<float>(bench, DType::f32, 0);
    for (std::size_t i = 0; i < one.size(); ++i) {
      const Tensor got = bench.shards.shard_gradient(i, reduced);
      std::size_t k = 0;
      for (const Chunk& c : bench.shards.ranges(i, mesh[{"dp", "domain"}].rank()))
        for (std::int64_t at = c.offset; at < c.offset + c.size; ++at)
          EXPECT_EQ(got.f32()[k++], 10 * one[i].f32()[static_cast<std::size_t>(at)]);
      EXPECT_EQ(k, got.f32().size());
    }
  });
}

TEST(ShardedParameters, WrongArgumentsAreNamed) {
  run_ranks(Ranks::threads, 1, [](Rank& rank) {
    const DeviceMesh mesh = DeviceMesh::arithmetic(rank.context, {{"dp", 2}, {"tp", 2}}, 0), dp = mesh["dp"];
    const auto text = [](const auto& call) { return std::string(error_of(call).what()); };
    using Entries = std::vector<ShardEntry>;
    const auto made = [&](Entries entries, const ShardedParametersOptions& o = {}) {
      return (text([&] { ShardedParameters(dp, std::move(entries), o); }));
    };
    const LayoutRef layout = replicated_layout(mesh, {4});
    EXPECT_EQ((text([&] { ShardedParameters({}, {}); })),
              "sharded_parameters: shard is an empty DeviceMesh, made by default or moved from");
    EXPECT_EQ(made({{"w", nullptr}}), "sharded_parameters: \"w\" has no layout; expected that of the whole");
    EXPECT_EQ(made({{"w", replicated_layout(mesh, {})}}),
              "sharded_parameters: \"w\" is a scalar; it has no dimension to cut");
    EXPECT_EQ(made({{"w", layout->with(dp, Shard{0})}}),
              "sharded_parameters: \"w\" is Shard(0) on dp=2; expected Replicate on the axes that cut it");
    EXPECT_EQ(
        made({{"w", layout->with("tp", Shard{0})}}, {.replicate = mesh["tp"]}),
        "sharded_parameters: \"w\" is Shard(0) on tp=2; expected Replicate on the axes that replicate it");
    EXPECT_EQ(made({{"w", layout->with("tp", Partial{})}}),
              "sharded_parameters: \"w\" is (4) as [dp: Replicate, tp: Partial(sum)]; expected whole values");
    EXPECT_EQ(made({{"w", layout}}, {.replicate = dp}),
              "sharded_parameters: options.replicate is dp, of which dp is to be cut; expected other axes");
    EXPECT_EQ(made({{"w", layout}}, {.reduce = DType::i32}),
              "sharded_parameters: options.reduce is i32; expected f64, f32, bf16 or f16");
    EXPECT_EQ(made({{"w", layout}}, {.alone_bytes = 0}),
              "sharded_parameters: options.alone_bytes is 0; expected 1 or more");
    const DeviceMesh other = DeviceMesh::arithmetic(rank.context, {{"dp", 2}}, 0);
    EXPECT_EQ(made({{"w", replicated_layout(other, {4})}}),
              "sharded_parameters: \"w\" lies over dp=2, the axes dp belong to dp=2 x tp=2: not the same "
              "DeviceMesh; use one for both");

    ShardedParameters shards(dp, {{"w", layout}});
    const Tensor good(rank.context, {2}), wrong(rank.context, {3});
    EXPECT_EQ((text([&] { (void)shards.start_unshard(std::vector<ConstTensorView>{}); })),
              "sharded_parameters: shards are 0; expected one for each of 1 entries");
    EXPECT_EQ((text([&] { (void)shards.start_unshard(std::vector<ConstTensorView>{wrong}); })),
              "sharded_parameters: the shard of \"w\" is f32 (3); expected f32 (2)");
    EXPECT_EQ((text([&] { (void)shards.start_unshard(std::vector<ConstTensorView>{good}, good); })),
              "sharded_parameters: into is f32 x2; expected u8 x64, made by make_whole()");
    EXPECT_EQ((text([&] { (void)shards.start_reduce_scatter(good); })),
              "sharded_parameters: gradients is f32 x2; expected f32 x16, made by make_gradients()");
    EXPECT_EQ((text([&] { (void)shards.start_reduce_scatter(shards.make_gradients(), ReduceOp::max); })),
              "sharded_parameters: op is max; expected sum or avg");
    EXPECT_EQ((text([&] { (void)shards.entry(1); })), "sharded_parameters: i is 1; expected less than 1");
    EXPECT_EQ((text([&] { (void)shards.ranges(0, 2); })), "sharded_parameters: rank is 2; expected 0 to 1");
  });
}

TEST(ShardedParameters, RanksWithDifferentListsOrOptionsAreTold) {
  run_ranks(Ranks::threads, 2, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", 2}});
    Bench bench(rank, mesh["dp"], {{rank.rank == 0 ? "a" : "b", replicated_layout(mesh, {4})}});
    const Error e = error_of([&] { bench.shards.unshard(Bench::views<ConstTensorView>(bench.own)); });
    EXPECT_EQ(e.code(), ErrorCode::mismatch);
    EXPECT_NE(std::string(e.what()).find("sharded_parameters: tensor 0 is \"a\""), std::string::npos)
        << e.what();
    ShardedParameters other(mesh["dp"], {{"w", replicated_layout(mesh, {4})}},
                            {.alone_bytes = rank.rank + 1});
    const std::string text = error_of([&] { other.reduce_scatter(other.make_gradients()); }).what();
    EXPECT_NE(
        text.find("alone_bytes 1 on dp rank 0, but reduce f32, gradient f32, alone_bytes 2 on dp rank 1"),
        std::string::npos)
        << text;
  });
}

}  // namespace
}  // namespace weft::test::sharded_parameters_test
