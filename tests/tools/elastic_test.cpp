// Drives `weft run --elastic` and `weft train --elastic`, whose ranks die or are killed at random moments.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "support/processes.hpp"
#include "support/temporary_folder.hpp"
#include "support/terminal.hpp"
#include "tools/weft_command.hpp"
#include "weft/base/clock.hpp"

namespace weft::test::elastic_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;
using Words = std::vector<std::string>;

class ElasticTest : public ::testing::Test {
 protected:
  void TearDown() override {
    for (const Deadline limit = Deadline::after(seconds(15)); !processes().empty() && !limit.passed();)
      std::this_thread::sleep_for(milliseconds(5));
    EXPECT_TRUE(processes().empty()) << "processes stay";
    std::error_code none;
    for (const auto& entry : std::filesystem::directory_iterator("/dev/shm", none))
      EXPECT_THAT(entry.path().filename().string(), Not(HasSubstr("weft")));
  }

  ChildProcess start(const Words& words) {
    return start_weft(words, folder_ / "out", folder_ / "err", {mark_});
  }
  int run(const Words& words) {
    ChildProcess process = start(words);
    const auto status = process.wait(seconds(60));
    return status ? status->code : -2;
  }
  int run_shell(const std::string& elastic, const std::string& script) {
    return run({"run", "--elastic", elastic, "--", "sh", "-c", script});
  }
  std::string out() { return contents(folder_ / "out"); }
  std::string err() { return contents(folder_ / "err"); }
  std::string file(const std::string& name) { return (folder_ / name).string(); }

  /// The lines of the launcher about its starts and about the end of the job.
  Words told() {
    Words lines;
    std::ifstream all(folder_ / "err");
    for (std::string line; std::getline(all, line);)
      for (const char* begin : {"weft run: start ", "weft run: the job ends", "weft run:   rank "})
        if (line.starts_with(begin)) lines.push_back(line.substr(10));
    return lines;
  }

  /// The processes of this test, or those of one rank.
  std::vector<int> processes(int rank = -1) const {
    std::vector<int> pids;
    std::error_code ignored;
    const std::string of_rank = '\0' + fmt::format("WEFT_RANK={}", rank) + '\0';
    for (const auto& entry : std::filesystem::directory_iterator("/proc", ignored)) {
      const int pid = std::atoi(entry.path().filename().c_str());
      if (pid <= 0) continue;
      const std::string variables = '\0' + contents(entry.path() / "environ");
      if (variables.find('\0' + mark_ + '\0') != std::string::npos &&
          (rank < 0 || variables.find(of_rank) != std::string::npos))
        pids.push_back(pid);
    }
    return pids;
  }

  TemporaryFolder folder_;
  const std::string mark_ = "WEFT_TEST_MARK=" + folder_.path().string();
};

// ---- the launcher ----

TEST_F(ElasticTest, ARankThatAlwaysDiesEndsTheJobWithAReportAfterThreeStarts) {
  EXPECT_EQ(run_shell("2:3", "[ $WEFT_RANK = 1 ] || exit 0; echo one >&2; echo two >&2; exit 3"), 3);
  EXPECT_THAT(
      told(),
      ElementsAre(
          "start 1 of the job, on 2 ranks", "start 2 of the job, on 2 ranks",
          "the job ends: 3 starts in a row ended with a failed rank, and got no further",
          MatchesRegex("start 0, 3 ranks: rank 1 \\(pid [0-9]+\\) exited with code 3 after [0-9.]+ s; "
                       "no step was reported"),
          "  rank 1 said: one", "  rank 1 said: two", HasSubstr("start 1, 2 ranks: rank 1 (pid "),
          "  rank 1 said: one", "  rank 1 said: two", HasSubstr("start 2, 2 ranks: rank 1 (pid "),
          "  rank 1 said: one", "  rank 1 said: two"));
}

TEST_F(ElasticTest, RanksThatDieInTurnEndTheJobAfterTenStarts) {
  EXPECT_EQ(run_shell("2:2", "[ $WEFT_RANK = $((WEFT_RESTART_COUNT % 2)) ] || exit 0; exit 3"), 3);
  EXPECT_THAT(err(), HasSubstr("the job ends: 10 starts in a row ended with a failed rank"));
  EXPECT_THAT(err(), HasSubstr("start 9, 2 ranks: rank 1 (pid "));
}

