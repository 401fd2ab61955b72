#include "progress_bar.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "weft/base/env.hpp"

namespace weft::tools {
namespace {

constexpr int kWidth = 28;
constexpr auto kBarPause = std::chrono::milliseconds(100);
constexpr auto kLinePause = std::chrono::seconds(5);

std::string minutes(double seconds) {
  const auto s = static_cast<std::int64_t>(std::lround(seconds));
  return fmt::format("{}:{:02}", s / 60, s % 60);
}

// Ranks write into pipes; the launcher tells what its own output is.
bool on_terminal() {
  const auto told = env::get("WEFT_TERMINAL");
  return told ? *told == "1" : isatty(STDOUT_FILENO) != 0;
}

}  // namespace

ProgressBar::ProgressBar(const std::string& style, std::int64_t first, std::int64_t until)
    : style_(style == "bar"     ? Style::bar
             : style == "lines" ? Style::lines
             : style == "none"  ? Style::none
             : on_terminal()    ? Style::bar
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
  const auto filled = static_cast<std::size_t>(kWidth * done / all);
  const std::string line = fmt::format("step {:>5}/{} [{}{}] loss {:.4f}  {:.0f} tokens/s  {} left", step + 1,
                                       until_, std::string(filled, '='), std::string(kWidth - filled, ' '),
                                       loss, tokens_per_second, minutes(left));
  if (style_ == Style::bar) {
    fmt::print("{}  \r", line);
  } else {
    fmt::print("{}\n", line);
  }
  std::fflush(stdout);
}

void ProgressBar::finish() {
  if (style_ == Style::bar) fmt::print("\n");
  std::fflush(stdout);
}

std::string loss_curve(const std::vector<double>& losses) {
  constexpr std::size_t kColumns = 72, kRows = 10;
  const std::size_t columns = std::min(kColumns, losses.size());
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
  return drawing + std::string(9, ' ') + "+" + std::string(columns, '-') +
         fmt::format(" {} steps", losses.size());
}

}  // namespace weft::tools
