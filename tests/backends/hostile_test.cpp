// The same failures on every backend, each in a separate job of processes (tests/backends/failing_ranks.cpp),
// whose output is read. It shows which rank is named, when, and that every process ends by itself.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "base/text/plain_streams.hpp"
#include "support/processes.hpp"
#include "support/temporary_folder.hpp"
#include "weft/backends/plugin.hpp"
#include "weft/store/tcp.hpp"

namespace weft::test::hostile_test {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::AnyOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

struct Kind {
  std::string name;
  bool there = true;
  std::string mpirun{};  // empty: the test starts the ranks itself
  const char* lacks = "";
  friend void PrintTo(const Kind& k, std::ostream* out) { *out << k.name; }
};

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all{
      {.name = "shm"},
      {.name = "threads"},
      {.name = "composed"},
      {.name = "gloo", .there = WEFT_HAVE_GLOO, .lacks = "libgloo-dev"},
      {.name = "mpi-openmpi",
       .there = WEFT_HAVE_OPENMPI,
       .mpirun = "mpirun.openmpi --oversubscribe --allow-run-as-root",
       .lacks = "libopenmpi-dev"},
      {.name = "mpi-mpich", .there = WEFT_HAVE_MPICH, .mpirun = "mpirun.mpich", .lacks = "libmpich-dev"},
  };
  return all;
}

/// A job of n ranks. Nothing of it outlives this.
class Job {
 public:
  Job(const Kind& kind, int n, const std::string& scene, const std::function<void()>& prepare = {},
      const std::string& flags = "", const std::string& more = "")
      : kind_(kind), n_(n) {
    const bool one = !kind.mpirun.empty() || kind.name == "threads";
    for (int r = 0; r < (one ? 1 : n); ++r) {
      processes_.push_back(ChildProcess::fork([&] {
        for (const int fd : {1, 2})
          ::dup2(::open((folder_ / "out").c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600), fd);
        ::dup2(::open("/dev/null", O_RDONLY), 0);
        ::setenv("OMPI_MCA_mpi_yield_when_idle", "1", 1);
        if (!one) {
          ::setenv("WEFT_RANK", std::to_string(r).c_str(), 1);
          ::setenv("WEFT_WORLD_SIZE", std::to_string(n).c_str(), 1);
          ::setenv("WEFT_STORE", server_.address().c_str(), 1);
          ::setenv("WEFT_JOB", "hostile", 1);
        }
        if (prepare) prepare();
        std::vector<std::string> words;
        TextIn start(kind.mpirun.empty() ? "" : fmt::format("{} {} -n {}", kind.mpirun, flags, n));
        for (std::string word; start >> word;) words.push_back(word);
        for (const std::string& word :
             {std::string(WEFT_FAILING_RANKS), kind.name, scene, std::to_string(n), more})
          words.push_back(word);
        std::vector<char*> argv;
        for (std::string& word : words) argv.push_back(word.data());
        argv.push_back(nullptr);
        ::execvp(argv[0], argv.data());
        return 99;
      }));
    }
  }

  ChildProcess& process(int rank) { return processes_[static_cast<std::size_t>(rank)]; }
  /// How the processes end that the test has started: the ranks in order, or the one mpirun.
  std::vector<std::optional<ExitStatus>> ends(Duration limit = 40s) {
    std::vector<std::optional<ExitStatus>> all;
    const Deadline deadline = Deadline::after(limit);
    for (ChildProcess& p : processes_) all.push_back(p.wait(deadline.left()));
    return all;
  }
  std::string all() const { return contents(folder_ / "out"); }
  std::vector<std::string> of(int rank) const {
    std::vector<std::string> lines;
    TextIn stream(all());
    const std::string lead = fmt::format("rank {}: ", rank);
    for (std::string line; std::getline(stream, line);) {
      std::erase(line, '\r');
      if (line.starts_with(lead)) lines.push_back(line.substr(lead.size()));
    }
    return lines;
  }
  /// The number in the line of that rank which begins with `word`; -1 without one.
  double number(int rank, const std::string& word) const {
    for (const std::string& line : of(rank))
      if (line.starts_with(word + " ")) return std::stod(line.substr(word.size() + 1));
    return -1;
  }

 private:
  const Kind& kind_;
  const int n_;
  TemporaryFolder folder_;
  Logger log_;
  TcpStoreServer server_{log_, {.linger = Duration::zero()}};
  std::vector<ChildProcess> processes_;
};

