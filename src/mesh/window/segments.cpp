#include "mesh/window/segments.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

#include "mesh/boxes.hpp"
#include "weft/base/error.hpp"

namespace weft::windows {

std::string kind_text(Edge::Kind kind) {
  switch (kind) {
    case Edge::Kind::none: return "none";
    case Edge::Kind::zero: return "zero";
    case Edge::Kind::constant: return "constant";
    case Edge::Kind::periodic: return "periodic";
    case Edge::Kind::reflect: return "reflect";
    case Edge::Kind::replicate: return "replicate";
    case Edge::Kind::pole: return "pole";
  }
  return fmt::format("{}", static_cast<int>(kind));
}

namespace {

/// How many elements beyond an end the rule can give. -1: any number.
std::int64_t reach(const Edge& edge, std::int64_t n) {
  switch (edge.kind) {
    case Edge::Kind::none: return 0;
    case Edge::Kind::zero:
    case Edge::Kind::constant: return -1;
    case Edge::Kind::periodic:
    case Edge::Kind::replicate: return n > 0 ? -1 : 0;
    case Edge::Kind::reflect: return std::max<std::int64_t>(0, n - 1);
    case Edge::Kind::pole: return n;
  }
  return 0;
}

void check_reach(const IndexRange& range, std::int64_t n, const Edge& before, const Edge& after,
                 std::string_view where) {
  if (range.lo > range.hi)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{} wants [{}, {}); expected an end that is not before its beginning", where,
                            range.lo, range.hi));
  if (range.lo < -kFarthest || range.hi > kFarthest)
    throw Error(ErrorCode::bad_argument, fmt::format("{} wants [{}, {}); expected within [{}, {})", where,
                                                     range.lo, range.hi, -kFarthest, kFarthest));
  if (range.size() == 0) return;
  const auto expect = [&](const Edge& edge, std::int64_t beyond, const char* end) {
    const std::int64_t most = reach(edge, n);
    if (beyond <= 0 || most < 0 || beyond <= most) return;
    throw Error(ErrorCode::bad_argument,
                edge.kind == Edge::Kind::none
                    ? fmt::format("{} wants [{}, {}) of {}; with edge none expected within [0, {})", where,
                                  range.lo, range.hi, n, n)
                    : fmt::format("{} wants [{}, {}) of {}: {} beyond the {}; edge {} has at most {} there",
                                  where, range.lo, range.hi, n, beyond, end, kind_text(edge.kind), most));
  };
  expect(before, -range.lo, "beginning");
  expect(after, range.hi - n, "end");
}

// How often indices beyond an end wrap around. Each turn is a run.
std::int64_t turns(const Edge& edge, std::int64_t beyond, std::int64_t n) {
  return edge.kind == Edge::Kind::periodic && beyond > 0 ? (beyond - 1) / n + 1 : 0;
}

/// Appends the runs of the indices [lo, hi), all beyond one end, or all within. `out` is the place of lo.
class Appender {
 public:
  Appender(std::vector<Run>& runs, std::int64_t n) : runs_(runs), n_(n) {}

  void within(std::int64_t lo, std::int64_t hi, std::int64_t out) {
    if (lo < hi) runs_.push_back({out, lo, hi - lo});
  }
  void beyond(std::int64_t lo, std::int64_t hi, std::int64_t out, const Edge& edge, bool after) {
    if (lo >= hi) return;
    const std::int64_t count = hi - lo;
    switch (edge.kind) {
      case Edge::Kind::none: return;  // refused before
      case Edge::Kind::zero: runs_.push_back({out, 0, count, 1, false, true, 0}); return;
      case Edge::Kind::constant: runs_.push_back({out, 0, count, 1, false, true, edge.value}); return;
      case Edge::Kind::replicate: runs_.push_back({out, after ? n_ - 1 : 0, count, 0}); return;
      case Edge::Kind::reflect: runs_.push_back({out, after ? 2 * (n_ - 1) - lo : -lo, count, -1}); return;
      case Edge::Kind::pole:
        runs_.push_back({out, after ? 2 * n_ - 1 - lo : -1 - lo, count, -1, true});
        return;
      case Edge::Kind::periodic:
        while (lo < hi) {
          const std::int64_t in = (lo % n_ + n_) % n_, length = std::min(hi - lo, n_ - in);
          runs_.push_back({out, in, length});
          lo += length, out += length;
        }
        return;
    }
  }