// Both die in the first start, one in the second: the third has the two, and not the one.
TEST_F(ElasticTest, RanksThatDiedComeBackAtTheNextStart) {
  EXPECT_EQ(run_shell("1:3",
                      "echo $WEFT_RESTART_COUNT $WEFT_RANK of $WEFT_WORLD_SIZE $WORLD_SIZE\n"
                      "case $WEFT_RESTART_COUNT$WEFT_RANK in 01|02|10) kill -9 $$ ;; esac; exec sleep 0.2"),
            0);
  EXPECT_THAT(told(), ElementsAre("start 1 of the job, on 1 rank", "start 2 of the job, on 2 ranks"));
  EXPECT_THAT(out(), HasSubstr("[0] 0 0 of 3 3\n"));
  EXPECT_THAT(out(), HasSubstr("[0] 1 0 of 1 1\n"));
  EXPECT_THAT(out(), HasSubstr("[1] 2 1 of 2 2\n"));
}

TEST_F(ElasticTest, AJobThatGetsFurtherIsStartedAgainAsOftenAsItTakes) {
  EXPECT_EQ(run({"run", "--elastic", "1:1", WEFT_STEPPING_RANK, file("step"), "25", "2"}), 0);
  EXPECT_EQ(contents(folder_ / "step"), "25");
  EXPECT_EQ(told().size(), 12u) << err();
}

TEST_F(ElasticTest, TheReportHasTheStep) {
  std::ofstream(folder_ / "step") << 7;
  EXPECT_EQ(run({"run", "--elastic", "1:1", "--", "sh", "-c",
                 fmt::format("echo 7 >'{0}'; exec '{1}' '{0}' 25 2", file("step"), WEFT_STEPPING_RANK)}),
            128 + SIGKILL);
  EXPECT_THAT(err(), HasSubstr("the job ends: 3 starts in a row"));
  EXPECT_THAT(err(), HasSubstr("killed by signal 9 (SIGKILL) after "));
  EXPECT_THAT(err(), HasSubstr(" s; 9 steps were done"));
  // The first start got further than none: the three behind it did not.
  EXPECT_THAT(err(), Not(HasSubstr("start 0, 1 rank: ")));
  EXPECT_THAT(err(), HasSubstr("start 3, 1 rank: "));
}

// Each start has a store, a token and a port of its own.
TEST_F(ElasticTest, StartsMeetAnew) {
  EXPECT_EQ(run_shell("1:2",
                      "[ $WEFT_RANK = 0 ] || exit 0; echo $WEFT_STORE; echo $WEFT_JOB; echo $WEFT_LAUNCHER\n"
                      "[ $WEFT_RESTART_COUNT = 1 ] || exit 3"),
            0);
  Words lines;
  std::ifstream all(folder_ / "out");
  for (std::string line; std::getline(all, line);) lines.push_back(line);
  ASSERT_EQ(lines.size(), 6u);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_NE(lines[i], lines[i + 3]);
}

TEST_F(ElasticTest, ASignalEndsTheJobForGood) {
  ChildProcess process =
      start({"run", "--elastic", "2:2", "--", "sh", "-c",
             "[ $WEFT_RESTART_COUNT = 0 ] && { [ $WEFT_RANK = 1 ] && exit 3; }; echo here; exec sleep 60"});
  const auto second_start = [&] { return err().find("start 1 of the job") != std::string::npos; };
  for (const Deadline limit = Deadline::after(seconds(15)); !second_start() && !limit.passed();)
    std::this_thread::sleep_for(milliseconds(5));
  process.kill(SIGINT);
  EXPECT_EQ(process.wait(seconds(20)), ExitStatus{.code = 128 + SIGINT}) << err();
  EXPECT_THAT(err(), Not(HasSubstr("start 2")));
}

// A launcher without --elastic below one with it.
TEST_F(ElasticTest, AnInnerJobDoesNotInheritTheCount) {
  EXPECT_EQ(run({"run", "--elastic", "1:1", WEFT_COMMAND, "run", "-n", "1", "--", "sh", "-c",
                 "echo ${WEFT_RESTART_COUNT-none}"}),
            0);
  EXPECT_EQ(out(), "[0] [0] none\n");
}