class Hostile : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    if (!GetParam().there) GTEST_SKIP() << GetParam().lacks << " is not installed";
  }
  static bool mpi() { return !GetParam().mpirun.empty(); }
  /// All ranks return from main with 0. After a failure MPI is not finalised, which mpirun reports.
  static void expect_all_end_well(Job& job, Duration limit = 40s) {
    for (const auto& end : job.ends(limit)) {
      ASSERT_TRUE(end.has_value()) << "hangs; so far:\n" << job.all();
      if (!mpi()) {
        EXPECT_EQ(*end, (ExitStatus{0, 0})) << job.all();
      }
    }
  }
};
auto name_of = [](const testing::TestParamInfo<Kind>& kind) {
  std::string name = kind.param.name;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
};
std::vector<Kind> kinds_but(std::string_view without) {
  std::vector<Kind> some = kinds();
  std::erase_if(some, [&](const Kind& k) { return k.name == without; });
  return some;
}
INSTANTIATE_TEST_SUITE_P(On, Hostile, testing::ValuesIn(kinds()), name_of);

/// Faults that cannot affect only one thread.
class HostileToProcesses : public Hostile {};
INSTANTIATE_TEST_SUITE_P(On, HostileToProcesses, testing::ValuesIn(kinds_but("threads")), name_of);

/// Operations that are composed of calls that the transport compares.
class HostileToParts : public Hostile {};
INSTANTIATE_TEST_SUITE_P(On, HostileToParts, testing::ValuesIn(kinds_but("composed")), name_of);

// If a transport has only messages, ranks detect different calls by messages that do not fit.
TEST_P(Hostile, ShortCountsAreToldOnBothSides) {
  Job job(GetParam(), 2, "counts");
  expect_all_end_well(job);
  const bool composed = GetParam().name == "composed";
  for (int r = 0; r < 2; ++r) {
    ASSERT_FALSE(job.of(r).empty()) << job.all();
    EXPECT_THAT(job.of(r)[0],
                AllOf(StartsWith("mismatch 0 1 | op all_reduce, call 0 | "), HasSubstr("rank 0 "),
                      HasSubstr("rank 1 "), HasSubstr(composed ? "x512" : "x1024 sum [call 0]"),
                      HasSubstr(composed ? "x500" : "x1000 sum [call 0]")));
  }
}

// A mismatch of a composed call: the text names the user's call.
TEST_P(HostileToParts, ShortCountsOfAComposedCallAreToldOnBothSides) {
  Job job(GetParam(), 2, "counts of an average");
  expect_all_end_well(job);
  for (int r = 0; r < 2; ++r) {
    ASSERT_FALSE(job.of(r).empty()) << job.all();
    EXPECT_THAT(job.of(r)[0], AllOf(StartsWith("mismatch 0 1 | op all_reduce, call 2 | "),
                                    HasSubstr("all_reduce bf16 x1024 avg [call 2]"),
                                    HasSubstr("all_reduce bf16 x1000 avg [call 2]"), HasSubstr("rank 0 "),
                                    HasSubstr("rank 1 ")));
  }
}

// If a transport has only messages, different calls never exchange messages: then the rank for which others
// wait is named.
TEST_P(Hostile, ASkippedCallIsNamed) {
  Job job(GetParam(), 3, "skips");
  expect_all_end_well(job);
  for (int r = 0; r < 3; ++r) {
    ASSERT_FALSE(job.of(r).empty()) << job.all();
    if (GetParam().name == "composed") {
      EXPECT_THAT(job.of(r)[0], HasSubstr("not finished within 1 s: rank"));
      continue;
    }
    EXPECT_THAT(job.of(r)[0], AllOf(StartsWith("mismatch "),
                                    ContainsRegex("rank 1 (called )?all_gather f32 x4 \\[call 1\\]"),
                                    ContainsRegex("rank [02] (called )?all_reduce f32 x4 sum \\[call 1\\]")));
  }
}

TEST_P(Hostile, ASkippedLastCallIsNamed) {
  Job job(GetParam(), 3, "skips the last");
  expect_all_end_well(job);
  for (const int r : {0, 2}) {
    ASSERT_FALSE(job.of(r).empty()) << job.all();
    EXPECT_THAT(
        job.of(r)[0],
        AllOf(
            StartsWith("timeout 1 | op all_reduce, call 3 | all_reduce: not finished within 0.5 s: rank 1 "),
            AnyOf(HasSubstr("had not arrived"), HasSubstr("has not done its part (by messages)"))));
  }
}

