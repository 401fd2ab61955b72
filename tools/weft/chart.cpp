#include "chart.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string_view>

namespace weft::tools {
namespace {

constexpr int kWidth = 800, kHeight = 480, kLeft = 80, kRight = 130, kTop = 50, kBottom = 60;

class Svg : public Drawing {
 public:
  void line(double x1, double y1, double x2, double y2, const std::string& colour, double width) override {
    body_ += fmt::format(
        "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\" stroke-width=\"{}\"/>\n",
        x1, y1, x2, y2, colour, width);
  }
  void words(double x, double y, Anchor anchor, const std::string& text, int size) override {
    const char* const where = anchor == Anchor::start ? "start" : anchor == Anchor::end ? "end" : "middle";
    body_ += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\" font-size=\"{}\">{}</text>\n", x,
                         y, where, size, escaped(text));
  }
  std::string bytes() const override {
    return fmt::format(
               "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} "
               "{1}\" "
               "font-family=\"sans-serif\">\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n",
               kWidth, kHeight) +
           body_ + "</svg>\n";
  }

 private:
  std::string body_;
};

// Letters of 5 x 7 points: a byte for each column, its lowest bit at the top. Capital letters look like small
// ones.
struct Letter {
  char c;
  std::array<std::uint8_t, 5> columns;
};
constexpr std::array<Letter, 47> kLetters{{
    {'%', {0x23, 0x13, 0x08, 0x64, 0x62}}, {'(', {0x00, 0x1c, 0x22, 0x41, 0x00}},
    {')', {0x00, 0x41, 0x22, 0x1c, 0x00}}, {'+', {0x08, 0x08, 0x3e, 0x08, 0x08}},
    {',', {0x00, 0x50, 0x30, 0x00, 0x00}}, {'-', {0x08, 0x08, 0x08, 0x08, 0x08}},
    {'.', {0x00, 0x60, 0x60, 0x00, 0x00}}, {'/', {0x20, 0x10, 0x08, 0x04, 0x02}},
    {'0', {0x3e, 0x51, 0x49, 0x45, 0x3e}}, {'1', {0x00, 0x42, 0x7f, 0x40, 0x00}},
    {'2', {0x42, 0x61, 0x51, 0x49, 0x46}}, {'3', {0x21, 0x41, 0x45, 0x4b, 0x31}},
    {'4', {0x18, 0x14, 0x12, 0x7f, 0x10}}, {'5', {0x27, 0x45, 0x45, 0x45, 0x39}},
    {'6', {0x3c, 0x4a, 0x49, 0x49, 0x30}}, {'7', {0x01, 0x71, 0x09, 0x05, 0x03}},
    {'8', {0x36, 0x49, 0x49, 0x49, 0x36}}, {'9', {0x06, 0x49, 0x49, 0x29, 0x1e}},
    {':', {0x00, 0x36, 0x36, 0x00, 0x00}}, {'_', {0x40, 0x40, 0x40, 0x40, 0x40}},
    {'a', {0x20, 0x54, 0x54, 0x54, 0x78}}, {'b', {0x7f, 0x48, 0x44, 0x44, 0x38}},
    {'c', {0x38, 0x44, 0x44, 0x44, 0x20}}, {'d', {0x38, 0x44, 0x44, 0x48, 0x7f}},
    {'e', {0x38, 0x54, 0x54, 0x54, 0x18}}, {'f', {0x08, 0x7e, 0x09, 0x01, 0x02}},
    {'g', {0x0c, 0x52, 0x52, 0x52, 0x3e}}, {'h', {0x7f, 0x08, 0x04, 0x04, 0x78}},
    {'i', {0x00, 0x44, 0x7d, 0x40, 0x00}}, {'j', {0x20, 0x40, 0x44, 0x3d, 0x00}},
    {'k', {0x7f, 0x10, 0x28, 0x44, 0x00}}, {'l', {0x00, 0x41, 0x7f, 0x40, 0x00}},
    {'m', {0x7c, 0x04, 0x18, 0x04, 0x78}}, {'n', {0x7c, 0x08, 0x04, 0x04, 0x78}},
    {'o', {0x38, 0x44, 0x44, 0x44, 0x38}}, {'p', {0x7c, 0x14, 0x14, 0x14, 0x08}},
    {'q', {0x08, 0x14, 0x14, 0x18, 0x7c}}, {'r', {0x7c, 0x08, 0x04, 0x04, 0x08}},
    {'s', {0x48, 0x54, 0x54, 0x54, 0x20}}, {'t', {0x04, 0x3f, 0x44, 0x40, 0x20}},
    {'u', {0x3c, 0x40, 0x40, 0x20, 0x7c}}, {'v', {0x1c, 0x20, 0x40, 0x20, 0x1c}},
    {'w', {0x3c, 0x40, 0x30, 0x40, 0x3c}}, {'x', {0x44, 0x28, 0x10, 0x28, 0x44}},
    {'y', {0x0c, 0x50, 0x50, 0x50, 0x3c}}, {'z', {0x44, 0x64, 0x54, 0x4c, 0x44}},
    {' ', {0x00, 0x00, 0x00, 0x00, 0x00}},
}};

void big_endian(std::string& to, std::uint32_t value) {
  for (int shift = 24; shift >= 0; shift -= 8) to += static_cast<char>(value >> shift);
}

// Pixels as numbers of colours, four bits each, not compressed (https://www.w3.org/TR/png-3/; RFC 1950 and
// 1951).
class Png : public Drawing {
 public:
  Png() : pixels_(static_cast<std::size_t>(kWidth) * kHeight, 0) {}

