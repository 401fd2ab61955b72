#include "progress_bar.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "terminal.hpp"
#include "weft/base/env.hpp"

namespace weft::tools {
namespace {

constexpr std::size_t kMostCells = 28, kLeastCells = 4;
constexpr std::size_t kLineColumns = 140;  // of lines that go to no terminal
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

// A part of the line, in two lengths.
struct Part {
  std::string usual, brief;
  int keeps;  // those of the highest number stay longest
};

std::size_t columns_of(const std::vector<Part>& parts) {
  std::size_t columns = 0;
  for (const Part& p : parts) columns += p.usual.size();
  return columns;
}

// As many parts as fit into `columns`: first they become brief, then they are left out. A bar fills what is
// left behind the first.
std::string line_of(std::vector<Part> parts, double done, std::size_t columns) {
  const std::size_t whole = columns_of(parts);
  constexpr std::size_t kBrackets = 3;  // and a blank
  if (whole + kBrackets + kLeastCells <= columns) {
    const std::size_t cells = std::min(kMostCells, columns - whole - kBrackets);
    const auto filled = static_cast<std::size_t>(static_cast<double>(cells) * done);
    parts[0].usual += fmt::format(" [{}{}]", std::string(filled, '='), std::string(cells - filled, ' '));
  } else if (whole > columns) {
    for (Part& p : parts) p.usual = p.brief;
    while (parts.size() > 1 && columns_of(parts) > columns)
      parts.erase(std::min_element(parts.begin(), parts.end(),
                                   [](const Part& x, const Part& y) { return x.keeps < y.keeps; }));
  }
  std::string line;
  for (const Part& p : parts) line += p.usual;
  return line.substr(0, columns);
}

// "950", "12.3k", "4.5M"
std::string brief_number(double value) {
  const char* const units[] = {"", "k", "M", "G"};
  int u = 0;
  while (value >= 999.5 && u < 3) value /= 1000, ++u;
  return u == 0 ? fmt::format("{:.0f}", value) : fmt::format("{:.3g}{}", value, units[u]);
}

}  // namespace

int output_columns() { return terminal_columns(STDOUT_FILENO).value_or(kUsualColumns); }

ProgressBar::ProgressBar(const std::string& style, std::int64_t first, std::int64_t until, KindWords words)
    : style_(style == "none"                     ? Style::none
             : style != "lines" && on_terminal() ? Style::bar
                                                 : Style::lines),
      first_(first),
      until_(until),
      words_(std::move(words)),
      began_(Clock::now()) {}

void ProgressBar::show(const Values& v) {
  if (style_ == Style::none) return;
  const auto now = Clock::now();
  const std::int64_t done = v.step + 1 - first_, all = until_ - first_;
  if (now - shown_ < (style_ == Style::bar ? Duration(kBarPause) : Duration(kLinePause)) && done < all)
    return;
  shown_ = now;
  const double passed = std::chrono::duration<double>(now - began_).count();
  const double left = passed / static_cast<double>(done) * static_cast<double>(all - done);
  const std::string total = fmt::format("{}", until_);
  std::vector<Part> parts;
  const auto add = [&](int keeps, const std::string& usual, const std::string& brief) {
    parts.push_back({usual, brief.empty() ? usual : brief, keeps});
  };
  const std::string step = fmt::format("step {:>{}}/{}", v.step + 1, total.size(), total);
  add(9, step, fmt::format("step {}/{}", v.step + 1, total));
  add(8, fmt::format(" loss {:.4f}", v.loss), fmt::format(" loss {:.3f}", v.loss));
  if (held_out_) add(6, fmt::format(" held-out {:.4f}", *held_out_), fmt::format(" held {:.3f}", *held_out_));
  add(4, fmt::format(" lr {:.2g}", v.lr), "");
  add(3, fmt::format(" norm {:.3g}", v.grad_norm), "");
  add(5, fmt::format("  {:.0f} {}/s", v.units_per_s, words_.rate),
      fmt::format(" {} {}/s", brief_number(v.units_per_s), words_.rate_brief));
  if (v.peak_share > 0)
    add(2, fmt::format(" {:.1f}% of peak", 100 * v.peak_share), fmt::format(" {:.0f}%", 100 * v.peak_share));
  add(1, fmt::format(" {:.0f} MiB", v.memory_mib),
      fmt::format(" {}", brief_number(v.memory_mib * 1.048576e6)));
  add(0, fmt::format("  {} left", minutes(left)), fmt::format(" {} left", minutes(left)));
  // The last column stays free: a terminal may go on to the next line if something is written there.
  const std::size_t columns =
      on_terminal() ? static_cast<std::size_t>(std::max(1, output_columns() - 1)) : kLineColumns;
  const std::string line =
      line_of(std::move(parts), static_cast<double>(done) / static_cast<double>(all), columns);
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
