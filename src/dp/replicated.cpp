#include "weft/dp/replicated.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "base/hash.hpp"
#include "dp/elements.hpp"
#include "dp/same_list.hpp"
#include "weft/base/error.hpp"
#include "weft/base/name_ranks.hpp"

namespace weft {
namespace {

// What is done to a gradient on one axis.
enum class Action : unsigned char { leave, sum, average, average_replicas };

struct Member {
  Gradient* gradient;
  std::size_t index;    // among the gradients given: the same on all ranks
  std::int64_t offset;  // in its flat buffer
};

// Gradients one after the other in one block of shared memory, reduced by one collective over some axes.
struct Flat {
  Action action;
  std::vector<std::string> axes;
  DType dtype;
  std::vector<Member> members;
  std::int64_t count = 0;
  Tensor memory;

  TensorView part(const Member& m) const {
    const std::int64_t n = m.gradient->data.count();
    return {memory.data() + m.offset * size_bytes(dtype), dtype, {}, Dims::line(n), Dims::line(1)};
  }
};

Action action_for(const Gradient& g, const DeviceMesh& axis, const char* what) {
  if (axis.size() == 1) return Action::leave;
  const auto wrong = [&](const std::string& text) {
    throw Error(ErrorCode::layout, fmt::format("{}: the gradient of \"{}\" {}", what, g.name, text));
  };
  if (g.layout == nullptr)
    wrong(fmt::format("is a plain tensor; on {}={} it needs a layout", axis.name(), axis.size()));
  const Placement& placement = g.layout->on(axis);
  if (is_shard(placement)) return Action::leave;
  if (is_replicate(placement)) return Action::average_replicas;
  if (placement == Placement(Partial{ReduceOp::sum})) return Action::sum;
  if (placement == Placement(Partial{ReduceOp::avg})) return Action::average;
  wrong(fmt::format("is {} on {}={}; expected Shard, Replicate, Partial(sum) or Partial(avg)",
                    to_string(placement), axis.name(), axis.size()));
  return Action::leave;
}

// The flat buffers of one kind of reduction, in the order in which gradients first need them.
std::vector<Flat> collect(std::span<Gradient> gradients, const std::vector<DeviceMesh>& axes, Action action,
                          const char* what) {
  std::vector<Flat> flats;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    std::vector<std::string> along;
    for (const DeviceMesh& axis : axes)
      if (action_for(gradients[i], axis, what) == action) along.push_back(axis.name());
    if (along.empty() || gradients[i].data.count() == 0) continue;
    auto flat = std::find_if(flats.begin(), flats.end(), [&](const Flat& f) {
      return f.axes == along && f.dtype == gradients[i].data.dtype;
    });
    if (flat == flats.end())
      flat = flats.insert(flats.end(), Flat{action, along, gradients[i].data.dtype, {}, 0, {}});
    flat->members.push_back({&gradients[i], i, flat->count});
    flat->count += gradients[i].data.count();
  }
  return flats;
}

// What one rank says of its replica that is furthest from the average.
struct Verdict {
  double excess = 0;  // distance / what rounding explains; more than 1: not rounding
  double index = -1, distance = 0;
};

// Of one gradient, where its replica is finite on this rank.
Verdict verdict_on(const TensorView& own, const TensorView& average, double tolerance, bool& finite) {
  double distance = 0, magnitude = 0;
  finite = true;
  dp::with_elements(own, [&](const auto& values) {
    using T = typename std::remove_cvref_t<decltype(values)>::value_type;
    const auto means = average.as<T>();
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double mine = dp::to_double(values[i]), mean = dp::to_double(means[i]);
      finite = finite && std::isfinite(mine);
      if (!std::isfinite(mine) || !std::isfinite(mean)) continue;
      distance = std::max(distance, std::abs(mine - mean));
      magnitude = std::max(magnitude, std::abs(mean));
    }
  });
  Verdict v;
  v.distance = distance;
  if (distance > 0) v.excess = distance / (tolerance * (magnitude + distance));
  return v;
}

