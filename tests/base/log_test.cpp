#include "weft/base/log.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace weft {
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

}  // namespace
}  // namespace weft
