#include "weft/dp/grad_norm.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>

#include "base/floating.hpp"
#include "base/hash.hpp"
#include "base/mutant.hpp"
#include "dp/elements.hpp"
#include "dp/fixed_sum.hpp"
#include "dp/loops.hpp"
#include "dp/parts.hpp"
#include "mesh/same_list.hpp"
#include "mesh/view_memory.hpp"
#include "weft/base/error.hpp"
#include "weft/base/name_ranks.hpp"
#include "weft/mesh/layout.hpp"

namespace weft {
namespace {

using Powers = PowerSum;

Powers nothing(double p) { return {dp::loops::plain(p) ? 1.0 : 0.0, 0}; }

Powers together(const Powers& a, const Powers& b, double p) {
  if (std::isnan(a.scale) || std::isnan(b.scale)) return {std::nan(""), 1};
  if (a.sum == 0) return b;
  if (b.sum == 0) return a;
  const double scale = std::max(a.scale, b.scale);
  if (std::isinf(p) || scale == 0 || std::isinf(scale)) return {scale, scale == 0 ? 0.0 : 1.0};
  const auto rescaled = [&](const Powers& x) { return x.sum * dp::loops::power(x.scale / scale, p); };
  return {scale, rescaled(a) + rescaled(b)};
}

double norm_of(const Powers& x, double p) {
  if (std::isinf(p) || !std::isfinite(x.scale)) return x.scale;
  return x.scale * (p == 2 ? std::sqrt(x.sum) : p == 1 ? x.sum : std::pow(x.sum, 1 / p));
}

// Gradients whose parts lie on the same ranks: they are sharded on the same axes of one mesh.
struct Cohort {
  std::vector<int> axes;  // the axes of the root mesh that shard; empty: every rank has all of it
  Powers powers;
  dp::FixedSum squares{};  // in place of powers in exact mode
};
// All gradients of one root mesh. Without a mesh, the gradients of this rank alone.
struct Part {
  DeviceMesh root;
  std::vector<Cohort> cohorts;
  ListDigest digest;  // of its gradients
};

DeviceMesh root_of(const Gradient& g) { return g.layout == nullptr ? DeviceMesh() : g.layout->mesh(); }

// Called after the ranks have compared their lists: then either all ranks throw or none does.
void expect_reduced(const char* what, std::span<const Gradient> gradients) {
  for (const Gradient& g : gradients)
    for (int axis = 0; g.layout != nullptr && axis < g.layout->mesh_shape().axis_count(); ++axis) {
      const MeshShape& mesh = g.layout->mesh_shape();
      const Placement& placement = g.layout->placements[static_cast<std::size_t>(axis)];
      if (is_partial(placement) && mesh.size(axis) > 1)
        throw Error(ErrorCode::layout,
                    fmt::format("{}: the gradient of \"{}\" is {} on {}={}; it must be reduced first", what,
                                g.name, to_string(placement), mesh.name(axis), mesh.size(axis)));
    }
}

// Returns the cohort of a gradient. Makes it if there is none yet.
Cohort& cohort_of(const Gradient& g, double p, std::vector<Part>& parts) {
  const DeviceMesh root = root_of(g);
  std::vector<int> axes;
  for (int axis = 0; g.layout != nullptr && axis < g.layout->mesh_shape().axis_count(); ++axis)
    if (is_shard(g.layout->placements[static_cast<std::size_t>(axis)]) &&
        g.layout->mesh_shape().size(axis) > 1)
      axes.push_back(axis);
  auto part = std::find_if(parts.begin(), parts.end(), [&](const Part& x) { return x.root == root; });
  if (part == parts.end()) part = parts.insert(parts.end(), Part{root, {}, {}});
  auto cohort = std::find_if(part->cohorts.begin(), part->cohorts.end(),
                             [&](const Cohort& c) { return c.axes == axes; });
  if (cohort == part->cohorts.end())
    cohort = part->cohorts.insert(part->cohorts.end(), Cohort{std::move(axes), nothing(p)});
  return *cohort;
}

// The fault of this rank's arguments.
using Fault = std::optional<Error>;

// The arguments, without the list, that must be equal on all ranks: they travel with the powers.
struct Settings {
  const char* what;  // the caller
  double p;
  double max_norm = 0;  // 0: nothing is clipped
  NonFinite non_finite = NonFinite::error;
  Exact exact = Exact::no;