[[noreturn]] void drifted(const Gradient& g, const DeviceMesh& axes, const std::vector<int>& ranks,
                          const std::string& how) {
  throw Error(Failure{
      ErrorCode::mismatch,
      fmt::format("sync_replicated_gradients: the gradient of \"{}\" is Replicate on {}={}, but on {} it "
                  "{}; a replica drifted, or the gradient is Partial there",
                  g.name, axes.name(), axes.size(), name_ranks(ranks), how),
      Op::none, kNoCall, ranks});
}

// Every rank tells all others which of its replicas are not finite, and the one that is furthest from the
// average, so that all throw or none. A gradient that is not finite on any rank has not drifted: clipping
// sees it.
void expect_no_drift(const Flat& averaged, const DeviceMesh& axes, double tolerance) {
  const std::size_t words = (averaged.members.size() + 51) / 52;  // bits that a double holds exactly
  std::vector<double> own(3 + words);
  Verdict worst;
  for (std::size_t m = 0; m < averaged.members.size(); ++m) {
    const Member& member = averaged.members[m];
    bool finite = true;
    Verdict v = verdict_on(member.gradient->data, averaged.part(member), tolerance, finite);
    v.index = static_cast<double>(m);
    if (!finite) own[3 + m / 52] += static_cast<double>(std::int64_t{1} << (m % 52));
    if (v.excess > worst.excess) worst = v;
  }
  own[0] = worst.excess;
  own[1] = worst.index;
  own[2] = worst.distance;
  const std::size_t ranks = static_cast<std::size_t>(axes.size());
  std::vector<double> all(own.size() * ranks);
  axes.group().all_gather(view(own), view(all)).wait();

  const auto not_finite = [&](std::size_t r, std::size_t m) {
    return (static_cast<std::int64_t>(all[r * own.size() + 3 + m / 52]) >> (m % 52) & 1) != 0;
  };
  for (std::size_t m = 0; m < averaged.members.size(); ++m) {
    std::vector<int> broken;
    for (std::size_t r = 0; r < ranks; ++r)
      if (not_finite(r, m)) broken.push_back(static_cast<int>(r));
    if (!broken.empty() && broken.size() < ranks)
      drifted(*averaged.members[m].gradient, axes, broken,
              broken.size() == 1 ? "is not finite" : "are not finite");
  }
  std::size_t most = 0;
  for (std::size_t r = 1; r < ranks; ++r)
    if (all[r * own.size()] > all[most * own.size()]) most = r;
  const Verdict found{all[most * own.size()], all[most * own.size() + 1], all[most * own.size() + 2]};
  if (found.excess <= 1) return;
  // Two ranks that differ are equally far from their average; of more, the one that drifted is the furthest.
  std::vector<int> blamed;
  for (std::size_t r = 0; r < ranks; ++r) {
    const double* const said = all.data() + r * own.size();
    if (said[1] == found.index && said[0] >= 0.999 * found.excess && said[2] >= 0.999 * found.distance)
      blamed.push_back(static_cast<int>(r));
  }
  drifted(*averaged.members[static_cast<std::size_t>(found.index)].gradient, axes, blamed,
          fmt::format("is {:.3g} from the average, {:.3g} times what rounding explains", found.distance,
                      found.excess));
}

// Without a tolerance the bits are compared, not distances from an average, which is rounded itself. Those
// that differ from most are named; where no value is held by more ranks than any other, all are.
void expect_same_bits(const Flat& averaged, const DeviceMesh& axes) {
  const std::size_t members = averaged.members.size(), ranks = static_cast<std::size_t>(axes.size());
  std::vector<std::uint64_t> own, all(members * ranks);
  for (const Member& m : averaged.members) {
    Fnv1a hash;
    hash.add({reinterpret_cast<const char*>(m.gradient->data.data),
              static_cast<std::size_t>(m.gradient->data.bytes())});
    own.push_back(hash.value);
  }
  axes.group().all_gather(view(own), view(all)).wait();
  for (std::size_t m = 0; m < members; ++m) {
    std::map<std::uint64_t, std::vector<int>> holders;
    for (std::size_t r = 0; r < ranks; ++r) holders[all[r * members + m]].push_back(static_cast<int>(r));
    if (holders.size() == 1) continue;
    std::size_t most = 0, as_many = 0;
    for (const auto& [hash, those] : holders) most = std::max(most, those.size());
    for (const auto& [hash, those] : holders) as_many += those.size() == most;
    std::vector<int> blamed;
    for (const auto& [hash, those] : holders)
      if (as_many > 1 || those.size() < most) blamed.insert(blamed.end(), those.begin(), those.end());
    std::sort(blamed.begin(), blamed.end());
    drifted(*averaged.members[m].gradient, axes, blamed, "has other bits, where the tolerance is 0");
  }
}

