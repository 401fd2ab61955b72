#include "weft/pp/schedule.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "pp/random_schedule.hpp"
#include "support/errors.hpp"
#include "support/temporary_folder.hpp"

namespace weft::schedule_test {
namespace {

using Kind = PipelineAction::Kind;
using test::error_of;
using ::testing::HasSubstr;

constexpr PipelineKind kKinds[] = {PipelineKind::gpipe, PipelineKind::one_f_one_b, PipelineKind::interleaved,
                                   PipelineKind::zero_bubble, PipelineKind::forward_only};

int per_rank(PipelineKind kind) { return kind == PipelineKind::interleaved ? 2 : 1; }

std::string refusal(const PipelineSchedule& s) {
  const Error e = error_of([&] { check_pipeline_schedule(s); });
  EXPECT_EQ(e.code(), ErrorCode::bad_argument);
  return e.what();
}

std::vector<PipelineAction>& list(PipelineSchedule& s, int rank) {
  return s.actions[static_cast<std::size_t>(rank)];
}

PipelineSchedule one_f_one_b() { return make_pipeline_schedule(PipelineKind::one_f_one_b, 2, 3); }

TEST(PipelineSchedule, OneForwardOneBackwardIsTheTableOfItsPaper) {
  EXPECT_EQ(to_string(one_f_one_b()),
            "schedule 1f1b\nranks 2\nmicro-batches 3\nstages 0 1\nmemory 2 1\n"
            "0: 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0F2 0SEND_F2 0RECV_B2 0B1 0B2\n"
            "1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1SEND_B2\n");
}

TEST(PipelineSchedule, EveryKindIsValidForAnyNumbers) {
  for (const PipelineKind kind : kKinds)
    for (int ranks = 1; ranks <= 6; ++ranks)
      for (int micro_batches = 1; micro_batches <= 12; ++micro_batches)
        for (int stages = per_rank(kind); stages <= per_rank(kind) + 1; ++stages) {
          if (stages != per_rank(kind) && per_rank(kind) == 1 && kind != PipelineKind::forward_only) continue;
          SCOPED_TRACE(fmt::format("{} {} {} {}", name(kind), ranks, micro_batches, stages));
          const PipelineSchedule s = make_pipeline_schedule(kind, ranks, micro_batches, stages);
          check_pipeline_schedule(s);
          EXPECT_EQ(s.trains(), kind != PipelineKind::forward_only);
          EXPECT_EQ(s.stages(), ranks * stages);
          EXPECT_EQ(parse_pipeline_schedule(to_string(s)), s);
        }
}

// The largest number of activations of each rank.
TEST(PipelineSchedule, MemoryIsThatOfThePapers) {
  const auto memory = [](PipelineKind kind, int stages = 1) {
    return make_pipeline_schedule(kind, 4, 12, stages).memory;
  };
  EXPECT_EQ(memory(PipelineKind::gpipe), (std::vector{12, 12, 12, 12}));
  EXPECT_EQ(memory(PipelineKind::one_f_one_b), (std::vector{4, 3, 2, 1}));
  EXPECT_EQ(memory(PipelineKind::interleaved, 2), (std::vector{11, 9, 7, 5}));
  for (const int kept : memory(PipelineKind::zero_bubble)) EXPECT_LE(kept, 4);
  EXPECT_EQ(memory(PipelineKind::forward_only), (std::vector{0, 0, 0, 0}));
  EXPECT_EQ(make_pipeline_schedule(PipelineKind::one_f_one_b, 4, 2).memory, (std::vector{2, 2, 2, 1}));
}

// (p − 1) (F + B) over the whole time of a rank; interleaved 1 / v of it; zero-bubble (p − 1) (F + I − W).
TEST(PipelineSchedule, SimulatedBubblesAreThoseOfTheFormulas) {
  for (int p = 1; p <= 8; ++p)
    for (int m : {1, 3, 8, 16, 24}) {
      SCOPED_TRACE(fmt::format("{} ranks, {} micro-batches", p, m));
      const double waits = p - 1;
      const auto bubble = [&](PipelineKind kind, int stages = 1) {
        return simulate_pipeline(make_pipeline_schedule(kind, p, m, stages)).bubble;
      };
      const double one = waits / (m + waits);
      EXPECT_NEAR(bubble(PipelineKind::gpipe), one, 0.05 * one);
      EXPECT_NEAR(bubble(PipelineKind::one_f_one_b), one, 0.05 * one);
      EXPECT_NEAR(bubble(PipelineKind::forward_only), one, 0.05 * one);
      if (m % p == 0) {
        for (int v = 2; v <= 4; ++v)
          EXPECT_NEAR(bubble(PipelineKind::interleaved, v), waits / (v * m + waits),
                      0.05 * waits / (v * m + waits))
              << v;
      }
      if (m >= 2 * p) {
        EXPECT_NEAR(bubble(PipelineKind::zero_bubble), waits / (3 * m + waits),
                    0.05 * waits / (3 * m + waits));
      }
    }
}

TEST(PipelineSchedule, ASimulationTakesCostsAndMessages) {
  const PipelineSchedule s = make_pipeline_schedule(PipelineKind::gpipe, 2, 1);
  const PipelineTimeline t = simulate_pipeline(s, {.forward = 2, .input = 3, .weight = 5, .message = 0.5});
  EXPECT_DOUBLE_EQ(t.length, 2 + 0.5 + 2 + 8 + 0.5 + 8);
  EXPECT_DOUBLE_EQ(t.bubble, 1 - 20.0 / (2 * 21));
  ASSERT_EQ(t.ranks[1].size(), 2u);
  EXPECT_DOUBLE_EQ(t.ranks[1][0].begin, 2.5);
  EXPECT_EQ(to_string(t.ranks[1][1].action), "1B0");
  test::expect_error(ErrorCode::bad_argument, "schedule \"gpipe\": a cost is -1; expected 0 to 1e9",
                     [&] { simulate_pipeline(s, {.forward = -1}); });
  const std::string svg = timeline_svg(t, "a < b");
  EXPECT_THAT(svg, HasSubstr("<title>1B0</title>"));
  EXPECT_THAT(svg, HasSubstr("a &lt; b (bubble 52.4 %)"));
}

TEST(PipelineSchedule, AThousandRandomSchedulesAreValid) {
  std::mt19937 random(1);
  for (int i = 0; i < 1000; ++i) {
    const PipelineSchedule s = test::random_schedule(random);
    SCOPED_TRACE(to_string(s));
    check_pipeline_schedule(s);
    EXPECT_EQ(parse_pipeline_schedule(to_string(s)), s);
    EXPECT_GT(simulate_pipeline(s).length, 0);
    if (HasFailure()) return;
  }
}

// A schedule from which one action is missing, or has another number, is never accepted.
TEST(PipelineSchedule, DamagedSchedulesAreRefused) {
  std::mt19937 random(2);
  for (int i = 0; i < 1000; ++i) {
    PipelineSchedule s = test::random_schedule(random);
    auto& actions = list(s, static_cast<int>(random() % static_cast<unsigned>(s.ranks)));
    const auto at = static_cast<std::ptrdiff_t>(random() % actions.size());
    switch (random() % 3) {
      case 0: actions.erase(actions.begin() + at); break;
      case 1: actions.insert(actions.begin() + at, actions[static_cast<std::size_t>(at)]); break;
      default: actions[static_cast<std::size_t>(at)].micro_batch += s.micro_batches; break;
    }
    // Without its only backward pass, a schedule of one stage and one micro-batch is one for evaluation.
    if (s.trains() || s.micro_batches > 1) refusal(s);
    if (HasFailure()) {
      ADD_FAILURE() << to_string(s);
      return;
    }
  }
}

TEST(PipelineSchedule, WhatDoesNotFitIsNamed) {
  PipelineSchedule s = one_f_one_b();
  const auto swap = [&](int rank, std::size_t a, std::size_t b) {
    std::swap(list(s, rank)[a], list(s, rank)[b]);
  };
  const auto erase = [&](int rank, int at) { list(s, rank).erase(list(s, rank).begin() + at); };
  const auto expect = [&](const std::string& text) {
    EXPECT_EQ(refusal(s), "schedule \"1f1b\": " + text);
    s = one_f_one_b();
  };
  // 0: 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0F2 0SEND_F2 0RECV_B2 0B1 0B2
  // 1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1SEND_B2
  s.ranks = 0;
  expect("0 ranks; expected 1 to 4096");
  s.micro_batches = 70000;
  expect("70000 micro-batches; expected 1 to 65536");
  s.rank_of_stage.clear();
  expect("0 stages; expected 1 to 4096");
  s.rank_of_stage.assign(4096, 0);
  s.micro_batches = 4096;
  expect("16777216 stages x micro-batches; expected 1 to 4194304");
  s.rank_of_stage = {0, 2};
  expect("stage 1 is on rank 2; expected 0 to 1");
  s.actions.pop_back();
  expect("there are lists of actions of 1 ranks; expected 2");
  s.memory = {1};
  expect("memory has 1 numbers; expected one for each of 2 ranks");
  s.memory.clear();
  expect("memory is missing; expected 2 numbers");
  list(s, 0)[3].stage = 2;
  expect("rank 0, action 4 (2F1): there are 2 stages");
  list(s, 0)[3].micro_batch = 3;
  expect("rank 0, action 4 (0F3): there are 3 micro-batches");
  list(s, 0)[3].stage = 1;
  expect("rank 0, action 4 (1F1): stage 1 is on rank 1");
  list(s, 0).push_back({Kind::forward, 0, 1});
  expect("rank 0, action 13 (0F1) is there twice: the first is rank 0, action 4 (0F1)");
  erase(0, 3);
  expect("0F1 is missing on rank 0");
  erase(1, 10);
  expect("1B2 is missing on rank 1, and so are its halves I and W");
  list(s, 1)[10].kind = Kind::input;
  expect("1W2 is missing on rank 1; there is rank 1, action 11 (1I2)");
  list(s, 1)[10].kind = Kind::weight;
  expect("1I2 is missing on rank 1; there is rank 1, action 11 (1W2)");
  list(s, 1).push_back({Kind::weight, 1, 2});
  expect(
      "rank 1, action 11 (1B2) and rank 1, action 13 (1W2): expected a whole backward pass, or two halves");
  swap(1, 1, 3);
  expect(
      "rank 1, action 2 (1B0) comes before rank 1, action 4 (1F0); a backward pass needs its forward pass");
  list(s, 1)[10].kind = Kind::weight;
  list(s, 1).push_back({Kind::input, 1, 2});
  expect(
      "rank 1, action 11 (1W2) comes before rank 1, action 13 (1I2); the weight half needs what the input "
      "half "
      "leaves");
  erase(0, 4);
  expect("0SEND_F1 is missing on rank 0, the other end of rank 1, action 3 (1RECV_F1)");
  erase(1, 2);
  expect("1RECV_F1 is missing on rank 1, the other end of rank 0, action 5 (0SEND_F1)");
  list(s, 0).push_back({Kind::send_backward, 0, 0});
  expect("rank 0, action 13 (0SEND_B0): there is no other rank to exchange this message with");
  swap(0, 3, 4);
  expect(
      "rank 0, action 4 (0SEND_F1) comes before rank 0, action 5 (0F1); a send follows the pass that makes "
      "its "
      "message");
  swap(1, 6, 9);
  expect(
      "rank 1, action 7 (1F2) comes before rank 1, action 10 (1RECV_F2); a receive is posted before the pass "
      "that needs its message");
  swap(0, 10, 11);
  expect(
      "rank 0, action 11 (0B2) comes before rank 0, action 12 (0B1); gradients of a stage are summed by "
      "rising "
      "micro-batch");
  swap(1, 1, 2);
  swap(1, 0, 1);
  expect(
      "rank 0, action 2 (0SEND_F0) and rank 1, action 1 (1RECV_F1): message number 1 from rank 0 to rank 1 "
      "is "
      "not the same at both ends");
  s.memory = {1, 1};
  expect("rank 0, action 4 (0F1) keeps activation number 2; memory allows rank 0 to keep 1");
}

// A file has a name as one word, behind which a comment may begin.
TEST(PipelineSchedule, ANameIsOneWord) {
  PipelineSchedule s = one_f_one_b();
  for (const char* name : {"two words", "a#b", "a\nb", " ", "a\t"}) {
    s.name = name;
    EXPECT_EQ(refusal(s),
              fmt::format("schedule \"{}\": the name is not one word, and no file could hold it; expected no "
                          "blanks, no '#' and no control characters",
                          name));
  }
  for (const char* name : {"", "1f1b", "größer"}) {
    s.name = name;
    check_pipeline_schedule(s);
    EXPECT_EQ(parse_pipeline_schedule(to_string(s)), s);
  }
}

// Channels are kept for ranks of neighbouring stages alone: lists of all pairs of 2048 ranks would take 130
// MB.
TEST(PipelineSchedule, ManyRanksAreChecked) {
  const PipelineSchedule s = make_pipeline_schedule(PipelineKind::gpipe, 2048, 1);
  check_pipeline_schedule(s);
  EXPECT_EQ(s.stages(), 2048);
}

TEST(PipelineSchedule, StagesOfOneRankHandTheirTensorsOver) {
  PipelineSchedule s = make_pipeline_schedule(PipelineKind::interleaved, 1, 1, 2);
  EXPECT_EQ(to_string(s),
            "schedule interleaved\nranks 1\nmicro-batches 1\nstages 0 0\nmemory 2\n0: 0F0 1F0 1B0 0B0\n");
  std::swap(list(s, 0)[0], list(s, 0)[1]);
  EXPECT_EQ(
      refusal(s),
      "schedule \"interleaved\": rank 0, action 1 (1F0) comes before rank 0, action 2 (0F0); it needs the "
      "outputs of the stage before");
  std::swap(list(s, 0)[0], list(s, 0)[1]);
  std::swap(list(s, 0)[2], list(s, 0)[3]);
  EXPECT_EQ(
      refusal(s),
      "schedule \"interleaved\": rank 0, action 3 (0B0) comes before rank 0, action 4 (1B0); it needs the "
      "gradient of the next stage");
}

// Each rank first waits for what the other would do second.
TEST(PipelineSchedule, ActionsThatWaitForEachOtherAreNamed) {
  PipelineSchedule s = parse_pipeline_schedule(
      "schedule crossed\nranks 2\nmicro-batches 2\nstages 0 1 0\nmemory 0 0  # for evaluation\n"
      "0: 2RECV_F0 2RECV_F1 2F1 0F0 0SEND_F0 2F0 0F1 0SEND_F1\n"
      "1: 1RECV_F0 1RECV_F1 1F0 1SEND_F0 1F1 1SEND_F1\n");
  EXPECT_EQ(
      refusal(s),
      "schedule \"crossed\": a cycle: rank 0, action 3 (2F1) waits for rank 1, action 6 (1SEND_F1), and "
      "rank 1, action 3 (1F0) waits for rank 0, action 5 (0SEND_F0)");
}

// A rank waits before it has more than kPipelineSendsInFlight sends whose receives are not posted.
TEST(PipelineSchedule, SendsAndReceivesInFlightHaveABound) {
  PipelineSchedule s;
  s.name = "late";
  s.ranks = 2;
  s.micro_batches = kPipelineReceivesPosted + 1;
  s.rank_of_stage = {0, 1};
  s.actions.resize(2);
  s.memory = {0, 0};
  for (int m = 0; m < s.micro_batches; ++m) {
    list(s, 0).push_back({Kind::forward, 0, m});
    list(s, 0).push_back({Kind::send_forward, 0, m});
    list(s, 1).push_back({Kind::recv_forward, 1, m});
  }
  for (int m = 0; m < s.micro_batches; ++m) list(s, 1).push_back({Kind::forward, 1, m});
  EXPECT_EQ(
      refusal(s),
      "schedule \"late\": rank 1, action 33 (1RECV_F32) is receive number 33 that is posted and not used "
      "yet; expected at most 32");
  // Rank 1 posts the receives of stage 4 when it has a message of rank 2, which waits for rank 0.
  s = parse_pipeline_schedule("schedule full\nranks 3\nmicro-batches 26\nstages 0 2 1 0 1\nmemory 0 0 0\n");
  const auto add = [&](int rank, int stage, int m) {
    if (stage > 0) list(s, rank).push_back({Kind::recv_forward, stage, m});
    list(s, rank).push_back({Kind::forward, stage, m});
    if (stage < 4) list(s, rank).push_back({Kind::send_forward, stage, m});
  };
  for (const int stage : {0, 3})
    for (int m = 0; m <= kPipelineSendsInFlight; ++m) add(0, stage, m);
  for (const int stage : {0, 3}) add(0, stage, 25);
  for (const int stage : {2, 4})
    for (int m = 0; m < 26; ++m) add(1, stage, m);
  for (int m = 0; m < 26; ++m) add(2, 1, m);
  EXPECT_EQ(
      refusal(s),
      "schedule \"full\": a cycle: rank 0, action 125 (3SEND_F24) waits for rank 1, action 79 (4RECV_F0), "
      "and "
      "rank 1, action 77 (2F25) waits for rank 2, action 78 (1SEND_F25), and rank 2, action 77 (1F25) waits "
      "for rank 0, action 127 (0SEND_F25)");
}

TEST(PipelineSchedule, AFileHasTheTable) {
  const test::TemporaryFolder folder;
  const PipelineSchedule s = make_pipeline_schedule(PipelineKind::zero_bubble, 3, 4);
  write_pipeline_schedule(s, folder / "a");
  EXPECT_EQ(read_pipeline_schedule(folder / "a"), s);
  const Error none = error_of([&] { read_pipeline_schedule(folder / "b"); });
  EXPECT_EQ(none.code(), ErrorCode::system);
  EXPECT_THAT(none.what(), HasSubstr((folder / "b").string() + ": cannot open it"));
  PipelineSchedule wrong = s;
  wrong.memory = {1, 1, 1};
  EXPECT_THAT(error_of([&] { write_pipeline_schedule(wrong, folder / "a"); }).what(),
              HasSubstr("memory allows"));
}

TEST(PipelineSchedule, AWrongLineIsNamed) {
  const auto expect = [](const std::string& text, const std::string& why) {
    const Error e = error_of([&] { parse_pipeline_schedule(text); });
    EXPECT_EQ(e.code(), ErrorCode::bad_argument);
    EXPECT_EQ(std::string(e.what()), "schedule: " + why);
  };
  expect("", "there is no line \"ranks N\"");
  expect("ranks 2\nranks 2", "line 2: \"ranks\" is there twice");
  expect("ranks 2 3", "line 1: \"ranks\" has 2 values; expected 1");
  expect("ranks two", "line 1: \"ranks\": \"two\"; expected a number from 0 to 1048576");
  expect("ranks 5000", "line 1: ranks 5000; expected 1 to 4096");
  expect(
      "\n# a\nsteps 2",
      "line 3: \"steps\"; expected schedule, ranks, micro-batches, stages, memory, or the number of a rank "
      "and ':'");
  expect("0: 0F0", "line 1: \"0:\"; expected a rank from 0 to -1, after \"ranks N\"");
  expect("ranks 1\n0: 0F0 0X0", "line 2: \"0X0\"; expected an action like 0F3, 1RECV_F2 or 2B0");
  expect("ranks 1\n0: F0", "line 2: \"F0\"; expected an action like 0F3, 1RECV_F2 or 2B0");
  expect("ranks 1\n0: 0F99999999999",
         "line 2: \"0F99999999999\"; expected an action like 0F3, 1RECV_F2 or 2B0");
}

TEST(PipelineSchedule, NamesAndNumbersAreChecked) {
  for (const PipelineKind kind : kKinds) EXPECT_EQ(pipeline_kind(name(kind)), kind);
  test::expect_error(
      ErrorCode::bad_argument,
      "pipeline: the schedule is \"2f2b\"; expected one of gpipe, 1f1b, interleaved, zero-bubble, "
      "forward",
      [] { pipeline_kind("2f2b"); });
  test::expect_error(ErrorCode::bad_argument, "schedule \"gpipe\": 2 stages a rank; expected 1",
                     [] { make_pipeline_schedule(PipelineKind::gpipe, 2, 2, 2); });
  test::expect_error(ErrorCode::bad_argument, "schedule \"interleaved\": 1 stages a rank; expected 2 or more",
                     [] { make_pipeline_schedule(PipelineKind::interleaved, 2, 2); });
  test::expect_error(ErrorCode::bad_argument, "schedule \"gpipe\": 0 ranks; expected 1 to 4096",
                     [] { make_pipeline_schedule(PipelineKind::gpipe, 0, 2); });
  test::expect_error(ErrorCode::bad_argument,
                     "schedule \"1f1b\": it has messages already; expected computations alone",
                     [] { with_messages(one_f_one_b()); });
}

}  // namespace
}  // namespace weft::schedule_test
