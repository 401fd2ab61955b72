#include "dp/replicas.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "dp/elements.hpp"
#include "dp/parts.hpp"
#include "mesh/axis_ranks.hpp"
#include "mesh/same_list.hpp"
#include "weft/base/error.hpp"

namespace weft::dp {
namespace {

constexpr std::size_t kWordsOfOptions = 2;
constexpr double kUnset = -1;  // the value that ranks send for a tolerance that is not set

// The largest distance of a replica from the average: a fraction of the largest element, and at least
// `least`.
struct Tolerance {
  double relative, least = 0;
};

// For elements below the smallest normal number, the unit in the last place is the unit of this smallest
// number.
constexpr Tolerance units_in_the_last_place(double units, double epsilon, double smallest) noexcept {
  return {units * epsilon, units * smallest};
}

Tolerance tolerance_of(const ReduceOptions& options, DType dtype) {
  if (options.tolerance) return {*options.tolerance};
  switch (dtype) {
    case DType::f64: return units_in_the_last_place(1024, 0x1p-52, 0x1p-1074);
    case DType::f32: return units_in_the_last_place(1024, 0x1p-23, 0x1p-149);
    case DType::bf16: return units_in_the_last_place(4, 0x1p-7, 0x1p-133);
    case DType::f16: return units_in_the_last_place(4, 0x1p-10, 0x1p-24);
    case DType::f8e4m3:
    case DType::f8e5m2:
    case DType::i8:
    case DType::i16:
    case DType::i32:
    case DType::i64:
    case DType::u8:
    case DType::u16:
    case DType::u32:
    case DType::u64:
    case DType::boolean:
    case DType::c64:
    case DType::c128: break;  // check_gradients() refused it
  }
  return {0};
}

// The words of a rank: the tolerance, then on_drift, with one bit for each data axis above it.
std::array<std::uint64_t, kWordsOfOptions> words_of(const ReduceOptions& options, std::uint64_t data) {
  return {std::bit_cast<std::uint64_t>(options.tolerance.value_or(kUnset)),
          data << 1 | static_cast<std::uint64_t>(options.on_drift)};
}

std::string text_of_options(const std::uint64_t* told, const DeviceMesh& axes, bool with_data) {
  const double tolerance = std::bit_cast<double>(told[0]);
  const std::string of_tolerance = tolerance == kUnset ? "unset" : fmt::format("{}", tolerance),
                    on_drift =
                        (told[1] & 1) == static_cast<std::uint64_t>(OnDrift::error) ? "error" : "average";
  if (!with_data) return fmt::format("tolerance {} and on_drift {}", of_tolerance, on_drift);
  std::vector<std::string> names;
  const std::vector<DeviceMesh> all = axes.each_axis();
  for (std::size_t a = 0; a < all.size(); ++a)
    if ((told[1] >> 1 >> a & 1) != 0) names.push_back(all[a].name());
  return fmt::format("tolerance {}, on_drift {} and data_axes {}", of_tolerance, on_drift,
                     names.empty() ? "none" : fmt::format("{}", fmt::join(names, ",")));
}

// The message of a rank about its replica that is furthest from the average, as words.
struct Verdict {
  double excess = 0;  // distance / the distance that rounding explains; more than 1: not rounding
  double distance = 0;
  std::uint64_t position = 0;  // among the replicas
};
constexpr std::size_t kVerdictWords = 3;

Verdict verdict_on(const TensorView& own, const TensorView& average, Tolerance tolerance, bool& finite) {
  double distance = 0, magnitude = 0;
  finite = true;
  with_elements(own, [&](const auto& values) {
    using T = typename std::remove_cvref_t<decltype(values)>::value_type;
    const auto means = average.as<T>();
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double mine = to_double(values[i]), mean = to_double(means[i]);
      finite = finite && std::isfinite(mine);
      if (!std::isfinite(mine) || !std::isfinite(mean)) continue;
      distance = std::max(distance, std::abs(mine - mean));
      magnitude = std::max(magnitude, std::abs(mean));
    }
  });
  Verdict v;
  v.distance = distance;
  // Both values are divided by the larger one, because their sum may be too large for a double. The distance
  // itself is infinite between the two ends of f64's range.
  const double most = std::max(magnitude, distance);
  if (std::isinf(distance))
    v.excess = distance;
  else if (distance > 0)
    v.excess = distance / most /
               (tolerance.relative * (magnitude / most + distance / most) + tolerance.least / most);
  return v;
}

}  // namespace

void Replicas::add(const Gradient& gradient, std::size_t index, const std::vector<int>& along) {
  replicas_.push_back({&gradient, index, along});
  bits_.add(gradient.data, along);
}

void Replicas::compare_bits(const ReduceOptions& options, std::uint64_t data, const char* what,
                            std::span<const Gradient> gradients, const std::optional<Error>& fault) {
  what_ = what;
  expect_same_options(bits_.compare(
      what, digest_of_list(gradients), words_of(options, data),
      [&] { return entries_of("gradient", gradients); }, fault));
}