// Every failing call reports op, call, rank and cause, in fields and in the text, for every cause and over
// every transport.
TEST_P(Hostile, EveryFailingCallLeavesOpRankAndCause) {
  struct Cause {
    const char *name, *code, *blamed, *op, *call;
    std::vector<const char*> words;
    std::initializer_list<int> told;  // the ranks whose call fails; the call of the others may fail
  };
  const Cause causes[] = {
      {"counts", "mismatch", "[012] [012]", "all_reduce", "1", {"rank 1 ", "all_reduce"}, {0, 1}},
      {"messages",
       "mismatch",
       "0 1",
       "recv",
       "0",
       {"rank 1 sent f32 x4 with tag 7, rank 0 receives f32 x3"},
       {0}},
      {"abort",
       "aborted",
       "1",
       "all_reduce",
       "(1|none)",
       {"all_reduce: aborted by rank 1: had enough"},
       {0, 1, 2}},
      {"drop",
       "aborted",
       "1",
       "all_reduce",
       "1",
       {"all_reduce: rank 1 dropped the Work of a call in flight"},
       {0, 1, 2}},
      {"leave", "peer_lost", "1", "all_reduce", "1", {"all_reduce: ", "rank 1 ", " left"}, {0, 2}},
      {"absent", "timeout", "1", "broadcast", "1", {"broadcast: not finished within 0.3 s: rank 1 "}, {0, 2}},
  };
  Job job(GetParam(), 3, "every cause");
  expect_all_end_well(job);
  for (int r = 0; r < 3; ++r) {
    const auto lines = job.of(r);
    for (const Cause& cause : causes) {
      const auto at = std::find(lines.begin(), lines.end(), cause.name);
      ASSERT_LT(at + 1, lines.end()) << job.all();
      const bool must = std::find(cause.told.begin(), cause.told.end(), r) != cause.told.end();
      if (!must && at[1] == "no error") continue;
      EXPECT_THAT(at[1],
                  ContainsRegex(fmt::format("^{} {} \\| op {}, call {} \\| .* \\[group \"{}\", rank {}",
                                            cause.code, cause.blamed, cause.op, cause.call, cause.name, r)))
          << job.all();
      for (const char* const word : cause.words) EXPECT_THAT(at[1], HasSubstr(word));
    }
  }
}

TEST_P(HostileToProcesses, ARankStoppedInTheMiddleIsNamedAndWritesNothingLater) {
  Job job(GetParam(), 3, "stopped in the middle");
  expect_all_end_well(job);
  for (const int r : {0, 2}) {
    const auto lines = job.of(r);
    ASSERT_EQ(lines.size(), 4u) << job.all();
    EXPECT_THAT(lines[0], StartsWith("timeout 1 | op all_reduce, call 1 | ")) << job.all();
    EXPECT_LT(job.number(r, "after"), 2.0 + 1.0);  // the deadline, a second, and one for a loaded machine
    EXPECT_EQ(lines[2], "quiesces true");
    EXPECT_EQ(lines[3], "untouched true");
  }
  ASSERT_FALSE(job.of(1).empty()) << job.all();
  EXPECT_THAT(job.of(1)[0], StartsWith("timeout 1 | op all_reduce, call 1 | "));
}

TEST_P(HostileToProcesses, ARankKilledInTheMiddleIsNamed) {
  Job job(GetParam(), 3, "killed in the middle");
  if (mpi()) {  // mpirun ends the job
    const auto end = job.ends()[0];
    ASSERT_TRUE(end.has_value()) << job.all();
    EXPECT_NE(*end, (ExitStatus{0, 0}));
    // MPICH's own transport aborts a survivor that was reading from the dead rank's memory; then Hydra
    // reports whichever of the two ended first.
    EXPECT_THAT(job.all(), AnyOf(HasSubstr("signal 9"), HasSubstr("EXIT CODE: 9"),
                                 ContainsRegex("process_vm_readv[^\n]*No such process")));
    return;
  }
  const auto ends = job.ends();
  for (const int r : {0, 2}) {
    EXPECT_EQ(ends[static_cast<std::size_t>(r)], (ExitStatus{0, 0})) << job.all();
    const auto lines = job.of(r);
    ASSERT_EQ(lines.size(), 3u) << job.all();
    EXPECT_THAT(lines[0], StartsWith("peer_lost 1 | op all_reduce, call 1 | all_reduce: "));
    EXPECT_LT(job.number(r, "after"), 3.0);  // a second, and what the call itself takes under load
    EXPECT_EQ(lines[2], "quiesces true");
  }
  EXPECT_EQ(ends[1], (ExitStatus{-1, SIGKILL}));
}

