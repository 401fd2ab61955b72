#include "output.hpp"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace weft::tools {
namespace {

constexpr std::string_view kEraseRest = "\x1b[K";  // from the cursor to the end of the line

}  // namespace

Sink::Sink(int fd, Screen& screen) : fd_(fd), terminal_(::isatty(fd) == 1), screen_(screen) {}

void Sink::add_line(std::string_view tag, std::string_view text) {
  if (broken_) return;
  pending_.append(tag).append(text);
  if (terminal_ && screen_.bar_shown) {
    pending_.append(kEraseRest);
    screen_.bar_shown = false;
  }
  pending_ += '\n';
}

void Sink::add_bar(std::string_view tag, std::string_view text) {
  if (broken_) return;
  pending_.append(tag).append(text).append(kEraseRest).append("\r");
  screen_.bar_shown = true;
}

void Sink::finish() {
  if (terminal_ && screen_.bar_shown && !broken_) {
    pending_ += '\n';
    screen_.bar_shown = false;
  }
}

// The descriptor is shared with others (our shell, say), so it is not made non-blocking; a pipe that poll
// calls writable takes PIPE_BUF bytes without blocking.
void Sink::flush() {
  constexpr std::size_t kAtOnce = 4096;
  std::size_t written = 0;
  while (written < pending_.size()) {
    pollfd p{fd_, POLLOUT, 0};
    if (::poll(&p, 1, 0) <= 0) break;
    const ssize_t n = ::write(fd_, pending_.data() + written, std::min(kAtOnce, pending_.size() - written));
    if (n >= 0) {
      written += static_cast<std::size_t>(n);
    } else if (errno != EINTR && errno != EAGAIN) {
      broken_ = true;
      if (errno != EPIPE) error_ = errno;
      written = pending_.size();
    }
  }
  pending_.erase(0, written);
}

void LineCutter::feed(std::string_view bytes) {
  const bool cut_at_return = sink_.terminal();
  const std::string_view ends = cut_at_return ? "\n\r" : "\n";
  while (!bytes.empty()) {
    const std::size_t end = bytes.find_first_of(ends);
    line_.append(bytes.substr(0, end));
    if (end == std::string_view::npos) break;
    if (bytes[end] == '\n') {
      line_feed();
    } else {
      carriage_return();
    }
    bytes.remove_prefix(end + 1);
  }
  if (line_.size() > kLongest) line_feed();
  // A bar drawn as "\r40 %" has no end until the next one: it is shown as far as it came.
  if (in_bar_ && !line_.empty()) show_bar(line_);
}

void LineCutter::line_feed() {
  const std::string& text = line_.empty() ? bar_ : line_;  // "done\r\n" is the line "done"
  sink_.add_line(tag_, text);
  if (text.find_first_not_of(" \t") != std::string::npos) last_ = text;
  line_.clear();
  bar_.clear();
  in_bar_ = false;
}

void LineCutter::carriage_return() {
  in_bar_ = true;
  if (line_.empty()) return;
  bar_ = std::move(line_);
  line_.clear();
  show_bar(bar_);
}

void LineCutter::show_bar(const std::string& text) {
  if (!shows_bars_ || (sink_.shows_bar() && text == shown_)) return;
  shown_ = text;
  sink_.add_bar(tag_, text);
}

void LineCutter::finish() {
  if (!line_.empty() || !bar_.empty()) line_feed();
}

}  // namespace weft::tools