// The time of the job, not of a start.
TEST_F(ElasticTest, ATimeoutEndsTheJobForGood) {
  EXPECT_EQ(run({"run", "--elastic", "1:1", "--timeout", "3", "--", "sh", "-c",
                 "sleep 0.6; [ $WEFT_RESTART_COUNT = 1 ] || exit 3; exec sleep 60"}),
            124);
  EXPECT_THAT(err(), HasSubstr("the job did not end within 3 s: rank 0 (pid "));
  EXPECT_THAT(told(), ElementsAre("start 1 of the job, on 1 rank"));
}

// The first start outlives the timeout: its rank 0 does not heed SIGTERM.
TEST_F(ElasticTest, NoStartBeginsAfterTheTimeout) {
  EXPECT_EQ(run({"run", "--elastic", "1:2", "--timeout", "3", "--", "sh", "-c",
                 "[ $WEFT_RANK = 1 ] && { sleep 0.5; exit 3; }; trap '' TERM; exec sleep 60"}),
            124);
  EXPECT_THAT(err(), HasSubstr("the job did not end within 3 s: there is no start 1"));
  EXPECT_THAT(told(), ElementsAre());
}

TEST_F(ElasticTest, WrongWordsAreRefused) {
  const auto refused = [&](const Words& words, const std::string& text) {
    EXPECT_EQ(run(words), 2) << text;
    EXPECT_THAT(err(), HasSubstr(text));
  };
  for (const char* wrong : {"3", "3:2", "0:2", "2:257", "a:b", "1:2:3", ":"})
    refused(
        {"run", "--elastic", wrong, "true"},
        fmt::format("run: --elastic is \"{}\"; expected MIN:MAX, two numbers of ranks from 1 to 256", wrong));
  refused({"run", "--elastic", "2:3", "-n", "4", "true"}, "run: --ranks is 4; expected 2 to 3");
  refused({"run", "--elastic", "2:3", "-n", "1", "true"}, "run: --ranks is 1; expected 2 to 3");
  refused({"run", "--elastic", "2:3", "--keep-going", "true"}, "--keep-going");
  EXPECT_EQ(run({"run", "--elastic", "1:2", "no-such-program"}), 127);
  EXPECT_THAT(told(), ElementsAre());
}

// ---- weft train ----

