// Drives the built `weft run` with small shell programs: its output, its end, and that it leaves nothing
// behind.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/text/plain_streams.hpp"
#include "support/processes.hpp"
#include "support/sanitizers.hpp"
#include "support/temporary_folder.hpp"
#include "support/terminal.hpp"
#include "weft/weft.h"

namespace weft::test::run_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::MatchesRegex;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

constexpr ExitStatus kSuccess{.code = 0};
ExitStatus code(int c) { return {.code = c}; }

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  TextIn stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

bool eventually(const std::function<bool()>& holds) {
  for (const Deadline deadline = Deadline::after(seconds(15)); !deadline.passed();) {
    if (holds()) return true;
    std::this_thread::sleep_for(milliseconds(5));
  }
  return holds();
}

class RunTest : public ::testing::Test {
 protected:
  void TearDown() override {
    EXPECT_TRUE(eventually([&] { return left_behind().empty(); })) << "processes stay";
  }

  /// Starts `weft run` with these words. Its processes, and theirs, carry a mark in their environment.
  ChildProcess start(std::vector<std::string> words, const std::function<void()>& prepare = {}) {
    return ChildProcess::fork([&] {
      const auto open_as = [&](const char* name, int flags, int fd) {
        return ::dup2(::open((folder_ / name).c_str(), flags, 0600), fd) == fd;
      };
      if (!std::filesystem::exists(folder_ / "in")) std::ofstream(folder_ / "in").flush();
      if (!open_as("in", O_RDONLY, 0) || !open_as("out", O_WRONLY | O_CREAT | O_APPEND, 1) ||
          !open_as("err", O_WRONLY | O_CREAT | O_APPEND, 2)) {
        return 99;
      }
      for (const int number : {SIGINT, SIGQUIT, SIGHUP, SIGPIPE}) ::signal(number, SIG_DFL);
      ::setenv("WEFT_TEST_MARK", folder_.path().c_str(), 1);
      ::setenv("WEFT_RANK", "of another job", 1);
      if (prepare) prepare();
      words.insert(words.begin(), {WEFT_COMMAND, "run"});
      std::vector<char*> argv;
      for (auto& word : words) argv.push_back(word.data());
      argv.push_back(nullptr);
      ::execv(argv[0], argv.data());
      return 99;
    });
  }

  ChildProcess start_shell(int ranks, const std::string& script) {
    return start({"-n", std::to_string(ranks), "--", "sh", "-c", script});
  }

  /// Runs to the end.
  ExitStatus run(std::vector<std::string> words) {
    ChildProcess process = start(std::move(words));
    return process.wait(seconds(20)).value_or(ExitStatus{});
  }
  ExitStatus run_shell(int ranks, const std::string& script) {
    return run({"-n", std::to_string(ranks), "--", "sh", "-c", script});
  }

  std::string out() { return contents(folder_ / "out"); }
  std::string err() { return contents(folder_ / "err"); }
  std::vector<std::string> out_lines() { return lines_of(out()); }

  /// The text of the launcher about ranks that never came.
  std::vector<std::string> early_lines() {
    std::vector<std::string> lines;
    for (const auto& line : lines_of(err()))
      if (line.find("ended before it joined") != std::string::npos) lines.push_back(line);
    return lines;
  }

  /// The number that rank `rank` printed after `word`, once it has.
  int printed_number(int rank, const std::string& word) {
    const std::string start_of_line = fmt::format("[{}] {} ", rank, word);
    int number = 0;
    EXPECT_TRUE(eventually([&] {
      for (const auto& line : out_lines()) {
        if (line.starts_with(start_of_line)) number = std::atoi(line.c_str() + start_of_line.size());
      }
      return number != 0;
    })) << "no line starts with: "
        << start_of_line;
    return number;
  }

  /// The processes that carry our mark.
  std::vector<int> left_behind() {
    const std::string mark = "WEFT_TEST_MARK=" + folder_.path().string();
    std::vector<int> pids;
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator("/proc", ignored)) {
      const int pid = std::atoi(entry.path().filename().c_str());
      if (pid > 0 && contents(entry.path() / "environ").find(mark) != std::string::npos) pids.push_back(pid);
    }
    return pids;
  }

  TemporaryFolder folder_;
};

// ---- output ----

TEST_F(RunTest, LinesCarryTheirRankAndTheirStream) {
  EXPECT_EQ(run_shell(3, "echo out $WEFT_RANK; echo err $WEFT_RANK >&2"), kSuccess);
  EXPECT_THAT(out_lines(), UnorderedElementsAre("[0] out 0", "[1] out 1", "[2] out 2"));
  EXPECT_THAT(lines_of(err()), UnorderedElementsAre("[0] err 0", "[1] err 1", "[2] err 2"));
}

TEST_F(RunTest, ALastLineWithoutLineFeedIsWhole) {
  EXPECT_EQ(run_shell(2, "printf 'a\\n\\npartial'"), kSuccess);
  EXPECT_THAT(out_lines(),
              UnorderedElementsAre("[0] a", "[0] ", "[0] partial", "[1] a", "[1] ", "[1] partial"));
}

TEST_F(RunTest, PiecesOfALineAreOneLine) {
  EXPECT_EQ(run_shell(2, "printf 'one '; sleep 0.2; printf 'two '; sleep 0.2; echo three"), kSuccess);
  EXPECT_THAT(out_lines(), UnorderedElementsAre("[0] one two three", "[1] one two three"));
}

TEST_F(RunTest, TagsCanBeLeftOut) {
  EXPECT_EQ(run({"-n", "2", "--no-tag-output", "--", "echo", "plain"}), kSuccess);
  EXPECT_EQ(out(), "plain\nplain\n");
}

TEST_F(RunTest, MuchOutputStaysWhole) {
  EXPECT_EQ(run_shell(3, "seq 1 40000"), kSuccess);
  std::vector<int> next(3, 1);
  for (const auto& line : out_lines()) {
    int rank = -1;
    int number = 0;
    ASSERT_EQ(std::sscanf(line.c_str(), "[%d] %d", &rank, &number), 2) << line;
    ASSERT_EQ(number, next.at(rank)++);
  }
  EXPECT_THAT(next, ::testing::Each(40001));
}

