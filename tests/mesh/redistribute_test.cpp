// Every pair of placements against arithmetic on the whole tensor, exactly: small integers in every dtype.
#include "weft/mesh/redistribute.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <thread>

#include "mesh/whole.hpp"
#include "support/errors.hpp"
#include "support/run_ranks.hpp"

namespace weft::redistribute_test {
namespace {

using test::error_text;
using test::every_list;
using test::expect_error;
using test::local_part;
using test::Rank;
using test::run_ranks;
using test::whole_tensor;

/// Goes from each list of placements to each other and compares with what each rank must then hold. Takes
/// every `every`-th of all pairs.
template <class T>
void check_pairs(const DeviceMesh& mesh, const Shape& global, const std::vector<Placements>& lists,
                 int every = 1) {
  const std::vector<double> whole = whole_tensor(global);
  int pair = 0;
  for (const Placements& from : lists)
    for (const Placements& to : lists) {
      if (pair++ % every != 0) continue;
      SCOPED_TRACE(to_string(global) + " over " + to_string(mesh.shape()) + ": " + to_string(from) + " to " +
                   to_string(to));
      const LayoutRef target = make_layout(mesh, to, global);
      const Tensor in = local_part<T>(whole, make_layout(mesh, from, global));
      const std::vector<T> before(in.as<T>().begin(), in.as<T>().end());
      const Tensor out = redistribute(in, to);
      ASSERT_EQ(out.layout(), target);
      ASSERT_EQ(out.shape(), target->local_shape());
      ASSERT_TRUE(test::equal_elements<T>(in.as<T>(), before)) << "the input changed";
      if (!target->partial()) {
        const Tensor expected = local_part<T>(whole, target);
        ASSERT_TRUE(test::equal_elements<T>(out.as<T>(), expected.as<T>()));
      }
      // The global tensor is unchanged, whatever its layout is now.
      const Tensor again = full(out);
      ASSERT_EQ(again.layout(), nullptr);
      const Tensor expected = local_part<T>(whole, replicated_layout(mesh, global));
      ASSERT_TRUE(test::equal_elements<T>(again.as<T>(), expected.as<T>()));
    }
}

const std::vector<Placement> kLinear{Replicate{}, Shard{0}, Shard{1}, Partial{}};

TEST(Redistribute, EveryPairOnOneAxis) {
  for (const int n : {1, 2, 3, 4})
    run_ranks(test::Ranks::threads, n, [](Rank& r) {
      const DeviceMesh mesh(r.group(), {{"tp", -1}});
      const auto lists =
          every_list(1, {Replicate{}, Shard{0}, Shard{1}, Shard{2}, Partial{}, Partial{ReduceOp::avg},
                         Partial{ReduceOp::min}, Partial{ReduceOp::max}});
      for (const Shape& global :
           {Shape{4, 8, 12}, Shape{5, 7, 3}, Shape{1, 2, 1}, Shape{0, 3, 2}, Shape{2, 3, 0}})
        check_pairs<float>(mesh, global, lists);
    });
}

TEST(Redistribute, EveryPairOnTwoAxes) {
  run_ranks(test::Ranks::threads, 4, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"dp", 2}, {"tp", 2}});
    for (const Shape& global : {Shape{4, 8}, Shape{7, 5}, Shape{3, 1}})
      check_pairs<float>(mesh, global, every_list(2, kLinear));
  });
}

TEST(Redistribute, EveryPairOnTwoUnequalAxes) {
  run_ranks(test::Ranks::threads, 6, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"dp", 2}, {"tp", 3}});
    check_pairs<float>(mesh, {13, 4}, every_list(2, kLinear));
  });
}

TEST(Redistribute, AxesOfOneRankChangeNothing) {
  run_ranks(test::Ranks::threads, 2, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"dp", 1}, {"tp", 2}, {"sp", 1}});
    check_pairs<float>(mesh, {3, 4}, every_list(3, {Replicate{}, Shard{0}, Partial{}}));
  });
}

// 7 does not divide 27: the pairs that are left go through all lists on both sides.
TEST(Redistribute, ManyPairsOnThreeAxes) {
  run_ranks(test::Ranks::threads, 8, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"a", 2}, {"b", 2}, {"c", 2}});
    check_pairs<std::int64_t>(mesh, {11}, every_list(3, {Replicate{}, Shard{0}, Partial{}}), 7);
  });
}

