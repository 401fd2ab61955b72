#include "progress_bar.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "terminal.hpp"
#include "weft/base/env.hpp"

namespace weft::tools {
namespace {

constexpr std::size_t kMostCells = 28, kLeastCells = 8;
constexpr int kUsualColumns = 80;
constexpr auto kBarPause = std::chrono::milliseconds(100);
constexpr auto kLinePause = std::chrono::seconds(5);

std::string minutes(double seconds) {
  const auto s = static_cast<std::int64_t>(std::lround(seconds));
  return fmt::format("{}:{:02}", s / 60, s % 60);
}

// Ranks write into pipes; the launcher reports the kind of its own output.
bool on_terminal() {
  const auto told = env::get("WEFT_TERMINAL");
  return told ? *told == "1" : isatty(STDOUT_FILENO) != 0;
}

// The text, as much of it as fits into `columns`: the bar is made shorter, then left out, then the rate is
// left out, then the time.
std::string line_of(const std::string& step, double done, const std::string& loss, const std::string& rate,
                    const std::string& left, std::size_t columns) {
  const std::size_t words = step.size() + loss.size() + rate.size() + left.size();
  constexpr std::size_t kBrackets = 3;  // and a blank
  if (words + kBrackets + kLeastCells <= columns) {
    const std::size_t cells = std::min(kMostCells, columns - words - kBrackets);
    const auto filled = static_cast<std::size_t>(static_cast<double>(cells) * done);
    return fmt::format("{} [{}{}]{}{}{}", step, std::string(filled, '='), std::string(cells - filled, ' '),
                       loss, rate, left);
  }
  for (const std::string& line : {step + loss + rate + left, step + loss + left, step + loss})
    if (line.size() <= columns) return line;
  return step.substr(0, columns);
}

}  // namespace

int output_columns() { return terminal_columns(STDOUT_FILENO).value_or(kUsualColumns); }

ProgressBar::ProgressBar(const std::string& style, std::int64_t first, std::int64_t until)
    : style_(style == "none"                     ? Style::none
             : style != "lines" && on_terminal() ? Style::bar
                                                 : Style::lines),
      first_(first),
      until_(until),
      began_(Clock::now()) {}

void ProgressBar::show(std::int64_t step, double loss, double tokens_per_second) {
  if (style_ == Style::none) return;
  const auto now = Clock::now();
  const std::int64_t done = step + 1 - first_, all = until_ - first_;
  if (now - shown_ < (style_ == Style::bar ? Duration(kBarPause) : Duration(kLinePause)) && done < all)
    return;
  shown_ = now;
  const double passed = std::chrono::duration<double>(now - began_).count();
  const double left = passed / static_cast<double>(done) * static_cast<double>(all - done);
  // The last column stays free: a terminal may go on to the next line if something is written there.
  const std::size_t columns =
      static_cast<std::size_t>(style_ == Style::bar ? std::max(1, output_columns() - 1) : kUsualColumns);
  const std::string line = line_of(
      fmt::format("step {:>5}/{}", step + 1, until_), static_cast<double>(done) / static_cast<double>(all),
      fmt::format(" loss {:.4f}", loss) + (held_out_ ? fmt::format(" held-out {:.4f}", *held_out_) : ""),
      fmt::format("  {:.0f} tokens/s", tokens_per_second), fmt::format("  {} left", minutes(left)), columns);
  if (style_ == Style::bar) {
    fmt::print("{}\x1b[K\r", line);
  } else {
    fmt::print("{}\n", line);
  }
  std::fflush(stdout);
}

void ProgressBar::finish() {
  if (style_ == Style::bar) fmt::print("\n");
  std::fflush(stdout);
}

std::string loss_curve(const std::vector<double>& losses, int columns_allowed) {
  constexpr std::size_t kMostColumns = 72, kRows = 10;
  const std::string steps = fmt::format(" {} steps", losses.size());
  const std::size_t beside = 10 + steps.size();  // the scale, and how many steps it were
  const std::size_t columns = std::min(
      {kMostColumns, losses.size(), static_cast<std::size_t>(std::max(40, columns_allowed)) - beside});
  std::vector<double> means(columns);
  for (std::size_t c = 0; c < columns; ++c) {
    const std::size_t from = c * losses.size() / columns, to = (c + 1) * losses.size() / columns;
    double sum = 0;
    for (std::size_t i = from; i < to; ++i) sum += losses[i];
    means[c] = sum / static_cast<double>(to - from);
  }
  const double low = *std::min_element(means.begin(), means.end()),
               high = *std::max_element(means.begin(), means.end());
  const double span = high > low ? high - low : 1;
  std::string drawing;
  for (std::size_t row = 0; row < kRows; ++row) {
    drawing += row == 0           ? fmt::format("{:8.4f} |", high)
               : row + 1 == kRows ? fmt::format("{:8.4f} |", low)
                                  : std::string(9, ' ') + "|";
    for (const double m : means) {
      const auto at = static_cast<std::size_t>(std::lround((high - m) / span * (kRows - 1)));
      drawing += at == row ? '*' : ' ';
    }
    while (!drawing.empty() && drawing.back() == ' ') drawing.pop_back();
    drawing += '\n';
  }
  return drawing + std::string(9, ' ') + "+" + std::string(columns, '-') + steps;
}

}  // namespace weft::tools
