// Tests the helper that other tests use: it reports ends, signals and time limits of child processes
// correctly.
#include "support/processes.hpp"

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <future>
#include <stdexcept>
#include <thread>
#include <vector>

namespace weft::test::processes_test {
namespace {

using namespace std::chrono_literals;

TEST(Processes, TellHowAChildEnded) {
  EXPECT_TRUE(run_in_child([] { return 0; }).ok());
  EXPECT_EQ(run_in_child([] { return 7; }).status, (ExitStatus{7, 0}));
  const auto killed = run_in_child([] { return ::raise(SIGKILL); });
  EXPECT_EQ(killed.status, (ExitStatus{-1, SIGKILL}));
  EXPECT_EQ(to_string(killed), "signal 9 (Killed)");
  EXPECT_EQ(to_string(ExitStatus{3, 0}), "exit code 3");
}

TEST(Processes, ExceptionsAndFailedChecksEndWithOne) {
  testing::internal::CaptureStderr();
  const auto thrown = run_in_child([]() -> int { throw std::runtime_error("no wind"); });
  EXPECT_EQ(thrown.status, (ExitStatus{1, 0}));
  EXPECT_NE(testing::internal::GetCapturedStderr().find("uncaught exception: no wind"), std::string::npos);
  testing::internal::CaptureStdout();  // where the child's failure is reported
  const auto failed = run_in_child([] {
    EXPECT_EQ(1, 2);
    return 0;
  });
  EXPECT_NE(testing::internal::GetCapturedStdout().find("Failure"), std::string::npos);
  EXPECT_EQ(failed.status, (ExitStatus{1, 0}));
}

TEST(Processes, AreKilledAfterTheTimeLimit) {
  const auto start = Clock::now();
  const auto result = run_in_child(
      [] {
        std::this_thread::sleep_for(60s);
        return 0;
      },
      50ms);
  EXPECT_TRUE(result.timed_out);
  EXPECT_FALSE(result.ok());
  EXPECT_EQ(to_string(result), "killed after the time limit");
  EXPECT_LT(Clock::now() - start, 30s);
}

// An allocator that is not ready for fork leaves the child its locks as they are, which other threads may
// hold.
TEST(Processes, AChildAllocatesThoughThreadsHaveJustBegun) {
  const auto allocate = [](int rounds) {
    for (int i = 0; i < rounds; ++i)
      for (std::size_t size = 16; size <= 4096; size *= 2) {
        const std::vector<std::vector<char>> some(64, std::vector<char>(size));
        EXPECT_EQ(some.back().size(), size);
      }
  };
  for (int round = 0; round < 10; ++round) {
    std::promise<void> end;
    const std::shared_future<void> ended = end.get_future();
    std::vector<std::jthread> threads;
    for (int i = 0; i < 3; ++i)
      threads.emplace_back([&] {
        allocate(3);
        ended.wait();
      });
    const auto result = run_in_child(
        [&] {
          allocate(1);
          return 0;
        },
        10s);
    end.set_value();
    ASSERT_TRUE(result.ok()) << "round " << round << ": " << to_string(result);
  }
}

TEST(Processes, StopAndResume) {
  Pipe from_child;
  ChildProcess child = ChildProcess::fork([&] {
    for (;;) {
      from_child.write_line("tick");
      std::this_thread::sleep_for(1ms);
    }
    return 0;
  });
  EXPECT_EQ(from_child.read_line(), "tick");
  child.stop();
  EXPECT_THROW(for (;;) from_child.read_line(200ms), std::runtime_error);
  child.resume();
  EXPECT_EQ(from_child.read_line(), "tick");
  EXPECT_FALSE(child.wait(1ms));
  child.kill(SIGTERM);
  EXPECT_EQ(child.wait(5s), (ExitStatus{-1, SIGTERM}));
  EXPECT_EQ(child.wait(0s), (ExitStatus{-1, SIGTERM}));  // may be asked again
}

TEST(Processes, NothingIsLeftRunning) {
  pid_t pid = -1;
  {
    const ChildProcess child = ChildProcess::fork([] {
      std::this_thread::sleep_for(60s);
      return 0;
    });
    pid = child.pid();
    EXPECT_EQ(::kill(pid, 0), 0);
  }
  EXPECT_EQ(::kill(pid, 0), -1);
}

TEST(Processes, SeveralRanksAreReportedByName) {
  run_in_children(3, [](int) {});
  EXPECT_NONFATAL_FAILURE(run_in_children(2,
                                          [](int rank) {
                                            if (rank == 1) ::_exit(5);
                                          }),
                          "rank 1 ended with exit code 5");
}

}  // namespace
}  // namespace weft::test::processes_test