  // One pixel after the other along the longer side, and as many beside it as the line is wide.
  void line(double x1, double y1, double x2, double y2, const std::string& colour, double width) override {
    const std::uint8_t c = number_of(colour);
    const double dx = x2 - x1, dy = y2 - y1;
    const int steps = std::max(1, static_cast<int>(std::ceil(std::max(std::abs(dx), std::abs(dy)))));
    const int wide = width > 1.5 ? 2 : 1;
    for (int i = 0; i <= steps; ++i) {
      const int x = static_cast<int>(std::lround(x1 + dx * i / steps)),
                y = static_cast<int>(std::lround(y1 + dy * i / steps));
      for (int w = 0; w < wide; ++w) std::abs(dx) > std::abs(dy) ? dot(x, y + w, c) : dot(x + w, y, c);
    }
  }
  void words(double x, double y, Anchor anchor, const std::string& text, int size) override {
    const int scale = size >= 16 ? 2 : 1, step = 6 * scale;
    const int width = step * static_cast<int>(text.size());
    int at = static_cast<int>(x) - (anchor == Anchor::end ? width : anchor == Anchor::middle ? width / 2 : 0);
    const int top = static_cast<int>(y) - 7 * scale;
    const std::uint8_t c = number_of("#000000");
    for (const char letter : text) {
      const char small = letter >= 'A' && letter <= 'Z' ? static_cast<char>(letter - 'A' + 'a') : letter;
      const auto* const found =
          std::find_if(kLetters.begin(), kLetters.end(), [&](const Letter& l) { return l.c == small; });
      for (int column = 0; column < 5 * scale; ++column)
        for (int row = 0; row < 7 * scale; ++row)
          if (found != kLetters.end() &&
              (found->columns[static_cast<std::size_t>(column / scale)] >> (row / scale) & 1) != 0)
            dot(at + column, top + row, c);
      at += step;
    }
  }
  std::string bytes() const override {
    std::string size, palette, rows;
    big_endian(size, kWidth);
    big_endian(size, kHeight);
    size += std::string("\x04\x03\0\0\0", 5);  // 4 bits, colours from a palette
    for (const std::string& colour : colours_)
      for (std::size_t at = 1; at < 7; at += 2)
        palette += static_cast<char>(std::strtol(colour.substr(at, 2).c_str(), nullptr, 16));
    for (std::size_t y = 0; y < kHeight; ++y) {
      rows += '\0';  // no filter
      for (std::size_t x = 0; x < kWidth; x += 2)
        rows += static_cast<char>(pixels_[y * kWidth + x] << 4 | pixels_[y * kWidth + x + 1]);
    }
    return "\x89PNG\r\n\x1a\n" + part("IHDR", size) + part("PLTE", palette) + part("IDAT", deflated(rows)) +
           part("IEND", "");
  }

 private:
  std::uint8_t number_of(const std::string& colour) {
    const auto found = std::find(colours_.begin(), colours_.end(), colour);
    if (found == colours_.end()) colours_.push_back(colour);
    return static_cast<std::uint8_t>(std::find(colours_.begin(), colours_.end(), colour) - colours_.begin());
  }
  void dot(int x, int y, std::uint8_t colour) {
    if (x >= 0 && x < kWidth && y >= 0 && y < kHeight)
      pixels_[static_cast<std::size_t>(y) * kWidth + static_cast<std::size_t>(x)] = colour;
  }
  // A part of the file: its length, its name, its bytes, and the CRC-32 of name and bytes.
  static std::string part(std::string_view name, std::string_view of) {
    std::string all;
    big_endian(all, static_cast<std::uint32_t>(of.size()));
    all += name;
    all += of;
    std::uint32_t crc = ~0U;
    for (const char c : std::string_view(all).substr(4)) {
      crc ^= static_cast<unsigned char>(c);
      for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ ((crc & 1) != 0 ? 0xedb88320U : 0);
    }
    big_endian(all, ~crc);
    return all;
  }
  // Blocks as they are, with the checksum Adler-32 at the end.
  static std::string deflated(std::string_view of) {
    constexpr std::size_t kMost = 65535;
    std::string all("\x78\x01");
    std::uint32_t a = 1, b = 0;
    for (const char c : of) a = (a + static_cast<unsigned char>(c)) % 65521, b = (b + a) % 65521;
    for (std::size_t at = 0; at < of.size(); at += kMost) {
      const std::string_view block = of.substr(at, kMost);
      const auto length = static_cast<unsigned>(block.size());
      all += at + kMost >= of.size() ? '\1' : '\0';
      for (const unsigned value : {length, ~length})
        all += {static_cast<char>(value & 0xff), static_cast<char>(value >> 8 & 0xff)};
      all += block;
    }
    big_endian(all, b << 16 | a);
    return all;
  }