class ElasticTrainTest : public ElasticTest {
 protected:
  ElasticTrainTest() {
    std::ofstream text(folder_ / "text");
    for (int i = 0; i < 400; ++i) text << "the quick brown fox " << i % 17 << " jumps over the lazy dog\n";
  }
  Words training(const std::string& save, Words more) const {
    Words words{"train",
                "--text",
                (folder_ / "text").string(),
                "--dim",
                "32",
                "--layers",
                "2",
                "--heads",
                "4",
                "--ffn",
                "64",
                "--seq",
                "32",
                "--batch",
                "8",
                "--steps",
                "200",
                "--lr",
                "0.003",
                "--progress",
                "none",
                "--save",
                (folder_ / save).string(),
                "--metrics",
                (folder_ / (save + ".json")).string()};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  double last_loss(const std::string& save) {
    std::ifstream in(folder_ / (save + ".json"));
    std::vector<double> losses;
    for (std::string line; std::getline(in, line);)
      losses.push_back(nlohmann::json::parse(line).at("loss").get<double>());
    EXPECT_EQ(losses.size(), 200u);
    double sum = 0;
    for (std::size_t i = 0; i < 20; ++i) sum += losses.at(losses.size() - 1 - i);
    return sum / 20;
  }

  int steps_of(const std::string& save) {
    const std::string lines = contents(folder_ / (save + ".json"));
    return static_cast<int>(std::count(lines.begin(), lines.end(), '\n'));
  }

  /// Starts an elastic run on four ranks, and kills two of them, each at a random moment of a random step, or
  /// while the ranks meet. Returns how often it killed.
  int run_with_kills(const std::string& save, unsigned seed, const Words& more) {
    Words words = training(save, {"--elastic", "1:4", "--ranks", "4", "--save-every", "10"});
    words.insert(words.end(), more.begin(), more.end());
    ChildProcess process = start(words);
    std::mt19937 random(seed);
    const auto below = [&](int end) { return static_cast<int>(random() % static_cast<unsigned>(end)); };
    int killed = 0;
    for (int kill = 0, after = -20; kill < 2; ++kill) {
      after += below(95);
      for (const Deadline limit = Deadline::after(seconds(60)); steps_of(save) < after && !limit.passed();)
        std::this_thread::sleep_for(milliseconds(1));
      std::this_thread::sleep_for(std::chrono::microseconds(below(after < 0 ? 100'000 : 5'000)));
      std::vector<int> pids = processes(kill == 0 && seed % 3 == 0 ? 0 : below(4));
      if (pids.empty()) pids = processes(0);
      if (!pids.empty() && ::kill(pids.front(), SIGKILL) == 0) ++killed;
    }
    const auto status = process.wait(seconds(120));
    EXPECT_TRUE(status && status->code == 0) << "seed " << seed << ": " << err();
    return killed;
  }

  /// How many runs are disturbed; with tools/test.sh --full twenty.
  static int runs(int usually) { return std::getenv("WEFT_TEST_FULL") != nullptr ? 20 : usually; }
};

TEST_F(ElasticTrainTest, ExactRunsWithKillsHaveTheBitsOfAnUndisturbedOne) {
  ASSERT_EQ(run(training("whole", {"--exact", "--ranks", "4"})), 0) << err();
  int killed = 0;
  for (int i = 0; i < runs(2); ++i) {
    const std::string save = fmt::format("run{}", i);
    killed += run_with_kills(save, static_cast<unsigned>(i), {"--exact"});
    EXPECT_EQ(run({"checkpoint", "diff", file("whole"), file(save)}), 0) << out();
    EXPECT_THAT(out(), HasSubstr(" tensors alike, 0 different"));
    EXPECT_EQ(last_loss(save), last_loss("whole"));
    EXPECT_THAT(contents(folder_ / save / "config.toml"), HasSubstr("ranks = 4\n")) << "not of a later start";
  }
  EXPECT_GE(killed, runs(2));
}

TEST_F(ElasticTrainTest, RunsWithKillsHaveTheLossOfAnUndisturbedOne) {
  ASSERT_EQ(run(training("whole", {"--ranks", "4"})), 0) << err();
  int killed = 0;
  for (int i = 0; i < runs(1); ++i) {
    const std::string save = fmt::format("run{}", i);
    killed += run_with_kills(save, static_cast<unsigned>(100 + i), {});
    EXPECT_NEAR(last_loss(save), last_loss("whole"), 0.01 * last_loss("whole"));
  }
  EXPECT_GE(killed, runs(1));
}

// As after a kill in the middle of a save, or of a machine that lost its cache of writes.
TEST_F(ElasticTrainTest, AStartGoesOnFromTheNewestWholeCheckpoint) {
  const Words twenty{"--exact", "--ranks", "2", "--save-every", "20"};
  ASSERT_EQ(run(training("whole", twenty)), 0) << err();
  Words words = twenty;
  words.insert(words.end(), {"--until", "100"});
  ASSERT_EQ(run(training("run", words)), 0) << err();
  std::filesystem::path largest;
  for (const auto& entry : std::filesystem::directory_iterator(folder_ / "run" / "step-00000100"))
    if (largest.empty() || entry.file_size() > std::filesystem::file_size(largest)) largest = entry.path();
  ASSERT_FALSE(largest.empty());
  std::filesystem::resize_file(largest, std::filesystem::file_size(largest) / 2);
  words = twenty;
  words.insert(words.end(), {"--elastic", "1:2"});
  ASSERT_EQ(run(training("run", words)), 0) << err();
  EXPECT_THAT(out(), HasSubstr("resumed at step 80"));
  EXPECT_EQ(run({"checkpoint", "diff", file("whole"), file("run")}), 0) << out();
}

// tp 2 stays, dp shrinks from 2 to 1, and the third rank is spare; on one rank tp shrinks, too.
TEST_F(ElasticTrainTest, TheMeshFitsTheRanks) {
  const Words more{"--tp", "2", "--save-every", "50"};
  Words words = training("run", more);
  words.insert(words.begin(), {"run", "--elastic", "1:4", "-n", "3", WEFT_COMMAND});
  ASSERT_EQ(run(words), 0) << err();
  EXPECT_THAT(out(), HasSubstr("mesh dp=1 x tp=2"));
  EXPECT_THAT(out(), HasSubstr("1 of 3 ranks are spare"));
  words[4] = "1";
  words.insert(words.end(), {"--steps", "210"});
  ASSERT_EQ(run(words), 0) << err();
  EXPECT_THAT(out(), HasSubstr("mesh dp=1 x tp=1"));
  EXPECT_THAT(out(), HasSubstr("resumed at step 200"));
  EXPECT_THAT(out(), Not(HasSubstr("spare")));
}

TEST_F(ElasticTrainTest, ASpareRankEndsWithTheOthersOnASignal) {
  Words words = training("run", {"--tp", "2", "--save-every", "50", "--steps", "1000000"});
  words.insert(words.begin(), {"run", "--elastic", "2:3", WEFT_COMMAND});
  ChildProcess process = start(words);
  for (const Deadline limit = Deadline::after(seconds(30));
       out().find("1 of 3 ranks are spare") == std::string::npos && !limit.passed();)
    std::this_thread::sleep_for(milliseconds(5));
  process.kill(SIGINT);
  EXPECT_EQ(process.wait(seconds(30)), ExitStatus{.code = 128 + SIGINT}) << err();
  EXPECT_THAT(out(), HasSubstr("stopped by SIGINT after step"));
}

TEST_F(ElasticTrainTest, WrongFlagsAreRefusedBeforeAStart) {
  const auto refused = [&](const Words& words, const std::string& text) {
    EXPECT_NE(run(words), 0) << text;
    EXPECT_THAT(err(), HasSubstr(text));
    EXPECT_THAT(told(), ElementsAre());
  };
  const Words elastic{"--elastic", "1:2", "--ranks", "2"};
  refused(training("run", elastic), "--elastic needs --save, and --save-every or --save-minutes");
  Words more = elastic;
  more.insert(more.end(), {"--save-every", "10", "--overwrite"});
  refused(training("run", more), "--elastic with --overwrite; each start goes on");
  more.back() = "--async-save";
  more[3] = "3";
  refused(training("run", more), "train: --ranks is 3; expected 1 to 2");
  more[1] = "2";
  refused(training("run", more), "train: --elastic is \"2\"; expected MIN:MAX");
  refused(training("run", {"--elastic", "1:2", "--save-every", "10"}),
          "--elastic needs --ranks, or weft run --elastic");
  refused(training("run", {"--elastic", "1:4", "--ranks", "4", "--save-every", "10", "--pp", "2"}),
          "no mesh fits 1 rank");
}

// ---- where a job runs ----

class ElasticPlaceTest : public ElasticTrainTest {
 protected:
  static Words elastic(Words more = {}) {
    more.insert(more.begin(), {"--elastic", "1:2", "--ranks", "2", "--save-every", "10"});
    return more;
  }
  /// Waits until the run has taken so many steps.
  void wait_for_steps(const std::string& save, int steps) {
    for (const Deadline limit = Deadline::after(seconds(60)); steps_of(save) < steps && !limit.passed();)
      std::this_thread::sleep_for(milliseconds(2));
    ASSERT_GE(steps_of(save), steps) << err();
  }
  void wait_for_checkpoint(const std::string& save) {
    for (const Deadline limit = Deadline::after(seconds(60));
         !std::filesystem::exists(folder_ / save / "latest") && !limit.passed();)
      std::this_thread::sleep_for(milliseconds(2));
  }
  /// The run `save` goes on to its end, and has the bits of the run `whole`, which it makes.
  void expect_goes_on_as_undisturbed(const std::string& save) {
    EXPECT_EQ(run(training(save, elastic({"--exact"}))), 0) << err();
    EXPECT_THAT(out(), HasSubstr("resumed at step "));
    ASSERT_EQ(run(training("whole", {"--exact", "--ranks", "2"})), 0) << err();
    EXPECT_EQ(run({"checkpoint", "diff", file("whole"), file(save)}), 0) << out();
  }
};

// A signal is for the job, and no rank's failure: nothing is started again.
TEST_F(ElasticPlaceTest, SignalsEndTheJobForGood) {
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
    SCOPED_TRACE(strsignal(number));
    const std::string save = fmt::format("run{}", number);
    const rlimit no_core{0, 0};
    ASSERT_EQ(::setrlimit(RLIMIT_CORE, &no_core), 0);  // of SIGQUIT
    ChildProcess process = start(training(save, elastic({"--exact"})));
    wait_for_checkpoint(save);
    process.kill(number);
    EXPECT_EQ(process.wait(seconds(30)), ExitStatus{.code = 128 + number}) << err();
    EXPECT_THAT(told(), ElementsAre());
    EXPECT_LT(steps_of(save), 200);
    if (number == SIGINT || number == SIGTERM) {
      EXPECT_THAT(out(), HasSubstr("--resume goes on from here"));
    }
  }
  expect_goes_on_as_undisturbed(fmt::format("run{}", SIGHUP));
}

