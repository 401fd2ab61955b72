#include "weft/dp/replicated.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "dp/axis_ranks.hpp"
#include "dp/replicas.hpp"
#include "dp/same_list.hpp"
#include "weft/base/error.hpp"

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
  const auto wrong = [&](const std::string& text) {
    throw Error(ErrorCode::layout, fmt::format("{}: the gradient of \"{}\" {}", what, g.name, text));
  };
  if (g.layout != nullptr && !(g.layout->mesh() == axis.root()))
    wrong(fmt::format("is laid out over {}, another mesh than that of {}", to_string(g.layout->mesh_shape()),
                      axis.name()));
  if (axis.size() == 1) return Action::leave;
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

std::vector<std::string> axes_with(const Gradient& g, const std::vector<DeviceMesh>& axes, Action action,
                                   const char* what) {
  std::vector<std::string> along;
  for (const DeviceMesh& axis : axes)
    if (action_for(g, axis, what) == action) along.push_back(axis.name());
  return along;
}

dp::Replicas find_replicas(std::span<Gradient> gradients, const DeviceMesh& axes,
                           const std::vector<DeviceMesh>& list, const char* what) {
  dp::Replicas replicas(axes);
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const std::vector<std::string> along = axes_with(gradients[i], list, Action::average_replicas, what);
    if (!along.empty()) replicas.add(gradients[i], i, along);
  }
  return replicas;
}

// The flat buffers of one kind of reduction, in the order in which gradients first need them: the same on all
// ranks of the axes, so that they make groups in one order. A gradient that is empty here, but not elsewhere,
// counts for it; and so do replicas that are the same already, which stay out of the buffer: their average may
// be rounded to something else, or overflow.
std::vector<Flat> collect(std::span<Gradient> gradients, const std::vector<DeviceMesh>& axes, Action action,
                          const dp::Replicas& replicas, const char* what) {
  std::vector<Flat> flats;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const std::vector<std::string> along = axes_with(gradients[i], axes, action, what);
    if (along.empty()) continue;
    auto flat = std::find_if(flats.begin(), flats.end(), [&](const Flat& f) {
      return f.axes == along && f.dtype == gradients[i].data.dtype;
    });
    if (flat == flats.end())
      flat = flats.insert(flats.end(), Flat{action, along, gradients[i].data.dtype, {}, 0, {}});
    if (action == Action::average_replicas && replicas.same_here(i)) continue;
    flat->members.push_back({&gradients[i], i, flat->count});
    flat->count += gradients[i].data.count();
  }
  return flats;
}

// Reduces all flat buffers side by side.
void reduce(std::vector<Flat>& flats, const DeviceMesh& axes) {
  std::vector<Work> works;
  for (Flat& f : flats) {
    if (f.count == 0) continue;
    f.memory = Tensor(axes.context(), {f.count}, f.dtype, Memory::shared);
    for (const Member& m : f.members)
      std::memcpy(f.part(m).data, m.gradient->data.data, static_cast<std::size_t>(m.gradient->data.bytes()));
    works.push_back(axes.root().submesh(f.axes).group().all_reduce(
        f.memory, f.memory, {.op = f.action == Action::sum ? ReduceOp::sum : ReduceOp::avg}));
  }
  for (Work& work : works) work.wait();
}

void copy_back(const std::vector<Flat>& flats) {
  for (const Flat& f : flats)
    for (const Member& m : f.members)
      if (f.count > 0)
        std::memcpy(m.gradient->data.data, f.part(m).data,
                    static_cast<std::size_t>(m.gradient->data.bytes()));
}

std::map<std::size_t, TensorView> averages_of(const std::vector<Flat>& flats) {
  std::map<std::size_t, TensorView> averages;
  for (const Flat& f : flats)
    for (const Member& m : f.members)
      if (f.action == Action::average_replicas && f.count > 0) averages[m.index] = f.part(m);
  return averages;
}

void expect_options(const SyncOptions& options) {
  if (options.tolerance && !(*options.tolerance >= 0))
    throw Error(ErrorCode::bad_argument,
                fmt::format("sync_replicated_gradients: options.tolerance is {}; expected 0 or more",
                            *options.tolerance));
}

void reduce_all(std::span<Gradient> gradients, const DeviceMesh& axes, const SyncOptions& options,
                const char* what) {
  const std::vector<DeviceMesh> list = axes.each_axis();
  dp::Replicas replicas = find_replicas(gradients, axes, list, what);
  replicas.compare_bits(options);
  const bool watched = options.on_drift == OnDrift::error && !replicas.same_everywhere();
  if (watched && options.tolerance == 0) replicas.throw_other_bits();
  // Replicas first: where one has drifted, nothing has changed yet.
  std::vector<std::vector<Flat>> rounds;
  std::vector<int> reductions(gradients.size());
  for (const Action action : {Action::average_replicas, Action::sum, Action::average}) {
    rounds.push_back(collect(gradients, list, action, replicas, what));
    for (std::size_t i = 0; i < gradients.size(); ++i)
      reductions[i] += !axes_with(gradients[i], list, action, what).empty();
  }
  // Side by side, unless a gradient is reduced in one way on one axis and in another way on another.
  if (std::all_of(reductions.begin(), reductions.end(), [](int n) { return n <= 1; })) {
    for (std::size_t i = 1; i < rounds.size(); ++i)
      std::move(rounds[i].begin(), rounds[i].end(), std::back_inserter(rounds[0]));
    rounds.resize(1);
  }
  for (std::vector<Flat>& flats : rounds) {
    reduce(flats, axes);
    if (watched && &flats == &rounds[0]) replicas.expect_no_drift(options, averages_of(flats));
    copy_back(flats);
  }
  for (Gradient& g : gradients)
    for (const DeviceMesh& axis : list)
      if (g.layout != nullptr && is_partial(g.layout->on(axis))) g.layout = g.layout->with(axis, Replicate{});
}

}  // namespace

void sync_replicated_gradients(std::span<Gradient> gradients, const DeviceMesh& axes,
                               const SyncOptions& options) {
  expect_options(options);
  dp::given_mesh("sync_replicated_gradients", axes);
  check_gradients("sync_replicated_gradients", gradients);
  dp::expect_same_list("sync_replicated_gradients", axes, gradients);
  reduce_all(gradients, axes, options, "sync_replicated_gradients");
}

void average_gradients(std::span<Gradient> gradients, const DeviceMesh& axes) {
  dp::given_mesh("average_gradients", axes);
  check_gradients("average_gradients", gradients);
  dp::expect_same_list("average_gradients", axes, gradients);
  const std::vector<DeviceMesh> list = axes.each_axis();
  for (const Gradient& g : gradients)
    for (const DeviceMesh& axis : list)
      if (action_for(g, axis, "average_gradients") == Action::average_replicas)
        throw Error(ErrorCode::layout,
                    fmt::format("average_gradients: the gradient of \"{}\" is Replicate on {}={}; expected "
                                "Partial(sum) or Partial(avg): there is nothing to reduce",
                                g.name, axis.name(), axis.size()));
  reduce_all(gradients, axes, {}, "average_gradients");
}

}  // namespace weft