  static constexpr std::size_t kWords = 3;
  std::array<std::uint64_t, kWords> words() const {
    return {std::bit_cast<std::uint64_t>(p), std::bit_cast<std::uint64_t>(max_norm),
            static_cast<std::uint64_t>(non_finite)};
  }
};

std::string text_of(std::span<const std::uint64_t> words) {
  const auto max_norm = std::bit_cast<double>(words[1]);
  return fmt::format(
      "p {}{}", std::bit_cast<double>(words[0]),
      max_norm == 0 ? std::string(" and no max_norm")
                    : fmt::format(", max_norm {} and non_finite {}", max_norm,
                                  static_cast<NonFinite>(words[2]) == NonFinite::skip ? "skip" : "error"));
}

// A gradient as ranks compare it. Whether sums are exact is compared with it, since messages depend on it.
std::uint64_t digest_of_gradient(const Gradient& g, Exact exact) {
  const std::uint64_t digest = digest_of_view(g.name, g.data, g.layout);
  return exact == Exact::yes ? digest_of(digest, 1) : digest;
}
std::string text_of_gradient(const Gradient& g, Exact exact) {
  return text_of_view(g.name, g.data, g.layout) + (exact == Exact::yes ? ", exact" : "");
}

// All gradients by mesh and cohort, and the powers of the elements that this rank holds. The powers of the
// parts are combined in order: the bits do not depend on the number of threads. If there is a fault, nothing
// is read.
std::vector<Part> parts_of(const Settings& settings, std::span<const Gradient> gradients, Compute* compute,
                           const Fault& fault) {
  const double p = settings.p;
  std::vector<Part> parts;
  for (const Gradient& g : gradients) {
    cohort_of(g, p, parts);
    if (const DeviceMesh root = root_of(g); root && root.size() > 1)
      std::find_if(parts.begin(), parts.end(), [&](const Part& x) {
        return x.root == root;
      })->digest.add(digest_of_gradient(g, settings.exact));
  }
  if (fault) return parts;
  if (settings.exact == Exact::yes) {
    for (const Gradient& g : gradients) cohort_of(g, p, parts).squares.add(g.data.as<float>());
    return parts;
  }
  Cohort* cohort = nullptr;
  std::size_t of = gradients.size();  // the gradient that `cohort` is of
  dp::for_power_sums(
      settings.what, compute, gradients.size(), [&](std::size_t g) { return gradients[g].data; }, p,
      [&](std::size_t g, const Powers& sum) {
        if (g != of) cohort = &cohort_of(gradients[g], p, parts);
        of = g;
        cohort->powers = together(cohort->powers, sum, p);
      });
  return parts;
}

// The ranks of one group, by their numbers in the group, on which an element is not finite.
struct NotFinite {
  DeviceMesh root;
  std::vector<int> ranks;
};
struct Norm {
  double value = 0;
  // for each group from which meshes were made; without gradients without a layout
  std::vector<NotFinite> where;
};

// Meshes made from one group number the ranks equally.
void add_not_finite(std::vector<NotFinite>& where, const DeviceMesh& root, const std::vector<int>& ranks) {
  if (ranks.empty()) return;
  auto known = std::find_if(where.begin(), where.end(), [&](const NotFinite& x) {
    return x.root == root || (x.root.size() > 1 && root.size() > 1 && &x.root.group() == &root.group());
  });
  if (known == where.end()) known = where.insert(where.end(), NotFinite{root, {}});
  for (const int r : ranks)
    if (std::find(known->ranks.begin(), known->ranks.end(), r) == known->ranks.end())
      known->ranks.push_back(r);
  std::sort(known->ranks.begin(), known->ranks.end());
}

// "rank 1"; of several groups `ranks 0, 2 of "world" and rank 1 of "experts"`
std::string text_of(const std::vector<NotFinite>& where) {
  if (where.empty()) return "this rank";
  if (where.size() == 1) return name_ranks(where[0].ranks);
  std::vector<std::string> texts;
  for (const NotFinite& x : where)
    texts.push_back(x.root.size() == 1
                        ? "this rank"
                        : fmt::format("{} of \"{}\"", name_ranks(x.ranks), x.root.group().name()));
  return fmt::format("{}", fmt::join(texts, " and "));
}

// The sums of a cohort as words of a message, and back.
struct PowerWords {
  using Sum = Powers;
  static constexpr std::size_t kWords = 2;
  static std::array<std::uint64_t, kWords> words(const Cohort& c) {
    return {std::bit_cast<std::uint64_t>(c.powers.scale), std::bit_cast<std::uint64_t>(c.powers.sum)};
  }
  static Powers of(std::span<const std::uint64_t> words) {
    return {std::bit_cast<double>(words[0]), std::bit_cast<double>(words[1])};
  }
};
struct SquareWords {
  using Sum = dp::FixedSum;
  static constexpr std::size_t kWords = dp::FixedSum::kWords;
  static std::array<std::uint64_t, kWords> words(const Cohort& c) { return c.squares.words(); }
  static dp::FixedSum of(std::span<const std::uint64_t> words) { return dp::FixedSum::of(words); }
};

// Gathers the sums of every cohort on every rank: those of rank r begin at r * cohorts.
template <class Words>
std::vector<typename Words::Sum> gather_sums(const Settings& settings, const Part& part,
                                             std::span<const Gradient> gradients, const Fault& fault) {
  std::vector<std::uint64_t> own;
  const auto settings_words = settings.words();
  own.insert(own.end(), settings_words.begin(), settings_words.end());
  for (const Cohort& c : part.cohorts) {
    const auto words = Words::words(c);
    own.insert(own.end(), words.begin(), words.end());
  }
  std::vector<std::uint64_t> told;
  if (part.root && part.root.size() > 1) {
    const auto list = [&] {  // of this mesh
      std::vector<const Gradient*> those;
      for (const Gradient& g : gradients)
        if (root_of(g) == part.root) those.push_back(&g);
      return ListEntries{
          "gradient", those.size(),
          [those, &settings](std::size_t i) { return digest_of_gradient(*those[i], settings.exact); },
          [those, &settings](std::size_t i) { return text_of_gradient(*those[i], settings.exact); }};
    };
    told = gather_with_list(settings.what, part.root, part.digest, own, list, fault);
    if (!WEFT_MUTANT("norms_unseen"))
      expect_same_words(settings.what, "", part.root, told, 0, Settings::kWords,
                        [](auto given, int) { return text_of(given); });
  } else {
    told = own;
  }
  std::vector<typename Words::Sum> all;
  const std::span<const std::uint64_t> words = told;
  for (std::size_t rank = 0; rank < told.size(); rank += own.size())
    for (std::size_t i = Settings::kWords; i < own.size(); i += Words::kWords)
      all.push_back(Words::of(words.subspan(rank + i, Words::kWords)));
  return all;
}

// Calls use(rank, sum, counts) for the sum of each cohort of each rank, in rank order. `counts`: the rank's
// elements are not those of an earlier rank, since it has coordinate 0 on the axes along which the cohort is
// replicated. Every rank sees the same sums. So all ranks get the same bits, even if replicas are no longer
// equal.
template <class Sum, class Use>
void for_sums(const Part& part, const std::vector<Sum>& all, const Use& use) {
  const int ranks = part.root ? part.root.size() : 1;
  const std::size_t cohorts = part.cohorts.size();
  for (int r = 0; r < ranks; ++r) {
    const std::vector<int> at = part.root ? part.root.shape().coordinates(r) : std::vector<int>{};
    for (std::size_t c = 0; c < cohorts; ++c) {
      const std::vector<int>& sharded = part.cohorts[c].axes;
      bool counts = true;
      for (int a = 0; a < static_cast<int>(at.size()); ++a)
        counts &= at[static_cast<std::size_t>(a)] == 0 ||
                  std::find(sharded.begin(), sharded.end(), a) != sharded.end();
      use(r, all[static_cast<std::size_t>(r) * cohorts + c], counts);
    }
  }
}

void add_rank(std::vector<int>& ranks, int rank) {
  if (ranks.empty() || ranks.back() != rank) ranks.push_back(rank);
}

// Returns the result over all ranks of a mesh, and the ranks that have an element that is not finite.
Powers gathered(const Settings& settings, const Part& part, std::span<const Gradient> gradients,
                std::vector<int>& not_finite, const Fault& fault) {
  const double p = settings.p;
  Powers total = nothing(p), broken = nothing(p);
  for_sums(part, gather_sums<PowerWords>(settings, part, gradients, fault),
           [&](int rank, const Powers& powers, bool counts) {
             if (!std::isfinite(powers.scale) || !std::isfinite(powers.sum)) {
               add_rank(not_finite, rank);
               broken = together(broken, powers, p);
             }
             if (counts) total = together(total, powers, p);
           });
  return not_finite.empty() ? total : broken;
}

dp::FixedSum gathered_squares(const Settings& settings, const Part& part, std::span<const Gradient> gradients,
                              std::vector<int>& not_finite, const Fault& fault) {
  dp::FixedSum total;
  for_sums(part, gather_sums<SquareWords>(settings, part, gradients, fault),
           [&](int rank, const dp::FixedSum& squares, bool counts) {
             if (!squares.finite()) add_rank(not_finite, rank);
             if (counts || !squares.finite()) total += squares;
           });
  return total;
}

// Returns whether all ranks get this error or none does: true for errors of arguments, not for errors of the
// transport.
bool is_told(const Error& e) {
  return e.code() == ErrorCode::bad_argument || e.code() == ErrorCode::layout ||
         e.code() == ErrorCode::mismatch || e.code() == ErrorCode::unsupported;
}

// A fault in a rank's arguments, or a fault found in one mesh, is reported in all other meshes. Their ranks
// throw, too, and no rank's call waits for another rank's.
Norm norm_over_all(const Settings& settings, std::span<const Gradient> gradients, Compute* compute,
                   Fault fault) {
  const double p = settings.p;
  const bool exact = settings.exact == Exact::yes;
  const std::vector<Part> parts = parts_of(settings, gradients, compute, fault);
  Powers total = nothing(p);
  dp::FixedSum squares;
  Norm norm;
  for (const Part& part : parts) {
    std::vector<int> ranks;
    try {
      if (exact)
        squares += gathered_squares(settings, part, gradients, ranks, fault);
      else
        total = together(total, gathered(settings, part, gradients, ranks, fault), p);
    } catch (const Error& e) {
      if (!is_told(e)) throw;
      if (!fault) fault = e;
    }
    if (part.root) add_not_finite(norm.where, part.root, ranks);
  }
  if (fault) throw Error(*fault);
  norm.value = !exact             ? norm_of(total, p)
               : squares.finite() ? squares.root()
                                  : std::numeric_limits<double>::quiet_NaN();
  return norm;
}

[[noreturn]] void throw_not_finite(const Norm& norm, std::span<const Gradient> gradients, Compute* compute) {
  std::vector<std::string> names;
  std::size_t named = gradients.size();  // the last one
  dp::for_power_sums(
      "clip_grad_norm", compute, gradients.size(), [&](std::size_t g) { return gradients[g].data; },
      std::numeric_limits<double>::infinity(),
      [&](std::size_t g, const Powers& largest) {
        if (std::isfinite(largest.scale) || g == named) return;
        names.push_back(fmt::format("\"{}\"", gradients[g].name));
        named = g;
      });
  throw Error(
      Failure{.code = ErrorCode::bad_argument,
              .text = fmt::format("clip_grad_norm: the norm is {}; not finite on {}; of this rank: {}",
                                  norm.value, text_of(norm.where),
                                  names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", "))),
              .ranks = norm.where.size() == 1 ? norm.where[0].ranks : std::vector<int>{}});
}

}  // namespace

