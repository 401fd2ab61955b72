// Where weft's few lines of diagnostics go. One logger per Context; thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace weft {

enum class LogLevel : std::uint8_t { error, warning, info, debug };

/// Receives one finished line, without a line feed. Called from any thread, one call at a time.
using LogSink = std::function<void(LogLevel, std::string_view)>;

class Logger {
 public:
  /// Lines above `level` are dropped. An empty sink writes "weft <level>: <line>" to stderr.
  explicit Logger(LogLevel level = LogLevel::warning, LogSink sink = {});
  ~Logger();
  Logger(const Logger&) = delete;
  Logger& operator=(const Logger&) = delete;

  bool enabled(LogLevel level) const noexcept { return level <= level_; }
  void write(LogLevel level, std::string_view line) noexcept;

 private:
  struct Impl;
  LogLevel level_;
  Impl* impl_;
};

}  // namespace weft
