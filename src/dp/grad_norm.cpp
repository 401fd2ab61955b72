#include "weft/dp/grad_norm.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "weft/base/error.hpp"
#include "weft/mesh/layout.hpp"

namespace weft {
namespace {

// A sum of powers as scale^p · sum, where scale is the largest magnitude in it: |g|^p itself may be too large
// or too small for a double. For the everyday norms the scale is 1 and sum is the plain sum.
struct Powers {
  double scale = 1, sum = 0;
};

bool plain(double p) { return p >= 1 && p <= 4; }

double power(double x, double p) {
  if (p == 1) return x;
  if (p == 2) return x * x;
  return std::pow(x, p);
}

double largest(std::span<const float> values) {
  double most = 0;
  for (const float v : values) {
    if (std::isnan(v)) return std::nan("");
    most = std::max(most, std::abs(static_cast<double>(v)));
  }
  return most;
}

// Σ (|v| / scale)^p. Eight sums side by side: faster, and their rounding errors stay small.
double sum_of_powers(std::span<const float> values, double scale, double p) {
  constexpr std::size_t kLanes = 8;
  double lanes[kLanes] = {};
  std::size_t i = 0;
  if (p == 2 && scale == 1) {
    for (; i + kLanes <= values.size(); i += kLanes)
      for (std::size_t l = 0; l < kLanes; ++l) {
        const auto v = static_cast<double>(values[i + l]);
        lanes[l] += v * v;
      }
  }
  for (; i < values.size(); ++i)
    lanes[i % kLanes] += power(std::abs(static_cast<double>(values[i])) / scale, p);
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

Powers powers_of(std::span<const float> values, double p) {
  if (values.empty()) return {plain(p) ? 1.0 : 0.0, 0};
  if (plain(p)) return {1, sum_of_powers(values, 1, p)};
  const double scale = largest(values);
  if (std::isinf(p) || scale == 0 || !std::isfinite(scale)) return {scale, scale == 0 ? 0.0 : 1.0};
  return {scale, sum_of_powers(values, scale, p)};
}

Powers together(const Powers& a, const Powers& b, double p) {
  if (std::isnan(a.scale) || std::isnan(b.scale)) return {std::nan(""), 1};
  const double scale = std::max(a.scale, b.scale);
  if (std::isinf(p) || scale == 0 || std::isinf(scale)) return {scale, scale == 0 ? 0.0 : 1.0};
  const auto rescaled = [&](const Powers& x) { return x.sum * power(x.scale / scale, p); };
  return {scale, rescaled(a) + rescaled(b)};
}

double norm_of(const Powers& x, double p) {
  if (std::isinf(p) || !std::isfinite(x.scale)) return x.scale;
  return x.scale * (p == 2 ? std::sqrt(x.sum) : p == 1 ? x.sum : std::pow(x.sum, 1 / p));
}

// Gradients whose parts lie on the same ranks: sharded on the same axes of one mesh.
struct Cohort {
  DeviceMesh root;                // null handle: on this rank alone
  std::vector<std::string> axes;  // that shard; empty: every rank has all of it
  Powers powers;
};

void expect_clippable(const char* what, std::span<Parameter* const> parameters) {
  for (const Parameter* parameter : parameters) {
    if (!parameter->has_gradient())
      throw Error(ErrorCode::bad_argument,
                  fmt::format("{}: \"{}\" has no gradient", what, parameter->path()));
    const LayoutRef layout = parameter->gradient_layout();
    for (int axis = 0; layout != nullptr && axis < layout->mesh_shape().axis_count(); ++axis) {
      const Placement& placement = layout->placements[static_cast<std::size_t>(axis)];
      if (is_partial(placement) && layout->mesh_shape().size(axis) > 1)
        throw Error(ErrorCode::layout,
                    fmt::format("{}: the gradient of \"{}\" is {} on {}={}; it must be reduced first", what,
                                parameter->path(), to_string(placement), layout->mesh_shape().name(axis),
                                layout->mesh_shape().size(axis)));
    }
  }
}

Cohort& cohort_of(const Parameter& parameter, double p, std::vector<Cohort>& cohorts) {
  Cohort wanted;
  if (const LayoutRef layout = parameter.gradient_layout(); layout != nullptr)
    for (int axis = 0; axis < layout->mesh_shape().axis_count(); ++axis)
      if (is_shard(layout->placements[static_cast<std::size_t>(axis)]) &&
          layout->mesh_shape().size(axis) > 1) {
        wanted.root = layout->mesh();
        wanted.axes.push_back(layout->mesh_shape().name(axis));
      }
  const auto found = std::find_if(cohorts.begin(), cohorts.end(), [&](const Cohort& c) {
    return c.axes == wanted.axes && (c.axes.empty() || c.root == wanted.root);
  });
  if (found != cohorts.end()) return *found;
  wanted.powers = powers_of({}, p);
  cohorts.push_back(std::move(wanted));
  return cohorts.back();
}

// What the ranks of a cohort have together. Every rank combines in rank order: the same bits on all.
Powers gathered(const Cohort& cohort, double p) {
  ProcessGroup& group = cohort.root.submesh(cohort.axes).group();
  const std::vector<double> own = {cohort.powers.scale, cohort.powers.sum};
  std::vector<double> all(own.size() * static_cast<std::size_t>(group.size()));
  group.all_gather(view(own), view(all)).wait();
  Powers total = powers_of({}, p);
  for (std::size_t i = 0; i < all.size(); i += 2) total = together(total, {all[i], all[i + 1]}, p);
  return total;
}

}  // namespace

// Each gradient's own powers are added to those of its cohort; then one gather per cohort makes them those of
// the whole gradients. Axes that replicate take no part: each of their ranks arrives at the same number.
double grad_norm(std::span<Parameter* const> parameters, double p) {
  if (!(p >= 1))
    throw Error(ErrorCode::bad_argument, fmt::format("grad_norm: p is {}; expected 1 or more", p));
  expect_clippable("grad_norm", parameters);
  std::vector<Cohort> cohorts;
  for (const Parameter* parameter : parameters) {
    Cohort& cohort = cohort_of(*parameter, p, cohorts);
    cohort.powers = together(cohort.powers, powers_of(parameter->gradient().f32(), p), p);
  }
  Powers total = powers_of({}, p);
  for (const Cohort& cohort : cohorts)
    total = together(total, cohort.axes.empty() ? cohort.powers : gathered(cohort, p), p);
  return norm_of(total, p);
}

double clip_grad_norm(std::span<Parameter* const> parameters, double max_norm, double p,
                      NonFinite non_finite) {
  if (!(max_norm > 0))
    throw Error(ErrorCode::bad_argument,
                fmt::format("clip_grad_norm: max_norm is {}; expected more than 0", max_norm));
  const double norm = grad_norm(parameters, p);
  if (!std::isfinite(norm)) {
    if (non_finite == NonFinite::skip) return norm;
    std::vector<std::string> names;
    for (const Parameter* parameter : parameters)
      if (!std::isfinite(largest(parameter->gradient().f32())))
        names.push_back('"' + parameter->path() + '"');
    throw Error(ErrorCode::bad_argument,
                fmt::format("clip_grad_norm: the norm is {}; not finite on this rank: {}", norm,
                            names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", "))));
  }
  const double coefficient = std::min(1.0, max_norm / (norm + 1e-6));
  if (coefficient < 1)
    for (const Parameter* parameter : parameters)
      for (float& g : parameter->gradient().f32()) g = static_cast<float>(g * coefficient);
  return norm;
}

}  // namespace weft