namespace {

void expect_exact(const char* what, std::span<const Gradient> gradients, double p, Compute* compute,
                  Exact exact) {
  if (exact == Exact::no) return;
  const auto wrong = [&](const std::string& text) {
    throw Error(ErrorCode::bad_argument, fmt::format("{}: exact: {}", what, text));
  };
  if (p != 2) wrong(fmt::format("p is {}; expected 2, the sum of squares", p));
  if (dp::on_device(compute))
    wrong(fmt::format("the gradients are on {}; expected the host", to_string(compute->device())));
  for (const Gradient& g : gradients)
    if (g.data.dtype != DType::f32)
      wrong(fmt::format("the gradient of \"{}\" is {}; expected f32, whose squares are exact", g.name,
                        name(g.data.dtype)));
}

}  // namespace

// Adds the sum of |g|^p of each gradient to its cohort's sum. One all-gather per mesh then adds the sums of
// all ranks.
double grad_norm(std::span<const Gradient> gradients, double p, Compute* compute, Exact exact) {
  const Fault fault = fault_of([&] {
    if (!(p >= 1))
      throw Error(ErrorCode::bad_argument, fmt::format("grad_norm: p is {}; expected 1 or more", p));
    check_gradients("grad_norm", gradients, compute);
    dp::kernels_of("grad_norm", compute);
    expect_exact("grad_norm", gradients, p, compute, exact);
  });
  const Norm norm = norm_over_all({.what = "grad_norm", .p = p, .exact = exact}, gradients, compute, fault);
  expect_reduced("grad_norm", gradients);
  return norm.value;
}

