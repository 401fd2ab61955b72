// The arithmetic of one dimension of a window: to which elements of the whole tensor a range of indices
// refers, and which of them a rank holds. Pure functions.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "weft/mesh/window.hpp"

namespace weft::windows {

/// Indices out … out + count of a window are the elements in, in + step, … of the whole tensor. Or they are
/// filled with a number.
struct Run {
  std::int64_t out = 0, in = 0, count = 0;
  int step = 1;         ///< 1; -1 reflected; 0 the same element each time
  bool turned = false;  ///< beyond a pole
  bool filled = false;
  double value = 0;
};

/// The runs of the ranges that one part wants of a dimension of n elements. Throws bad_argument, beginning
/// with `where`, if an edge rule has nothing for an index.
std::vector<Run> runs_of_ranges(const IndexRanges& wanted, std::int64_t n, const Edge& before,
                                const Edge& after, std::string_view where);

/// The same runs half a turn away, in a dimension of n elements, an even number.
std::vector<Run> half_a_turn(const std::vector<Run>& runs, std::int64_t n);

/// The elements of a run that one rank holds. Indices out … of the window are the elements in, in + step, …
/// of its part.
struct Segment {
  std::int64_t in = 0, out = 0, count = 0;
  int step = 1;
  bool turned = false;
};

/// The elements of `runs` that lie in the ranges which a rank holds, in the order of the runs, then of the
/// ranges.
std::vector<Segment> held(const std::vector<Run>& runs, const IndexRanges& owned);

/// Windows are at most this far from index 0, and have at most twice as many indices in a dimension. So no
/// sum of them overflows.
inline constexpr std::int64_t kFarthest = std::int64_t{1} << 60;

/// "periodic".
std::string kind_text(Edge::Kind kind);

/// A part's window goes at most so often round a periodic dimension: each turn is a run.
inline constexpr std::int64_t kMostTurns = std::int64_t{1} << 16;

/// How many indices ranges have together.
std::int64_t size_of(const IndexRanges& ranges) noexcept;

}  // namespace weft::windows
