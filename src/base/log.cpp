#include "weft/base/log.hpp"

#include <unistd.h>

#include <cstdio>
#include <mutex>

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
  std::mutex mutex;
  LogSink sink;
};

Logger::Logger(LogLevel level, LogSink sink)
    : level_(level),
      impl_(new Impl{.mutex = {}, .sink = sink ? std::move(sink) : LogSink(write_to_stderr)}) {}

Logger::~Logger() { delete impl_; }

void Logger::write(LogLevel level, std::string_view line) noexcept {
  if (!enabled(level)) return;
  try {
    const std::lock_guard lock(impl_->mutex);
    impl_->sink(level, line);
  } catch (
      ...) {  // a sink that throws must not take the program along: diagnostics are worth less than the run
  }
}

}  // namespace weft
