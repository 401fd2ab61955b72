#include "weft/dp/replicated.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "weft/base/error.hpp"
#include "weft/base/name_ranks.hpp"
#include "weft/mesh/layout.hpp"

namespace weft {
namespace {

struct Gradient {
  Parameter* parameter;
  std::size_t index;    // among the parameters given: the same on all ranks
  bool replica;         // Replicate, else Partial
  std::int64_t offset;  // in its flat buffer
};

// Gradients one after the other in one block of shared memory, reduced by one collective.
struct Flat {
  ReduceOp op;
  std::vector<Gradient> gradients;
  std::int64_t count = 0;
  Tensor memory;

  void add(Parameter& parameter, std::size_t index, bool replica) {
    gradients.push_back({&parameter, index, replica, count});
    count += parameter.gradient().count();
  }
  Tensor part(const Gradient& g) const {
    return memory.slice_flat(g.offset, Shape{g.parameter->gradient().count()});
  }
  Work post(ProcessGroup& group) {
    memory = Tensor(group.context(), {count}, DType::f32, Memory::shared);
    for (const Gradient& g : gradients) {
      const Tensor& own = g.parameter->gradient();
      std::memcpy(part(g).data(), own.data(), static_cast<std::size_t>(own.bytes()));
    }
    return group.all_reduce(memory, memory, {.op = op});
  }
};

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// What one rank says of its replica that is furthest from the average, relative to what rounding explains.
struct Verdict {
  double excess = 0;  // more than 1: not rounding; infinite: not finite, where the average must tell nothing
  double index = -1, distance = 0;
};

Verdict verdict_on(const Flat& averaged, double tolerance) {
  Verdict worst;
  for (const Gradient& g : averaged.gradients) {
    if (!g.replica) continue;
    const auto own = g.parameter->gradient().f32();
    const auto average = averaged.part(g).f32();
    double distance = 0, magnitude = 0;
    bool finite = true;
    for (std::size_t i = 0; i < own.size(); ++i) {
      const auto mine = static_cast<double>(own[i]), mean = static_cast<double>(average[i]);
      finite = finite && std::isfinite(mine);
      if (!std::isfinite(mine) || !std::isfinite(mean)) continue;
      distance = std::max(distance, std::abs(mine - mean));
      magnitude = std::max(magnitude, std::abs(mean));
    }
    const double excess = !finite         ? kInfinity
                          : distance == 0 ? 0
                                          : distance / (tolerance * (magnitude + distance));
    if (excess > worst.excess) worst = {excess, static_cast<double>(g.index), distance};
  }
  return worst;
}

// Every rank tells its verdict to all, so that all throw or none. Where every rank's replicas are not finite
// they have not drifted apart: that is for clipping to see.
void expect_no_drift(const Flat& averaged, std::span<Parameter* const> parameters, const DeviceMesh& axis,
                     double tolerance) {
  const Verdict own = verdict_on(averaged, tolerance);
  std::vector<double> told = {own.excess, own.index, own.distance};
  std::vector<double> all(told.size() * static_cast<std::size_t>(axis.size()));
  axis.group().all_gather(view(told), view(all)).wait();
  std::vector<Verdict> verdicts;
  for (std::size_t i = 0; i < all.size(); i += told.size())
    verdicts.push_back({all[i], all[i + 1], all[i + 2]});

  const auto by_excess = [](const Verdict& a, const Verdict& b) { return a.excess < b.excess; };
  const Verdict worst = *std::max_element(verdicts.begin(), verdicts.end(), by_excess);
  const Verdict least = *std::min_element(verdicts.begin(), verdicts.end(), by_excess);
  if (worst.excess <= 1 || std::isinf(least.excess)) return;
  // Two ranks that differ are equally far from their average; of more, the one that drifted is the furthest.
  std::vector<int> ranks;
  for (std::size_t r = 0; r < verdicts.size(); ++r)
    if (verdicts[r].index == worst.index && verdicts[r].excess >= 0.999 * worst.excess)
      ranks.push_back(static_cast<int>(r));
  const std::string& path = parameters[static_cast<std::size_t>(worst.index)]->path();
  const std::string how = std::isinf(worst.excess)
                              ? std::string("is not finite")
                              : fmt::format("is {:.3g} from the average, {:.3g} times what rounding explains",
                                            worst.distance, worst.excess);
  throw Error(
      Failure{ErrorCode::mismatch,
              fmt::format("sync_replicated_gradients: the gradient of \"{}\" is Replicate on {}={}, but on "
                          "{} it {}; a replica drifted, or the gradient is Partial there",
                          path, axis.name(), axis.size(), name_ranks(ranks), how),
              Op::none, kNoCall, ranks});
}

void take_over(const Flat& flat, const DeviceMesh& axis) {
  for (const Gradient& g : flat.gradients) {
    const Tensor& own = g.parameter->gradient();
    std::memcpy(own.data(), flat.part(g).data(), static_cast<std::size_t>(own.bytes()));
    g.parameter->set_gradient_layout(g.parameter->gradient_layout()->with(axis, Replicate{}));
  }
}

void restate(std::span<Parameter* const> parameters, const DeviceMesh& axis) {
  for (Parameter* parameter : parameters)
    if (const LayoutRef layout = parameter->gradient_layout();
        layout != nullptr && is_partial(layout->on(axis)))
      parameter->set_gradient_layout(layout->with(axis, Replicate{}));
}

}  // namespace

// Every gradient goes into the flat buffer of its reduction, by its placement. Both buffers are reduced side
// by side; the averages are compared with the replicas they were made of; only then do gradients change.
void sync_replicated_gradients(std::span<Parameter* const> parameters, const DeviceMesh& axis,
                               const SyncOptions& options) {
  Flat summed{ReduceOp::sum, {}, 0, {}}, averaged{ReduceOp::avg, {}, 0, {}};
  bool replicas = false;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    Parameter& parameter = *parameters[i];
    const std::string what =
        fmt::format("sync_replicated_gradients: the gradient of \"{}\"", parameter.path());
    if (!parameter.has_gradient())
      throw Error(ErrorCode::bad_argument,
                  fmt::format("sync_replicated_gradients: \"{}\" has no gradient", parameter.path()));
    const Placement placement = placement_on(parameter.gradient(), axis, what);
    if (is_shard(placement)) continue;
    if (is_replicate(placement)) {
      averaged.add(parameter, i, true);
      replicas = true;
    } else if (placement == Placement(Partial{ReduceOp::sum})) {
      summed.add(parameter, i, false);
    } else if (placement == Placement(Partial{ReduceOp::avg})) {
      averaged.add(parameter, i, false);
    } else {
      throw Error(ErrorCode::layout,
                  fmt::format("{} is {} on {}={}; expected Shard, Replicate, Partial(sum) or "
                              "Partial(avg)",
                              what, to_string(placement), axis.name(), axis.size()));
    }
  }
  if (axis.size() == 1) return restate(parameters, axis);

  ProcessGroup& group = axis.group();
  Work sums, averages;
  if (summed.count > 0) sums = summed.post(group);
  if (averaged.count > 0) averages = averaged.post(group);
  if (sums.valid()) sums.wait();
  if (averages.valid()) averages.wait();
  if (replicas && options.on_drift == OnDrift::error)
    expect_no_drift(averaged, parameters, axis, options.tolerance);
  take_over(summed, axis);
  take_over(averaged, axis);
}

}  // namespace weft