// The ranks of each start meet the limit; the job ends with what they said.
TEST_F(ElasticPlaceTest, ALimitOfFileSizesEndsTheJobWithItsCause) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{.rlim_cur = 100 << 10, .rlim_max = before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  ChildProcess process = start(training("run", elastic()));
  EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  const auto status = process.wait(seconds(120));
  ASSERT_TRUE(status) << err();
  EXPECT_GT(status->code, 0);
  EXPECT_THAT(err(), HasSubstr("starts in a row ended with a failed rank, and got no further"));
  EXPECT_THAT(err(), HasSubstr(" said: "));
  EXPECT_THAT(err(), HasSubstr("File too large (ulimit -f is 100)"));
}

// The disk fills up while the job runs. Once there is room, the same command goes on.
TEST_F(ElasticPlaceTest, AFullDiskEndsTheJobWithItsCause) {
  const std::filesystem::path disk = folder_ / "disk";
  std::filesystem::create_directory(disk);
  if (::mount("weft-test", disk.c_str(), "tmpfs", 0, "size=2m") != 0)
    GTEST_SKIP() << "a small file system cannot be mounted here (needs root)";
  const auto status = start(training("disk/run", elastic({"--exact"}))).wait(seconds(120));
  EXPECT_TRUE(status && status->code > 0) << err();
  EXPECT_THAT(err(), HasSubstr("starts in a row ended with a failed rank, and got no further"));
  EXPECT_THAT(err(), HasSubstr("No space left on device"));
  EXPECT_EQ(::mount("weft-test", disk.c_str(), "tmpfs", MS_REMOUNT, "size=64m"), 0);
  expect_goes_on_as_undisturbed("disk/run");
  EXPECT_EQ(::umount2(disk.c_str(), MNT_DETACH), 0);
}