 private:
  std::vector<Run>& runs_;
  std::int64_t n_;
};

}  // namespace

std::int64_t size_of(const IndexRanges& ranges) noexcept {
  std::int64_t sum = 0;
  for (const IndexRange& r : ranges) sum += r.size();
  return sum;
}

std::vector<Run> runs_of_ranges(const IndexRanges& wanted, std::int64_t n, const Edge& before,
                                const Edge& after, std::string_view where) {
  std::vector<Run> runs;
  Appender append(runs, n);
  std::int64_t out = 0, turned = 0;
  for (const IndexRange& r : wanted) {
    check_reach(r, n, before, after, where);
    if (r.size() > 0) turned += turns(before, -r.lo, n) + turns(after, r.hi - n, n);
    if (turned > kMostTurns)
      throw Error(ErrorCode::bad_argument,
                  fmt::format("{} wants [{}, {}) of {}: {} turns of edge periodic; expected at most {}",
                              where, r.lo, r.hi, n, turned, kMostTurns));
    append.beyond(r.lo, std::min<std::int64_t>(r.hi, 0), out, before, false);
    const std::int64_t lo = std::clamp<std::int64_t>(r.lo, 0, n), hi = std::clamp<std::int64_t>(r.hi, 0, n);
    append.within(lo, hi, out + lo - r.lo);
    const std::int64_t first = std::max(r.lo, n);
    append.beyond(first, r.hi, out + first - r.lo, after, true);
    out += r.size();
    if (out > 2 * kFarthest)
      throw Error(ErrorCode::bad_argument,
                  fmt::format("{} wants more than {} indices", where, 2 * kFarthest));
  }
  return runs;
}

std::vector<Run> half_a_turn(const std::vector<Run>& runs, std::int64_t n) {
  std::vector<Run> turned;
  for (const Run& run : runs) {
    if (run.filled) {
      turned.push_back(run);
      continue;
    }
    // Cut where the turned index passes an end.
    for (std::int64_t done = 0; done < run.count;) {
      Run part = run;
      part.out += done;
      part.in = (run.in + run.step * done + n / 2) % n;
      const std::int64_t left = run.count - done;
      part.count = run.step == 0 ? left : std::min(left, run.step > 0 ? n - part.in : part.in + 1);
      turned.push_back(part);
      done += part.count;
    }
  }
  return turned;
}

std::vector<Segment> held(const std::vector<Run>& runs, const IndexRanges& owned) {
  std::vector<Segment> segments;
  for (const Run& run : runs) {
    if (run.filled) continue;
    std::int64_t offset = 0;  // the place of the range in the part
    for (const IndexRange& range : owned) {
      if (run.step == 0) {
        if (range.lo <= run.in && run.in < range.hi)
          segments.push_back({offset + run.in - range.lo, run.out, run.count, 0, run.turned});
      } else {
        const bool forward = run.step > 0;
        const Chunk both = intersection({forward ? run.in : run.in - run.count + 1, run.count},
                                        Chunk{range.lo, range.size()});
        const std::int64_t begin = forward ? both.offset : both.offset + both.size - 1;
        if (both.size > 0)
          segments.push_back({offset + begin - range.lo, run.out + std::abs(begin - run.in), both.size,
                              run.step, run.turned});
      }
      offset += range.size();
    }
  }
  return segments;
}

}  // namespace weft::windows