TEST(Redistribute, EveryPairBetweenProcesses) {
  run_ranks(test::Ranks::processes, 4, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"dp", 2}, {"tp", 2}});
    check_pairs<float>(mesh, {7, 5}, every_list(2, kLinear));
    check_pairs<bf16>(mesh, {300, 130}, every_list(2, kLinear), 5);
  });
}

template <class T>
class RedistributeOf : public ::testing::Test {};
using Reducible = ::testing::Types<double, float, bf16, f16, std::int32_t, std::int64_t>;
TYPED_TEST_SUITE(RedistributeOf, Reducible);

TYPED_TEST(RedistributeOf, EveryPairInEveryReducibleType) {
  run_ranks(test::Ranks::threads, 3, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"tp", 3}});
    for (const Shape& global : {Shape{6, 4}, Shape{4, 7}})
      check_pairs<TypeParam>(mesh, global, every_list(1, kLinear));
  });
}

template <class T>
class MoveOf : public ::testing::Test {};
using Movable =
    ::testing::Types<std::int8_t, std::int16_t, std::uint8_t, std::uint16_t, std::uint32_t, std::uint64_t>;
TYPED_TEST_SUITE(MoveOf, Movable);

TYPED_TEST(MoveOf, EveryTypeMoves) {
  run_ranks(test::Ranks::threads, 3, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"tp", 3}});
    check_pairs<TypeParam>(mesh, {5, 4}, every_list(1, {Replicate{}, Shard{0}, Shard{1}}));
  });
}

/// From each layout to each other, as check_pairs() does for placements.
void check_layouts(const std::vector<LayoutRef>& layouts, int every = 1) {
  const std::vector<double> whole = whole_tensor(layouts.at(0)->global);
  int pair = 0;
  for (const LayoutRef& from : layouts)
    for (const LayoutRef& to : layouts) {
      if (pair++ % every != 0) continue;
      SCOPED_TRACE(to_string(*from) + " to " + to_string(*to));
      const Tensor out = redistribute(local_part<float>(whole, from), to);
      ASSERT_EQ(out.layout(), to);
      ASSERT_EQ(out.shape(), to->local_shape());
      if (!to->partial()) {
        ASSERT_TRUE(test::equal_elements<float>(out.as<float>(), local_part<float>(whole, to).as<float>()));
      }
      const Tensor expected = local_part<float>(whole, replicated_layout(to->mesh(), to->global));
      ASSERT_TRUE(test::equal_elements<float>(full(out).as<float>(), expected.as<float>()));
    }
}

TEST(Redistribute, BetweenNestings) {
  run_ranks(test::Ranks::threads, 8, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"a", 2}, {"b", 2}, {"c", 2}});
    std::vector<LayoutRef> layouts;
    for (const Placements& p : every_list(3, {Replicate{}, Shard{0}, Shard{1}})) {
      const LayoutRef natural = make_layout(mesh, p, {13, 6});
      for (const LayoutRef& layout :
           {natural, natural->nested({"c", "b", "a"}), natural->nested({"b", "a", "c"})})
        if (std::find(layouts.begin(), layouts.end(), layout) == layouts.end()) layouts.push_back(layout);
    }
    ASSERT_GT(layouts.size(), 27U);
    check_layouts(layouts, 5);
  });
}

TEST(Redistribute, SegmentsStayTogether) {
  run_ranks(test::Ranks::threads, 4, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"dp", 2}, {"tp", 2}});
    for (const auto& [dim, sizes] : {std::pair{0, std::vector<std::int64_t>{6, 3, 2}},
                                     std::pair{1, std::vector<std::int64_t>{4, 0, 3}}}) {
      std::vector<LayoutRef> layouts;
      for (const Placements& p : every_list(2, kLinear)) {
        layouts.push_back(make_layout(mesh, p, {11, 7})->segmented(dim, sizes));
        const LayoutRef nested = layouts.back()->nested({"tp", "dp"});
        if (nested != layouts.back()) layouts.push_back(nested);
      }
      check_layouts(layouts);
    }
  });
}

/// The group's calls so far: (op, count).
std::vector<std::pair<std::string, std::int64_t>> calls_of(ProcessGroup& group) {
  std::vector<std::pair<std::string, std::int64_t>> calls;
  const nlohmann::json trace = nlohmann::json::parse(group.trace_json());
  for (const auto& call : trace["calls"]) calls.emplace_back(call["op"], call["count"]);
  return calls;
}

