#include "host/strided/overlap.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>

namespace weft {
namespace {

// Decides whether lo < start + the sum of step_k * v_k < hi has a solution with v_k in [least_k, most_k].
class Search {
 public:
  Search(std::int64_t lo, std::int64_t hi) : lo_(lo), hi_(hi) {}

  // Steps of equal size count as one variable.
  void add(std::int64_t step, std::int64_t least, std::int64_t most) {
    if (step == 0 || (least == 0 && most == 0)) return;
    if (step < 0) {
      step = -step;
      std::swap(least, most);
      least = -least, most = -most;
    }
    for (std::size_t i = 0; i < count_; ++i)
      if (terms_[i].step == step) {
        terms_[i].least += least, terms_[i].most += most;
        return;
      }
    terms_[count_++] = {step, least, most, 0, 0};
  }

  // `nonzero`: excludes the solution with all variables 0.
  bool finds(std::int64_t start, bool nonzero) {
    std::sort(terms_.begin(), terms_.begin() + static_cast<std::ptrdiff_t>(count_),
              [](const Term& a, const Term& b) { return a.step > b.step; });
    std::int64_t below = 0, above = 0;
    for (std::size_t i = count_; i-- > 0;) {
      terms_[i].rest_below = below, terms_[i].rest_above = above;
      below += terms_[i].step * terms_[i].least;
      above += terms_[i].step * terms_[i].most;
    }
    return descend(0, start, nonzero);
  }

 private:
  struct Term {
    std::int64_t step, least, most;
    std::int64_t rest_below, rest_above;  // bounds of the sum of the terms after this one
  };
  static std::int64_t floor_of(std::int64_t a, std::int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }

  bool descend(std::size_t i, std::int64_t sum, bool nonzero) {
    if (i == count_) return !nonzero && lo_ < sum && sum < hi_;
    if (++steps_ > kMostSteps) return true;
    const Term& t = terms_[i];
    // v must satisfy lo < sum + step * v + rest < hi for some rest within its bounds.
    const std::int64_t first = std::max(t.least, floor_of(lo_ - sum - t.rest_above, t.step) + 1);
    const std::int64_t last = std::min(t.most, -(floor_of(-(hi_ - sum - t.rest_below), t.step)) - 1);
    for (std::int64_t v = first; v <= last; ++v)
      if (descend(i + 1, sum + t.step * v, nonzero && v == 0)) return true;
    return false;
  }

  static constexpr int kMostSteps = 1'000'000;
  const std::int64_t lo_, hi_;
  std::size_t count_ = 0;
  int steps_ = 0;
  std::array<Term, 2 * Dims::kMaxDims> terms_{};
};

}  // namespace

std::pair<const std::byte*, const std::byte*> span_of(const ConstTensorView& v) noexcept {
  if (v.count() == 0) return {v.data, v.data};
  std::int64_t low = 0, high = 0;
  for (int d = 0; d < v.shape.rank(); ++d) (v.strides[d] < 0 ? low : high) += (v.shape[d] - 1) * v.strides[d];
  const std::int64_t element = size_bytes(v.dtype);
  return {v.data + low * element, v.data + (high + 1) * element};
}

bool share_memory(const ConstTensorView& a, const ConstTensorView& b) noexcept {
  if (a.count() == 0 || b.count() == 0) return false;
  const auto in_a = span_of(a), in_b = span_of(b);
  if (in_a.first >= in_b.second || in_b.first >= in_a.second) return false;
  const std::int64_t of_a = size_bytes(a.dtype), of_b = size_bytes(b.dtype);
  Search search(-of_a,
                // an element of a begins less than of_a before an element of b, or less than of_b behind it
                of_b);
  for (int d = 0; d < a.shape.rank(); ++d) search.add(a.strides[d] * of_a, 0, a.shape[d] - 1);
  for (int d = 0; d < b.shape.rank(); ++d) search.add(b.strides[d] * of_b, -(b.shape[d] - 1), 0);
  return search.finds(a.data - b.data, false);
}

bool overlaps_itself(const ConstTensorView& v) noexcept {
  if (v.count() == 0) return false;
  const std::int64_t element = size_bytes(v.dtype);
  Search search(-element, element);
  for (int d = 0; d < v.shape.rank(); ++d) {
    if (v.strides[d] == 0 && v.shape[d] > 1) return true;
    // If two dimensions have one stride, the sum of their differences is one variable, which may be 0
    // although the differences are not.
    for (int e = 0; e < d; ++e)
      if (v.shape[d] > 1 && v.shape[e] > 1 && std::abs(v.strides[d]) == std::abs(v.strides[e])) return true;
    search.add(v.strides[d] * element, -(v.shape[d] - 1), v.shape[d] - 1);
  }
  return search.finds(0, true);
}

}  // namespace weft