void Replicas::expect_same_options(const std::vector<std::uint64_t>& all) const {
  for (int r = 1; r < axes_.size(); ++r) {
    const std::uint64_t* const told = all.data() + static_cast<std::size_t>(r) * kWordsOfOptions;
    if (std::equal(all.data(), all.data() + kWordsOfOptions, told)) continue;
    const bool with_data = all[1] >> 1 != told[1] >> 1;
    throw Error(Failure{ErrorCode::mismatch,
                        fmt::format("{}: ranks gave different options: {} on {}, {} on {}", what_,
                                    text_of_options(all.data(), axes_, with_data), name_axis_rank(axes_, 0),
                                    text_of_options(told, axes_, with_data), name_axis_rank(axes_, r)),
                        Op::none,
                        kNoCall,
                        {0, r}});
  }
}

bool Replicas::same_here(std::size_t index) const {
  const auto at = std::lower_bound(replicas_.begin(), replicas_.end(), index,
                                   [](const Replica& r, std::size_t i) { return r.index < i; });
  return bits_.same_here(static_cast<std::size_t>(at - replicas_.begin()));
}

void Replicas::throw_drift(const Replica& replica, const std::vector<int>& ranks,
                           const std::string& how) const {
  std::vector<std::string> names;
  for (const int a : replica.along) names.push_back(axes_.root().shape().name(a));
  const DeviceMesh along = axes_.root().submesh(names);
  throw Error(Failure{ErrorCode::mismatch,
                      fmt::format("{}: the gradient of \"{}\" is Replicate on {}={}, but on {} it "
                                  "{}; a replica drifted, or the gradient is Partial there",
                                  what_, replica.gradient->name, along.name(), along.size(),
                                  name_axis_ranks(axes_, ranks), how),
                      Op::none, kNoCall, ranks});
}

void Replicas::throw_other_bits() const {
  for (std::size_t i = 0; i < replicas_.size(); ++i)
    if (const std::vector<int> ranks = bits_.drifted(i); !ranks.empty())
      throw_drift(replicas_[i], ranks, "has other bits, where the tolerance is 0");
  throw Error(ErrorCode::bad_argument, fmt::format("{}: all replicas have the same bits", what_));
}

void Replicas::expect_no_drift(const ReduceOptions& options,
                               const std::map<std::size_t, TensorView>& averages) const {
  std::vector<std::uint64_t> own(kVerdictWords + (replicas_.size() + 63) / 64);
  Verdict worst;
  for (std::size_t position = 0; position < replicas_.size(); ++position) {
    const Replica& replica = replicas_[position];
    const auto average = averages.find(replica.index);
    if (average == averages.end()) continue;
    bool finite = true;
    const TensorView& data = replica.gradient->data;
    Verdict v =
        verdict_on(on_host(data, options.compute).view(), on_host(average->second, options.compute).view(),
                   tolerance_of(options, replica.gradient->data.dtype), finite);
    v.position = position;
    if (!finite) own[kVerdictWords + position / 64] |= std::uint64_t{1} << (position % 64);
    if (v.excess > worst.excess) worst = v;
  }
  own[0] = std::bit_cast<std::uint64_t>(worst.excess);
  own[1] = std::bit_cast<std::uint64_t>(worst.distance);
  own[2] = worst.position;
  std::vector<std::uint64_t> all(own.size() * static_cast<std::size_t>(axes_.size()));
  gather_on_host(axes_.group(), view(own), view(all));

  const auto told = [&](int r) { return all.data() + static_cast<std::size_t>(r) * own.size(); };
  for (std::size_t position = 0; position < replicas_.size(); ++position) {
    std::vector<int> broken;
    for (const std::vector<int>& set : bits_.holders(position)) {
      std::vector<int> those;
      for (const int r : set)
        if ((told(r)[kVerdictWords + position / 64] >> (position % 64) & 1) != 0) those.push_back(r);
      if (those.size() < set.size()) broken.insert(broken.end(), those.begin(), those.end());
    }
    std::sort(broken.begin(), broken.end());
    if (!broken.empty())
      throw_drift(replicas_[position], broken, broken.size() == 1 ? "is not finite" : "are not finite");
  }
  const auto verdict = [&](int r) {
    return Verdict{std::bit_cast<double>(told(r)[0]), std::bit_cast<double>(told(r)[1]), told(r)[2]};
  };
  Verdict found;
  for (int r = 0; r < axes_.size(); ++r)
    if (verdict(r).excess > found.excess) found = verdict(r);
  if (found.excess <= 1) return;
  // Two ranks that differ are equally far from their average. If there are more ranks, the rank that differs
  // is the furthest.
  std::vector<int> blamed;
  for (int r = 0; r < axes_.size(); ++r) {
    const Verdict v = verdict(r);
    if (v.position == found.position && v.excess >= 0.999 * found.excess &&
        v.distance >= 0.999 * found.distance)
      blamed.push_back(r);
  }
  throw_drift(replicas_[found.position], blamed,
              fmt::format("is {:.3g} from the average, {:.3g} times what rounding explains", found.distance,
                          found.excess));
}

}  // namespace weft::dp
