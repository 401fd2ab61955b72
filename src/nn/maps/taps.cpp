#include "nn/maps/taps.hpp"

#include <algorithm>
#include <cmath>

namespace weft::taps {

using kernels::Padding;
using kernels::Taps;

namespace {

void tap(Taps& t, std::int64_t index, double weight) {
  t.index.push_back(index);
  t.weight.push_back(static_cast<float>(weight));
}
void end_output(Taps& t) { t.begin.push_back(static_cast<std::int64_t>(t.index.size())); }

}  // namespace

Taps padded(std::int64_t n, std::int64_t before, std::int64_t after, Padding padding) {
  Taps t;
  for (std::int64_t at = -before; at < n + after; ++at) {
    std::int64_t pixel = at;
    if (at < 0 || at >= n) switch (padding) {
        case Padding::zeros: pixel = -1; break;
        case Padding::reflect: pixel = at < 0 ? -at : 2 * (n - 1) - at; break;
        case Padding::replicate: pixel = at < 0 ? 0 : n - 1; break;
        case Padding::circular: pixel = at < 0 ? at + n : at - n; break;
      }
    if (pixel >= 0) tap(t, pixel, 1);
    end_output(t);
  }
  return t;
}

Taps averaged(std::int64_t n, std::int64_t kernel, std::int64_t stride, std::int64_t padding,
              bool count_padding) {
  Taps t;
  for (std::int64_t r = 0; r * stride + kernel <= n + 2 * padding; ++r) {
    const std::int64_t first = r * stride - padding;
    const std::int64_t lo = std::max<std::int64_t>(first, 0), hi = std::min(first + kernel, n);
    const std::int64_t count = count_padding ? kernel : hi - lo;
    for (std::int64_t i = lo; i < hi; ++i) tap(t, i, 1.0 / static_cast<double>(count));
    end_output(t);
  }
  return t;
}

Taps averaged_to(std::int64_t n, std::int64_t out) {
  Taps t;
  for (std::int64_t r = 0; r < out; ++r) {
    const std::int64_t lo = r * n / out, hi = ((r + 1) * n + out - 1) / out;
    for (std::int64_t i = lo; i < hi; ++i) tap(t, i, 1.0 / static_cast<double>(hi - lo));
    end_output(t);
  }
  return t;
}

Taps nearest(std::int64_t n, std::int64_t out) {
  Taps t;
  for (std::int64_t r = 0; r < out; ++r) {
    tap(t, r * n / out, 1);
    end_output(t);
  }
  return t;
}

Taps linear(std::int64_t n, std::int64_t out, bool align_corners) {
  Taps t;
  for (std::int64_t r = 0; r < out; ++r) {
    const auto in = static_cast<double>(n), to = static_cast<double>(out), at = static_cast<double>(r);
    const double place =
        align_corners ? (out > 1 ? at * (in - 1) / (to - 1) : 0) : std::max(0.0, (at + 0.5) * in / to - 0.5);
    const std::int64_t first = std::min(static_cast<std::int64_t>(place), n - 1);
    const double second = place - static_cast<double>(first);
    if (second > 0 && first + 1 < n) {
      tap(t, first, 1 - second);
      tap(t, first + 1, second);
    } else {
      tap(t, first, 1);
    }
    end_output(t);
  }
  return t;
}

Taps transposed(const Taps& of, std::int64_t n) {
  Taps t;
  t.begin.assign(static_cast<std::size_t>(n) + 1, 0);
  for (const std::int64_t i : of.index) ++t.begin[static_cast<std::size_t>(i) + 1];
  for (std::size_t i = 1; i < t.begin.size(); ++i) t.begin[i] += t.begin[i - 1];
  t.index.resize(of.index.size());
  t.weight.resize(of.index.size());
  std::vector<std::int64_t> next(t.begin.begin(), t.begin.end() - 1);
  for (std::int64_t r = 0; r < of.outputs(); ++r)
    for (std::int64_t e = of.begin[static_cast<std::size_t>(r)];
         e < of.begin[static_cast<std::size_t>(r) + 1]; ++e) {
      const auto to =
          static_cast<std::size_t>(next[static_cast<std::size_t>(of.index[static_cast<std::size_t>(e)])]++);
      t.index[to] = r;
      t.weight[to] = of.weight[static_cast<std::size_t>(e)];
    }
  return t;
}

}  // namespace weft::taps