// Without tags the output of a rank is passed on unchanged.
TEST_F(RunTest, ALongLineStaysOneLine) {
  const std::string print = "head -c 300000 /dev/zero | tr '\\0' x", line(300'000, 'x');
  EXPECT_EQ(run({"-n", "1", "--no-tag-output", "--", "sh", "-c", print}), kSuccess);
  EXPECT_EQ(out(), line);
  std::filesystem::remove(folder_ / "out");
  EXPECT_EQ(run_shell(2, print + "; echo; echo next"), kSuccess);
  EXPECT_THAT(out_lines(), UnorderedElementsAre("[0] " + line, "[0] next", "[1] " + line, "[1] next"));
  std::filesystem::remove(folder_ / "out");
  EXPECT_EQ(run({"-n", "2", "--no-tag-output", "--", "sh", "-c", "printf half"}), kSuccess);
  EXPECT_EQ(out(), "half\nhalf");
}

// A line of more than 4 MiB is not kept until it ends. Nothing is put into it, unless another rank's line
// comes meanwhile.
TEST_F(RunTest, AVeryLongLineLeavesInParts) {
  constexpr std::size_t kBytes = 5'000'000;
  const std::string print = fmt::format("head -c {} /dev/zero | tr '\\0' x", kBytes);
  EXPECT_EQ(run({"-n", "1", "--no-tag-output", "--", "sh", "-c", print}), kSuccess);
  EXPECT_TRUE(out() == std::string(kBytes, 'x'));
  std::filesystem::remove(folder_ / "out");
  EXPECT_EQ(
      run_shell(
          2,
          fmt::format(
              "cd '{}'; if [ $WEFT_RANK = 0 ]; then {}; while [ ! -e said ]; do sleep 0.02; done; echo end; "
              "else while [ ! -s out ]; do sleep 0.02; done; echo between; touch said; fi",
              folder_.path().string(), print)),
      kSuccess);
  std::string text = out();
  EXPECT_EQ(std::count(text.begin(), text.end(), 'x'), kBytes);
  text.erase(std::remove(text.begin(), text.end(), 'x'), text.end());
  EXPECT_EQ(text, "[0] \n[1] between\n[0] end\n");
}

TEST_F(RunTest, CarriageReturnsPassThroughToFiles) {
  EXPECT_EQ(run_shell(1, "printf '10%%\\r20%%\\rdone\\n'"), kSuccess);
  EXPECT_EQ(out(), "[0] 10%\r20%\rdone\n");
}

// A reader that leaves, as `head` does, costs its output and not the job.
TEST_F(RunTest, AReaderThatLeavesDoesNotEndTheJob) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  ChildProcess process = start({"-n", "2", "--", "sh", "-c", "seq 1 100000; echo end of $WEFT_RANK >&2"},
                               [&] { ::dup2(ends[1], STDOUT_FILENO), ::close(ends[0]), ::close(ends[1]); });
  ::close(ends[1]);
  char some[100];
  EXPECT_GT(::read(ends[0], some, sizeof some), 0);
  ::close(ends[0]);
  EXPECT_EQ(process.wait(seconds(20)), kSuccess);
  EXPECT_THAT(lines_of(err()), UnorderedElementsAre("[0] end of 0", "[1] end of 1"));
}

// A reader that stays but does not read delays neither signals nor the end of the job.
TEST_F(RunTest, AReaderThatDoesNotReadDoesNotKeepTheJobAlive) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  ChildProcess process = start({"-n", "2", "--", "sh", "-c", "echo pid $$ >&2; seq 1 10000000"},
                               [&] { ::dup2(ends[1], STDOUT_FILENO), ::close(ends[0]), ::close(ends[1]); });
  EXPECT_TRUE(eventually([&] { return lines_of(err()).size() == 2; }));
  std::this_thread::sleep_for(milliseconds(200));  // all queues are full by now, or soon
  process.kill(SIGKILL);
  EXPECT_TRUE(eventually([&] { return left_behind().empty(); }));
  ::close(ends[0]);
  ::close(ends[1]);
}

/// The output of `weft run` on a terminal with this script.
std::string on_a_terminal(const std::string& script) {
  const OnATerminal got =
      run_on_a_terminal({WEFT_COMMAND, "run", "-n", "2", "--", "sh", "-c", script}, 0, seconds(20));
  EXPECT_EQ(got.status, kSuccess);
  return got.text;
}

// Rank 0 draws a bar, once with the carriage return in front and once behind; rank 1 says a line meanwhile,
// and of its own bar only the last state is shown. The terminal itself makes \r\n of \n.
TEST_F(RunTest, ProgressBarsOfRankZeroMoveOnATerminal) {
  const std::string text = on_a_terminal(
      "if [ $WEFT_RANK = 0 ]; then printf '\\r10%%'; sleep 0.3; printf '\\r20%%'; sleep 1.2; printf "
      "'30%%\\r40%%\\ndone\\n';"
      "else sleep 0.8; printf 'a\\rb\\rhello\\n'; sleep 1; printf 'crlf\\r\\n'; echo $WEFT_TERMINAL; fi");
  EXPECT_EQ(text,
            "[0] 10%\x1b[K\r[0] 20%\x1b[K\r"
            "[1] hello\x1b[K\r\n"
            "[0] 20%30%\x1b[K\r[0] 40%\x1b[K\r\n[0] done\r\n"
            "[1] crlf\r\n[1] 1\r\n");
}

// Standard output is a full disk: reported, and in the exit status.
TEST_F(RunTest, OutputThatCannotBeWrittenIsTold) {
  const auto run_full = [&](int fd, const std::string& script) {
    return start({"-n", "2", "--", "sh", "-c", script}, [fd] { ::dup2(::open("/dev/full", O_WRONLY), fd); })
        .wait(seconds(20))
        .value_or(ExitStatus{});
  };
  EXPECT_EQ(run_full(1, "echo words; echo more >&2"), code(74));
  EXPECT_THAT(
      lines_of(err()),
      UnorderedElementsAre("[0] more", "[1] more",
                           "weft run: cannot write standard output: No space left on device; what the ranks "
                           "write there is lost from here on"));
  EXPECT_EQ(run_full(2, "echo words; echo more >&2"), code(74));
  EXPECT_EQ(run_full(1, "echo words"), code(74));
  EXPECT_EQ(run_full(1, "true"), kSuccess);
  EXPECT_EQ(run_full(1, "echo words; exit 3"), code(3));
}

// A file that may not grow (ulimit -f) is as a full disk; the ranks get the signal that tells of it, as
// without the launcher.
TEST_F(RunTest, OutputBeyondALimitOfFilesIsTold) {
  const auto limited = [&] {
    const rlimit limit = {.rlim_cur = 4096, .rlim_max = 4096};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    ::dup2(::open((folder_ / "limited").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600), 1);
  };
  const auto run_limited = [&](const std::string& script) {
    return start({"-n", "2", "--", "sh", "-c", script}, limited).wait(seconds(20)).value_or(ExitStatus{});
  };
  EXPECT_EQ(run_limited("seq 1 2000; echo the end >&2"), code(74));
  EXPECT_THAT(err(), HasSubstr("weft run: cannot write standard output: File too large"));
  EXPECT_THAT(err(), ::testing::AllOf(HasSubstr("[0] the end"), HasSubstr("[1] the end")));
  EXPECT_EQ(run_limited("seq 1 2000 >'" + (folder_ / "own").string() + "'$WEFT_RANK; exit $?"),
            code(128 + SIGXFSZ));
}

TEST_F(RunTest, OtherSubCommandsSayThatOutputIsLost) {
  const std::string command =
      fmt::format("'{}' --help >/dev/full 2>'{}'", WEFT_COMMAND, (folder_ / "err").string());
  const int status = std::system(command.c_str());
  EXPECT_EQ(WEXITSTATUS(status), 1);
  EXPECT_THAT(err(), ::testing::StartsWith("weft: cannot write standard output: "));
}

