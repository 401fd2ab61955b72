// Trace files that weft writes itself, into the folder that WEFT_TRACE names: when a group fails and at
// SIGUSR2. They must not replace a signal handler of the program, throw, or leave anything behind.
#include "group/trace/trace_files.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "support/recording_backend.hpp"
#include "support/run_ranks.hpp"
#include "support/sanitizers.hpp"
#include "support/temporary_folder.hpp"
#include "weft/base/view.hpp"

namespace weft::test::trace_files_test {
namespace {

using namespace std::chrono_literals;
using namespace std::string_literals;
using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::MatchesRegex;

using Handler = void (*)(int);
Handler handler() {
  struct sigaction now {};
  ::sigaction(SIGUSR2, nullptr, &now);
  return now.sa_handler;
}

class TraceFiles : public testing::Test {
 protected:
  TraceFiles() { ::setenv("WEFT_TRACE", folder.path().c_str(), 1); }
  ~TraceFiles() override { ::unsetenv("WEFT_TRACE"); }

  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
      names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
  }
  // Once there are so many.
  std::vector<std::string> await_files(std::size_t count) const {
    for (const Deadline deadline = Deadline::after(20s); !deadline.passed(); std::this_thread::sleep_for(2ms))
      if (const auto f = files(); f.size() >= count && f.back().ends_with(".json")) return f;
    return files();
  }
  json content(const std::string& name) const {
    std::ifstream in(folder.path() / name);
    return json::parse(in);
  }

  ProcessGroup make(Context& context, const std::string& name = "x", int size = 2) {
    Membership m;
    m.store = store;
    m.size = size;
    m.name = name;
    return ProcessGroup::create(context, recording.factory(), m);
  }

