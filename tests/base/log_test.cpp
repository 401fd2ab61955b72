#include "weft/base/log.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace weft::log_test {
namespace {

using testing::ElementsAre;

TEST(Log, DropsLinesAboveItsLevel) {
  std::vector<std::string> lines;
  Logger log(LogLevel::info, [&](LogLevel, std::string_view line) { lines.emplace_back(line); });
  log.write(LogLevel::error, "a");
  log.write(LogLevel::info, "b");
  log.write(LogLevel::debug, "c");
  EXPECT_THAT(lines, ElementsAre("a", "b"));
  EXPECT_TRUE(log.enabled(LogLevel::warning));
  EXPECT_FALSE(log.enabled(LogLevel::debug));
}

TEST(Log, GoesToStderrByDefault) {
  Logger log;
  testing::internal::CaptureStderr();
  log.write(LogLevel::warning, "tide is rising");
  log.write(LogLevel::info, "birds");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "weft warning: tide is rising\n");
}

TEST(Log, CallsItsSinkFromOneThreadAtATimeAndSurvivesIt) {
  std::vector<std::string> lines;
  Logger log(LogLevel::error, [&](LogLevel, std::string_view line) {
    lines.emplace_back(line);
    throw std::runtime_error("full");
  });
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 100; ++i) log.write(LogLevel::error, "x");
    });
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(lines.size(), 400u);
}

// Two threads with the lock of an interpreter, say: one holds it and logs, the other is in the sink and wants
// it.
TEST(Log, HoldsNoLockWhileItsSinkRuns) {
  std::mutex users;
  std::atomic<int> in_sink{0};
  std::vector<std::string> lines;
  Logger log(LogLevel::error, [&](LogLevel, std::string_view line) {
    ++in_sink;
    const std::lock_guard lock(users);
    lines.emplace_back(line);
  });
  std::unique_lock lock(users);
  std::thread other([&] { log.write(LogLevel::error, "from a thread without the lock"); });
  while (in_sink == 0) std::this_thread::yield();
  log.write(LogLevel::error, "from the thread that has it");  // it would wait for ever
  EXPECT_THAT(lines, testing::IsEmpty());
  lock.unlock();
  other.join();
  EXPECT_THAT(lines, ElementsAre("from a thread without the lock", "from the thread that has it"));
}

TEST(Log, ASinkMayLog) {
  std::vector<std::string> lines;
  Logger* self = nullptr;
  Logger log(LogLevel::error, [&](LogLevel, std::string_view line) {
    if (lines.empty()) self->write(LogLevel::error, "again");
    lines.emplace_back(line);
  });
  self = &log;
  log.write(LogLevel::error, "once");
  EXPECT_THAT(lines, ElementsAre("once", "again"));
}

// Whoever is in the sink takes what others log meanwhile: not for ever, where that never ends.
TEST(Log, EndsThoughItsSinkLogsEachTime) {
  Logger* self = nullptr;
  int lines = 0;
  Logger log(LogLevel::error, [&](LogLevel, std::string_view) {
    ++lines;
    self->write(LogLevel::error, "again");
  });
  self = &log;
  log.write(LogLevel::error, "once");
  const int told = lines;
  EXPECT_GE(told, 1000);
  log.write(LogLevel::error, "twice");
  EXPECT_GE(lines, told + 1000);
}

TEST(Log, KeepsLinesUntilNoLockIsHeld) {
  std::vector<std::string> lines;
  {
    Logger log(LogLevel::error, [&](LogLevel, std::string_view line) { lines.emplace_back(line); });
    log.write_later(LogLevel::error, "a");
    log.write_later(LogLevel::info, "no");
    EXPECT_THAT(lines, testing::IsEmpty());
    log.write(LogLevel::error, "b");
    EXPECT_THAT(lines, ElementsAre("a", "b"));
    log.write_later(LogLevel::error, "c");
    log.flush();
    EXPECT_THAT(lines, ElementsAre("a", "b", "c"));
    for (int i = 0; i < 1030; ++i) log.write_later(LogLevel::error, "many");
  }
  ASSERT_EQ(lines.size(), 3u + 1024 + 1);
  EXPECT_EQ(lines.back(), "log: 6 lines were left out: the sink was too slow");
}

}  // namespace
}  // namespace weft::log_test
