// The ranks' output on its way out: cut into lines, tagged, queued until it can be written. For use by one
// thread.
#pragma once

#include <cstddef>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

namespace weft::tools {

/// The state of the terminal that standard output and standard error may share.
struct Screen {
  bool bar_shown = false;  ///< the cursor stands at the start of a line that shows a progress bar
};

class LineCutter;

/// One of our own outputs. Never blocks for long: text that cannot be written yet stays queued.
class Sink {
 public:
  Sink(int fd, Screen& screen);
  int fd() const { return fd_; }
  bool terminal() const { return terminal_; }
  bool shows_bar() const { return screen_.bar_shown; }
  bool empty() const { return written_ == pending_.size(); }
  /// The errno of the write that failed, after which nothing more is written; 0 if none failed, or if the
  /// reader left (EPIPE), which is no failure.
  int error() const { return error_; }
  /// Returns whether so much is queued that no more should be read from the ranks.
  bool full() const { return pending_.size() - written_ > kFull; }

  /// `from`: the stream of the line; null: the launcher itself.
  void add_line(std::string_view tag, std::string_view text, const LineCutter* from = nullptr);
  /// Adds a part of a line that is too long to be kept until it ends. If another line comes before the next
  /// part, a line feed separates them.
  void add_part(std::string_view tag, std::string_view text, const LineCutter* from);
  /// Call this if the stream of `from` ended within a line. Without a tag the line feed comes with the
  /// next line, if there is one: the output of a single rank leaves unchanged.
  void end_of_stream(std::string_view tag, std::string_view text, const LineCutter* from);
  /// Returns whether the last addition is a part of that line.
  bool is_within(const LineCutter* line) const;
  /// How many bytes of incomplete lines are kept, in all streams together.
  std::size_t kept() const { return kept_; }
  void keep(std::size_t more, std::size_t less) { kept_ += more - less; }
  /// Shows `text` on a line that later output may write over. Terminals only.
  void add_bar(std::string_view tag, std::string_view text);
  /// A last bar stays on the screen.
  void finish();
  /// Writes what the descriptor accepts now. If the reader is gone (EPIPE), nothing more is written; the
  /// ranks go on.
  void flush();
  void drop() {
    pending_.clear();
    written_ = 0;
  }

 private:
  static constexpr std::size_t kFull = std::size_t{1} << 20;
  void begin_line(std::string_view tag, const LineCutter* from);

  int fd_;
  bool terminal_;
  bool broken_ = false;
  int error_ = 0;
  Screen& screen_;
  std::string pending_;
  std::size_t written_ = 0;  // of pending_
  std::size_t kept_ = 0;
  bool within_line_ = false;           // the last addition has no line feed
  const LineCutter* whose_ = nullptr;  // the owner of that line; null: it has none any more
};

/// Cuts one stream of one rank into lines. A line leaves complete: a program whose output is buffered in
/// blocks pauses in the middle of lines, so waiting longer for the rest is the only way not to break them. A
/// line of more than 4 MiB, or of more than 64 KiB if all ranks' unfinished lines together have 64 MiB,
/// leaves in parts. On a terminal a carriage return also ends a line, which the next one may overwrite.
/// Progress bars of rank 0 are shown in this way; of the other ranks' bars only the final text is shown.
/// If the output is no terminal, carriage returns pass through unchanged.
class LineCutter {
 public:
  LineCutter(std::string tag, bool shows_bars, Sink& sink)
      : tag_(std::move(tag)), shows_bars_(shows_bars), sink_(sink) {}
  void feed(std::string_view bytes);
  /// Call this when the stream is over: the remaining text is a line.
  void finish();
  Sink& sink() { return sink_; }
  /// The last few lines that are not empty, oldest first, each of at most 512 bytes.
  std::vector<std::string> last_lines() const;
  /// The last line that is not empty, even if it is not complete yet.
  const std::string& last() const {
    return line_.find_first_not_of(" \t") != std::string::npos ? line_ : last_;
  }

 private:
  static constexpr std::size_t kShort = std::size_t{64} << 10, kLongest = std::size_t{4} << 20,
                               kMostKept = std::size_t{64} << 20;
  bool too_long() const {
    return line_.size() > kLongest || (line_.size() > kShort && sink_.kept() > kMostKept);
  }
  void cut(std::string_view bytes);
  void line_feed();
  void leave_line(const std::string& text);
  void carriage_return();
  void show_bar(const std::string& text);

  std::string tag_;
  bool shows_bars_;
  Sink& sink_;
  std::string line_;                 // since the last line end
  std::string last_;                 // the last line that left and was not blank
  std::deque<std::string> earlier_;  // the beginnings of a few such lines before it
  std::string bar_;                  // the last text that a carriage return ended, if only bars came since
  std::string shown_;                // the text of the bar that was shown last
  bool in_bar_ = false;
  bool in_parts_ = false;  // a part of this line has left
};

}  // namespace weft::tools
