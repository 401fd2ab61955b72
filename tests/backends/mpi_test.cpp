// Failures over MPI, and programs that also use MPI themselves: jobs under a real mpirun, whose output is
// read.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "base/text/plain_streams.hpp"

namespace weft::test::mpi_test {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::MatchesRegex;
using testing::Not;
using testing::StartsWith;

// One of the two MPIs, and the program that starts its jobs. Empty: not built here.
struct Mpi {
  const char *name, *library, *mpirun, *program, *other;
};
constexpr Mpi kMpis[] = {
    {"mpi-openmpi", "Open MPI", "mpirun.openmpi --oversubscribe --allow-run-as-root",
     WEFT_MPI_PROGRAM_OPENMPI, "mpi-mpich"},
    {"mpi-mpich", "MPICH", "mpirun.mpich", WEFT_MPI_PROGRAM_MPICH, "mpi-openmpi"},
};

struct Outcome {
  int status = -1;
  std::string all;
  std::vector<std::string> of(int rank) const {
    std::vector<std::string> lines;
    TextIn stream(all);
    const std::string lead = fmt::format("rank {}: ", rank);
    for (std::string line; std::getline(stream, line);)
      if (line.starts_with(lead)) lines.push_back(line.substr(lead.size()));
    return lines;
  }
};

Outcome run(const std::string& command) {
  Outcome o;
  std::FILE* const pipe = ::popen(
      fmt::format("OMPI_MCA_mpi_yield_when_idle=1 timeout -k 5 60 {} 2>&1 </dev/null", command).c_str(), "r");
  char buffer[4096];
  for (std::size_t n = 0; (n = std::fread(buffer, 1, sizeof buffer, pipe)) > 0;) o.all.append(buffer, n);
  std::erase(o.all, '\r');
  const int status = ::pclose(pipe);
  o.status = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  return o;
}

// A port of the loopback interface that was free a moment ago.
int free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  ::bind(fd, reinterpret_cast<const sockaddr*>(&address), length);
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
  ::close(fd);
  return ntohs(address.sin_port);
}

class MpiFailures : public testing::TestWithParam<Mpi> {
 protected:
  void SetUp() override {
    if (*GetParam().program == '\0') GTEST_SKIP() << GetParam().library << " is not installed";
  }
  static Outcome job(const std::string& what, int ranks = 2, const std::string& flags = "") {
    return run(fmt::format("{} {} -n {} {} {} '{}'", GetParam().mpirun, flags, ranks, WEFT_FAILING_RANKS,
                           GetParam().name, what));
  }
  static Outcome program(const std::string& what, const char* backend, bool alone = false) {
    return alone ? run(fmt::format("{} {} {}", GetParam().program, what, backend))
                 : run(fmt::format("{} -n 2 {} {} {}", GetParam().mpirun, GetParam().program, what, backend));
  }
};
INSTANTIATE_TEST_SUITE_P(Each, MpiFailures, testing::ValuesIn(kMpis),
                         [](const auto& mpi) { return std::string(mpi.param.name).substr(4); });

TEST_P(MpiFailures, RanksThatCallDifferentThingsAreNamedOnAll) {
  const Outcome o = job("mismatch", 3);
  for (int r = 0; r < 3; ++r) {
    const auto lines = o.of(r);
    ASSERT_EQ(lines.size(), 4u) << o.all;
    EXPECT_THAT(lines[0], AllOf(HasSubstr("mismatch"), HasSubstr("all_gather f32 x4 [call 0]"),
                                HasSubstr("all_reduce f32 x4 sum [call 0]")));
    EXPECT_EQ(lines[1], "quiesced true");
    EXPECT_EQ(lines[2], lines[0]);
  }
}

// It is reported by the call, if the other rank's envelope has arrived already, or by the warning.
TEST_P(MpiFailures, TwoRootsOfTheLastCallAreTold) {
  const Outcome o = job("two roots");
  for (int r = 0; r < 2; ++r) {
    ASSERT_FALSE(o.of(r).empty()) << o.all;
    if (o.of(r)[0] == "no error") {
      EXPECT_THAT(o.all,
                  HasSubstr(fmt::format(
                      "weft warning: [backends] mismatch, found when the group was left: rank {0} called "
                      "broadcast f32 x4 root {0} [call 0], rank {1} broadcast f32 x4 root {1} "
                      "[call 0] [group \"world\", rank {1}]",
                      1 - r, r)));
    } else {
      EXPECT_THAT(o.of(r)[0],
                  AllOf(HasSubstr("mismatch 0 1: "), HasSubstr("broadcast f32 x4 root 0 [call 0]"),
                        HasSubstr("broadcast f32 x4 root 1 [call 0]")));
    }
  }
}