TEST_F(RunTest, WeftSaysItsVersionAndWhatACommandThatItDoesNotHaveMayMean) {
  const auto weft = [&](const std::string& words) {
    const int status = std::system(fmt::format("'{}' {} >'{}' 2>'{}'", WEFT_COMMAND, words,
                                               (folder_ / "out").string(), (folder_ / "err").string())
                                       .c_str());
    return WEXITSTATUS(status);
  };
  EXPECT_EQ(weft("--version"), 0);
  EXPECT_EQ(out(), "weft " WEFT_VERSION "\n");
  EXPECT_EQ(weft("version"), 0);
  EXPECT_EQ(out(), "weft " WEFT_VERSION "\n");
  EXPECT_EQ(weft("help"), 0);
  EXPECT_THAT(out(), HasSubstr("weft: programs of many ranks"));
  EXPECT_EQ(weft("help doctor"), 0);
  EXPECT_THAT(out(), HasSubstr("What this machine has"));
  EXPECT_EQ(weft("help frob"), 2);
  EXPECT_THAT(err(), HasSubstr("unknown command \"frob\""));
  EXPECT_EQ(weft("rum -n 2 ./a"), 2);
  EXPECT_THAT(err(),
              ::testing::StartsWith("weft: unknown command \"rum\"; is run meant? The commands are run, "));
  EXPECT_EQ(weft("be"), 2);
  EXPECT_THAT(err(), HasSubstr("unknown command \"be\"; is bench meant?"));
  EXPECT_EQ(weft("nonsense"), 2);
  EXPECT_THAT(err(), ::testing::StartsWith("weft: unknown command \"nonsense\"; the commands are run, "));
  EXPECT_THAT(err(), HasSubstr("doctor"));
  EXPECT_EQ(weft("doctor foo"), 2);
  EXPECT_THAT(err(), HasSubstr("unknown command \"doctor foo\"; the commands are trace"));
  EXPECT_EQ(weft("doctor --tablez"), 2);
  EXPECT_THAT(err(), HasSubstr("doctor has no option \"--tablez\"; is --tables meant?"));
  EXPECT_EQ(weft("check --no-threads --no-processes"), 2);
  EXPECT_THAT(err(), HasSubstr("ranks must be one or the other"));
  EXPECT_EQ(weft("run --help"), 0);
  EXPECT_THAT(out(), HasSubstr("weft run -n RANKS [OPTIONS] PROGRAM [ITS OWN WORDS]"));
}

// The command line speaks as weft does, and its help fits a terminal.
TEST_F(RunTest, ErrorsOfTheCommandLineAndHelpAreInWeftsWords) {
  const auto weft = [&](const std::string& words) {
    const int status = std::system(fmt::format("'{}' {} >'{}' 2>'{}'", WEFT_COMMAND, words,
                                               (folder_ / "out").string(), (folder_ / "err").string())
                                       .c_str());
    return WEXITSTATUS(status);
  };
  const auto refused = [&](const std::string& words, const std::string& text) {
    EXPECT_EQ(weft(words), 2) << words;
    EXPECT_THAT(err(), ::testing::StartsWith("weft: " + text + "\nweft: see weft ")) << words;
    EXPECT_EQ(out(), "") << words;
  };
  EXPECT_EQ(weft(""), 2);
  EXPECT_THAT(err(), ::testing::StartsWith("weft: no command; the commands are run, "));
  EXPECT_THAT(err(), ::testing::EndsWith("\nweft: see weft --help\n"));
  EXPECT_EQ(weft("checkpoint"), 2);
  EXPECT_THAT(err(), ::testing::StartsWith("weft: checkpoint: no command; the commands are "));
  refused("run -n", "run: --ranks has no value; expected one");
  refused("run -n x true", "run: --ranks is x; expected 1 to 256");
  refused("run -n 010 true",
          "run: --ranks is 010; expected a decimal number without leading zeros, from "
          "-9223372036854775808 to 9223372036854775807");
  refused("doctor -- x", "doctor: -- is not expected");
  refused("bench all_reduce --rounds x",
          "bench: --rounds is x; expected a decimal number without leading "
          "zeros, from -9223372036854775808 to 9223372036854775807");
  refused("bench all_reduce --seconds x", "bench: --seconds is x; expected a number");
  refused("check --jobs 65", "check: --jobs is 65; expected 1 to 64");
  refused("check --program /no/such", "check: --program is /no/such, which is not there");
  refused("check --program /", "check: --program is /, a folder; expected a file");
  for (const char* words : {"--help", "run --help", "doctor --help", "check --help", "bench --help",
                            "checkpoint --help", "train --help", "parity --help"}) {
    if (weft(words) == 2) continue;  // this build has no such command
    for (const std::string& line : lines_of(out())) EXPECT_LE(line.size(), 80u) << words << ": " << line;
    EXPECT_THAT(out(), ::testing::Not(HasSubstr("REQUIRED"))) << words;
    EXPECT_THAT(out(), ::testing::Not(HasSubstr("TEXT:"))) << words;
    EXPECT_THAT(out(), ::testing::Not(HasSubstr(" INT"))) << words;
  }
  EXPECT_EQ(weft("run --help"), 0);
  EXPECT_THAT(out(),
              HasSubstr("  -n,--ranks N            How many ranks; required without --elastic (1 to 256)\n"));
  EXPECT_THAT(out(), HasSubstr("  --bind none|cores       cores: each rank runs"));
}

// A reader that does not read slows the ranks down; the launcher buffers only a limited part of their output.
TEST_F(RunTest, RanksThatWriteFasterThanTheReaderAreSlowed) {
  if (!test::kPlainMemory) GTEST_SKIP() << test::kNoPlainMemory;
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  // Short lines, tagged, take six times what the rank wrote.
  ChildProcess process = start({"-n", "64", "--", "yes", ""},
                               [&] { ::dup2(ends[1], STDOUT_FILENO), ::close(ends[0]), ::close(ends[1]); });
  ::close(ends[1]);
  const auto supervisor = [&] {
    return std::atoi(contents(fmt::format("/proc/{0}/task/{0}/children", process.pid())).c_str());
  };
  EXPECT_TRUE(eventually([&] { return supervisor() > 0; }));
  const auto memory_kib = [&](int pid) {
    const std::string status = contents(fmt::format("/proc/{}/status", pid));
    const std::size_t at = status.find("VmHWM:");
    return at == std::string::npos ? 0 : std::atoi(status.c_str() + at + 6);
  };
  std::set<std::string> ranks;  // who has been heard: each has its turn
  std::string text(64 * 1024, ' ');
  for (const Deadline limit = Deadline::after(seconds(20)); ranks.size() < 64 && !limit.passed();) {
    const ssize_t got = ::read(ends[0], text.data(), text.size());
    if (got <= 0) break;
    const std::string part = text.substr(0, static_cast<std::size_t>(got));
    for (std::size_t at = 0; (at = part.find("\n[", at)) != std::string::npos; ++at)
      if (const std::size_t end = part.find(']', at); end != std::string::npos)
        ranks.insert(part.substr(at, end - at));
  }
  EXPECT_EQ(ranks.size(), 64u);
  EXPECT_LT(memory_kib(supervisor()), 24 * 1024);
  process.kill(SIGKILL);
  EXPECT_TRUE(eventually([&] { return left_behind().empty(); }));
  ::close(ends[0]);
}

// ---- limits ----

