#include "weft/train/freeze_schedule.hpp"

#include <gtest/gtest.h>

#include "support/errors.hpp"

namespace weft::freeze_schedule_test {
namespace {

TEST(FreezeSchedule, TheLastRuleThatHasBegunCounts) {
  const FreezeSchedule s(
      {{5, "layers.1", false}, {0, "*", true}, {0, "head", false}, {9, "layers.*.norm", true}});
  EXPECT_EQ(s.frozen("embedding", 0), true);
  EXPECT_EQ(s.frozen("head.weight", 0), false);
  EXPECT_EQ(s.frozen("layers.1.norm.weight", 4), true);
  EXPECT_EQ(s.frozen("layers.1.norm.weight", 5), false);
  EXPECT_EQ(s.frozen("layers.1.norm.weight", 9), true);
  EXPECT_EQ(s.frozen("layers.1.mlp.weight", 1000), false);
  EXPECT_EQ(s.frozen("layers.0.mlp.weight", 1000), true);
  EXPECT_EQ(FreezeSchedule({{3, "head", true}}).frozen("head", 2), std::nullopt);
}

// Within a step, the order of the rules counts.
TEST(FreezeSchedule, HasOneTextForEqualSchedules) {
  const FreezeSchedule s({{100, "layers.3", false}, {0, "layers.*", true}, {0, "layers.*", true}});
  EXPECT_EQ(to_string(s), "0:frozen:layers.*,100:trained:layers.3");
  EXPECT_EQ(s, FreezeSchedule::from_text(" 100:trained:layers.3 , 0:frozen:layers.*"));
  EXPECT_NE(s, FreezeSchedule::from_text("0:frozen:layers.*,101:trained:layers.3"));
  EXPECT_EQ(FreezeSchedule::from_text(to_string(s)), s);
  EXPECT_EQ(to_string(FreezeSchedule()), "");
  EXPECT_EQ(FreezeSchedule::from_text(""), FreezeSchedule());
  EXPECT_EQ(FreezeSchedule::from_text("0:frozen:a,0:trained:a").frozen("a", 0), false);
  EXPECT_EQ(FreezeSchedule::from_text("0:trained:a,0:frozen:a").frozen("a", 0), true);
}

TEST(FreezeSchedule, WhatIsWrongIsNamed) {
  const auto text = [](const auto& call) {
    const Error e = test::error_of(call);
    EXPECT_EQ(e.code(), ErrorCode::bad_argument);
    return std::string(e.what());
  };
  for (const char* wrong : {"layers.3", "1:frozen", "x:frozen:a", "1:thawed:a", ""})
    EXPECT_EQ(text([&] { FreezeSchedule::from_text(std::string("0:frozen:a,") + wrong); }),
              std::string("freeze schedule: \"") + wrong +
                  "\"; expected STEP:frozen:PATTERN or STEP:trained:PATTERN");
  EXPECT_EQ(text([] {
              FreezeSchedule({{-1, "a", true}});
            }),
            "freeze schedule: step -1 of \"a\"; expected 0 or more");
  EXPECT_EQ(text([] {
              FreezeSchedule({{0, "a,b", true}});
            }),
            "freeze schedule: the pattern is \"a,b\"; expected a path, without blank, ':' and ','");
}

}  // namespace
}  // namespace weft::freeze_schedule_test
