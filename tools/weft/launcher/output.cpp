#include "output.hpp"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace weft::tools {
namespace {

constexpr std::size_t kLastLines = 4, kMostWords = 512;  // as reported of a rank that has died
constexpr std::string_view kEraseRest = "\x1b[K";        // from the cursor to the end of the line

}  // namespace

Sink::Sink(int fd, Screen& screen) : fd_(fd), terminal_(::isatty(fd) == 1), screen_(screen) {}

// Ends a line that was left open, unless its own rank continues it.
void Sink::begin_line(std::string_view tag, const LineCutter* from) {
  if (within_line_ && (from == nullptr || whose_ != from)) {
    pending_ += '\n';
    within_line_ = false;
  }
  if (!within_line_) pending_.append(tag);
}

void Sink::add_line(std::string_view tag, std::string_view text, const LineCutter* from) {
  if (broken_) return;
  begin_line(tag, from);
  pending_.append(text);
  if (terminal_ && screen_.bar_shown) {
    pending_.append(kEraseRest);
    screen_.bar_shown = false;
  }
  pending_ += '\n';
  within_line_ = false;
}

void Sink::add_part(std::string_view tag, std::string_view text, const LineCutter* from) {
  if (broken_) return;
  begin_line(tag, from);
  pending_.append(text);
  within_line_ = true;
  whose_ = from;
}

bool Sink::is_within(const LineCutter* line) const { return within_line_ && whose_ == line; }

void Sink::end_of_stream(std::string_view tag, std::string_view text, const LineCutter* from) {
  if (!tag.empty() || terminal_) return add_line(tag, text, from);
  add_part(tag, text, from);
  whose_ = nullptr;
}

void Sink::add_bar(std::string_view tag, std::string_view text) {
  if (broken_) return;
  begin_line(tag, nullptr);
  pending_.append(text).append(kEraseRest).append("\r");
  screen_.bar_shown = true;
}

void Sink::finish() {
  if (terminal_ && screen_.bar_shown && !broken_) {
    pending_ += '\n';
    screen_.bar_shown = false;
  }
}

// The descriptor is shared with other processes (our shell, for example), so it is not made non-blocking; a
// pipe that poll calls writable takes PIPE_BUF bytes without blocking.
void Sink::flush() {
  constexpr std::size_t kAtOnce = 4096;
  while (!empty()) {
    pollfd p{fd_, POLLOUT, 0};
    if (::poll(&p, 1, 0) <= 0) break;
    const ssize_t n = ::write(fd_, pending_.data() + written_, std::min(kAtOnce, pending_.size() - written_));
    if (n >= 0) {
      written_ += static_cast<std::size_t>(n);
    } else if (errno != EINTR && errno != EAGAIN) {
      broken_ = true;
      if (errno != EPIPE) error_ = errno;
      written_ = pending_.size();
    }
  }
  if (empty()) return drop();
  if (written_ > pending_.size() / 2) pending_.erase(0, std::exchange(written_, 0));
}

void LineCutter::feed(std::string_view bytes) {
  const std::size_t before = line_.size();
  cut(bytes);
  sink_.keep(line_.size(), before);
  if (too_long()) {
    sink_.add_part(tag_, line_, this);
    sink_.keep(0, line_.size());
    in_parts_ = true;
    last_.assign(line_, 0, kShort);
    line_.clear();
  }
  // A bar drawn as "\r40 %" has no end until the next one: it is shown as far as it has arrived.
  if (in_bar_ && !line_.empty()) show_bar(line_);
}

void LineCutter::cut(std::string_view bytes) {
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
}

void LineCutter::line_feed() {
  const std::string& text = line_.empty() ? bar_ : line_;  // "done\r\n" is the line "done"
  // If parts of a line have been written, and a line of another rank has ended it, nothing more of it need be
  // written.
  if (!in_parts_ || !text.empty() || sink_.is_within(this)) sink_.add_line(tag_, text, this);
  leave_line(text);
}

std::vector<std::string> LineCutter::last_lines() const {
  std::vector<std::string> lines(earlier_.begin(), earlier_.end());
  for (const std::string* line : {&last_, &line_})
    if (line->find_first_not_of(" \t") != std::string::npos) lines.push_back(line->substr(0, kMostWords));
  return lines;
}

void LineCutter::leave_line(const std::string& text) {
  if (text.find_first_not_of(" \t") != std::string::npos) {
    if (!last_.empty()) earlier_.push_back(last_.substr(0, kMostWords));
    if (earlier_.size() >= kLastLines) earlier_.pop_front();
    last_.assign(text, 0, kShort);
  }
  line_.clear();
  bar_.clear();
  in_bar_ = in_parts_ = false;
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
  sink_.keep(0, line_.size());
  if (line_.empty() && bar_.empty() && !in_parts_) return;
  const std::string text = line_.empty() ? bar_ : line_;
  if (!text.empty() || sink_.is_within(this)) sink_.end_of_stream(tag_, text, this);
  leave_line(text);
}

}  // namespace weft::tools