TEST_F(RunTest, ASmallStackIsEnough) {
  if (!test::kPlainMemory) GTEST_SKIP() << test::kNoPlainMemory;
  const auto small = [](rlim_t bytes) {
    return [bytes] {
      const rlimit limit{bytes, bytes};
      ::setrlimit(RLIMIT_STACK, &limit);
    };
  };
  const auto run_small = [&](std::vector<std::string> words, rlim_t bytes) {
    return start(std::move(words), small(bytes)).wait(seconds(20)).value_or(ExitStatus{});
  };
  EXPECT_EQ(run_small({"-n", "2", "--", "sh", "-c", "seq 1 20000; echo end"}, 64 * 1024), kSuccess);
  EXPECT_EQ(out_lines().size(), 2u * 20001);
  EXPECT_EQ(run_small({"-n", "2", "--", WEFT_MEET}, 64 * 1024), kSuccess) << err();
  EXPECT_THAT(out(), HasSubstr("[1] rank 1 of 2: "));
}

TEST_F(RunTest, TheLimitThatKeptARankFromStartingIsNamed) {
  ChildProcess process = start({"-n", "8", "--", "sleep", "60"}, [] {
    const rlimit limit{16, 16};
    ::setrlimit(RLIMIT_NOFILE, &limit);
  });
  EXPECT_EQ(process.wait(seconds(20)), code(126));
  EXPECT_THAT(err(),
              ::testing::MatchesRegex(
                  "weft run: cannot start rank [0-9] of 8: pipe: Too many open files .ulimit -n is 16.\n"));
}

// The number of processes is limited for users other than root.
TEST_F(RunTest, TheLimitOfProcessesIsNamed) {
  if (::geteuid() != 0) GTEST_SKIP() << "a user without other processes is needed (needs root)";
  constexpr uid_t kNobodyElse = 54321;
  ChildProcess can = ChildProcess::fork([] {
    return ::setresuid(kNobodyElse, kNobodyElse, kNobodyElse) == 0 && ::access(WEFT_COMMAND, X_OK) == 0 ? 0
                                                                                                        : 1;
  });
  if (can.wait(seconds(10)) != kSuccess) GTEST_SKIP() << "other users may not run " << WEFT_COMMAND;
  ChildProcess process = start({"-n", "4", "--", "sleep", "60"}, [] {
    const rlimit limit{4, 4};
    ::setrlimit(RLIMIT_NPROC, &limit);
    [[maybe_unused]] const int changed = ::setresuid(kNobodyElse, kNobodyElse, kNobodyElse);
  });
  EXPECT_EQ(process.wait(seconds(20)), code(126));
  EXPECT_EQ(err(), "weft run: cannot start \"sleep\": Resource temporarily unavailable (ulimit -u is 4)\n");
}

// ---- environment ----

TEST_F(RunTest, RanksKnowTheirPlace) {
  EXPECT_EQ(run_shell(3, "echo $WEFT_RANK $WEFT_LOCAL_RANK $WEFT_WORLD_SIZE $WEFT_TERMINAL"), kSuccess);
  EXPECT_THAT(out_lines(), UnorderedElementsAre("[0] 0 0 3 0", "[1] 1 1 3 0", "[2] 2 2 3 0"));
}

TEST_F(RunTest, RanksMeetInTheLaunchersStore) {
  EXPECT_EQ(run({"-n", "3", "--", WEFT_MEET}), kSuccess) << err();
  EXPECT_THAT(out_lines(),
              UnorderedElementsAre("[0] rank 0 of 3: 33", "[1] rank 1 of 3: 33", "[2] rank 2 of 3: 33"));
}

TEST_F(RunTest, JobsHaveTokensOfTheirOwn) {
  EXPECT_EQ(run_shell(2, "echo $WEFT_JOB"), kSuccess);
  EXPECT_EQ(run_shell(1, "echo $WEFT_JOB"), kSuccess);
  const auto lines = out_lines();
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_EQ(lines[0].size(), 4u + 16u);
  EXPECT_EQ(lines[0].substr(4), lines[1].substr(4));
  EXPECT_NE(lines[0].substr(4), lines[2].substr(4));
}

TEST_F(RunTest, RankZeroReadsStandardInput) {
  std::ofstream(folder_ / "in") << "typed\n";
  EXPECT_EQ(run_shell(2, "cat; echo end"), kSuccess);
  EXPECT_THAT(out_lines(), UnorderedElementsAre("[0] typed", "[0] end", "[1] end"));
}

TEST_F(RunTest, ArgumentsReachTheProgramAsTheyAre) {
  EXPECT_EQ(run({"-n", "1", "--", "printf", "%s|", "-n", "5", "--", "--bind", "a b"}), kSuccess);
  EXPECT_EQ(out(), "[0] -n|5|--|--bind|a b|\n");
}

// The program is the first word that is no option and no option's value, and takes all that follows.
TEST_F(RunTest, DashesBeforeTheProgramMayBeLeftOut) {
  EXPECT_EQ(run({"-n", "1", "--bind", "cores", "printf", "%s|", "-n", "5", "--", "--bind", "-np", "a b"}),
            kSuccess);
  EXPECT_EQ(run({"-n", "1", "--timeout=100", "train"}), code(127));  // a program, not weft's command
  EXPECT_EQ(run({"-n", "1", "--no-tag-output", "printf", "%s|", "run", "-h"}), kSuccess);
  EXPECT_EQ(out(), "[0] -n|5|--|--bind|-np|a b|\nrun|-h|");
  EXPECT_EQ(err(), "weft run: cannot start \"train\": No such file or directory\n");
}

TEST_F(RunTest, TheNumberOfRanksIsTakenAsOtherLaunchersTakeIt) {
  EXPECT_EQ(run({"-np", "2", WEFT_MEET}), kSuccess) << err();
  EXPECT_EQ(run({"-n2", WEFT_MEET}), kSuccess) << err();
  EXPECT_EQ(run({"-np", "2", "--", WEFT_MEET}), kSuccess) << err();
  EXPECT_EQ(run({"--ranks=2", WEFT_MEET}), kSuccess) << err();
  EXPECT_EQ(out_lines().size(), 8u);
  EXPECT_THAT(out_lines(), ::testing::Each(::testing::EndsWith(" of 2: 21")));
  EXPECT_EQ(run({"-np"}), code(2));
  EXPECT_THAT(err(), HasSubstr("--ranks"));
}

TEST_F(RunTest, AProgramOfPythonIsRunByPython3) {
  std::ofstream(folder_ / "sum.py") << "import os, sys\nprint(sys.argv[1:], os.environ['WEFT_RANK'])\n";
  EXPECT_EQ(run({"-n", "2", (folder_ / "sum.py").string(), "-x", "a b"}), kSuccess) << err();
  EXPECT_THAT(out_lines(), UnorderedElementsAre("[0] ['-x', 'a b'] 0", "[1] ['-x', 'a b'] 1"));
  EXPECT_EQ(run({"-n", "1", "--", (folder_ / "none.py").string()}), code(2));
  EXPECT_THAT(err(), HasSubstr("none.py"));
}

TEST_F(RunTest, BindGivesEachRankItsShareOfTheCores) {
  cpu_set_t usable;
  ASSERT_EQ(::sched_getaffinity(0, sizeof usable, &usable), 0);
  const int cores = CPU_COUNT(&usable);
  EXPECT_EQ(run({"-n", std::to_string(cores), "--bind", "cores", "--", "nproc"}), kSuccess);
  for (const auto& line : out_lines()) EXPECT_THAT(line, ::testing::EndsWith("] 1"));
  EXPECT_EQ(out_lines().size(), static_cast<std::size_t>(cores));
}

