// Which differences of losses `weft parity` takes for rounding, and which for a fault.
#include "parity_verdict.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <utility>

namespace weft::parity_verdict_test {
namespace {

using tools::Losses;

const std::vector<std::string> kNames{"1x1", "2x1", "1x2"};
constexpr double kTolerance = 1e-5, kNaN = std::numeric_limits<double>::quiet_NaN();

struct Judged {
  bool passed;
  std::string text;
};
Judged judged(const std::vector<Losses>& losses, const Losses* control = nullptr,
              double tolerance = kTolerance) {
  const tools::ParityVerdict v = tools::verdict_of(losses, control, tolerance);
  return {v.passed, tools::sentence(v, kNames, losses[0], control, tolerance)};
}

TEST(ParityVerdict, WithinTheToleranceNeedsNoControl) {
  const Judged j = judged({{4, 3, 2}, {4, 3, 2.00001}, {4, 3, 2}});
  EXPECT_TRUE(j.passed);
  EXPECT_EQ(j.text, "worst difference relative to 1x1: 5.00e-06; at most 1e-05 is allowed: passed");
}

TEST(ParityVerdict, WithoutAControlWhatIsAboveTheToleranceFails) {
  const Judged j = judged({{4, 3, 2}, {4, 3, 2}, {4, 3, 2.0002}});
  EXPECT_FALSE(j.passed);
  EXPECT_EQ(j.text, "worst difference relative to 1x1: 1.00e-04; at most 1e-05 is allowed: FAILED");
}

TEST(ParityVerdict, AMeshMayBeTenTimesAsFarAsTheControlHasBeen) {
  // The control is away at step 1, and back at step 2: how far it has been counts.
  const Losses control{4, 3.0003, 2};
  const Judged j = judged({{4, 3, 2}, {4, 3, 2.0004}, {4, 3, 2.0018}}, &control);
  EXPECT_TRUE(j.passed);
  EXPECT_EQ(
      j.text,
      "worst difference relative to 1x1: 9.00e-04, above 1e-05. So 1x1 was trained again with a learning "
      "rate 1 + 1e-08 times as high: that control differs by 1.00e-04. At step 2, 1x2 is 9.0 times as "
      "far from 1x1 as the control was by then; at most 10 times is allowed: passed");
}

TEST(ParityVerdict, AMeshThatIsFurtherIsNamedWithItsStep) {
  const Losses control{4, 3.0003, 2.0002};
  const Judged j = judged({{4, 3, 2}, {4, 3.0036, 2.0002}, {4, 3.0003, 2.0002}}, &control);
  EXPECT_FALSE(j.passed);
  EXPECT_NE(j.text.find("At step 1, 2x1 is 12.0 times as far from 1x1 as the control was by then; at most 10 "
                        "times is allowed: FAILED"),
            std::string::npos)
      << j.text;
}

// A fault at the beginning is not excused by chaos at the end.
TEST(ParityVerdict, WhatTheControlDoesLaterExcusesNothingBefore) {
  const Losses control{4, 3, 2.2};
  EXPECT_FALSE(judged({{4, 3, 2}, {4, 3.001, 2}, {4, 3, 2}}, &control).passed);
  EXPECT_TRUE(judged({{4, 3, 2}, {4, 3, 2.01}, {4, 3, 2}}, &control).passed);
}

TEST(ParityVerdict, ALossThatIsNoNumberFails) {
  const Losses control{4, 3.3, 2.2};
  EXPECT_FALSE(judged({{4, 3, 2}, {4, 3, kNaN}, {4, 3, 2}}, &control).passed);
  EXPECT_FALSE(
      judged({{4, 3, 2}, {4, 3, std::numeric_limits<double>::infinity()}, {4, 3, 2}}, &control).passed);
  EXPECT_FALSE(judged({{4, 3, kNaN}, {4, 3, kNaN}, {4, 3, kNaN}}, &control).passed);
  // A control that is no number says nothing of how far rounding leads.
  const Losses lost{4, kNaN, kNaN};
  EXPECT_FALSE(judged({{4, 3, 2}, {4, 3.001, 2}, {4, 3, 2}}, &lost).passed);
}

TEST(ParityVerdict, LossesOfZeroAreEqual) {
  EXPECT_TRUE(judged({{4, 0}, {4, 0}, {4, 0}}).passed);
  EXPECT_FALSE(judged({{4, 0}, {4, 1e-9}, {4, 0}}).passed);
}

TEST(ParityVerdict, AControlThatDidNotDifferIsSaid) {
  const Losses control{4, 3, 2.0002};
  const Judged j = judged({{4, 3, 2}, {4, 3.003, 2}, {4, 3, 2}}, &control, 0);
  EXPECT_FALSE(j.passed);
  EXPECT_EQ(j.text,
            "worst difference relative to 1x1: 1.00e-03, above 0. So 1x1 was trained again with a learning "
            "rate 1 + 1e-08 times as high: that control differs by 1.00e-04. At step 1, 2x1 differs by "
            "1.00e-03; the control did not differ by then: FAILED");
}

// The step that the sentence names is one that is above the tolerance, though 2x1 comes closer to its limit.
TEST(ParityVerdict, NamesAStepAboveTheTolerance) {
  const Losses control{4, 3, 2.0002};
  const Judged j = judged({{4, 3, 2}, {4.00003, 3, 2}, {4, 3, 2.0004}}, &control);
  EXPECT_TRUE(j.passed);
  EXPECT_NE(j.text.find("At step 2, 1x2 is 2.0 times as far from 1x1 as the control was by then; at most 10 "
                        "times is allowed: passed"),
            std::string::npos)
      << j.text;
}

TEST(ParityVerdict, ALossThatIsNoNumberIsSaid) {
  const Losses control{4, 3.3, 2.2};
  const Judged j = judged({{4, 3, 2}, {4, 3, kNaN}, {4, 3, 2}}, &control);
  EXPECT_NE(j.text.find("At step 2, 2x1 has a loss that cannot be compared with that of 1x1: FAILED"),
            std::string::npos)
      << j.text;
}

TEST(ParityVerdict, TheToleranceIsShownInFull) {
  const Judged j = judged({{4, 3, 2}, {4, 3, 2.000032}, {4, 3, 2}}, nullptr, 1.5e-5);
  EXPECT_EQ(j.text, "worst difference relative to 1x1: 1.60e-05; at most 1.5e-05 is allowed: FAILED");
}

// A run that is cut short to look at a step changes its mesh where the whole run did.
TEST(ParityVerdict, AShorterRunChangesItsMeshAtTheSameStep) {
  const auto ends = [](std::int64_t steps, std::int64_t compared) {
    const tools::RunEnds e = tools::ends_of_run(steps, compared);
    return std::pair(e.first, e.second);
  };
  EXPECT_EQ(ends(10, 10), std::pair(std::int64_t{5}, std::int64_t{10}));
  EXPECT_EQ(ends(7, 10), std::pair(std::int64_t{5}, std::int64_t{7}));
  EXPECT_EQ(ends(5, 10), std::pair(std::int64_t{5}, std::int64_t{0}));
  EXPECT_EQ(ends(2, 10), std::pair(std::int64_t{2}, std::int64_t{0}));
  EXPECT_EQ(ends(1, 1), std::pair(std::int64_t{0}, std::int64_t{1}));
}

// Below 0 nothing is near enough.
TEST(ParityVerdict, NothingMeetsANegativeTolerance) {
  EXPECT_FALSE(judged({{4, 3}, {4, 3}, {4, 3}}, nullptr, -1).passed);
}

}  // namespace
}  // namespace weft::parity_verdict_test
