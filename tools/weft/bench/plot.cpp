// The curve of a Result as SVG. It uses no library, so that on every machine one run gives both a table and
// its picture.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "chart.hpp"
#include "results.hpp"

namespace weft::bench {
namespace {

constexpr double kWidth = 900, kHeight = 560, kLeft = 80, kRight = 190, kTop = 50, kBottom = 60;
// One logarithmic axis. Values from `low` to `high` lie between two places of the picture.
struct Axis {
  double low, high, begin, end;
  double at(double x) const { return begin + (end - begin) * std::log(x / low) / std::log(high / low); }
};

std::string bytes_label(std::int64_t b) {
  const char* const units[] = {"B", "KB", "MB", "GB"};
  int u = 0;
  auto x = static_cast<double>(b);
  while (x >= 1024 && u < 3) x /= 1024, ++u;
  return fmt::format("{:.4g} {}", x, units[u]);
}

std::string words(double x, double y, const std::string& anchor, const std::string& text, int size = 12) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\" font-size=\"{}\">{}</text>\n", x, y,
                     anchor, size, tools::escaped(text));
}

std::string line(double x1, double y1, double x2, double y2, const char* style) {
  return fmt::format("<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" {}/>\n", x1, y1, x2, y2,
                     style);
}

}  // namespace

std::string to_svg(const Result& r) {
  struct Curve {
    std::string title;
    std::vector<std::pair<std::int64_t, double>> points;
    std::string style;
  };
  std::vector<Curve> curves;
  for (const Column& c : r.columns) {
    Curve curve{c.competitor.title, {}, {}};
    for (const auto& [bytes, cell] : c.cells) curve.points.emplace_back(bytes, cell.median_us);
    curve.style = fmt::format("stroke=\"{}\" stroke-width=\"{}\"",
                              tools::kCurveColours[curves.size() % tools::kCurveColours.size()],
                              c.competitor.who == Competitor::Who::weft ? 2.5 : 1.5);
    if (!curve.points.empty()) curves.push_back(std::move(curve));
  }
  const std::string limit_title = "memory limit";
  Curve limit{limit_title,
              {r.limit_us.begin(), r.limit_us.end()},
              "stroke=\"#000\" stroke-width=\"1.2\" stroke-dasharray=\"6 4\""};
  if (!limit.points.empty()) curves.push_back(std::move(limit));

  double least = 1e300, most = 0;
  std::int64_t small = INT64_MAX, large = 0;
  for (const Curve& c : curves)
    for (const auto& [bytes, us] : c.points) {
      if (us <= 0) continue;
      least = std::min(least, us), most = std::max(most, us);
      small = std::min(small, bytes), large = std::max(large, bytes);
    }
  if (most == 0) least = most = 1, small = large = 1;
  const Axis x{static_cast<double>(small), static_cast<double>(std::max(large, small + 1)), kLeft,
               kWidth - kRight};
  const Axis y{std::pow(10, std::floor(std::log10(least))), std::pow(10, std::floor(std::log10(most)) + 1),
               kHeight - kBottom, kTop};

  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\" "
      "font-family=\"sans-serif\">\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n",
      kWidth, kHeight);
  svg += words(kLeft, 28, "start",
               fmt::format("{} {}, {} {}", r.op, fmt::join(r.options.dtypes, " and "), r.options.ranks,
                           r.options.ranks_as),
               16);
  for (double v = y.low; v <= y.high * 1.001; v *= 10) {
    svg += line(kLeft, y.at(v), kWidth - kRight, y.at(v), "stroke=\"#ddd\"");
    svg += words(kLeft - 8, y.at(v) + 4, "end", fmt::format("{:g}", v));
  }
  for (const std::int64_t b : r.options.bytes) {
    if (b < small || b > large) continue;
    const double at = x.at(static_cast<double>(b));
    svg += line(at, kTop, at, kHeight - kBottom, "stroke=\"#eee\"");
    svg += words(at, kHeight - kBottom + 18, "middle", bytes_label(b), r.options.bytes.size() > 10 ? 10 : 12);
  }
  svg += words((kLeft + kWidth - kRight) / 2, kHeight - 16, "middle", "bytes");
  svg += fmt::format(
      "<text x=\"20\" y=\"{0:.1f}\" text-anchor=\"middle\" font-size=\"12\" transform=\"rotate(-90 20 "
      "{0:.1f})\">"
      "microseconds, median</text>\n",
      kHeight / 2);
  double legend = kTop + 10;
  for (const Curve& c : curves) {
    std::string points;
    for (const auto& [bytes, us] : c.points) {
      const double px = x.at(static_cast<double>(bytes)), py = y.at(std::max(us, y.low));
      points += fmt::format("{}{:.1f},{:.1f}", points.empty() ? "" : " ", px, py);
      if (c.title == limit_title) continue;
      svg += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"2\" fill=\"none\" {}/>\n", px, py, c.style);
    }
    svg += fmt::format("<polyline fill=\"none\" {} points=\"{}\"/>\n", c.style, points);
    svg += line(kWidth - kRight + 14, legend, kWidth - kRight + 40, legend, c.style.c_str());
    svg += words(kWidth - kRight + 46, legend + 4, "start", c.title);
    legend += 20;
  }
  return svg + "</svg>\n";
}

}  // namespace weft::bench
