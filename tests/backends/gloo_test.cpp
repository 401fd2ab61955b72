// What is Gloo's own: the transport under random calls, and each way in which it fails.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <thread>

#include "support/random_calls.hpp"
#include "support/run_ranks.hpp"
#include "support/values.hpp"
#include "weft/backends/plugin.hpp"
#include "weft/base/tensor.hpp"

namespace weft::test {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::HasSubstr;

std::vector<int> ranks_of(const Error& e) { return {e.ranks().begin(), e.ranks().end()}; }

#define SKIP_WITHOUT_GLOO() \
  if (!WEFT_HAVE_GLOO) GTEST_SKIP() << "libgloo-dev is not installed"

RankOptions gloo() {
  RankOptions options;
  options.backend = "gloo";
  return options;
}

struct Gloo : testing::TestWithParam<Ranks> {
  void SetUp() override { SKIP_WITHOUT_GLOO(); }
};
INSTANTIATE_TEST_SUITE_P(Ranks, Gloo, testing::Values(Ranks::threads, Ranks::processes),
                         [](const auto& kind) { return to_string(kind.param); });

TEST_P(Gloo, RandomCallsGiveWhatTheyShould) {
  for (const int n : {1, 2, 3, 5}) {
    run_ranks(
        GetParam(), n,
        [](Rank& r) {
          Variety v;
          v.many = {4099, 70001};
          calls_at_random(r, r.group(), 120, std::mt19937(7), std::mt19937(100 + r.rank), v, std::nullopt);
        },
        gloo());
  }
}

TEST_P(Gloo, BothPostALargeSendThenAReceiveThenWait) {
  run_ranks(
      GetParam(), 2,
      [](Rank& r) {
        std::vector<double> in(2 << 20, r.rank + 1.0), out(in.size());
        Work send = r.group().send(view(in), 1 - r.rank, {.tag = 3});
        Work recv = r.group().recv(view(out), 1 - r.rank, {.tag = 3});
        send.wait();
        recv.wait();
        EXPECT_EQ(out.front(), 2.0 - r.rank);
        EXPECT_EQ(out.back(), 2.0 - r.rank);
      },
      gloo());
}

TEST_P(Gloo, TagsMayComeInAnyOrder) {
  run_ranks(
      GetParam(), 2,
      [](Rank& r) {
        constexpr std::size_t kSizes[] = {1, 5000, 0, 300, 20000, 1024};
        std::vector<std::vector<std::int32_t>> data;
        std::vector<Work> works;
        for (std::size_t i = 0; i < std::size(kSizes); ++i)
          data.emplace_back(kSizes[i], r.rank == 0 ? static_cast<std::int32_t>(i + 1) : 0);
        for (std::size_t i = 0; i < std::size(kSizes); ++i) {
          const std::size_t k = r.rank == 0 ? i : std::size(kSizes) - 1 - i;
          const CallOptions options{.tag = static_cast<int>(k)};
          works.push_back(r.rank == 0 ? r.group().send(view(data[k]), 1, options)
                                      : r.group().recv(view(data[k]), 0, options));
        }
        for (Work& w : works) w.wait();
        for (std::size_t i = 0; i < std::size(kSizes); ++i)
          for (const std::int32_t x : data[i]) ASSERT_EQ(x, static_cast<std::int32_t>(i + 1));
      },
      gloo());
}

// A message never waits behind a collective that is not complete.
TEST_P(Gloo, MessagesPassCollectives) {
  run_ranks(
      GetParam(), 3,
      [](Rank& r) {
        r.group();
        Work barrier;
        if (r.rank != 2) barrier = r.group().barrier();
        std::vector<float> x(9000, static_cast<float>(r.rank));
        if (r.rank == 0) r.group().send(view(x), 1).wait();
        if (r.rank == 1) {
          r.group().recv(view(x), 0).wait();
          EXPECT_EQ(x.back(), 0.0f);
        }
        r.meet("the message has passed");
        if (r.rank == 2) barrier = r.group().barrier();
        barrier.wait();
      },
      gloo());
}

TEST_P(Gloo, AMessageOfAnotherSizeIsAMismatch) {
  for (const std::int64_t sent : {10, 30, 5000})
    run_ranks(
        GetParam(), 2,
        [&](Rank& r) {
          std::vector<float> x(5000);
          const Error e = error_of([&] {
            if (r.rank == 0) r.group().send(view(x.data(), sent), 1, {.tag = 4}).wait();
            if (r.rank == 1) r.group().recv(view(x.data(), 20), 0, {.tag = 4}).wait();
            r.group().barrier().wait();
          });
          EXPECT_EQ(e.code(), ErrorCode::mismatch) << e.what();
          EXPECT_THAT(e.what(), HasSubstr("rank 0 sent f32 x" + std::to_string(sent) +
                                          " with tag 4, rank 1 receives f32 x20"));
          EXPECT_THAT(ranks_of(e), ElementsAre(0, 1));
        },
        gloo());
}

// The announcements of collectives are behind messages that nobody has asked for, so these cannot wait.
TEST_P(Gloo, TooManyUnexpectedMessagesFailTheGroup) {
  ::setenv("WEFT_UNEXPECTED_MESSAGES", "100", 1);
  run_ranks(
      GetParam(), 2,
      [&](Rank& r) {
        std::vector<float> x(5);
        for (int round = 0; round < 3; ++round) {  // as many as are allowed, in the opposite order
          for (int k = 0; k < 100 && r.rank == 0; ++k) r.group().send(view(x), 1, {.tag = k}).wait();
          r.group().barrier().wait();
          for (int k = 100; k-- > 0 && r.rank == 1;) r.group().recv(view(x), 0, {.tag = k}).wait();
          r.group().barrier().wait();
        }
        const Error e = error_of([&] {
          for (int k = 0; k < 101 && r.rank == 0; ++k) r.group().send(view(x), 1, {.tag = k}).wait();
          r.group().barrier().wait();
          r.group().barrier().wait();
        });
        EXPECT_EQ(e.code(), ErrorCode::system) << e.what();
        EXPECT_THAT(ranks_of(e), ElementsAre(0, 1));
        EXPECT_THAT(e.what(),
                    HasSubstr("rank 1 has no room for a message of 20 bytes with tag 100 from rank 0: "
                              "it holds 100 messages of 2000 bytes that it has not received yet, and "
                              "WEFT_UNEXPECTED_MESSAGES is 100"));
      },
      gloo());
  ::unsetenv("WEFT_UNEXPECTED_MESSAGES");
}

TEST_P(Gloo, MismatchSaysWhatBothCalled) {
  run_ranks(
      GetParam(), 2,
      [](Rank& r) {
        std::vector<float> x(1024), y(2048);
        const Error e = error_of([&] {
          if (r.rank == 0) r.group().all_reduce(view(x), view(x)).wait();
          if (r.rank == 1) r.group().all_gather(view(x.data(), 1000), view(y.data(), 2000)).wait();
        });
        EXPECT_EQ(e.code(), ErrorCode::mismatch) << e.what();
        EXPECT_THAT(e.what(), HasSubstr("all_gather f32 x1000"));
        EXPECT_THAT(e.what(), HasSubstr("all_reduce f32 x1024 sum"));
        EXPECT_THAT(e.what(), HasSubstr("[call 0]"));
      },
      gloo());
}

TEST_P(Gloo, CountsBetweenTwoRanksAreCompared) {
  run_ranks(
      GetParam(), 2,
      [](Rank& r) {
        std::vector<float> in(10), out(10);
        const std::int64_t give[2][2] = {{1, 2}, {3, 4}}, get[2][2] = {{1, 3}, {5, 4}};
        const Error e = error_of([&] {
          r.group()
              .all_to_all_v(view(in), {.counts = give[r.rank]}, view(out), {.counts = get[r.rank]})
              .wait();
        });
        EXPECT_EQ(e.code(), ErrorCode::mismatch) << e.what();
        EXPECT_THAT(e.what(), HasSubstr("rank 0 gives rank 1 2 elements, which expects 5"));
      },
      gloo());
}

TEST_P(Gloo, AnAbsentRankIsNamedAtTheDeadline) {
  run_ranks(
      GetParam(), 3,
      [](Rank& r) {
        r.group().barrier().wait();
        if (r.rank != 1) {
          std::vector<float> x(10);
          const auto began = Clock::now();
          const Error e =
              error_of([&] { r.group().all_reduce(view(x), view(x), {.deadline = 300ms}).wait(); });
          EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
          EXPECT_THAT(e.what(), HasSubstr("all_reduce: not finished within 0.3 s: rank 1 had not arrived"));
          EXPECT_THAT(ranks_of(e), ElementsAre(1));
          EXPECT_GE(Clock::now() - began, 290ms);
          EXPECT_TRUE(r.group().quiesce(5s));
        }
        r.meet("both have failed");
        const Error late = error_of([&] { r.group().barrier().wait(); });
        EXPECT_THAT(late.what(), HasSubstr("rank 1 had not arrived"));
      },
      gloo());
}

TEST_P(Gloo, AMessageThatDoesNotComeIsATimeout) {
  run_ranks(
      GetParam(), 2,
      [](Rank& r) {
        r.group().barrier().wait();
        if (r.rank == 0) {
          std::vector<float> x(10);
          const Error e = error_of([&] { r.group().recv(view(x), 1, {.deadline = 200ms, .tag = 6}).wait(); });
          EXPECT_EQ(e.code(), ErrorCode::timeout);
          EXPECT_THAT(e.what(), HasSubstr("rank 1 has sent no message with tag 6"));
        }
        r.meet("end");
      },
      gloo());
}

TEST_P(Gloo, RanksThatDoNotJoinAreNamed) {
  run_ranks(
      GetParam(), 2,
      [](Rank& r) {
        Membership m = r.membership("never whole");
        m.size = 4;
        m.deadline = 300ms;
        const Error e = error_of([&] { ProcessGroup::create(r.context, "gloo", m); });
        EXPECT_EQ(e.code(), ErrorCode::timeout);
        EXPECT_THAT(e.what(), HasSubstr("group \"never whole\": ranks 2, 3 did not join within "));
        EXPECT_THAT(ranks_of(e), ElementsAre(2, 3));
      },
      gloo());
}

TEST_P(Gloo, AbortIsHeardByAll) {
  run_ranks(
      GetParam(), 3,
      [](Rank& r) {
        r.group();
        r.meet("all have a group");
        if (r.rank == 2) r.group().abort("the loss is not a number");
        const Error e = error_of([&] { r.group().barrier().wait(); });
        EXPECT_EQ(e.code(), ErrorCode::aborted) << e.what();
        EXPECT_THAT(e.what(), HasSubstr("aborted by rank 2: the loss is not a number"));
        EXPECT_THAT(ranks_of(e), ElementsAre(2));
      },
      gloo());
}

TEST_P(Gloo, ARankThatLeavesIsNamed) {
  run_ranks(
      GetParam(), 2,
      [](Rank& r) {
        r.group().barrier().wait();
        if (r.rank == 0) {
          const Error e = error_of([&] { r.group().barrier().wait(); });
          EXPECT_EQ(e.code(), ErrorCode::peer_lost) << e.what();
          EXPECT_THAT(e.what(), HasSubstr("rank 1 left the group"));
          EXPECT_THAT(ranks_of(e), ElementsAre(1));
        } else {
          r.group() = ProcessGroup();
        }
        r.meet("end");
      },
      gloo());
}

TEST_P(Gloo, DestructionWithCallsInFlightAborts) {
  run_ranks(
      GetParam(), 2,
      [](Rank& r) {
        r.group().barrier().wait();
        std::vector<float> x(200000);
        if (r.rank == 0) {
          { const Work dropped = r.group().all_reduce(view(x), view(x)); }
          r.meet("dropped");
        } else {
          r.meet("dropped");
        }
        const Error e = error_of([&] { r.group().all_reduce(view(x), view(x)).wait(); });
        EXPECT_EQ(e.code(), ErrorCode::aborted) << e.what();
        EXPECT_THAT(e.what(), HasSubstr("all_reduce: rank 0 dropped the Work of a call in flight"));
      },
      gloo());
}

// A switch, and one: calls work without the comparison, mismatches are no more found, and all ranks must
// have it alike.
TEST(GlooProcesses, TheComparisonCanBeSwitchedOff) {
  SKIP_WITHOUT_GLOO();
  run_ranks(
      Ranks::processes, 3,
      [](Rank& r) {
        ::setenv("WEFT_GLOO_CHECK", "off", 1);
        EXPECT_FALSE(r.group().traits().promises.checks_calls);
        EXPECT_FALSE(r.group().traits().promises.names_absent);
        Variety v;
        v.many = {4099};
        calls_at_random(r, r.group(), 100, std::mt19937(7), std::mt19937(100 + r.rank), v, std::nullopt);
        r.meet("calls are done");
        std::vector<float> x(10);
        if (r.rank != 1) {
          const Error e =
              error_of([&] { r.group().all_reduce(view(x), view(x), {.deadline = 200ms}).wait(); });
          EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
          EXPECT_THAT(e.what(), HasSubstr("Gloo cannot tell who is missing (WEFT_GLOO_CHECK is off)"));
        }
        r.meet("both have failed");
        ::setenv("WEFT_GLOO_CHECK", r.rank == 1 ? "off" : "on", 1);
        const Error e = error_of([&] { ProcessGroup::create(r.context, "gloo", r.membership("mixed")); });
        EXPECT_EQ(e.code(), ErrorCode::mismatch) << e.what();
        EXPECT_THAT(e.what(), HasSubstr("group \"mixed\": WEFT_GLOO_CHECK is "));
        EXPECT_THAT(e.what(), HasSubstr("expected the same on all ranks"));
        ::setenv("WEFT_GLOO_CHECK", "perhaps", 1);
        EXPECT_EQ(error_text([&] { ProcessGroup::create(r.context, "gloo", r.membership("other")); }),
                  "bad_argument: WEFT_GLOO_CHECK is \"perhaps\"; expected on or off");
      },
      gloo());
}

TEST(GlooProcesses, AKilledRankIsNamedByTheSurvivors) {
  SKIP_WITHOUT_GLOO();
  RankOptions options = gloo();
  options.deadline = 60s;  // so it is not the deadline that tells
  options.limit = 30s;
  RankProcesses ranks(
      3,
      [](Rank& r) {
        r.group().barrier().wait();
        r.meet("ready");
        std::vector<float> x(3000000);
        const Error e = error_of([&] {
          for (;;) r.group().all_reduce(view(x), view(x)).wait();
        });
        EXPECT_EQ(e.code(), ErrorCode::peer_lost) << e.what();
        EXPECT_THAT(e.what(), HasSubstr("rank 1 was lost"));
        EXPECT_THAT(ranks_of(e), ElementsAre(1));
        EXPECT_TRUE(r.group().quiesce(5s));
        // The survivors go on in a group of their own.
        Membership m = r.membership("survivors");
        m.size = 2;
        m.rank = r.rank / 2;
        ProcessGroup survivors = ProcessGroup::create(r.context, "gloo", m);
        survivors.barrier().wait();
      },
      options);
  ranks.store().get("test/met/ready", Deadline::after(20s));
  std::this_thread::sleep_for(50ms);
  ranks[1].kill(SIGKILL);
  ranks.finish({1});
}

TEST(GlooProcesses, AStoppedRankIsATimeoutAndMemoryIsOursAgain) {
  SKIP_WITHOUT_GLOO();
  RankProcesses ranks(
      2,
      [](Rank& r) {
        r.group().barrier().wait();
        r.meet("ready");
        if (r.rank == 1) {
          r.store->get("test/never", Deadline::after(20s));
          return;
        }
        r.store->get("test/stopped", Deadline::after(10s));
        std::vector<float> x(3000000);
        const Error e = error_of([&] { r.group().all_reduce(view(x), view(x), {.deadline = 300ms}).wait(); });
        EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
        EXPECT_THAT(ranks_of(e), ElementsAre(1));
        EXPECT_TRUE(r.group().quiesce(5s));
      },
      gloo());
  ranks.store().get("test/met/ready", Deadline::after(20s));
  ranks[1].kill(SIGSTOP);
  ranks.store().set("test/stopped", "1");
  ranks.finish({1});
  ranks[1].kill(SIGKILL);
}

}  // namespace
}  // namespace weft::test
