// Which elements of the whole a rank's part has, in its order: against a list of indices for each dimension.
#include "nn/runs.hpp"

#include <gtest/gtest.h>

#include "weft/host/context.hpp"
#include "weft/mesh/layout.hpp"

namespace weft::runs_test {
namespace {

using Indices = std::vector<std::int64_t>;

// The first of n parts of a range that does not divide have one more.
std::pair<std::int64_t, std::int64_t> part_of(std::int64_t begin, std::int64_t end, int parts, int part) {
  const std::int64_t each = (end - begin) / parts, more = (end - begin) % parts;
  const std::int64_t first = begin + each * part + std::min<std::int64_t>(part, more);
  return {first, first + each + (part < more ? 1 : 0)};
}

// What a rank with these coordinates holds of dimension d: of each segment what all axes in the order of nesting leave.
Indices indices_of(const Layout& layout, const std::vector<int>& sizes, const std::vector<int>& at, int d) {
  Indices segments = {layout.global[d]};
  if (!layout.segments.sizes.empty() && layout.segments.dim == d) segments = layout.segments.sizes;
  Indices held;
  std::int64_t start = 0;
  for (const std::int64_t size : segments) {
    std::int64_t begin = start, end = start + size;
    for (const int axis : layout.nesting) {
      const auto a = static_cast<std::size_t>(axis);
      if (is_shard(layout.placements[a], d)) std::tie(begin, end) = part_of(begin, end, sizes[a], at[a]);
    }
    for (std::int64_t i = begin; i < end; ++i) held.push_back(i);
    start += size;
  }
  return held;
}

void expect_runs(const LayoutRef& layout, const std::vector<int>& sizes, const std::vector<int>& at) {
  SCOPED_TRACE(to_string(*layout));
  const Shape& local = layout->local_shape();
  Indices found(static_cast<std::size_t>(local.count()), -1);
  each_run(layout->global, layout, local, [&](std::int64_t start, std::int64_t place, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
      ASSERT_LT(place + i, local.count());
      EXPECT_EQ(found[static_cast<std::size_t>(place + i)], -1) << "twice";
      found[static_cast<std::size_t>(place + i)] = start + i;
    }
  });
  Indices expected;
  for (const std::int64_t i : indices_of(*layout, sizes, at, 0))
    for (const std::int64_t j : indices_of(*layout, sizes, at, 1))
      for (const std::int64_t k : indices_of(*layout, sizes, at, 2))
        expected.push_back((i * layout->global[1] + j) * layout->global[2] + k);
  EXPECT_EQ(found, expected);
}

TEST(Runs, AreWhatEachRankHoldsForEveryNestingAndSegments) {
  Context context;
  const std::vector<int> sizes{2, 3};
  const std::vector<Placement> ways = {Replicate{}, Shard{0}, Shard{1}, Shard{2}};
  for (int rank = 0; rank < 6; ++rank) {
    const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"dp", 2}, {"tp", 3}}, rank);
    const std::vector<int> at{rank / 3, rank % 3};
    for (const Placement& on_dp : ways)
      for (const Placement& on_tp : ways)
        for (const Shape& global : {Shape{7, 9, 2}, Shape{1, 9, 5}, Shape{6, 0, 3}}) {
          const LayoutRef plain = make_layout(mesh, {on_dp, on_tp}, global);
          for (const LayoutRef& layout : {plain, plain->nested({"tp", "dp"})}) {
            expect_runs(layout, sizes, at);
            if (global[1] == 9) expect_runs(layout->segmented(1, {4, 0, 5}), sizes, at);
          }
        }
  }
}

TEST(Runs, OfAPlainTensorAreOne) {
  int runs = 0;
  each_run({4, 3}, nullptr, {4, 3}, [&](std::int64_t start, std::int64_t place, std::int64_t count) {
    EXPECT_EQ(start, 0);
    EXPECT_EQ(place, 0);
    EXPECT_EQ(count, 12);
    ++runs;
  });
  EXPECT_EQ(runs, 1);
}

}  // namespace
}  // namespace weft::runs_test