// Without rights to the folder no rank is started; if they are taken away later, the job ends.
TEST_F(ElasticPlaceTest, AFolderWithoutRightsEndsTheJob) {
  const std::filesystem::path disk = folder_ / "disk";
  std::filesystem::create_directory(disk);
  const bool root = ::geteuid() == 0;  // to whom only a read-only file system says no
  if (root && ::mount("weft-test", disk.c_str(), "tmpfs", MS_RDONLY, "size=64m") != 0)
    GTEST_SKIP() << "no file system can be mounted here, and root has the rights to all folders";
  if (!root)
    std::filesystem::permissions(disk,
                                 std::filesystem::perms::owner_read | std::filesystem::perms::owner_exec);
  EXPECT_NE(run(training("disk/run", elastic({"--metrics", file("run.json")}))), 0);
  EXPECT_THAT(err(), HasSubstr("train: --save: cannot make the folder \"" + file("disk/run") + "\""));
  EXPECT_THAT(told(), ElementsAre());
  if (!root) return std::filesystem::permissions(disk, std::filesystem::perms::owner_all);

  EXPECT_EQ(::mount("weft-test", disk.c_str(), "tmpfs", MS_REMOUNT, "size=64m"), 0);
  ChildProcess process = start(
      training("disk/run", elastic({"--metrics", file("run.json"), "--steps", "100000", "--keep", "2"})));
  wait_for_steps("run", 15);
  // Busy while a checkpoint is written.
  for (const Deadline limit = Deadline::after(seconds(20));
       ::mount("weft-test", disk.c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY, "size=64m") != 0 &&
       !limit.passed();)
    std::this_thread::sleep_for(milliseconds(1));
  const auto status = process.wait(seconds(60));
  EXPECT_TRUE(status && status->code > 0) << err();
  EXPECT_THAT(err(), HasSubstr("Read-only file system"));
  EXPECT_EQ(::umount2(disk.c_str(), MNT_DETACH), 0);
}