// Reduces all flat buffers side by side. Only then do gradients change.
void reduce(std::vector<Flat>& flats, const DeviceMesh& axes, const SyncOptions& options) {
  std::vector<Work> works;
  for (Flat& f : flats) {
    f.memory = Tensor(axes.context(), {f.count}, f.dtype, Memory::shared);
    for (const Member& m : f.members)
      std::memcpy(f.part(m).data, m.gradient->data.data, static_cast<std::size_t>(m.gradient->data.bytes()));
    works.push_back(axes.root().submesh(f.axes).group().all_reduce(
        f.memory, f.memory, {.op = f.action == Action::sum ? ReduceOp::sum : ReduceOp::avg}));
  }
  for (Work& work : works) work.wait();
  for (const Flat& f : flats)
    if (f.action == Action::average_replicas && options.on_drift == OnDrift::error) {
      if (options.tolerance == 0)
        expect_same_bits(f, axes.root().submesh(f.axes));
      else
        expect_no_drift(f, axes.root().submesh(f.axes), options.tolerance);
    }
  for (const Flat& f : flats)
    for (const Member& m : f.members)
      std::memcpy(m.gradient->data.data, f.part(m).data, static_cast<std::size_t>(m.gradient->data.bytes()));
}

void expect_options(const SyncOptions& options) {
  if (!(options.tolerance >= 0))
    throw Error(ErrorCode::bad_argument,
                fmt::format("sync_replicated_gradients: options.tolerance is {}; expected 0 or more",
                            options.tolerance));
}

void reduce_all(std::span<Gradient> gradients, const DeviceMesh& axes, const SyncOptions& options,
                const char* what) {
  const std::vector<DeviceMesh> list = axes.each_axis();
  // Replicas first: where one has drifted, nothing has changed yet.
  std::vector<std::vector<Flat>> rounds;
  std::vector<int> reductions(gradients.size());
  for (const Action action : {Action::average_replicas, Action::sum, Action::average}) {
    rounds.push_back(collect(gradients, list, action, what));
    for (const Flat& f : rounds.back())
      for (const Member& m : f.members) ++reductions[m.index];
  }
  // Side by side, unless a gradient is reduced in one way on one axis and in another way on another.
  if (std::all_of(reductions.begin(), reductions.end(), [](int n) { return n <= 1; })) {
    for (std::size_t i = 1; i < rounds.size(); ++i)
      std::move(rounds[i].begin(), rounds[i].end(), std::back_inserter(rounds[0]));
    rounds.resize(1);
  }
  for (std::vector<Flat>& flats : rounds) reduce(flats, axes, options);
  for (Gradient& g : gradients)
    for (const DeviceMesh& axis : list)
      if (g.layout != nullptr && is_partial(g.layout->on(axis))) g.layout = g.layout->with(axis, Replicate{});
}

}  // namespace

void sync_replicated_gradients(std::span<Gradient> gradients, const DeviceMesh& axes,
                               const SyncOptions& options) {
  expect_options(options);
  check_gradients("sync_replicated_gradients", gradients);
  dp::expect_same_list("sync_replicated_gradients", axes, gradients);
  reduce_all(gradients, axes, options, "sync_replicated_gradients");
}

void average_gradients(std::span<Gradient> gradients, const DeviceMesh& axes) {
  check_gradients("average_gradients", gradients);
  dp::expect_same_list("average_gradients", axes, gradients);
  for (const Gradient& g : gradients)
    for (const DeviceMesh& axis : axes.each_axis())
      if (action_for(g, axis, "average_gradients") == Action::average_replicas)
        throw Error(ErrorCode::layout,
                    fmt::format("average_gradients: the gradient of \"{}\" is Replicate on {}={}; expected "
                                "Partial(sum) or Partial(avg): there is nothing to reduce",
                                g.name, axis.name(), axis.size()));
  reduce_all(gradients, axes, {}, "average_gradients");
}

}  // namespace weft