// ---- ends ----

TEST_F(RunTest, TheFirstFailureNamesItselfAndEndsTheOthers) {
  const auto begin = Clock::now();
  EXPECT_EQ(run_shell(3, "if [ $WEFT_RANK = 2 ]; then echo pid $$; sleep 0.2; exit 3; fi; exec sleep 60"),
            code(3));
  EXPECT_LT(Clock::now() - begin, seconds(10));
  EXPECT_EQ(err(), "weft run: rank 2 (pid " + std::to_string(printed_number(2, "pid")) +
                       ") was first to fail: exited with code 3\n");
}

// With that option the launcher leaves the other ranks alone, and their exit codes count.
TEST_F(RunTest, OthersMayKeepGoing) {
  const std::string script =
      "if [ $WEFT_RANK = 1 ]; then echo pid $$; kill -9 $$; fi; sleep 0.8; echo still there; ";
  const auto words = [&](const std::string& end) {
    return std::vector<std::string>{"-n", "3", "--keep-going", "--", "sh", "-c", script + end};
  };
  EXPECT_EQ(run(words("exit $WEFT_RANK")), kSuccess);  // rank 0's
  EXPECT_THAT(out(), testing::AllOf(HasSubstr("[0] still there"), HasSubstr("[2] still there")));
  const std::string killed = "weft run: rank 1 (pid " + std::to_string(printed_number(1, "pid")) +
                             ") failed: killed by signal 9 (SIGKILL); the others go on\n";
  EXPECT_THAT(err(), HasSubstr(killed));
  EXPECT_THAT(err(), HasSubstr(") failed: exited with code 2; the others go on\n"));
  EXPECT_EQ(run(words("exit 7")), code(128 + 9));  // nobody ended well: as without
}

TEST_F(RunTest, AKilledRankIsNamedAndTheOthersEnd) {
  ChildProcess process = start_shell(3, "echo pid $$; exec sleep 60");
  const int victim = printed_number(1, "pid");
  printed_number(0, "pid");
  printed_number(2, "pid");
  ASSERT_EQ(::kill(victim, SIGKILL), 0);
  const auto begin = Clock::now();
  EXPECT_EQ(process.wait(seconds(20)), code(128 + SIGKILL));
  EXPECT_LT(Clock::now() - begin, seconds(5));
  EXPECT_EQ(err(), "weft run: rank 1 (pid " + std::to_string(victim) +
                       ") was first to fail: killed by signal 9 (SIGKILL)\n");
}

// The rank that failed by itself is named, also if those that noticed are gone before it: in the cases
// "leave" and "throw" they have ended when rank 1 does.
TEST_F(RunTest, TheRankThatFailedByItselfIsNamed) {
  const auto expect = [&](const std::vector<std::string>& how, int status, const std::string& said) {
    for (const char* reaction : {"exit", "terminate"}) {
      std::filesystem::remove(folder_ / "err");
      std::vector<std::string> words{"-n", "3", "--", WEFT_FAILING_RANK, reaction};
      words.insert(words.end(), how.begin(), how.end());
      EXPECT_EQ(run(words), code(status)) << reaction << " " << how.back() << "\n" << err();
      EXPECT_THAT(err(), ::testing::ContainsRegex("weft run: rank 1 .pid [0-9]+. was first to fail: " + said))
          << reaction << " " << how.back();
      EXPECT_EQ(err().find("was first to fail"), err().rfind("was first to fail"));
    }
  };
  expect({"kill"}, 128 + SIGKILL, "killed by signal 9");
  expect({"exit"}, 3, "exited with code 3");
  expect({"leave"}, 3, "exited with code 3");
  expect({"throw"}, 3, "exited with code 3\nweft run: rank 1 said last: no such file");
  expect({"kill", "exit"}, 128 + SIGKILL, "killed by signal 9");
}

// If a rank has left early and returned 0, the first rank that fails because of that is not blamed.
TEST_F(RunTest, ARankThatReturnedTooEarlyIsNamed) {
  for (const auto& [reaction, how] :
       {std::pair("exit", "exited with code 1"), {"terminate", "killed by signal 6 .SIGABRT."}}) {
    std::filesystem::remove(folder_ / "err");
    const auto status = run({"-n", "3", "--", WEFT_FAILING_RANK, reaction, "return"});
    EXPECT_EQ(status, code(reaction == std::string("exit") ? 1 : 128 + SIGABRT)) << err();
    EXPECT_THAT(err(), ::testing::ContainsRegex(
                           fmt::format("weft run: rank [02] .pid [0-9]+. failed because of others: {}; "
                                       "rank 1 .pid [0-9]+. has returned 0\n",
                                       how)));
    EXPECT_THAT(err(), Not(HasSubstr("first to fail")));
  }
}

// If no Error could report a fault, the launcher prints a warning, and the job fails.
TEST_F(RunTest, AMistakeThatIsOnlyAWarningEndsTheJobWithAStatusOfItsOwn) {
  const auto expect = [&](const std::vector<std::string>& flags, const char* mistake,
                          const std::string& warning) {
    std::filesystem::remove(folder_ / "err");
    // Two of three ranks call as roots: the third rank receives, and gets the error at once if both roots
    // have called.
    std::vector<std::string> words{"-n", std::string(mistake) == "roots" ? "2" : "3"};
    words.insert(words.end(), flags.begin(), flags.end());
    words.insert(words.end(), {"--", WEFT_FAILING_RANK, "mistake", mistake});
    EXPECT_EQ(run(words), code(70)) << mistake << err();
    EXPECT_THAT(err(), HasSubstr(warning));
    EXPECT_THAT(err(), ::testing::ContainsRegex("weft run: rank [0-2] .pid [0-9]+. returned 0, but has "
                                                "logged a warning that its results may be wrong\n"));
  };
  expect({}, "drop", "dropped the Work of a call in flight");
  expect({"--keep-going"}, "drop", "dropped the Work of a call in flight");
  expect({}, "roots", "mismatch, found when the group was left: ");
  expect({}, "left out", "rank 1 left the group without it");
  std::filesystem::remove(folder_ / "err");
  EXPECT_EQ(run({"-n", "3", "--", WEFT_FAILING_RANK, "mistake", "none"}), kSuccess);
  EXPECT_EQ(err(), "");
}

// Any process may send to the launcher; notices of foreign processes do not use up the space for the job's
// own notices.
TEST_F(RunTest, NoticesOfStrangersAreDropped) {
  ChildProcess process = start_shell(
      1, fmt::format("echo $WEFT_LAUNCHER >'{}'; echo pid $$; exec sleep 60", (folder_ / "name").string()));
  printed_number(0, "pid");
  const std::string name = lines_of(contents(folder_ / "name")).at(0);
  const int supervisor =
      std::atoi(contents(fmt::format("/proc/{0}/task/{0}/children", process.pid())).c_str());
  ASSERT_GT(supervisor, 0);
  ASSERT_EQ(::kill(supervisor, SIGSTOP), 0);  // it reads nothing
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  name.copy(address.sun_path + 1, sizeof address.sun_path - 1);
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  const int fd = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  for (const std::string text : {"", "short", "0123456789abcdef 0 others failed"})
    for (int i = 0; i < 2000; ++i)
      ASSERT_EQ(::sendto(fd, text.data(), text.size(), MSG_DONTWAIT,
                         reinterpret_cast<const sockaddr*>(&address), size),
                static_cast<ssize_t>(text.size()))
          << "no room after " << i;
  ::close(fd);
  ASSERT_EQ(::kill(supervisor, SIGCONT), 0);
  process.kill(SIGTERM);
  EXPECT_EQ(process.wait(seconds(20)), code(128 + SIGTERM));
}