// Over every transport: all ranks continue after a failure; then they continue without a rank that calls too
// late and gets an error.
TEST_P(Hostile, SurvivorsGoOnInAGroupOfTheirOwn) {
  Job job(GetParam(), 3, "shrinks");
  expect_all_end_well(job);
  for (int r = 0; r < 3; ++r) {
    const auto lines = job.of(r);
    ASSERT_GE(lines.size(), 4u) << job.all();
    EXPECT_THAT(lines[0], StartsWith("aborted 1 | op all_reduce"));
    EXPECT_EQ(lines[2], fmt::format("goes on as rank {} of 3, once {}, the sum is 3", r, r));
    if (r != 1) {
      EXPECT_EQ(lines[3], fmt::format("goes on as rank {} of 2, once {}, the sum is 2", r / 2, r));
      continue;
    }
    ASSERT_GE(lines.size(), 6u) << job.all();
    EXPECT_THAT(lines[3], StartsWith("peer_lost 1 | op barrier, call "));
    EXPECT_THAT(lines[3], HasSubstr("barrier: shrink: the group continues as ranks 0, 2 without rank 1"));
    EXPECT_THAT(lines[5],
                StartsWith("peer_lost 1 | op none, call none | shrink: rank 1 is not in the new group"));
  }
}

// A rank is killed. mpirun ends the job, if it is not asked to leave it alone.
TEST_P(HostileToProcesses, SurvivorsOfADeathGoOn) {
  Kind kind = GetParam();
  if (kind.name == "mpi-openmpi") kind.mpirun += " --enable-recovery";
  if (kind.name == "mpi-mpich") GTEST_SKIP() << "Hydra ends the job";
  Job job(kind, 3, "killed, then shrinks");
  const auto ends = job.ends();
  ASSERT_TRUE(ends[0].has_value()) << "hangs; so far:\n" << job.all();
  for (const int r : {0, 2}) {
    const auto lines = job.of(r);
    ASSERT_EQ(lines.size(), 3u) << job.all();
    EXPECT_THAT(lines[0], StartsWith(mpi() ? "timeout 1 | " : "peer_lost 1 | "));
    EXPECT_EQ(lines[2], fmt::format("goes on as rank {} of 2, once {}, the sum is 2", r / 2, r));
  }
}

/// A job over what the test itself can start, with the ranks' limits.
class HostileToOurs : public Hostile {};
INSTANTIATE_TEST_SUITE_P(On, HostileToOurs, testing::Values(kinds()[0], kinds()[3]), name_of);

// Rank 1 names the refused resource, with the limit; rank 0 gets the error that rank 1 did not come. Once the
// resource is available, all works again.
void expect_the_limit_named(const Job& job, const std::string& limit) {
  const auto of_0 = job.of(0), of_1 = job.of(1);
  ASSERT_GE(of_1.size(), 3u) << job.all();
  ASSERT_EQ(of_0.back(), "works afterwards") << job.all();
  ASSERT_EQ(of_1.back(), "works afterwards") << job.all();
  int refused = 0;
  for (const std::string& line : of_1) {
    if (line.find(": made") != std::string::npos || line == "works afterwards" ||
        line.find("keeps") != std::string::npos || line.find(": timeout | ") != std::string::npos)
      continue;  // on a loaded machine a peer may come too late, too
    EXPECT_THAT(line, AllOf(AnyOf(HasSubstr(": system | "), HasSubstr(": unsupported | ")), HasSubstr(limit),
                            AnyOf(HasSubstr("group \"with"), HasSubstr("cannot be loaded"))));
    ++refused;
  }
  EXPECT_GE(refused, 1) << job.all();
  for (const std::string& line : of_0)
    EXPECT_THAT(line, AnyOf(HasSubstr(": made"), HasSubstr("works afterwards"), HasSubstr(": timeout | "),
                            HasSubstr(": peer_lost | "), HasSubstr(": system | ")))
        << job.all();
}

// An error in a thread of Gloo's own is thrown there, which ends the process: nobody can catch it.
bool ended_by_gloo(Job& job) {
  job.ends();
  return job.all().find("terminate called after throwing an instance of 'gloo::") != std::string::npos;
}
constexpr const char* kEndedByGloo = "Gloo met the limit in a thread of its own, which ended the process";

