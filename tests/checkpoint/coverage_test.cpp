// Compares the check that parts cover a tensor exactly once with a count of the parts of every element.
#include "checkpoint/index/coverage.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace weft::coverage_test {
namespace {

using Random = std::mt19937;

int below(Random& random, int n) { return std::uniform_int_distribution<int>(0, n - 1)(random); }

// A box cut in two again and again.
void split(Random& random, const Box& box, int times, std::vector<CheckpointPart>& parts) {
  const int d = box.shape.rank() == 0 ? 0 : below(random, box.shape.rank());
  if (times == 0 || box.shape.rank() == 0 || box.shape[d] < 2) {
    parts.push_back({"f", box});
    return;
  }
  const std::int64_t first = 1 + below(random, static_cast<int>(box.shape[d]) - 1);
  Box low = box, high = box;
  low.shape[d] = first;
  high.offset[d] += first;
  high.shape[d] -= first;
  split(random, low, times - 1, parts);
  split(random, high, times - 1, parts);
}

bool next(Dims& at, const Shape& whole) {
  for (int d = whole.rank() - 1; d >= 0; --d) {
    if (++at[d] < whole[d]) return true;
    at[d] = 0;
  }
  return false;
}

std::optional<NotCovered> by_counting(const Shape& whole, const std::vector<CheckpointPart>& parts) {
  if (whole.count() == 0) return std::nullopt;
  Dims at = whole;
  for (int d = 0; d < whole.rank(); ++d) at[d] = 0;
  do {
    const auto count = std::count_if(parts.begin(), parts.end(), [&](const CheckpointPart& p) {
      for (int d = 0; d < whole.rank(); ++d)
        if (at[d] < p.box.offset[d] || at[d] >= p.box.offset[d] + p.box.shape[d]) return false;
      return true;
    });
    if (count != 1) return NotCovered{at, count};
  } while (next(at, whole));
  return std::nullopt;
}

TEST(Coverage, IsWhatCountingGives) {
  Random random(7);
  int sound = 0;
  constexpr int kRounds = 3000;
  for (int round = 0; round < kRounds; ++round) {
    Shape whole;
    for (int d = below(random, 5); d > 0; --d) whole.push_back(1 + below(random, 4));
    Box all{whole, whole};
    for (int d = 0; d < whole.rank(); ++d) all.offset[d] = 0;
    std::vector<CheckpointPart> parts;
    split(random, all, below(random, 5), parts);
    std::shuffle(parts.begin(), parts.end(), random);
    for (int changes = below(random, 3); changes > 0 && !parts.empty() && whole.rank() > 0; --changes) {
      Box& box = parts[static_cast<std::size_t>(below(random, static_cast<int>(parts.size())))].box;
      const int d = below(random, whole.rank());
      box.offset[d] = below(random, static_cast<int>(whole[d]) + 1);
      box.shape[d] = below(random, static_cast<int>(whole[d] - box.offset[d]) + 1);
    }
    if (below(random, 10) == 0) parts.push_back(parts.front());
    const auto expected = by_counting(whole, parts), got = first_not_covered_once(whole, parts);
    ASSERT_EQ(got.has_value(), expected.has_value()) << to_string(whole) << " round " << round;
    sound += !expected;
    if (!expected) continue;
    ASSERT_EQ(got->element, expected->element) << to_string(whole) << " round " << round;
    ASSERT_EQ(got->parts, expected->parts) << to_string(whole) << " round " << round;
  }
  EXPECT_GT(sound, kRounds / 4);
  EXPECT_LT(sound, 3 * kRounds / 4);
}

TEST(Coverage, EmptyWholesNeedNoPart) {
  EXPECT_FALSE(first_not_covered_once(Shape{0, 5}, {}));
  const std::vector<CheckpointPart> one = {{"f", {Dims{0, 0}, Shape{0, 5}}}};
  EXPECT_FALSE(first_not_covered_once(Shape{0, 5}, one));
  EXPECT_TRUE(first_not_covered_once(Shape{1}, {}));
  EXPECT_TRUE(first_not_covered_once(Shape{}, {}));
}

// The largest extents: no sum of them is made.
TEST(Coverage, LargeExtents) {
  const std::int64_t most = INT64_MAX;
  const std::vector<CheckpointPart> two = {{"f", {Dims{0}, Shape{most - 1}}},
                                           {"f", {Dims{most - 1}, Shape{1}}}};
  EXPECT_FALSE(first_not_covered_once(Shape{most}, two));
  const auto wrong = first_not_covered_once(Shape{most}, std::vector<CheckpointPart>{two[0]});
  ASSERT_TRUE(wrong);
  EXPECT_EQ(wrong->element, Dims{most - 1});
  EXPECT_EQ(wrong->parts, 0);
}

}  // namespace
}  // namespace weft::coverage_test