// The kernel gives it to nobody, and a server that sets SO_REUSEADDR gets it.
TEST_F(RunTest, MasterPortIsReserved) {
  ChildProcess process = start_shell(1, "echo pid $$; echo port $MASTER_PORT; exec sleep 60");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(printed_number(0, "port")));
  for (const int reuse : {0, 1}) {
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof reuse);
    EXPECT_EQ(::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address), reuse - 1);
    if (reuse == 1) {
      EXPECT_EQ(::listen(fd, 4), 0) << errno;
    }
    ::close(fd);
  }
  process.kill(SIGTERM);
  EXPECT_EQ(process.wait(seconds(20)), code(128 + SIGTERM));
}

// Programs without weft send no notices: a kill that is found soon after an exit code counts as the first
// event.
TEST_F(RunTest, AKillCountsBeforeAnExitCode) {
  EXPECT_EQ(
      run_shell(3, "case $WEFT_RANK in 0) exit 4;; 1) sleep 0.05; kill -9 $$;; 2) exec sleep 60;; esac"),
      code(128 + SIGKILL));
  EXPECT_THAT(err(), HasSubstr("weft run: rank 1 (pid "));
  std::filesystem::remove(folder_ / "err");
  // An abort may be the consequence.
  EXPECT_EQ(
      run_shell(3, "case $WEFT_RANK in 0) exit 4;; 1) sleep 0.05; kill -6 $$;; 2) exec sleep 60;; esac"),
      code(4));
  EXPECT_THAT(err(), HasSubstr("weft run: rank 0 (pid "));
}

// The others have half a second to print what they saw; then they get SIGTERM, and three seconds later
// SIGKILL.
TEST_F(RunTest, RanksThatIgnoreSigtermAreKilled) {
  const auto begin = Clock::now();
  EXPECT_EQ(run_shell(2,
                      "if [ $WEFT_RANK = 0 ]; then exit 5; fi; echo pid $$; trap 'echo asked to end' TERM; "
                      "while :; do sleep 0.1; done"),
            code(5));
  const auto took = Clock::now() - begin;
  EXPECT_GE(took, milliseconds(3400));
  EXPECT_LT(took, seconds(12));
  EXPECT_THAT(out(), HasSubstr("[1] asked to end\n"));
  EXPECT_THAT(err(), HasSubstr("weft run: rank 1 (pid " + std::to_string(printed_number(1, "pid")) +
                               ") did not end within 3.0 s of SIGTERM: killed\n"));
}

TEST_F(RunTest, AStoppedRankEndsToo) {
  ChildProcess process =
      start_shell(2, "echo pid $$; if [ $WEFT_RANK = 0 ]; then sleep 0.5; exit 4; fi; exec sleep 60");
  ::kill(printed_number(1, "pid"), SIGSTOP);
  EXPECT_EQ(process.wait(seconds(20)), code(4));
}

TEST_F(RunTest, WhatSuccessfulRanksLeaveRunningIsEnded) {
  const auto begin = Clock::now();
  EXPECT_EQ(run_shell(2, "sleep 60 & setsid sleep 60 & echo started"), kSuccess);
  EXPECT_LT(Clock::now() - begin, seconds(10));
  EXPECT_THAT(out_lines(), UnorderedElementsAre("[0] started", "[1] started"));
  EXPECT_THAT(left_behind(), IsEmpty());
}

// A daemon, which has left its process group, is ended too, while other ranks go on.
TEST_F(RunTest, WhatARankLeavesRunningEndsWithIt) {
  ChildProcess process = start_shell(2,
                                     "if [ $WEFT_RANK = 1 ]; then echo pid $$; exec sleep 60; fi; "
                                     "(setsid sh -c 'echo daemon $$; exec sleep 60' &) ; (setsid sh -c "
                                     "'sleep 60 & echo mother $$; wait' &) ; "
                                     "while [ ! -e \"$WEFT_TEST_MARK/go\" ]; do sleep 0.02; done");
  const int daemon = printed_number(0, "daemon"), mother = printed_number(0, "mother");
  const int other = printed_number(1, "pid");
  const auto runs = [](int pid) { return !contents(fmt::format("/proc/{}/environ", pid)).empty(); };
  EXPECT_TRUE(runs(daemon));
  std::ofstream(folder_ / "go").flush();
  EXPECT_TRUE(eventually([&] { return !runs(daemon) && !runs(mother); }));
  EXPECT_TRUE(eventually([&] { return left_behind().size() == 3; })) << "guard, supervisor, rank 1";
  EXPECT_TRUE(runs(other));
  EXPECT_FALSE(process.wait(milliseconds(50)).has_value());
  process.kill(SIGTERM);
  EXPECT_EQ(process.wait(seconds(20)), code(128 + SIGTERM));
}

TEST_F(RunTest, AProgramThatDoesNotExistIsNamed) {
  EXPECT_EQ(run({"-n", "2", "--", "no-such-program", "x"}), code(127));
  EXPECT_EQ(err(), "weft run: cannot start \"no-such-program\": No such file or directory\n");
}

TEST_F(RunTest, AProgramOfThisFolderNeedsItsFolder) {
  const TemporaryFolder folder;
  std::ofstream(folder / "mine") << "#!/bin/sh\n";
  std::filesystem::permissions(folder / "mine", std::filesystem::perms::owner_all);
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(folder.path());
  EXPECT_EQ(run({"-n", "2", "--", "mine"}), code(127));
  std::filesystem::current_path(before);
  EXPECT_EQ(err(), "weft run: cannot start \"mine\": No such file or directory; is ./mine meant?\n");
}

TEST_F(RunTest, AProgramThatCannotBeRunIsNamed) {
  EXPECT_EQ(run({"-n", "2", "--", "/etc/passwd"}), code(126));
  EXPECT_EQ(err(), "weft run: cannot start \"/etc/passwd\": Permission denied\n");
}

TEST_F(RunTest, WrongFlagsExitWithTwo) {
  EXPECT_EQ(run({"-n", "0", "--", "true"}), code(2));
  EXPECT_THAT(err(),
              ::testing::StrEq("weft: run: --ranks is 0; expected 1 to 256\nweft: see weft run --help\n"));
  EXPECT_EQ(run({"-n", "2"}), code(2));
  EXPECT_THAT(err(), HasSubstr("weft: run: no program; expected: weft run -n 4 PROGRAM\n"));
  EXPECT_EQ(run({"--", "true"}), code(2));
  EXPECT_THAT(err(), HasSubstr("weft: run: --ranks is required\n"));
  EXPECT_EQ(run({"-n", "2", "--bnd", "true"}), code(2));
  EXPECT_THAT(err(), HasSubstr("weft: run has no option \"--bnd\"; is --bind meant?"));
  EXPECT_EQ(run({"-n", "2", "--bind", "sockets", "--", "true"}), code(2));
  EXPECT_THAT(err(), HasSubstr("weft: run: --bind is sockets; expected none, cores\n"));
}

