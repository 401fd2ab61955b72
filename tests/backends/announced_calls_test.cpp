// Tests how ranks announce their collectives, and which ranks are reported as late.
#include "backends/messages/announced_calls.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <vector>

namespace weft::test::announced_calls_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

OpState all_reduce(std::uint64_t number, std::int64_t count) {
  OpState s{.op = Op::all_reduce, .dtype = DType::f32, .call = number, .scratch = {}};
  s.in_count = s.out_count = count;
  return s;
}

TEST(AnnouncedCalls, ARankMayBeAheadAndIsComparedWhenThisOneCalls) {
  AnnouncedCalls calls(0, 3);
  const OpState first = all_reduce(0, 10), second = all_reduce(1, 20), other = all_reduce(1, 30);
  calls.arrived(1, announcement_of(first, 3));
  calls.arrived(1, announcement_of(other, 3));
  EXPECT_EQ(calls.announced_by(1), 2u);
  EXPECT_FALSE(calls.has_current());
  const std::uint64_t sequence = calls.announce(announcement_of(first, 3), first);
  EXPECT_EQ(calls.compare(1), std::nullopt);
  EXPECT_TRUE(calls.agrees(1, sequence));
  EXPECT_THAT(calls.late(sequence), ElementsAre(2));
  EXPECT_EQ(calls.current(), sequence);
  calls.arrived(2, announcement_of(first, 3));
  EXPECT_THAT(calls.late(sequence), IsEmpty());
  EXPECT_EQ(calls.compare(2), std::nullopt);
  calls.finish(sequence);
  EXPECT_EQ(calls.kept(), 0u);
  EXPECT_EQ(calls.last(0)->state, LastCall::State::finished);
  calls.announce(announcement_of(second, 3), second);
  const std::optional<Failure> differs = calls.compare(1);
  ASSERT_TRUE(differs.has_value());
  EXPECT_THAT(differs->text,
              HasSubstr("rank 1 called all_reduce f32 x30 sum [call 1], rank 0 all_reduce f32 x20"));
}

// Both ranks of the pair find the mismatch, although one of them only sends.
TEST(AnnouncedCalls, CountsOfAPairAreComparedInBothDirections) {
  const std::array<std::array<BufferBlock, 2>, 2> give{{{{{0, 1}, {1, 2}}}, {{{0, 3}, {3, 4}}}}},
      get{{{{{0, 1}, {1, 3}}}, {{{0, 5}, {5, 4}}}}};
  std::vector<Announcement> told;
  std::vector<OpState> states;
  for (std::size_t r = 0; r < 2; ++r) {
    OpState& s = states.emplace_back(OpState{.op = Op::all_to_all_v, .dtype = DType::f32, .scratch = {}});
    s.in_blocks = give[r].data();
    s.out_blocks = get[r].data();
    announce_to(told.emplace_back(announcement_of(s, 2)), s, 1 - static_cast<int>(r), 2);
  }
  for (std::size_t r = 0; r < 2; ++r) {
    AnnouncedCalls calls(static_cast<int>(r), 2);
    calls.announce(told[r], states[r]);
    calls.arrived(1 - static_cast<int>(r), told[1 - r]);
    const std::optional<Failure> differs = calls.compare(1 - static_cast<int>(r));
    ASSERT_TRUE(differs.has_value()) << r;
    EXPECT_EQ(differs->text, "all_to_all_v: rank 0 sends 2 elements to rank 1, which expects 5");
  }
}

}  // namespace
}  // namespace weft::test::announced_calls_test