// FSDP over tensor parallel: what a rank receives is the rest of its own tensor-parallel shard, and nothing
// moves along tp.
TEST(Redistribute, GatheringDataShardsMovesNothingOfTensorParallelPeers) {
  run_ranks(test::Ranks::threads, 8, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"dp_shard", 4}, {"tp", 2}});
    const std::vector<double> whole = whole_tensor({64, 8});
    const LayoutRef tp = make_layout(mesh, {{"tp", Shard{0}}}, {64, 8});
    const Tensor shard = local_part<float>(whole, tp->shard_inside(mesh["dp_shard"], 0));
    const std::size_t before = calls_of(r.group()).size();
    const Tensor gathered = redistribute(shard, mesh["dp_shard"], Replicate{});
    EXPECT_EQ(gathered.layout(), tp);
    EXPECT_TRUE(test::equal_elements<float>(gathered.as<float>(), local_part<float>(whole, tp).as<float>()));
    // One call of the tensor-parallel shard's 32 x 8 elements, of which each of the three others on the axis
    // gives 8 x 8: 3/4 of it moves.
    using Calls = std::vector<std::pair<std::string, std::int64_t>>;
    EXPECT_EQ(calls_of(mesh["dp_shard"].group()), (Calls{{"all_gather", 32 * 8}}));
    EXPECT_EQ(calls_of(mesh["tp"].group()), Calls{});
    EXPECT_EQ(calls_of(r.group()).size(), before);
    // The way back: each rank keeps its part, and nothing moves.
    const Tensor again = redistribute(gathered, shard.layout());
    EXPECT_TRUE(test::equal_elements<float>(again.as<float>(), shard.as<float>()));
    EXPECT_EQ(calls_of(mesh["dp_shard"].group()).size(), 1U);
  });
}

TEST(Redistribute, SeveralMayBeOnTheirWay) {
  run_ranks(test::Ranks::threads, 4, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"dp", 2}, {"tp", 2}});
    const std::vector<double> whole = whole_tensor({6, 5});
    const LayoutRef goal = replicated_layout(mesh, {6, 5});
    const Tensor expected = local_part<float>(whole, goal);
    std::vector<Transfer> transfers;
    for (const Placements& p : every_list(2, kLinear))
      transfers.push_back(start_redistribute(local_part<float>(whole, make_layout(mesh, p, {6, 5})), goal));
    for (Transfer& t : transfers) {
      const Tensor out = t.finish();
      EXPECT_EQ(out.layout(), goal);
      EXPECT_TRUE(test::equal_elements<float>(out.as<float>(), expected.as<float>()));
      EXPECT_FALSE(t.finish()) << "it is given once";
    }
    Transfer polled =
        start_redistribute(local_part<float>(whole, make_layout(mesh, {Shard{1}, Partial{}}, {6, 5})), goal);
    while (!polled.done()) std::this_thread::yield();  // the first of its two steps
    EXPECT_TRUE(test::equal_elements<float>(polled.finish().as<float>(), expected.as<float>()));
  });
}

TEST(Redistribute, LargeTensorsMove) {
  run_ranks(test::Ranks::threads, 3, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"tp", 3}});
    check_pairs<float>(mesh, {257, 521}, every_list(1, kLinear));
  });
}

TEST(Redistribute, ByAxisLeavesTheOthers) {
  run_ranks(test::Ranks::threads, 4, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"dp", 2}, {"tp", 2}});
    const std::vector<double> whole = whole_tensor({5, 6});
    const Tensor in = local_part<float>(whole, make_layout(mesh, {Shard{0}, Partial{}}, {5, 6}));
    const Tensor out = redistribute(in, mesh["tp"], Shard{1});
    EXPECT_EQ(out.layout(), make_layout(mesh, {Shard{0}, Shard{1}}, {5, 6}));
    EXPECT_TRUE(
        test::equal_elements<float>(out.as<float>(), local_part<float>(whole, out.layout()).as<float>()));
  });
}

TEST(Redistribute, WhatCrossesRanksIsSharedMemory) {
  run_ranks(test::Ranks::threads, 2, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"tp", 2}});
    const auto part = [&](Placement p) {
      return local_part<float>(whole_tensor({3, 4}), make_layout(mesh, {p}, {3, 4}));
    };
    EXPECT_EQ(redistribute(part(Shard{1}), {Replicate{}}).storage().memory(), Memory::shared);
    EXPECT_EQ(redistribute(part(Partial{}), {Replicate{}}).storage().memory(), Memory::shared);
    EXPECT_EQ(redistribute(part(Partial{}), {Shard{0}}).storage().memory(), Memory::shared);
    EXPECT_EQ(redistribute(part(Shard{0}), {Shard{1}}).storage().memory(), Memory::shared);
    EXPECT_EQ(redistribute(part(Replicate{}), {Shard{0}}).storage().memory(), Memory::local)
        << "a slice stays where it was";
  });
}