TEST_F(RunTest, TheLastWordsOfTheFirstThatFailedAreRepeated) {
  EXPECT_EQ(
      run_shell(2,
                "if [ $WEFT_RANK = 0 ]; then exec sleep 60; fi; echo pid $$; echo first >&2; echo 'rank 1: "
                "no such file' >&2; echo >&2; exit 7"),
      code(7));
  const std::string pid = std::to_string(printed_number(1, "pid"));
  EXPECT_THAT(err(), HasSubstr("weft run: rank 1 (pid " + pid + ") was first to fail: exited with code 7\n" +
                               "weft run: rank 1 said last: rank 1: no such file\n"));
}

TEST_F(RunTest, AJobThatTakesTooLongEndsAndWhoStillRanIsNamed) {
  const auto begin = Clock::now();
  EXPECT_EQ(run({"-n", "3", "--timeout", "0.5", "--", "sh", "-c",
                 "echo pid $$; if [ $WEFT_RANK != 1 ]; then exec sleep 60; fi"}),
            code(124));
  EXPECT_GE(Clock::now() - begin, milliseconds(500));
  EXPECT_LT(Clock::now() - begin, seconds(10));
  EXPECT_EQ(err(), fmt::format("weft run: the job did not end within 0.5 s: rank 0 (pid {}), rank 2 (pid {}) "
                               "still ran\n",
                               printed_number(0, "pid"), printed_number(2, "pid")));
}

// If a signal or a debugger has stopped a rank, the others usually wait for that rank.
TEST_F(RunTest, AJobThatTakesTooLongTellsWhichRankIsStopped) {
  EXPECT_EQ(run({"-n", "2", "--timeout", "0.5", "--", "sh", "-c",
                 "echo pid $$; if [ $WEFT_RANK = 1 ]; then kill -STOP $$; fi; exec sleep 60"}),
            code(124));
  EXPECT_EQ(
      err(),
      fmt::format("weft run: the job did not end within 0.5 s: rank 0 (pid {}), rank 1 (pid {}, stopped) "
                  "still ran\n",
                  printed_number(0, "pid"), printed_number(1, "pid")));
}

TEST_F(RunTest, AJobThatEndsInTimeIsNotDisturbed) {
  EXPECT_EQ(run({"-n", "2", "--timeout", "100", "--", "true"}), kSuccess);
  EXPECT_EQ(run({"-n", "2", "--timeout", "100", "--", "sh", "-c", "exit 3"}), code(3));
  EXPECT_EQ(run({"-n", "2", "--timeout", "0", "--", "true"}), code(2));
  EXPECT_THAT(err(), HasSubstr("weft: run: --timeout is 0; expected 0.001 to 1000000000\n"));
  for (const std::string value : {"nan", "-nan", "inf", "-inf", "-1", "1e10", "1e999"}) {
    EXPECT_EQ(run({"-n", "2", "--timeout=" + value, "--", "true"}), code(2)) << value;
    EXPECT_THAT(err(), HasSubstr("--timeout is " + value + "; expected 0.001 to 1000000000"));
  }
  EXPECT_EQ(run({"-n", "2", "--timeout", "soon", "--", "true"}), code(2));
  EXPECT_THAT(err(), HasSubstr("--timeout is soon; expected 0.001 to 1000000000"));
}

TEST_F(RunTest, TheBackendIsTheRanksToTake) {
  EXPECT_EQ(run({"-n", "2", "--backend", "gloo", "--", "sh", "-c", "echo $WEFT_BACKEND"}), kSuccess);
  EXPECT_THAT(out_lines(), UnorderedElementsAre("[0] gloo", "[1] gloo"));
}

TEST_F(RunTest, ABackendThatIsNotThereIsAnErrorBeforeAnythingStarts) {
  EXPECT_EQ(run({"-n", "2", "--backend", "nope", "--", "echo", "started"}), code(2));
  EXPECT_THAT(err(), HasSubstr("--backend: there is no transport \"nope\"; expected one of auto, shm"));
  EXPECT_THAT(out(), Not(HasSubstr("started")));
  EXPECT_EQ(run({"-n", "2", "--backend", "shn", "--", "true"}), code(2));
  EXPECT_THAT(err(), HasSubstr("there is no transport \"shn\"; is shm meant? Expected one of auto, shm"));
  EXPECT_EQ(run({"-n", "2", "--backend", "auto", "--", "true"}), kSuccess);
}

// ---- torch's variables ----

TEST_F(RunTest, RanksFindTorchsVariables) {
  const std::string print =
      "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR; echo port $MASTER_PORT";
  EXPECT_EQ(run({"-n", "2", "--", "sh", "-c", "unset x; " + print}), kSuccess);
  EXPECT_THAT(out(), HasSubstr("[0] 0 2 0 2 127.0.0.1\n"));
  EXPECT_THAT(out(), HasSubstr("[1] 1 2 1 2 127.0.0.1\n"));
  EXPECT_EQ(printed_number(0, "port"), printed_number(1, "port"));
  EXPECT_GT(printed_number(0, "port"), 0);
}

TEST_F(RunTest, TorchsVariablesThatAreSetStay) {
  for (const auto& [name, value] : {std::pair{"RANK", "7"}, {"MASTER_PORT", "29123"}})
    ::setenv(name, value, 1);
  EXPECT_EQ(run({"-n", "2", "--", "sh", "-c",
                 "echo $WEFT_RANK of $RANK, $WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT"}),
            kSuccess);
  for (const char* name : {"RANK", "MASTER_PORT"}) ::unsetenv(name);
  EXPECT_THAT(out_lines(),
              UnorderedElementsAre("[0] 0 of 7, at 127.0.0.1:29123", "[1] 1 of 7, at 127.0.0.1:29123"));
}

// A job inside of a rank is a job of its own.
TEST_F(RunTest, AnInnerJobHasItsOwn) {
  EXPECT_EQ(run({"-n", "1", "--no-tag-output", "--", WEFT_COMMAND, "run", "-n", "2", "--", "sh", "-c",
                 "echo $RANK of $WORLD_SIZE"}),
            kSuccess);
  EXPECT_THAT(out_lines(), UnorderedElementsAre("[0] 0 of 2", "[1] 1 of 2"));
}

// ---- a rank that ends well and never joins ----

TEST_F(RunTest, OthersDoNotWaitForARankThatHasEnded) {
  const auto begin = Clock::now();
  EXPECT_EQ(run({"-n", "3", "--", "sh", "-c",
                 fmt::format("[ $WEFT_RANK = 1 ] && exit 0; exec '{}' exit", WEFT_FAILING_RANK)}),
            code(1));
  EXPECT_LT(Clock::now() - begin, seconds(20));  // not the five minutes of a group's deadline
  EXPECT_THAT(err(),
              HasSubstr("group \"world\": rank 1 did not join: its process exited with code 0 [rank 0]"));
  EXPECT_THAT(err(),
              HasSubstr("group \"world\": rank 1 did not join: its process exited with code 0 [rank 2]"));
  EXPECT_THAT(early_lines(),
              ElementsAre(MatchesRegex("weft run: rank 1 \\(pid [0-9]+\\) ended before it joined the others: "
                                       "exited with code 0; those that wait for it are told so")));
}

