// Where weft's few lines of diagnostics go. One logger per Context; thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "weft/base/cxx20.hpp"

namespace weft {

enum class LogLevel : std::uint8_t { error, warning, info, debug };

/// Receives one finished line, without a line feed. Called from any thread, weft's own among them, one call
/// at a time. No lock of weft's is held meanwhile: a sink may take a lock of its own, write to the Logger,
/// and make, use and destroy groups. A line that is written while the sink runs, by whichever thread or by
/// the sink itself, waits and is handed over by the thread that is in the sink, so write() may return before;
/// at most 1024 lines wait; later ones are dropped, and their number is logged. The sink must not end the
/// Context, nor use the Work whose wait called it. A thread that ends the Context must not hold a lock that the
/// sink takes, since it waits for weft's own threads. What a sink throws is dropped.
using LogSink = std::function<void(LogLevel, std::string_view)>;

class Logger {
 public:
  /// Lines above `level` are dropped. An empty sink writes "weft <level>: <line>" to stderr.
  explicit Logger(LogLevel level = LogLevel::warning, LogSink sink = {});
  ~Logger();
  Logger(const Logger&) = delete;
  Logger& operator=(const Logger&) = delete;

  bool enabled(LogLevel level) const noexcept { return level <= level_; }
  /// Must not be called with a lock held that a sink may take: see write_later().
  void write(LogLevel level, std::string_view line) noexcept;
  /// For callers that hold a lock: the sink gets the line at the next write() or flush() of any thread. Never
  /// blocks.
  void write_later(LogLevel level, std::string_view line) noexcept;
  /// Hands waiting lines to the sink, unless another thread is doing so. Cheap where no line waits.
  void flush() noexcept;

 private:
  struct Impl;
  LogLevel level_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weft