// A terminal of 80 x 24, and a rank that is killed: no line is wider, also of the second start.
TEST_F(ElasticPlaceTest, OnATerminalEachLineFits) {
  Words words = training("run", elastic({"--threads", "1"}));
  *std::next(std::ranges::find(words, "--progress")) = "auto";
  words.insert(words.begin(), WEFT_COMMAND);
  std::thread killer([&] {
    wait_for_checkpoint("run");
    for (const int pid : processes(1)) ::kill(pid, SIGKILL);
  });
  const OnATerminal got = run_on_a_terminal(words, 80, seconds(60), [&] {
    ::putenv(const_cast<char*>(mark_.c_str()));
    for (const char* inherited : {"WEFT_RANK", "RANK", "WEFT_STORE", "COLUMNS", "WEFT_TERMINAL"})
      ::unsetenv(inherited);
  });
  killer.join();
  EXPECT_TRUE(got.status && got.status->code == 0) << got.text;
  EXPECT_THAT(got.text, HasSubstr("weft run: start 1 of the job, on 1 rank"));
  EXPECT_THAT(got.text, HasSubstr("resumed at step"));
  EXPECT_THAT(got.text, HasSubstr("step 200/200"));
  std::string line;
  for (std::size_t i = 0; i < got.text.size(); ++i) {
    if (got.text.compare(i, 3, "\x1b[K") == 0) {
      i += 2;
    } else if (got.text[i] != '\r' && got.text[i] != '\n') {
      line += got.text[i];
    } else {
      if (!line.starts_with("weft run: ") && !line.starts_with("weft error: ") &&
          !line.starts_with("weft: ")) {
        EXPECT_LE(line.size(), 80u) << line;  // errors have the length that they need
      }
      line.clear();
    }
  }
}

// The reader of the output goes away: the ranks go on to their end, and a rank that dies is started again.
TEST_F(ElasticPlaceTest, APipeThatClosesEndsNothing) {
  Words words = training("run", elastic({"--exact"}));
  *std::next(std::ranges::find(words, "--progress")) = "lines";
  std::string command = WEFT_COMMAND;
  for (const std::string& word : words) command += fmt::format(" '{}'", word);
  const std::string script = fmt::format("{{ {} 2>'{}'; echo $? >'{}'; }} | head -n 1 >'{}'", command,
                                         file("err"), file("status"), file("out"));
  ChildProcess shell = ChildProcess::fork([&] {
    ::putenv(const_cast<char*>(mark_.c_str()));
    for (const char* inherited : {"WEFT_RANK", "RANK", "WEFT_STORE", "WORLD_SIZE", "WEFT_WORLD_SIZE"})
      ::unsetenv(inherited);
    ::execl("/bin/sh", "sh", "-c", script.c_str(), nullptr);
    return 99;
  });
  wait_for_checkpoint("run");
  for (const int pid : processes(1)) ::kill(pid, SIGKILL);
  EXPECT_TRUE(shell.wait(seconds(60)).has_value());
  EXPECT_EQ(contents(folder_ / "status"), "0\n") << err();  // as of `weft run`: a reader may leave
  EXPECT_THAT(err(), Not(HasSubstr("cannot write")));
  EXPECT_THAT(told(), ElementsAre("start 1 of the job, on 1 rank"));
  EXPECT_EQ(steps_of("run"), 200);
  ASSERT_EQ(run(training("whole", {"--exact", "--ranks", "2"})), 0) << err();
  EXPECT_EQ(run({"checkpoint", "diff", file("whole"), file("run")}), 0) << out();
}

}  // namespace
}  // namespace weft::test::elastic_test