TEST(Redistribute, DistributeAndFullAreInverse) {
  run_ranks(test::Ranks::threads, 4, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"dp", 2}, {"tp", 2}});
    const Tensor whole =
        local_part<float>(whole_tensor({5, 3}), replicated_layout(mesh, {5, 3})).with_layout(nullptr);
    for (const Placements& p : every_list(2, kLinear)) {
      const LayoutRef layout = make_layout(mesh, p, {5, 3});
      const Tensor part = distribute(whole, layout);
      EXPECT_EQ(part.layout(), layout);
      EXPECT_EQ(part.shape(), layout->local_shape());
      EXPECT_TRUE(test::equal_elements<float>(full(part).as<float>(), whole.as<float>()))
          << to_string(*layout);
    }
    EXPECT_EQ(full(whole).data(), whole.data()) << "a plain tensor is whole already";
  });
}

TEST(Redistribute, OnMemoryOfTheCaller) {
  for (const int n : {2, 4})
    run_ranks(test::Ranks::threads, n, [](Rank& r) {
      const DeviceMesh mesh(r.group(), {{"dp", 2}, {"tp", -1}});
      const Shape global{7, 5};
      const std::vector<double> whole = whole_tensor(global);
      const auto lists = every_list(2, kLinear);
      for (const Placements& a : lists)
        for (const Placements& b : lists) {
          SCOPED_TRACE(to_string(a) + " to " + to_string(b));
          const LayoutRef from = make_layout(mesh, a, global), to = make_layout(mesh, b, global);
          const Tensor in = local_part<float>(whole, from), expected = redistribute(in, to);
          std::vector<float> mine(in.f32().begin(), in.f32().end());
          std::vector<float> out(expected.f32().size(), -1.0f);
          redistribute(view(mine.data(), from->local_shape()), from, view(out.data(), to->local_shape()), to);
          ASSERT_TRUE(test::equal_elements<float>(out, expected.f32()));
          ASSERT_TRUE(test::equal_elements<float>(mine, in.f32())) << "the input changed";
          // In place, in memory that is long enough for both; begun here, finished later.
          mine.resize(static_cast<std::size_t>(global.count()), -1.0f);
          Transfer transfer = start_redistribute(view(mine.data(), from->local_shape()), from,
                                                 view(mine.data(), to->local_shape()), to);
          const Tensor given = transfer.finish();
          ASSERT_EQ(given.data(), reinterpret_cast<std::byte*>(mine.data()));
          ASSERT_EQ(given.layout(), to);
          ASSERT_TRUE(test::equal_elements<float>(given.f32(), expected.f32()));
        }
    });
}

TEST(Redistribute, MemoryOfTheCallerThatDoesNotFit) {
  run_ranks(test::Ranks::threads, 2, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"tp", 2}});
    const LayoutRef all = replicated_layout(mesh, {4, 3}), cut = all->with("tp", Shard{0});
    std::vector<float> x(24), y(12);
    const auto expect = [&](ErrorCode code, const std::string& text, const ConstTensorView& in,
                            const LayoutRef& from, const TensorView& out, const LayoutRef& to) {
      expect_error(code, "redistribute: " + text, [&] { redistribute(in, from, out, to); });
    };
    const TensorView whole = view(x.data(), {4, 3}), part = view(y.data(), {2, 3});
    const ErrorCode bad = ErrorCode::bad_argument;
    expect(bad, "the layout of in is null", whole, nullptr, part, cut);
    expect(bad, "the layout of out is null", whole, all, part, nullptr);
    expect(ErrorCode::layout,
           "out is (3, 3); rank " + std::to_string(r.rank) + " of (4, 3) as [tp: Shard(0)] holds (2, 3)",
           whole, all, view(y.data(), {3, 3}), cut);
    expect(bad, "in has no memory", view(static_cast<float*>(nullptr), {4, 3}), all, part, cut);
    std::vector<double> wide(6);
    expect(bad, "out is f64; expected f32 as in", whole, all, view(wide.data(), {2, 3}), cut);
    expect(bad, "in and out overlap; expected disjoint memory, or the same first address", whole, all,
           view(x.data() + 3, {2, 3}), cut);
    TensorView elsewhere = part;
    elsewhere.device = {DeviceKind::cuda, 0};
    expect(bad, "out is on cuda:0; expected cpu", whole, all, elsewhere, cut);
    expect(ErrorCode::layout,
           "from (4, 3) as [tp: Replicate] to (8, 3) as [tp: Shard(0)]; expected the same mesh, shape and "
           "segments",
           whole, all, view(y.data(), {4, 3}), cut->with_global({8, 3}));
  });
}

