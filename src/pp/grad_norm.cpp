#include "weft/pp/grad_norm.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "dp/fixed_sum.hpp"
#include "dp/parts.hpp"
#include "weft/base/error.hpp"
#include "weft/base/name_ranks.hpp"

namespace weft {
namespace {

constexpr const char* kNormOfStages = "pipeline_grad_norm";

// Whether this rank counts the elements of a gradient: it has coordinate 0 on all axes that replicate the
// gradient, except for the axis of the stages, on which no other rank has the gradient.
bool counts_here(const Gradient& g, const DeviceMesh& root, const DeviceMesh& stages) {
  if (g.layout == nullptr) return true;
  const std::vector<int> at = root.shape().coordinates(root.rank());
  for (int axis = 0; axis < root.shape().axis_count(); ++axis)
    if (std::ranges::count(stages.root_axes(), axis) == 0 && at[static_cast<std::size_t>(axis)] != 0 &&
        !is_shard(g.layout->placements[static_cast<std::size_t>(axis)]))
      return false;
  return true;
}

void check_of_stages(std::span<const Gradient> gradients, const DeviceMesh& stages, double max_norm) {
  const auto wrong = [](ErrorCode code, const std::string& text) {
    throw Error(code, fmt::format("{}: {}", kNormOfStages, text));
  };
  if (!(max_norm > 0))
    wrong(ErrorCode::bad_argument, fmt::format("max_norm is {}; expected more than 0", max_norm));
  check_gradients(kNormOfStages, gradients);
  const DeviceMesh root = stages.root();
  for (const Gradient& g : gradients) {
    if (g.data.dtype != DType::f32)
      wrong(ErrorCode::bad_argument,
            fmt::format("the gradient of \"{}\" is {}; expected f32, whose squares are exact", g.name,
                        name(g.data.dtype)));
    if (g.layout == nullptr && root.size() != stages.size())
      wrong(ErrorCode::layout, fmt::format("the gradient of \"{}\" is plain; on {} it needs a layout", g.name,
                                           to_string(root.shape())));
    if (g.layout == nullptr) continue;
    if (!(g.layout->mesh() == root))
      wrong(ErrorCode::layout, fmt::format("the gradient of \"{}\" lies over another mesh", g.name));
    if (g.layout->partial())
      wrong(ErrorCode::layout, fmt::format("the gradient of \"{}\" is {}; it must be reduced first", g.name,
                                           to_string(*g.layout)));
  }
}

// The norm, and whether all elements are finite: the same on all ranks.
double norm_of_stages(std::span<const Gradient> gradients, const DeviceMesh& stages, double max_norm,
                      NonFinite non_finite, std::span<const std::string> copies) {
  std::optional<Error> own;
  dp::FixedSum squares;
  const DeviceMesh root = stages.root();
  try {
    check_of_stages(gradients, stages, max_norm);
    for (const Gradient& g : gradients) {
      dp::FixedSum of_gradient;
      of_gradient.add(
          {reinterpret_cast<const float*>(g.data.data), static_cast<std::size_t>(g.data.count())});
      const bool counts = counts_here(g, root, stages) && std::ranges::count(copies, g.name) == 0;
      // Replicas that are not finite count, so that their ranks are named.
      if (counts || !of_gradient.finite()) squares += of_gradient;
    }
  } catch (const Error& e) {
    own = e;
  }
  std::vector<std::int64_t> mine{own ? 1 : 0, std::bit_cast<std::int64_t>(max_norm),
                                 static_cast<std::int64_t>(non_finite)};
  constexpr std::size_t kHead = 3, kWords = kHead + dp::FixedSum::kWords;
  for (const std::uint64_t word : squares.words()) mine.push_back(static_cast<std::int64_t>(word));
  std::vector<std::int64_t> all = mine;
  if (root.size() > 1) {
    all.resize(kWords * static_cast<std::size_t>(root.size()));
    root.group().all_gather(mine, all).wait();
  }
  if (own) throw Error(*own);
  dp::FixedSum total;
  std::vector<int> not_finite;
  for (int rank = 0; rank < static_cast<int>(all.size() / kWords); ++rank) {
    const std::span<const std::int64_t> of =
        std::span(all).subspan(static_cast<std::size_t>(rank) * kWords, kWords);
    if (of[0] != 0)
      throw Error(
          ErrorCode::bad_argument,
          fmt::format("{}: rank {} gave wrong arguments; its own error says why", kNormOfStages, rank));
    if (of[1] != mine[1] || of[2] != mine[2])
      throw Error(Failure{
          .code = ErrorCode::mismatch,
          .text = fmt::format("{}: max_norm or non_finite is another one on rank {}", kNormOfStages, rank),
          .ranks = {rank}});
    std::vector<std::uint64_t> words;
    for (const std::int64_t word : of.subspan(kHead)) words.push_back(static_cast<std::uint64_t>(word));
    const dp::FixedSum sum = dp::FixedSum::of(words);
    if (!sum.finite()) not_finite.push_back(rank);
    total += sum;
  }
  if (total.finite()) return total.root();
  if (non_finite == NonFinite::error)
    throw Error(Failure{
        .code = ErrorCode::bad_argument,
        .text = fmt::format("{}: gradients are not finite on {}", kNormOfStages, name_ranks(not_finite)),
        .ranks = not_finite});
  return std::numeric_limits<double>::quiet_NaN();
}

}  // namespace

double pipeline_grad_norm(std::span<const Gradient> gradients, const DeviceMesh& stages,
                          std::span<const std::string> copies) {
  return norm_of_stages(gradients, stages, std::numeric_limits<double>::infinity(), NonFinite::skip, copies);
}

double clip_pipeline_grad_norm(std::span<const Gradient> gradients, const DeviceMesh& stages, double max_norm,
                               NonFinite non_finite, std::span<const std::string> copies) {
  const double norm = norm_of_stages(gradients, stages, max_norm, non_finite, copies);
  if (!std::isfinite(norm)) return norm;
  const double coefficient = std::min(1.0, max_norm / (norm + 1e-6));
  if (coefficient < 1)
    dp::scale_all(
        kNormOfStages, nullptr, gradients.size(), [&](std::size_t g) { return gradients[g].data; },
        coefficient);
  return norm;
}

}  // namespace weft
