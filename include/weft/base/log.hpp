// The log, to which weft writes its diagnostics. One logger per Context; thread-safe.
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

/// The part of weft that a line comes from; `program`: the program that uses weft. Each layer has its own
/// level.
enum class LogLayer : std::uint8_t { program, host, store, backends, group, dp };
inline constexpr std::size_t kLogLayers = 6;

/// "program", "host", …
std::string_view name(LogLayer layer) noexcept;
/// "error", "warning", …
std::string_view name(LogLevel level) noexcept;

/// For each layer, the level of its least important lines that are still logged.
class LogLevels {
 public:
  explicit constexpr LogLevels(LogLevel all = LogLevel::warning) noexcept { of_.fill(all); }
  constexpr LogLevel of(LogLayer layer) const noexcept { return of_[static_cast<std::size_t>(layer)]; }
  constexpr void set(LogLayer layer, LogLevel level) noexcept {
    of_[static_cast<std::size_t>(layer)] = level;
  }
  /// Returns these levels, changed by a text such as "info", "store=debug" or "info,store=debug,dp=error". A
  /// level without a layer is for all layers that the text does not name. Throws bad_argument if the text is
  /// wrong; the error gives the text and what was expected. `what` is the text's name in the error: WEFT_LOG.
  LogLevels changed_by(std::string_view text, std::string_view what) const;

 private:
  std::array<LogLevel, kLogLayers> of_{};
};

/// Receives one finished line, without a line feed, which begins with its layer: "[store] rendezvous: …". Any
/// thread may call the sink, including weft's own threads, but only one at a time. The calling thread holds
/// no lock of weft. So a sink may take its own lock, write to the Logger, and make, use and destroy groups.
/// If any thread (or the sink itself) writes a line while the sink runs, the line waits. The thread that runs
/// the sink then passes it to the sink; write() may return before that. At most 1024 lines wait. weft drops
/// later lines, and logs their number. The sink must not end the Context, and must not use the Work whose
/// wait called the sink. A thread that ends the Context waits for weft's own threads. So it must not hold a
/// lock that the sink takes. weft ignores exceptions of a sink.
using LogSink = std::function<void(LogLevel, std::string_view)>;

class Logger {
 public:
  /// The Logger drops lines that are less important than their layer's level. With an empty sink it writes
  /// "weft <level>: <line>" to stderr.
  explicit Logger(const LogLevels& levels, LogSink sink = {});
  /// One level for all layers.
  explicit Logger(LogLevel level = LogLevel::warning, LogSink sink = {});
  ~Logger();
  Logger(const Logger&) = delete;
  Logger& operator=(const Logger&) = delete;

  bool enabled(LogLayer layer, LogLevel level) const noexcept { return level <= levels_.of(layer); }
  /// The caller must not hold a lock that a sink may take: see write_later().
  void write(LogLayer layer, LogLevel level, std::string_view line) noexcept;
  /// For callers that hold a lock. The sink gets the line at the next write() or flush() of any thread. Never
  /// blocks.
  void write_later(LogLayer layer, LogLevel level, std::string_view line) noexcept;
  /// Like the three functions above, for LogLayer::program.
  bool enabled(LogLevel level) const noexcept { return enabled(LogLayer::program, level); }
  void write(LogLevel level, std::string_view line) noexcept;
  void write_later(LogLevel level, std::string_view line) noexcept;
  /// Passes waiting lines to the sink, unless another thread is doing so. Cheap if no line waits.
  void flush() noexcept;

 private:
  struct Impl;
  LogLevels levels_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weft