  TemporaryFolder folder;
  Recording recording;
  std::shared_ptr<Store> store = make_local_store();
  std::vector<float> a = std::vector<float>(12);
};

TEST_F(TraceFiles, OneFileWhenAGroupFailsBeforeTheErrorIsThrown) {
  Context context;
  ProcessGroup g = make(context), well = make(context, "well");
  g.barrier().wait();
  well.barrier().wait();
  EXPECT_THAT(files(), IsEmpty());
  g.abort("the loss is not a number");
  EXPECT_EQ(error_of([&] { g.barrier().wait(); }).code(), ErrorCode::aborted);
  ASSERT_THAT(files(), ElementsAre(MatchesRegex("x\\.rank0\\..*-" + std::to_string(::getpid()) +
                                                "-[0-9a-f]{8}-0\\.json")));
  const std::string file = files()[0];
  const json trace = content(file);
  EXPECT_EQ(trace["weft_trace"], 1);
  EXPECT_EQ(trace["calls"].size(), 1u);
  EXPECT_EQ(trace["failure"]["code"], "aborted");
  EXPECT_EQ(trace["traceEvents"].back()["name"], "aborted");
  EXPECT_EQ(error_of([&] { g.barrier().wait(); }).code(), ErrorCode::aborted);
  EXPECT_EQ(files().size(), 1u);  // of the first failure only
}

// For any names of groups, in any processes, no two files have one name, and no file is outside the folder.
TEST_F(TraceFiles, NamesDoNotCollide) {
  for (int k = 0; k < 2; ++k) {
    Context context;
    for (const std::string& name : {"same"s, "same"s, "../up/and away"s, std::string(500, 'n')}) {
      ProcessGroup g = make(context, name);
      g.abort("now");
      EXPECT_EQ(error_of([&] { g.barrier().wait(); }).code(), ErrorCode::aborted);
    }
  }
  const auto all = files();
  EXPECT_EQ(all.size(), 8u);
  EXPECT_THAT(all, testing::Contains(testing::StartsWith("___up_and_away.rank0.")).Times(2));
}

TEST_F(TraceFiles, TheSignalWritesAllGroupsOfAllRanks) {
  EXPECT_EQ(handler(), SIG_DFL);
  {
    Context context;
    ProcessGroup g = make(context, "first"), h = make(context, "second");
    { const ProcessGroup gone = make(context, "gone"); }
    g.barrier().wait();
    EXPECT_NE(handler(), SIG_DFL);
    ::raise(SIGUSR2);
    const auto two = await_files(2);
    ASSERT_THAT(two, ElementsAre(testing::StartsWith("first.rank0."), testing::StartsWith("second.rank0.")));
    EXPECT_EQ(content(two[0])["calls"].size(), 1u);
    // Again: the same files, with what is new.
    g.barrier().wait();
    ::raise(SIGUSR2);
    for (int k = 0; k < 5000 && content(two[0])["calls"].size() < 2; ++k) std::this_thread::sleep_for(2ms);
    EXPECT_EQ(content(two[0])["calls"].size(), 2u);
    EXPECT_EQ(files().size(), 2u);
  }
  EXPECT_EQ(handler(), SIG_DFL);  // given back
  Context again;
  ProcessGroup g = make(again);
  EXPECT_NE(handler(), SIG_DFL);
}

// One rank computes and another is stuck in a wait.
TEST_F(TraceFiles, TheSignalReachesRanksWhateverTheyDo) {
  const RankOptions options;
  RankProcesses ranks(
      2,
      [](Rank& r) {
        r.group().barrier().wait();
        r.meet("ready");
        if (r.rank == 0) {
          volatile double x = 1;
          while (!r.store->try_get("go"))
            for (int k = 0; k < 100000; ++k) x = x * 1.0000001;
        }
        r.group().barrier().wait();
      },
      options);
  ranks.store().get("test/met/ready", Deadline::after(20s));
  std::this_thread::sleep_for(100ms);  // rank 1 waits by now
  for (int r = 0; r < 2; ++r) ranks[r].kill(SIGUSR2);
  const auto both = await_files(2);
  ranks.store().set("go", "1");
  ASSERT_THAT(both, ElementsAre(testing::StartsWith("world.rank0."), testing::StartsWith("world.rank1.")));
  const json waits = content(both[1])["calls"];
  EXPECT_EQ(waits.back()["op"], "barrier");
  EXPECT_EQ(content(both[0])["calls"].size(), 1u);
  EXPECT_EQ(waits.back()["state"], waits.size() == 2 ? "pending" : "done");
  ranks.finish();
}

TEST_F(TraceFiles, ASignalThatIsTakenIsLeftAlone) {
  static std::atomic<int> got{0};
  struct sigaction theirs {
  }, before{};
  theirs.sa_handler = [](int) { ++got; };
  ::sigaction(SIGUSR2, &theirs, &before);
  std::vector<std::string> lines;
  {
    Context context({.log_level = LogLevel::info,
                     .log_sink = [&](LogLevel, std::string_view line) { lines.emplace_back(line); }});
    ProcessGroup g = make(context);
    EXPECT_EQ(handler(), theirs.sa_handler);
    ::raise(SIGUSR2);
    EXPECT_EQ(got, 1);
    EXPECT_THAT(lines, testing::Contains(
                           "[group] WEFT_TRACE: SIGUSR2 is the program's or another Context's: it writes no "
                           "traces here"));
    g.abort("but failures are written");
    EXPECT_EQ(error_of([&] { g.barrier().wait(); }).code(), ErrorCode::aborted);
    EXPECT_EQ(files().size(), 1u);
  }
  EXPECT_EQ(handler(), theirs.sa_handler);
  ::sigaction(SIGUSR2, &before, nullptr);
}

TEST_F(TraceFiles, WithoutTheVariableNothingIsTaken) {
  ::unsetenv("WEFT_TRACE");
  Context context;
  ProcessGroup g = make(context);
  EXPECT_EQ(handler(), SIG_DFL);
  g.abort("now");
  EXPECT_EQ(error_of([&] { g.barrier().wait(); }).code(), ErrorCode::aborted);
  EXPECT_THAT(files(), IsEmpty());
}

// In a child the signal has its default action until the child makes its own Context.
TEST_F(TraceFiles, Forks) {
  if (!kThreadsInForks) GTEST_SKIP() << kNoThreadsInForks;
  Context context;
  ProcessGroup g = make(context);
  const auto child = run_in_child([] {
    ::raise(SIGUSR2);
    return 0;
  });
  EXPECT_EQ(child.status, (ExitStatus{-1, SIGUSR2})) << to_string(child);
  EXPECT_THAT(files(), IsEmpty());
  const auto other = run_in_child([&] {
    Recording own;
    Context here;
    Membership m;
    m.name = "childs";
    ProcessGroup mine = ProcessGroup::create(here, own.factory(), m);
    ::raise(SIGUSR2);
    await_files(1);
    return 0;
  });
  EXPECT_TRUE(other.ok()) << to_string(other);
  EXPECT_THAT(files(), ElementsAre(testing::StartsWith("childs.rank0.")));
}

// If a trace cannot be written, weft logs a warning, and the error of the call stays the same.
TEST_F(TraceFiles, AMissingFolderIsAWarning) {
  ::setenv("WEFT_TRACE", (folder.path() / "nowhere").c_str(), 1);
  std::vector<std::string> lines;
  Context context({.log_sink = [&](LogLevel level, std::string_view line) {
    EXPECT_EQ(level, LogLevel::warning);
    lines.emplace_back(line);
  }});
  ProcessGroup g = make(context);
  g.abort("now");
  EXPECT_EQ(error_text([&] { g.barrier().wait(); }),
            "aborted: barrier: aborted by rank 0: now [group \"x\", rank 0]");
  EXPECT_THAT(lines, ElementsAre(MatchesRegex(
                         ".group. WEFT_TRACE: no trace is written: cannot create .*/nowhere/x.rank0.*"
                         ".json.tmp.*: No such file or directory")));
}

TEST_F(TraceFiles, AFullDiskIsAWarning) {
  const auto child = run_in_child([&] {
    std::vector<std::string> lines;
    Context context({.log_sink = [&](LogLevel, std::string_view line) { lines.emplace_back(line); }});
    ProcessGroup g = make(context);
    rlimit before{};
    ::getrlimit(RLIMIT_FSIZE, &before);
    const rlimit small{1024, before.rlim_max};  // as if there were no more room
    for (int k = 0; k < 20; ++k) g.barrier().wait();
    EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
    g.abort("now");
    EXPECT_EQ(error_text([&] { g.barrier().wait(); }),
              "aborted: barrier: aborted by rank 0: now [group \"x\", rank 0]");
    ::setrlimit(RLIMIT_FSIZE, &before);
    EXPECT_THAT(lines,
                ElementsAre(MatchesRegex(".group. WEFT_TRACE: no trace is written: cannot write .*/x.rank0.*"
                                         ".json.tmp.*: File too large.*")));
    return 0;
  });
  EXPECT_TRUE(child.ok()) << to_string(child);
  EXPECT_THAT(files(), IsEmpty());  // no half of one either
}

}  // namespace
}  // namespace weft::test::trace_files_test
