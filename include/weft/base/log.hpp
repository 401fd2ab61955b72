// Where weft's few lines of diagnostics go. One logger per Context; thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace weft {

enum class LogLevel : std::uint8_t { error, warning, info, debug };

/// Receives one finished line, without a line feed. Called from any thread, weft's own among them, one call
/// at a time. No lock of weft's is held meanwhile: a sink may take a lock of its own, write to the Logger,
/// and make, use and destroy groups. A line that is written while the sink runs, by whichever thread or by
/// the sink itself, waits and is handed over by the thread that is in the sink, so write() may return before;
/// of more than 1024 that wait the latest are left out, and how many is said. The sink must not end the
/// Context, nor use the Work whose wait called it; and who ends the Context must not hold a lock that the
/// sink takes, since that waits for weft's own threads. What a sink throws is dropped.
using LogSink = std::function<void(LogLevel, std::string_view)>;

class Logger {
 public:
  /// Lines above `level` are dropped. An empty sink writes "weft <level>: <line>" to stderr.
  explicit Logger(LogLevel level = LogLevel::warning, LogSink sink = {});
  ~Logger();
  Logger(const Logger&) = delete;
  Logger& operator=(const Logger&) = delete;

  bool enabled(LogLevel level) const noexcept { return level <= level_; }
  /// Not where a lock is held that a sink may need, see write_later().
  void write(LogLevel level, std::string_view line) noexcept;
  /// For who holds a lock: the sink gets the line at the next write() or flush(), of whichever thread. Never
  /// blocks.
  void write_later(LogLevel level, std::string_view line) noexcept;
  /// Hands out what waits, unless another thread is at it. Cheap where nothing does.
  void flush() noexcept;

 private:
  struct Impl;
  LogLevel level_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weft
