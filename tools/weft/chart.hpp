// Charts as SVG and as PNG, without a library: on every machine one run gives its figures and their picture.
// Any thread.
#pragma once

#include <array>
#include <string>
#include <utility>
#include <vector>

namespace weft::tools {

/// A picture is lines and words; coordinates are pixels from the upper left corner.
class Drawing {
 public:
  enum class Anchor : unsigned char { start, middle, end };
  virtual ~Drawing() = default;
  /// `colour`: as "#0072b2".
  virtual void line(double x1, double y1, double x2, double y2, const std::string& colour, double width) = 0;
  virtual void words(double x, double y, Anchor anchor, const std::string& text, int size) = 0;
  /// The file.
  virtual std::string bytes() const = 0;
};

/// Colours that people with any vision tell apart (M. Okabe, K. Ito, "Color Universal Design", 2008), and two
/// more.
inline constexpr std::array<const char*, 8> kCurveColours = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                                             "#e69f00", "#56b4e9", "#882255", "#555555"};
/// The letters of SVG in a text.
std::string escaped(const std::string& text);

using Points = std::vector<std::pair<double, double>>;
struct Curve {
  std::string name;
  Points points;
};

/// Curves over one linear axis each way, as the bytes of a file. `png`: otherwise SVG. Points that are not
/// finite are left out.
std::string chart(const std::string& title, const std::string& below, const std::string& beside,
                  const std::vector<Curve>& curves, bool png);

}  // namespace weft::tools
