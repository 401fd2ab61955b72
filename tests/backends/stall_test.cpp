// A rank that waits long logs for whom it waits: one line per call, in the Context's log, over every
// transport.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>
#include <thread>

#include "support/masked_backend.hpp"
#include "support/recording_backend.hpp"
#include "support/run_ranks.hpp"
#include "weft/base/view.hpp"

namespace weft::test::stall_test {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// The log of all ranks of this process.
class Lines {
 public:
  LogSink sink() {
    return [this](LogLevel level, std::string_view line) {
      EXPECT_EQ(level, LogLevel::warning) << line;
      const std::lock_guard lock(mutex_);
      lines_.emplace_back(line);
    };
  }
  std::vector<std::string> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(lines_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> lines_;
};

struct Over {
  const char* name;
  Ranks kind;
  const char* absent;  // its words for ranks that have not come to a collective; a regular expression
  BackendFactory factory = nullptr;
};

class Stall : public testing::TestWithParam<Over> {};
INSTANTIATE_TEST_SUITE_P(
    Of, Stall,
    testing::Values(Over{"shm", Ranks::threads, "had not arrived"},
                    Over{"shm", Ranks::processes, "had not arrived"},
                    Over{"gloo", Ranks::threads, "had not arrived"},
                    Over{"gloo", Ranks::processes, "had not arrived"},
                    Over{"composed", Ranks::threads, "not done (its part|their parts) \\(by messages\\)",
                         masked(messages_only())}),
    [](const auto& p) { return std::string(p.param.name) + "_" + to_string(p.param.kind); });

// Rank 1 is late for a collective and for a message. Ranks 0 and 2 each log it once. Nothing else is logged:
// nothing by rank 1, nothing about prompt calls, and nothing about calls that wait behind others.
TEST_P(Stall, TheAbsentRankIsNamedWhileTheOthersWait) {
  if (GetParam().name == std::string("gloo") && !WEFT_HAVE_GLOO) GTEST_SKIP() << "the build found no Gloo";
  Lines lines;
  RankOptions options;
  options.backend = GetParam().factory ? "shm" : GetParam().name;
  options.factory = GetParam().factory;
  options.context.log_sink = lines.sink();
  run_ranks(
      GetParam().kind, 3,
      [&](Rank& r) {
        const bool apart = GetParam().kind == Ranks::processes;  // a log for each rank
        std::vector<float> x(1000), y(1000);
        r.group().barrier().wait();
        r.meet("all are there");
        EXPECT_THAT(lines.take(), IsEmpty());
        const CallOptions slow{.deadline = 6s};
        if (r.rank == 1) std::this_thread::sleep_for(1300ms);
        Work first = r.group().all_reduce(view(x), view(x), slow);
        Work second = r.group().all_reduce(view(y), view(y), slow);  // behind it
        first.wait();
        second.wait();
        r.meet("first");
        if (apart || r.rank == 0) {
          // On a loaded machine other ranks may be late, too. But no rank logs the waiting call twice.
          const std::vector<std::string> told = lines.take();
          for (const int who : {0, 2})
            if (!apart || r.rank == who) {
              EXPECT_THAT(told,
                          testing::Contains(testing::ContainsRegex(
                              "^.group. all_reduce f32 x1000 sum: not finished after 0.6 s, a tenth of its "
                              "deadline: (rank [02].*; )?ranks? ([02], )?1[ ,].*" +
                              std::string(GetParam().absent) + ".* \\[group \"world\", rank " +
                              std::to_string(who) + ", call 1\\]$")));
              EXPECT_THAT(told,
                          testing::Contains(HasSubstr("rank " + std::to_string(who) + ", call 1]")).Times(1));
            }
          EXPECT_THAT(told, testing::Each(testing::Not(HasSubstr("group \"world\", rank 1, call 1]"))));
        }
        r.meet("second");
        if (r.rank == 1) {
          std::this_thread::sleep_for(1100ms);
          r.group().send(view(x), 0, {.deadline = 6s, .tag = 5}).wait();
        } else if (r.rank == 0) {
          r.group().recv(view(x), 1, {.deadline = 6s, .tag = 5}).wait();
          EXPECT_THAT(lines.take(),
                      ElementsAre(testing::AllOf(
                          HasSubstr("recv f32 x1000 from rank 1: not finished after 0.6 s, a tenth of its "
                                    "deadline: rank 1 has "),
                          HasSubstr("tag 5"), HasSubstr("[group \"world\", rank 0, call 0]"))));
        }
        r.meet("end");
        EXPECT_THAT(lines.take(), IsEmpty());
      },
      options);
}

// A failing rank has logged a warning before, with the same text.
TEST(StallOfOne, BeforeTheFailure) {
  Recording recording;
  Lines lines;
  Context context({.log_sink = lines.sink()});
  recording.decide({.kind = Fate::never});
  recording.miss({2}, "rank 2 is on holiday");
  Membership m;
  m.store = make_local_store();
  m.rank = 1;
  m.size = 3;
  ProcessGroup g = ProcessGroup::create(context, recording.factory(), m);
  std::vector<float> x(5);
  Work w = g.broadcast(view(x), view(x), 2, {.deadline = 400ms});
  EXPECT_THAT(error_text([&] { w.wait(); }),
              "timeout: broadcast: not finished within 0.4 s: rank 2 is on holiday [group \"world\", rank 1, "
              "call 0]");
  EXPECT_THAT(
      lines.take(),
      ElementsAre(
          "[group] broadcast f32 x5 root 2: not finished after 0.04 s, a tenth of its deadline: rank 2 is "
          "on holiday [group \"world\", rank 1, call 0]"));
}

// All ranks have arrived and the call takes long: no rank is to blame.
TEST(StallOfOne, NothingWhereNobodyIsMissing) {
  Recording recording;
  Lines lines;
  Context context({.log_sink = lines.sink()});
  recording.decide({.kind = Fate::never});
  Membership m;
  m.store = make_local_store();
  m.size = 3;
  ProcessGroup g = ProcessGroup::create(context, recording.factory(), m);
  std::vector<float> x(5);
  Work w = g.broadcast(view(x), view(x), 2, {.deadline = 300ms});
  EXPECT_EQ(error_of([&] { w.wait(); }).code(), ErrorCode::timeout);
  EXPECT_THAT(lines.take(), IsEmpty());
}

}  // namespace
}  // namespace weft::test::stall_test