  std::vector<std::uint8_t> pixels_;
  std::vector<std::string> colours_{"#ffffff"};
};

struct Axis {
  double low, high, begin, end;
  double at(double x) const { return begin + (end - begin) * (x - low) / (high - low); }
};

// Means of neighbours, if there are more points than columns.
Points thinned(const Points& all) {
  constexpr std::size_t kMost = kWidth - kLeft - kRight;
  Points finite, thin;
  for (const auto& p : all)
    if (std::isfinite(p.first) && std::isfinite(p.second)) finite.push_back(p);
  const std::size_t group = (finite.size() + kMost - 1) / kMost;
  for (std::size_t at = 0; at < finite.size(); at += group) {
    const std::size_t count = std::min(group, finite.size() - at);
    std::pair<double, double> sum{0, 0};
    for (std::size_t i = 0; i < count; ++i)
      sum.first += finite[at + i].first, sum.second += finite[at + i].second;
    thin.emplace_back(sum.first / static_cast<double>(count), sum.second / static_cast<double>(count));
  }
  return thin;
}

// Steps of 1, 2 or 5 times a power of ten: four to ten of them.
double step_of(double span) {
  const double power = std::pow(10, std::floor(std::log10(span)));
  for (const double times : {0.1, 0.2, 0.5})
    if (span / (power * times) <= 10) return power * times;
  return power;
}

}  // namespace

std::string escaped(const std::string& text) {
  std::string s;
  for (const char c : text)
    s += c == '<' ? "&lt;" : c == '>' ? "&gt;" : c == '&' ? "&amp;" : std::string(1, c);
  return s;
}

std::string chart(const std::string& title, const std::string& below, const std::string& beside,
                  const std::vector<Curve>& given, bool png) {
  std::vector<Curve> curves;
  for (const Curve& c : given) curves.push_back({c.name, thinned(c.points)});
  Svg svg;
  Png pixels;
  Drawing& d = png ? static_cast<Drawing&>(pixels) : svg;
  Axis x{1e300, -1e300, kLeft, kWidth - kRight}, y{1e300, -1e300, kHeight - kBottom, kTop};
  for (const Curve& c : curves)
    for (const auto& p : c.points) {
      x.low = std::min(x.low, p.first), x.high = std::max(x.high, p.first);
      y.low = std::min(y.low, p.second), y.high = std::max(y.high, p.second);
    }
  for (Axis* a : {&x, &y}) {
    if (a->low > a->high) a->low = 0, a->high = 1;
    if (!(a->high > a->low)) a->high = a->low + 1;
  }
  d.words(kLeft, 28, Drawing::Anchor::start, title, 16);
  const double dy = step_of(y.high - y.low), dx = step_of(x.high - x.low);
  y.low = std::floor(y.low / dy) * dy, y.high = std::ceil(y.high / dy) * dy;
  for (int i = 0; y.low + i * dy <= y.high + dy / 2; ++i) {
    const double v = y.low + i * dy;
    d.line(kLeft, y.at(v), kWidth - kRight, y.at(v), "#dddddd", 1);
    d.words(kLeft - 8, y.at(v) + 4, Drawing::Anchor::end, fmt::format("{:.4g}", std::abs(v) < dy / 2 ? 0 : v),
            12);
  }
  for (double v = std::ceil(x.low / dx) * dx; v <= x.high + dx / 1000; v += dx) {
    d.line(x.at(v), kTop, x.at(v), kHeight - kBottom, "#eeeeee", 1);
    d.words(x.at(v), kHeight - kBottom + 18, Drawing::Anchor::middle, fmt::format("{:.6g}", v), 12);
  }
  d.words((kLeft + kWidth - kRight) / 2.0, kHeight - 16, Drawing::Anchor::middle, below, 12);
  d.words(kLeft, kTop - 6, Drawing::Anchor::middle, beside, 12);
  double legend = kTop + 10;
  for (std::size_t i = 0; i < curves.size(); ++i) {
    const std::string colour = kCurveColours[i % kCurveColours.size()];
    const std::pair<double, double>* before = nullptr;
    for (const auto& p : curves[i].points) {
      const auto& from = before != nullptr ? *before : p;  // a point alone is a dot
      d.line(x.at(from.first), y.at(from.second), x.at(p.first) + (before == nullptr ? 1 : 0), y.at(p.second),
             colour, 2);
      before = &p;
    }
    d.line(kWidth - kRight + 14, legend, kWidth - kRight + 34, legend, colour, 2);
    d.words(kWidth - kRight + 40, legend + 4, Drawing::Anchor::start, curves[i].name, 12);
    legend += 20;
  }
  return d.bytes();
}

}  // namespace weft::tools
