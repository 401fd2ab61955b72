#include "weft/base/log.hpp"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>

namespace weft {
namespace {

std::string_view name(LogLevel level) noexcept {
  switch (level) {
    case LogLevel::error: return "error";
    case LogLevel::warning: return "warning";
    case LogLevel::info: return "info";
    case LogLevel::debug: return "debug";
  }
  return "?";
}

// One write for the whole line, so that lines of several processes do not mix. Nothing can be done if it
// fails.
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

  void add(LogLevel level, std::string_view text) {
    const std::lock_guard lock(mutex);
    if (lines.size() >= kMost) {
      ++left_out;
      return;
    }
    lines.push_back({level, std::string(text)});
    waiting.store(true, std::memory_order_relaxed);
  }

  // The next line, for the thread that is in the sink. Nothing: there is none, and the thread has left the sink.
  std::optional<Line> next() {
    const std::lock_guard lock(mutex);
    std::optional<Line> line;
    if (!lines.empty()) {
      line = std::move(lines.front());
      lines.pop_front();
    } else if (left_out > 0) {
      const std::size_t n = std::exchange(left_out, 0);
      line = Line{LogLevel::warning,
                  "log: " + std::to_string(n) + " lines were left out: the sink was too slow"};
    } else {
      in_sink = false;
      waiting.store(false, std::memory_order_relaxed);
    }
    return line;
  }

  // Lines come faster than the sink takes them, perhaps from the sink itself: the next call goes on.
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
  std::mutex mutex;                  // of what follows; never held while the sink runs
  std::deque<Line> lines;
  std::size_t left_out = 0;
  bool in_sink = false;  // a thread is there and takes what comes
};

Logger::Logger(LogLevel level, LogSink sink)
    : level_(level), impl_(std::make_unique<Impl>(sink ? std::move(sink) : LogSink(write_to_stderr))) {}

Logger::~Logger() { flush(); }

void Logger::write(LogLevel level, std::string_view line) noexcept {
  if (!enabled(level)) return;
  write_later(level, line);
  flush();
}

void Logger::write_later(LogLevel level, std::string_view line) noexcept {
  if (!enabled(level)) return;
  try {
    impl_->add(level, line);
  } catch (...) {  // out of memory: diagnostics are worth less than the run
  }
}

void Logger::flush() noexcept {
  if (!impl_->waiting.load(std::memory_order_relaxed) || !impl_->enter_sink()) return;
  for (std::size_t told = 0; told <= Impl::kMost; ++told) {
    try {
      const std::optional<Impl::Line> line = impl_->next();
      if (!line) return;
      impl_->sink(line->level, line->text);
    } catch (...) {  // a sink that throws must not take the program along
    }
  }
  impl_->leave_sink();
}

}  // namespace weft