TEST_P(HostileToOurs, FewDescriptorsAreToldWithTheLimit) {
  Job job(GetParam(), 2, "few descriptors");
  if (GetParam().name == "gloo" && ended_by_gloo(job)) GTEST_SKIP() << kEndedByGloo;
  expect_all_end_well(job);
  expect_the_limit_named(job, "Too many open files (ulimit -n is 256)");
  if (GetParam().name == "shm") {
    EXPECT_THAT(job.all(), Not(HasSubstr("keeps")));
  }
}

TEST_P(HostileToOurs, LittleMemoryIsToldWithTheLimit) {
  Job job(GetParam(), 2, "little memory");
  if (GetParam().name == "gloo" && ended_by_gloo(job)) GTEST_SKIP() << kEndedByGloo;
  expect_all_end_well(job);
  expect_the_limit_named(job, "(ulimit -v is ");
}

// If a peer's new memory cannot be mapped it is copied instead.
TEST_P(HostileToOurs, WithoutAnyMoreOfAnythingCallsGoOn) {
  Job job(GetParam(), 2, "no more of anything");
  expect_all_end_well(job);
  for (int r = 0; r < 2; ++r)
    EXPECT_THAT(job.of(r), testing::ElementsAre("no error", "no error", "no error", "sum 2")) << job.all();
}

TEST_P(HostileToProcesses, AForkedChildIsToldSoAndItsParentGoesOn) {
  Job job(GetParam(), 2, "forks");
  expect_all_end_well(job);
  const auto lines = job.of(0);
  ASSERT_EQ(lines.size(), 8u) << job.all();
  for (const int i : {0, 2, 4})
    EXPECT_THAT(lines[static_cast<std::size_t>(i)],
                AllOf(StartsWith("unsupported | "), HasSubstr("this process was forked from process "),
                      HasSubstr("make a new Context in the child, or fork before the first one")));
  EXPECT_EQ(lines[6], "child 0");
  EXPECT_EQ(lines[7], "sum 2");
  EXPECT_THAT(job.of(1), testing::ElementsAre("sum 2"));
}

// 10 200 groups over shm, hundreds elsewhere.
TEST_P(Hostile, ManyGroupsLeaveNothing) {
  const std::string& name = GetParam().name;
  const int times = name == "shm" ? 3400 : name == "threads" ? 1000 : name == "gloo" ? 60 : 100;
  Job job(GetParam(), 2, "many groups", {}, "", std::to_string(times));
  expect_all_end_well(job, 120s);  // 17 s on two cores with nothing else to do
  for (int r = 0; r < 2; ++r) {
    EXPECT_LE(job.number(r, "descriptors"), 0) << job.all();
    EXPECT_LE(job.number(r, "threads"), 0) << job.all();
    ASSERT_EQ(job.of(r).size(), 4u) << job.all();
    EXPECT_LE(job.number(r, "mappings"), 8) << job.all();  // of the allocator
    EXPECT_LE(job.number(r, "KiB"), 8 << 10) << job.all();
  }
}

bool small_dev_shm() {
  return ::unshare(CLONE_NEWNS) == 0 && ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         ::mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=64m") == 0;
}

TEST_P(HostileToProcesses, ASmallDevShmDoesNotMatter) {
  if (!run_in_child([] { return small_dev_shm() ? 0 : 1; }).ok())
    GTEST_SKIP() << "mount namespaces are not permitted";
  Job job(GetParam(), 2, "large", [] {
    if (!small_dev_shm()) ::_exit(98);
  });
  expect_all_end_well(job);
  for (int r = 0; r < 2; ++r) EXPECT_THAT(job.of(r), testing::ElementsAre("no error", "sum 2")) << job.all();
}

// All at the same time, since it takes long.
TEST(HostileWaits, ALongWaitCostsAtMostFivePercentOfACore) {
  std::vector<std::pair<Kind, std::unique_ptr<Job>>> jobs;
  for (const Kind& kind : kinds())
    if (kind.there) jobs.emplace_back(kind, std::make_unique<Job>(kind, 2, "waits"));
  for (auto& [kind, job] : jobs) {
    for (const auto& end : job->ends()) EXPECT_EQ(end, (ExitStatus{0, 0})) << kind.name << "\n" << job->all();
    const double cpu = job->number(0, "cpu");
    EXPECT_GE(cpu, 0) << job->all();
    EXPECT_LE(cpu, 0.05) << kind.name;
    std::printf("%s: %.2f %% of a core\n", kind.name.c_str(), cpu * 100);
  }
}

}  // namespace
}  // namespace weft::test::hostile_test
