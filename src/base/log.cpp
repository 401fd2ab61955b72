#include "weft/base/log.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>

#include "base/text/printable.hpp"
#include "weft/base/error.hpp"

namespace weft {

std::string_view name(LogLevel level) noexcept {
  switch (level) {
    case LogLevel::error: return "error";
    case LogLevel::warning: return "warning";
    case LogLevel::info: return "info";
    case LogLevel::debug: return "debug";
  }
  return "?";
}

std::string_view name(LogLayer layer) noexcept {
  switch (layer) {
    case LogLayer::program: return "program";
    case LogLayer::host: return "host";
    case LogLayer::store: return "store";
    case LogLayer::backends: return "backends";
    case LogLayer::group: return "group";
    case LogLayer::dp: return "dp";
  }
  return "?";
}

namespace {

template <class Value, std::size_t kCount>
std::optional<Value> named(std::string_view text) {
  for (std::size_t i = 0; i < kCount; ++i)
    if (name(static_cast<Value>(i)) == text) return static_cast<Value>(i);
  return std::nullopt;
}

[[noreturn]] void refuse(std::string_view what, std::string_view text, std::string_view why) {
  throw Error(ErrorCode::bad_argument, printable(fmt::format("{} is \"{}\"; {}", what, text, why)));
}

std::string_view without_blanks(std::string_view text) {
  const auto first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

LogLevel level_of(std::string_view word, std::string_view what, std::string_view text) {
  constexpr std::size_t kLevels = 4;
  constexpr std::string_view kExpected =
      "expected error, warning, info or debug, and for single layers layer=level, as in info,store=debug";
  if (const auto level = named<LogLevel, kLevels>(word)) return *level;
  refuse(what, text,
         word == text ? std::string(kExpected) : fmt::format("\"{}\" is no level; {}", word, kExpected));
}

// Writes the whole line by one write(), so that lines of several processes do not mix. If the write fails,
// nothing can be done.
void write_to_stderr(LogLevel level, std::string_view line) {
  std::string text = "weft ";
  text += name(level);
  text += ": ";
  text += line;
  text += '\n';
  std::fwrite(text.data(), 1, text.size(), stderr);
}

}  // namespace

struct Logger::Impl {
  static constexpr std::size_t kMost = 1024;
  struct Line {
    LogLevel level;
    std::string text;
  };

  explicit Impl(LogSink s) : sink(std::move(s)) {}

  void add(LogLevel level, std::string text) {
    const std::lock_guard lock(mutex);
    if (lines.size() >= kMost) {
      ++left_out;
      return;
    }
    lines.push_back({level, std::move(text)});
    waiting.store(true, std::memory_order_relaxed);
  }

  // Returns the next line for the thread that runs the sink. Returns nothing if there is no line; this thread
  // then no longer counts as running the sink.
  std::optional<Line> next() {
    const std::lock_guard lock(mutex);
    std::optional<Line> line;
    if (!lines.empty()) {
      line = std::move(lines.front());
      lines.pop_front();
    } else if (left_out > 0) {
      const std::size_t n = std::exchange(left_out, 0);
      line = Line{LogLevel::warning,
                  "[host] log: " + std::to_string(n) + " lines were left out: the sink was too slow"};
    } else {
      in_sink = false;
      waiting.store(false, std::memory_order_relaxed);
    }
    return line;
  }

  // For lines that are written faster than the sink takes them, perhaps by the sink itself. The thread then
  // stops running the sink, and the next call passes the remaining lines to it.
  void leave_sink() {
    const std::lock_guard lock(mutex);
    in_sink = false;
  }

  bool enter_sink() {
    const std::lock_guard lock(mutex);
    return !std::exchange(in_sink, true);
  }

  const LogSink sink;
  std::atomic<bool> waiting{false};  // there are lines
  std::mutex mutex;                  // guards the members below; never held while the sink runs
  std::deque<Line> lines;
  std::size_t left_out = 0;
  bool in_sink = false;  // a thread runs the sink, and hands over new lines
};

LogLevels LogLevels::changed_by(std::string_view text, std::string_view what) const {
  std::array<std::optional<LogLevel>, kLogLayers> named_layers;
  std::optional<LogLevel> all;
  for (std::string_view rest = text;;) {
    const std::size_t comma = rest.find(',');
    const std::string_view entry = without_blanks(rest.substr(0, comma));
    const std::size_t equals = entry.find('=');
    if (equals == std::string_view::npos) {
      const LogLevel level = level_of(entry, what, text);
      if (all) refuse(what, text, "expected one level for all layers, and then layer=level");
      all = level;
    } else {
      const std::string_view layer = without_blanks(entry.substr(0, equals));
      const auto found = named<LogLayer, kLogLayers>(layer);
      if (!found)
        refuse(
            what, text,
            fmt::format("\"{}\" is no layer; expected program, host, store, backends, group or dp", layer));
      auto& to = named_layers[static_cast<std::size_t>(*found)];
      if (to) refuse(what, text, fmt::format("expected one level for {}", layer));
      to = level_of(without_blanks(entry.substr(equals + 1)), what, text);
    }
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
  }
  LogLevels changed = all ? LogLevels(*all) : *this;
  for (std::size_t i = 0; i < kLogLayers; ++i)
    if (named_layers[i]) changed.of_[i] = *named_layers[i];
  return changed;
}

Logger::Logger(const LogLevels& levels, LogSink sink)
    : levels_(levels), impl_(std::make_unique<Impl>(sink ? std::move(sink) : LogSink(write_to_stderr))) {}

Logger::Logger(LogLevel level, LogSink sink) : Logger(LogLevels(level), std::move(sink)) {}

Logger::~Logger() { flush(); }

void Logger::write(LogLevel level, std::string_view line) noexcept { write(LogLayer::program, level, line); }

void Logger::write_later(LogLevel level, std::string_view line) noexcept {
  write_later(LogLayer::program, level, line);
}

void Logger::write(LogLayer layer, LogLevel level, std::string_view line) noexcept {
  if (!enabled(layer, level)) return;
  write_later(layer, level, line);
  flush();
}

void Logger::write_later(LogLayer layer, LogLevel level, std::string_view line) noexcept {
  if (!enabled(layer, level)) return;
  try {
    impl_->add(level, fmt::format("[{}] {}", name(layer), line));
  } catch (...) {  // out of memory: the line is lost, and the program goes on
  }
}

void Logger::flush() noexcept {
  if (!impl_->waiting.load(std::memory_order_relaxed) || !impl_->enter_sink()) return;
  for (std::size_t told = 0; told <= Impl::kMost; ++told) {
    try {
      const std::optional<Impl::Line> line = impl_->next();
      if (!line) return;
      impl_->sink(line->level, line->text);
    } catch (...) {  // a sink that throws must not end the program
    }
  }
  impl_->leave_sink();
}

}  // namespace weft