namespace {

// `limit` returns max_norm, or throws.
template <class Limit>
double clip(std::span<const Gradient> gradients, const Limit& limit, double p, NonFinite non_finite,
            Compute* compute, Exact exact) {
  double max_norm = 0;
  const Fault fault = fault_of([&] {
    max_norm = limit();
    if (!(max_norm > 0))
      throw Error(ErrorCode::bad_argument,
                  fmt::format("clip_grad_norm: max_norm is {}; expected more than 0", max_norm));
    if (!(p >= 1))
      throw Error(ErrorCode::bad_argument, fmt::format("clip_grad_norm: p is {}; expected 1 or more", p));
    check_gradients("clip_grad_norm", gradients, compute);
    dp::kernels_of("clip_grad_norm", compute);
    expect_exact("clip_grad_norm", gradients, p, compute, exact);
  });
  const Norm norm =
      norm_over_all({"clip_grad_norm", p, max_norm, non_finite, exact}, gradients, compute, fault);
  expect_reduced("clip_grad_norm", gradients);
  if (!std::isfinite(norm.value)) {
    if (non_finite == NonFinite::skip) return norm.value;
    throw_not_finite(norm, gradients, compute);
  }
  const double coefficient = std::min(1.0, max_norm / (norm.value + 1e-6));
  if (coefficient < 1)
    dp::scale_all(
        "clip_grad_norm", compute, gradients.size(), [&](std::size_t g) { return gradients[g].data; },
        coefficient);
  return norm.value;
}

// Returns one element, on the host or on a device.
double number_of(const Tensor& limit, Compute* compute) {
  if (limit.count() != 1)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("clip_grad_norm: max_norm is a tensor of {} elements; expected 1", limit.count()));
  if (!is_floating(limit.dtype()))
    throw Error(ErrorCode::bad_argument,
                fmt::format("clip_grad_norm: max_norm is a tensor of {}; expected {}", name(limit.dtype()),
                            kFloatingNames));
  if (const std::string wrong = device_fault(limit.device(), compute);
      !wrong.empty() && limit.device() != Device{})
    throw Error(ErrorCode::bad_argument, fmt::format("clip_grad_norm: max_norm {}", wrong));
  double value = 0;
  const Tensor here = limit.device() == Device{} ? limit : to_host(compute->context(), limit);
  dp::with_elements(here.view(), [&](const auto& values) { value = dp::to_double(values[0]); });
  return value;
}

}  // namespace

double clip_grad_norm(std::span<const Gradient> gradients, double max_norm, double p, NonFinite non_finite,
                      Compute* compute, Exact exact) {
  return clip(
      gradients, [=] { return max_norm; }, p, non_finite, compute, exact);
}

double clip_grad_norm(std::span<const Gradient> gradients, const Tensor& max_norm, double p,
                      NonFinite non_finite, Compute* compute, Exact exact) {
  return clip(
      gradients, [&] { return number_of(max_norm, compute); }, p, non_finite, compute, exact);
}

}  // namespace weft
