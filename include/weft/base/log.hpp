// Where weft's few lines of diagnostics go. One logger per Context; thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "weft/base/cxx20.hpp"

namespace weft {

enum class LogLevel : std::uint8_t { error, warning, info, debug };

/// The part of weft that a line comes from; `program`: the program that uses weft. Each has a level of its
/// own.
enum class LogLayer : std::uint8_t { program, host, store, backends, group, dp };
inline constexpr std::size_t kLogLayers = 6;

/// "program", "host", …
std::string_view name(LogLayer layer) noexcept;
/// "error", "warning", …
std::string_view name(LogLevel level) noexcept;

/// The least important line that is still logged, for each layer.
class LogLevels {
 public:
  explicit constexpr LogLevels(LogLevel all = LogLevel::warning) noexcept { of_.fill(all); }
  constexpr LogLevel of(LogLayer layer) const noexcept { return of_[static_cast<std::size_t>(layer)]; }
  constexpr void set(LogLayer layer, LogLevel level) noexcept {
    of_[static_cast<std::size_t>(layer)] = level;
  }
  /// Returns these levels, changed by a text: "info", "store=debug", or several, separated by commas:
  /// "info,store=debug,dp=error". A level without a layer is for all layers that the text does not name.
  /// Throws bad_argument with the text's value and the expected one; `what` is the text's name: WEFT_LOG.
  LogLevels changed_by(std::string_view text, std::string_view what) const;

 private:
  std::array<LogLevel, kLogLayers> of_{};
};

/// Receives one finished line, without a line feed, which begins with its layer: "[store] rendezvous: …".
/// Called from any thread, weft's own among them, one call at a time. No lock of weft's is held meanwhile: a
/// sink may take a lock of its own, write to the Logger, and make, use and destroy groups. A line that is
/// written while the sink runs, by whichever thread or by the sink itself, waits and is handed over by the
/// thread that is in the sink, so write() may return before. At most 1024 lines wait; later lines are
/// dropped, and their number is logged. The sink must not end the Context, nor use the Work whose wait called
/// it. A thread that ends the Context waits for weft's own threads, so it must not hold a lock that the sink
/// takes. Exceptions of a sink are dropped.
using LogSink = std::function<void(LogLevel, std::string_view)>;

class Logger {
 public:
  /// Lines above their layer's level are dropped. An empty sink writes "weft <level>: <line>" to stderr.
  explicit Logger(const LogLevels& levels, LogSink sink = {});
  /// One level for all layers.
  explicit Logger(LogLevel level = LogLevel::warning, LogSink sink = {});
  ~Logger();
  Logger(const Logger&) = delete;
  Logger& operator=(const Logger&) = delete;

  bool enabled(LogLayer layer, LogLevel level) const noexcept { return level <= levels_.of(layer); }
  /// Must not be called with a lock held that a sink may take: see write_later().
  void write(LogLayer layer, LogLevel level, std::string_view line) noexcept;
  /// For callers that hold a lock: the sink gets the line at the next write() or flush() of any thread. Never
  /// blocks.
  void write_later(LogLayer layer, LogLevel level, std::string_view line) noexcept;
  /// Like the three functions above, for LogLayer::program.
  bool enabled(LogLevel level) const noexcept { return enabled(LogLayer::program, level); }
  void write(LogLevel level, std::string_view line) noexcept;
  void write_later(LogLevel level, std::string_view line) noexcept;
  /// Hands waiting lines to the sink, unless another thread is doing so. Cheap if no line waits.
  void flush() noexcept;

 private:
  struct Impl;
  LogLevels levels_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weft