TEST(Redistribute, ErrorsSayWhatDoesNotFit) {
  run_ranks(test::Ranks::threads, 2, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"dp", 1}, {"tp", 2}});
    const Tensor plain = Tensor::zeros(r.context, {4, 4});
    expect_error(
        ErrorCode::layout,
        "redistribute: the tensor (4, 4) is plain; give it a layout, which says what part of the whole it is",
        [&] {
          (void)redistribute(plain, {Replicate{}, Replicate{}});
        });
    expect_error(
        ErrorCode::layout,
        "redistribute: the tensor (4, 4) is plain; give it a layout, which says what part of the whole it is",
        [&] { (void)redistribute(plain, mesh["tp"], Replicate{}); });
    const Tensor x = as_layout(plain, replicated_layout(mesh, {4, 4}));
    expect_error(
        ErrorCode::layout,
        "redistribute: from (4, 4) as [dp: Replicate, tp: Replicate] to (4, 5) as [dp: Replicate, tp: "
        "Replicate]; expected the same mesh, shape and segments",
        [&] {
          (void)redistribute(x, replicated_layout(mesh, {4, 5}));
        });
    expect_error(
        ErrorCode::layout,
        "redistribute: from (4, 4) as [dp: Replicate, tp: Replicate] to no layout; expected the same "
        "mesh, shape and segments",
        [&] { (void)redistribute(x, LayoutRef()); });
    expect_error(ErrorCode::layout,
                 "layout: 1 placements [Shard(0)]; expected one for each axis of dp=1 x tp=2",
                 [&] { (void)redistribute(x, Placements{Shard{0}}); });
    expect_error(ErrorCode::layout, "layout: Shard(2) on tp; the tensor (4, 4) has dimensions 0 to 1",
                 [&] { (void)redistribute(x, mesh["tp"], Shard{2}); });
    // with_layout() checks nothing: memory beyond the tensor must not be read.
    expect_error(
        ErrorCode::layout,
        "redistribute: the tensor is (4, 4); rank " + std::to_string(r.rank) +
            " of (400000, 4) as [dp: Replicate, tp: Replicate] holds (400000, 4)",
        [&] {
          (void)redistribute(plain.with_layout(replicated_layout(mesh, {400000, 4})), mesh["tp"], Shard{0});
        });
    Tensor given = x;
    const Tensor taken = std::move(given);
    expect_error(
        ErrorCode::bad_argument,
        "redistribute: the tensor (4, 4) has no memory: it is empty or was moved from", [&] {
          (void)redistribute(given.with_layout(replicated_layout(mesh, {4, 4})), mesh["tp"], Shard{0});
        });
    expect_error(ErrorCode::bad_argument, "distribute: layout is null; expected the layout of the result",
                 [&] { (void)distribute(plain, nullptr); });
  });
}

TEST(Redistribute, AValueIsNoContributionToAProduct) {
  run_ranks(test::Ranks::threads, 2, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"dp", 1}, {"tp", 2}});
    const Tensor x = as_layout(Tensor::zeros(r.context, {4}), replicated_layout(mesh, {4}));
    for (const ReduceOp op : {ReduceOp::prod, ReduceOp::premul_sum(2.0), ReduceOp::bit_xor})
      EXPECT_EQ(error_text(ErrorCode::layout, [&] { (void)redistribute(x, mesh["tp"], Partial{op}); }),
                "redistribute: to " + to_string(Placement(Partial{op})) +
                    " on tp=2; expected a sum, avg, min or max, of which a value can be made contributions");
    EXPECT_NO_THROW((void)redistribute(x, mesh["dp"], Partial{ReduceOp::prod})) << "one rank";
    const Tensor product = x.with_layout(make_layout(mesh, {{"tp", Partial{ReduceOp::prod}}}, {4}));
    EXPECT_NO_THROW((void)redistribute(product, mesh["tp"], Replicate{}));
  });
}

}  // namespace
}  // namespace weft::redistribute_test
