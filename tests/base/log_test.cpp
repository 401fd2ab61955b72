#include "weft/base/log.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/errors.hpp"

namespace weft::log_test {
namespace {

using testing::ElementsAre;

TEST(Log, DropsLinesAboveItsLevel) {
  std::vector<std::string> lines;
  Logger log(LogLevel::info, [&](LogLevel, std::string_view line) { lines.emplace_back(line); });
  log.write(LogLevel::error, "a");
  log.write(LogLevel::info, "b");
  log.write(LogLevel::debug, "c");
  EXPECT_THAT(lines, ElementsAre("[program] a", "[program] b"));
  EXPECT_TRUE(log.enabled(LogLevel::warning));
  EXPECT_FALSE(log.enabled(LogLevel::debug));
}

TEST(Log, EachLayerHasALevelOfItsOwn) {
  LogLevels levels(LogLevel::warning);
  levels.set(LogLayer::store, LogLevel::debug);
  levels.set(LogLayer::group, LogLevel::error);
  std::vector<std::string> lines;
  Logger log(levels, [&](LogLevel, std::string_view line) { lines.emplace_back(line); });
  for (const LogLayer layer : {LogLayer::program, LogLayer::host, LogLayer::store, LogLayer::backends,
                               LogLayer::group, LogLayer::dp}) {
    log.write(layer, LogLevel::error, "an error");
    log.write(layer, LogLevel::warning, "a warning");
    log.write_later(layer, LogLevel::debug, "a detail");
    log.flush();
  }
  EXPECT_THAT(lines,
              ElementsAre("[program] an error", "[program] a warning", "[host] an error", "[host] a warning",
                          "[store] an error", "[store] a warning", "[store] a detail", "[backends] an error",
                          "[backends] a warning", "[group] an error", "[dp] an error", "[dp] a warning"));
  EXPECT_TRUE(log.enabled(LogLayer::store, LogLevel::debug));
  EXPECT_FALSE(log.enabled(LogLayer::group, LogLevel::warning));
  EXPECT_TRUE(log.enabled(LogLevel::warning));
}

// "error warning …" by layer, in the order of LogLayer.
std::string shown(const LogLevels& levels) {
  std::string text;
  for (std::size_t i = 0; i < kLogLayers; ++i)
    text += std::string(name(levels.of(static_cast<LogLayer>(i)))) + (i + 1 < kLogLayers ? " " : "");
  return text;
}

TEST(LogLevels, ATextChangesThem) {
  const LogLevels before(LogLevel::warning);
  EXPECT_EQ(shown(before.changed_by("info", "X")), "info info info info info info");
  EXPECT_EQ(shown(before.changed_by("info,store=debug", "X")), "info info debug info info info");
  EXPECT_EQ(shown(before.changed_by("store=debug,info", "X")), "info info debug info info info");
  EXPECT_EQ(shown(before.changed_by(" info , store = debug ", "X")), "info info debug info info info");
  EXPECT_EQ(shown(before.changed_by("dp=error,program=debug", "X")),
            "debug warning warning warning warning error");
  EXPECT_EQ(shown(before.changed_by("host=info,backends=debug,group=error", "X")),
            "warning info warning debug error warning");
}

TEST(LogLevels, WhatIsNoneIsNamed) {
  const auto text = [](std::string_view given) {
    return test::error_text([&] { LogLevels().changed_by(given, "WEFT_LOG"); });
  };
  const std::string levels =
      "expected error, warning, info or debug, and for single layers layer=level, as in info,store=debug";
  EXPECT_EQ(text("loud"), "bad_argument: WEFT_LOG is \"loud\"; " + levels);
  EXPECT_EQ(text("Info"), "bad_argument: WEFT_LOG is \"Info\"; " + levels);
  EXPECT_EQ(text(""), "bad_argument: WEFT_LOG is \"\"; " + levels);
  EXPECT_EQ(text("info,"), "bad_argument: WEFT_LOG is \"info,\"; \"\" is no level; " + levels);
  EXPECT_EQ(text("info,store=all"),
            "bad_argument: WEFT_LOG is \"info,store=all\"; \"all\" is no level; " + levels);
  EXPECT_EQ(text("store="), "bad_argument: WEFT_LOG is \"store=\"; \"\" is no level; " + levels);
  EXPECT_EQ(
      text("info,stor=debug"),
      "bad_argument: WEFT_LOG is \"info,stor=debug\"; \"stor\" is no layer; expected program, host, store, "
      "backends, group or dp");
  EXPECT_EQ(
      text("=debug"),
      "bad_argument: WEFT_LOG is \"=debug\"; \"\" is no layer; expected program, host, store, backends, "
      "group or dp");
  EXPECT_EQ(
      text("info,debug"),
      "bad_argument: WEFT_LOG is \"info,debug\"; expected one level for all layers, and then layer=level");
  EXPECT_EQ(text("dp=info,dp=info"),
            "bad_argument: WEFT_LOG is \"dp=info,dp=info\"; expected one level for dp");
}

TEST(Log, GoesToStderrByDefault) {
  Logger log;
  testing::internal::CaptureStderr();
  log.write(LogLevel::warning, "tide is rising");
  log.write(LogLevel::info, "birds");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "weft warning: [program] tide is rising\n");
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

// Two threads and the lock of an interpreter, for example. One thread holds the lock and logs; the other is
// in the sink and waits for the lock.
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
  log.write(LogLevel::error, "from the thread that has it");  // it would wait forever
  EXPECT_THAT(lines, testing::IsEmpty());
  lock.unlock();
  other.join();
  EXPECT_THAT(lines, ElementsAre("[program] from a thread without the lock",
                                 "[program] from the thread that has it"));
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
  EXPECT_THAT(lines, ElementsAre("[program] once", "[program] again"));
}

// The thread in the sink also passes on lines that others log meanwhile, but not forever if they never stop.
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
    EXPECT_THAT(lines, ElementsAre("[program] a", "[program] b"));
    log.write_later(LogLevel::error, "c");
    log.flush();
    EXPECT_THAT(lines, ElementsAre("[program] a", "[program] b", "[program] c"));
    for (int i = 0; i < 1030; ++i) log.write_later(LogLevel::error, "many");
  }
  ASSERT_EQ(lines.size(), 3u + 1024 + 1);
  EXPECT_EQ(lines.back(), "[host] log: 6 lines were left out: the sink was too slow");
}

}  // namespace
}  // namespace weft::log_test