TEST_F(RunTest, ARankThatWasKilledBeforeItJoinedIsNamed) {
  EXPECT_EQ(run({"-n", "2", "--keep-going", "--", "sh", "-c",
                 fmt::format("[ $WEFT_RANK = 0 ] && kill -9 $$; exec '{}' exit", WEFT_FAILING_RANK)}),
            code(128 + 9));
  EXPECT_THAT(err(), HasSubstr("rank 0 did not join: its process killed by signal 9 (SIGKILL) [rank 1]"));
  EXPECT_THAT(early_lines(), ElementsAre(HasSubstr("ended before it joined the others: killed by signal 9 "
                                                   "(SIGKILL); those that wait for it are told so")));
}

TEST_F(RunTest, RanksThatJoinedOrThatNobodyMissesEndWithoutAWord) {
  const std::string first = "[ $WEFT_RANK = 0 ] || exit 0; exec sleep 0.7";
  EXPECT_EQ(run({"-n", "3", "--", "sh", "-c", first}), kSuccess);
  EXPECT_THAT(err(), IsEmpty());
  EXPECT_EQ(run({"-n", "3", "--", "sh", "-c", fmt::format("'{}' || exit 1; {}", WEFT_MEET, first)}),
            kSuccess);
  EXPECT_THAT(err(), IsEmpty());
}

// ---- signals ----

TEST_F(RunTest, SignalsReachEveryRank) {
  ChildProcess process = start_shell(2,
                                     "trap 'echo got USR1' USR1; trap 'echo got USR2' USR2; trap 'echo got "
                                     "HUP' HUP; trap 'echo got INT; exit 0' INT; "
                                     "echo pid $$; while :; do sleep 0.05; done");
  printed_number(0, "pid");
  printed_number(1, "pid");
  const auto both_say = [&](const std::string& word) {
    return eventually([&] {
      const std::string text = out();
      return text.find("[0] got " + word) != std::string::npos &&
             text.find("[1] got " + word) != std::string::npos;
    });
  };
  process.kill(SIGUSR1);
  EXPECT_TRUE(both_say("USR1"));
  process.kill(SIGUSR2);
  EXPECT_TRUE(both_say("USR2"));
  process.kill(SIGHUP);
  EXPECT_TRUE(both_say("HUP"));
  process.kill(SIGINT);
  EXPECT_TRUE(both_say("INT"));
  EXPECT_EQ(process.wait(seconds(20)), kSuccess);
  EXPECT_THAT(err(), Not(HasSubstr("weft run")));
}

TEST_F(RunTest, SigtermEndsTheJob) {
  ChildProcess process = start_shell(2, "echo pid $$; exec sleep 60");
  printed_number(0, "pid");
  printed_number(1, "pid");
  process.kill(SIGTERM);
  EXPECT_EQ(process.wait(seconds(20)), code(128 + SIGTERM));
  EXPECT_EQ(err(), "") << "it did as asked";
}

TEST_F(RunTest, CtrlCIsNoFailure) {
  ChildProcess process = start_shell(2, "echo pid $$; exec sleep 60");
  printed_number(0, "pid");
  printed_number(1, "pid");
  process.kill(SIGINT);
  EXPECT_EQ(process.wait(seconds(20)), code(128 + SIGINT));
  EXPECT_EQ(err(), "");
}

// A rank that fails in another way is named, whether it was asked to end or not.
TEST_F(RunTest, AFailureAfterARequestIsNamed) {
  ChildProcess process = start_shell(1, "trap 'exit 9' INT; echo pid $$; while :; do sleep 0.05; done");
  printed_number(0, "pid");
  process.kill(SIGINT);
  EXPECT_EQ(process.wait(seconds(20)), code(9));
  EXPECT_THAT(err(), HasSubstr("was first to fail: exited with code 9\n"));
}

TEST_F(RunTest, ASecondRequestEndsRanksThatIgnoredTheFirst) {
  ChildProcess process = start_shell(2, "trap 'echo not yet' INT; echo pid $$; while :; do sleep 0.05; done");
  printed_number(0, "pid");
  printed_number(1, "pid");
  process.kill(SIGINT);
  EXPECT_FALSE(process.wait(milliseconds(800)).has_value());
  process.kill(SIGINT);
  EXPECT_EQ(process.wait(seconds(20)), code(128 + SIGINT));
  EXPECT_THAT(err(), Not(HasSubstr("fail")));
}

// ---- the launcher itself is killed ----

// Each rank has a child in its process group and one that left it; all ignore what can be ignored.
constexpr const char* kFamily =
    "trap '' TERM INT HUP; sleep 60 & setsid sleep 60 & echo pid $$; exec sleep 60";

class KilledLauncherTest : public RunTest {
 protected:
  ChildProcess start_family() {
    ChildProcess process = start_shell(2, kFamily);
    printed_number(0, "pid");
    printed_number(1, "pid");
    EXPECT_TRUE(eventually([&] { return left_behind().size() == 8; }))
        << "guard, supervisor, 2 ranks, 4 children";
    return process;
  }
};

TEST_F(KilledLauncherTest, NothingStaysWhenTheGuardIsKilled) {
  ChildProcess process = start_family();
  process.kill(SIGKILL);
  const auto begin = Clock::now();
  EXPECT_TRUE(eventually([&] { return left_behind().empty(); }));
  EXPECT_LT(Clock::now() - begin, seconds(5));
  EXPECT_EQ(process.wait(seconds(5)), (ExitStatus{.signal = SIGKILL}));
}

TEST_F(KilledLauncherTest, NothingStaysWhenTheSupervisorIsKilled) {
  ChildProcess process = start_family();
  const std::string children = contents(fmt::format("/proc/{0}/task/{0}/children", process.pid()));
  const int supervisor = std::atoi(children.c_str());
  ASSERT_GT(supervisor, 0);
  ASSERT_EQ(::kill(supervisor, SIGKILL), 0);
  EXPECT_EQ(process.wait(seconds(20)), code(128 + SIGKILL));
  EXPECT_THAT(left_behind(), IsEmpty());
  EXPECT_EQ(err(), "weft run: the supervisor (pid " + std::to_string(supervisor) +
                       ") was killed by signal 9 (SIGKILL)\n");
}

// No launcher is left to end the children of the ranks; the ranks themselves die.
TEST_F(KilledLauncherTest, TheRanksDieWithBoth) {
  ChildProcess process = start_family();
  const int ranks[] = {printed_number(0, "pid"), printed_number(1, "pid")};
  const int supervisor =
      std::atoi(contents(fmt::format("/proc/{0}/task/{0}/children", process.pid())).c_str());
  ASSERT_GT(supervisor, 0);
  process.kill(SIGSTOP);  // so that it does not see the other one go first
  ASSERT_EQ(::kill(supervisor, SIGKILL), 0);
  process.kill(SIGKILL);
  for (const int rank : ranks)
    EXPECT_TRUE(eventually([&] { return contents(fmt::format("/proc/{}/environ", rank)).empty(); }));
  for (const int child : left_behind()) ::kill(child, SIGKILL);  // the four sleepers
}

}  // namespace
}  // namespace weft::test::run_test