TEST_P(MpiFailures, ACallThatARankLeftOutIsTold) {
  const Outcome o = job("left out");
  EXPECT_THAT(
      o.all,
      HasSubstr(
          "weft warning: [backends] mismatch, found when the group was left: rank 0 called "
          "broadcast f32 x4 root 0 [call 1], rank 1 left the group without it [group \"world\", rank 1]"));
}

TEST_P(MpiFailures, TheRankAtTheEndOfAChainIsNamed) {
  const Outcome o = job("chain", 4);
  for (const int r : {0, 1, 3}) {
    ASSERT_FALSE(o.of(r).empty()) << o.all;
    EXPECT_THAT(o.of(r)[0],
                HasSubstr("timeout 2: recv: not finished within 0.5 s: rank 0 has not sent it (tag "
                          "0); rank 0 waits, too; rank 2 does not answer"));
  }
}

TEST_P(MpiFailures, WhoWaitsInTheMakingOfAGroupIsNotNamed) {
  const Outcome o = job("makes a group", 4);
  for (const int r : {0, 3}) {
    ASSERT_FALSE(o.of(r).empty()) << o.all;
    EXPECT_THAT(o.of(r)[0],
                StartsWith("timeout 2: all_reduce: not finished within 0.5 s: rank 2 had not arrived; "));
    EXPECT_THAT(o.of(r)[0], HasSubstr("; rank 1 waits, too"));
  }
}

TEST_P(MpiFailures, AReceiveThatDoesNotFitIsAMismatchAndNoCrash) {
  const Outcome o = job("message");
  ASSERT_EQ(o.of(0).size(), 2u) << o.all;
  EXPECT_EQ(o.of(0)[0],
            "mismatch 0 1: rank 1 sent f32 x4 with tag 7, rank 0 receives f32 x3 [group \"world\", rank 0, "
            "call 0]");
}

TEST_P(MpiFailures, TooManyUnexpectedMessagesFailTheGroup) {
  const Outcome o = job("unexpected");
  for (int r = 0; r < 2; ++r) {
    ASSERT_FALSE(o.of(r).empty()) << o.all;
    EXPECT_THAT(
        o.of(r)[0],
        AllOf(HasSubstr("system 0 1: "),
              HasSubstr("rank 0 has no room for a message of 16 bytes with tag 100 from rank 1: it holds "
                        "100 messages of 1600 bytes that it has not received yet, and "
                        "WEFT_UNEXPECTED_MESSAGES is 100 [")));
  }
}

TEST_P(MpiFailures, AnAbortReachesWhoWaits) {
  const Outcome o = job("abort");
  for (int r = 0; r < 2; ++r) {
    ASSERT_FALSE(o.of(r).empty()) << o.all;
    EXPECT_THAT(o.of(r)[0], HasSubstr("aborted 1: all_reduce: aborted by rank 1: had enough"));
  }
}

TEST_P(MpiFailures, AnAbortReachesWhoComesLaterThoughItsRankCallsMpiNoMore) {
  const Outcome o = job("abort behind messages");
  ASSERT_FALSE(o.of(0).empty()) << o.all;
  EXPECT_THAT(o.of(0)[0], HasSubstr("aborted 1: all_reduce: aborted by rank 1: had enough"));
}

TEST_P(MpiFailures, AnAbsentRankIsNamedAndToldAfterwards) {
  const Outcome o = job("absent", 3);
  for (int r = 0; r < 3; ++r) {
    ASSERT_FALSE(o.of(r).empty()) << o.all;
    EXPECT_THAT(o.of(r)[0],
                HasSubstr("timeout 1: all_reduce: not finished within 2 s: rank 1 had not arrived"))
        << o.all;
  }
  for (const int r : {0, 2})  // reported before, too
    EXPECT_THAT(o.all,
                testing::ContainsRegex(fmt::format(
                    "weft warning: .group. all_reduce f32 x4 sum: not finished after 0.2 s, a tenth of its "
                    "deadline: ranks? .*1.* had not arrived.*group \"world\", rank {}, call 0",
                    r)));
}

TEST_P(MpiFailures, AStoppedRankIsNamedAndWritesNothingLater) {
  const Outcome o = job("stopped");
  const auto lines = o.of(0);
  ASSERT_EQ(lines.size(), 4u) << o.all;
  EXPECT_THAT(lines[0],
              HasSubstr("timeout 1: all_reduce: not finished within 0.5 s: rank 1 had not arrived"));
  EXPECT_EQ(lines[1], "quiesced true");
  EXPECT_EQ(lines[2], "quiesces true");
  EXPECT_EQ(lines[3], "out is 7");
  ASSERT_FALSE(o.of(1).empty()) << o.all;
  EXPECT_THAT(o.of(1)[0], HasSubstr("timeout 1: all_reduce"));
}

TEST_P(MpiFailures, ARankThatNeverComesIsNamed) {
  const Outcome o = job("never comes");
  ASSERT_FALSE(o.of(0).empty()) << o.all;
  EXPECT_THAT(o.of(0)[0],
              MatchesRegex("timeout 1: group \"world\": rank 1 did not join within [0-9.]+ s .*"));
}

TEST_P(MpiFailures, ARankThatLeavesIsLost) {
  const Outcome o = job("leaves");
  ASSERT_FALSE(o.of(0).empty()) << o.all;
  EXPECT_THAT(o.of(0)[0], HasSubstr("peer_lost 1: all_reduce: rank 1 left the group without it"));
}

// mpirun ends the job at once, with an error; a survivor prints nothing, or that it timed out.
TEST_P(MpiFailures, AKilledRankEndsTheJob) {
  const Outcome o = job("killed");
  EXPECT_NE(o.status, 0) << o.all;
  EXPECT_NE(o.status, 124) << o.all;  // timeout(1)'s
  EXPECT_THAT(o.of(0), IsEmpty()) << o.all;
  EXPECT_THAT(o.all, AnyOf(HasSubstr("signal 9"), HasSubstr("EXIT CODE: 9"))) << o.all;
}

TEST_P(MpiFailures, RanksThatNoMpirunStartedTogetherAreRefused) {
  const std::string start = fmt::format("{} {} mismatch", WEFT_FAILING_RANKS, GetParam().name);
  const Outcome o = run(
      fmt::format("env WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={} sh -c 'RANK=0 {} & RANK=1 {}; wait'",
                  free_port(), start, start));
  for (int r = 0; r < 2; ++r) {
    ASSERT_FALSE(o.of(r).empty()) << o.all;
    EXPECT_THAT(o.of(r)[0], HasSubstr(fmt::format(
                                "unsupported: group \"world\": ranks 0 and 1 are both process 0 of an "
                                "MPI_COMM_WORLD of 1; over {}, ranks are processes that one mpirun of {} "
                                "has started",
                                GetParam().name, GetParam().library)));
  }
}

TEST_P(MpiFailures, JoinsAnMpiThatIsInitialised) {
  const Outcome o = program("join", GetParam().name);
  EXPECT_EQ(o.status, 0) << o.all;
  for (int r = 0; r < 2; ++r)
    EXPECT_THAT(o.of(r), testing::ElementsAre("sum 3", "world 1, fatal true")) << o.all;
}

TEST_P(MpiFailures, AnMpiForOneThreadIsNotCalledFromAnother) {
  const Outcome o = program("single", GetParam().name);
  for (int r = 0; r < 2; ++r) {
    ASSERT_EQ(o.of(r).size(), 3u) << o.all;
    EXPECT_THAT(o.of(r)[1],
                HasSubstr("unsupported: the program initialised MPI for one thread, and this is another"));
  }
}

TEST_P(MpiFailures, AProgramOfOneMpiIsRefusedTheOther) {
  const Mpi& other = kMpis[GetParam().name == std::string("mpi-mpich") ? 0 : 1];
  if (*other.program == '\0') GTEST_SKIP() << other.library << " is not installed";
  const Outcome o = program("other", other.name, true);
  EXPECT_EQ(o.status, 0) << o.all;
  ASSERT_EQ(o.of(0).size(), 2u) << o.all;
  for (const std::string& line : o.of(0)) {
    EXPECT_THAT(line, HasSubstr(fmt::format("cannot be used here: the program already carries {} (",
                                            GetParam().library)));
    EXPECT_THAT(line, HasSubstr(fmt::format("{} needs {}, and a process can have one MPI only", other.name,
                                            other.library)));
  }
}

}  // namespace
}  // namespace weft::test::mpi_test
