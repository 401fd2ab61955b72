#include "weft/dp/reduce_gradients.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/mutant.hpp"
#include "dp/parts.hpp"
#include "dp/reduce_as.hpp"
#include "dp/replicas.hpp"
#include "mesh/axis_ranks.hpp"
#include "mesh/pieces.hpp"
#include "mesh/same_list.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

// The action for a gradient on one axis.
enum class Action : unsigned char { leave, sum, average, average_replicas };
// Replicas are reduced first. If one differs, nothing has been changed yet.
constexpr Action kReductions[] = {Action::average_replicas, Action::sum, Action::average};

struct Member {
  Gradient* gradient;
  std::size_t index;    // among the given gradients: equal on all ranks
  std::int64_t offset;  // in its flat buffer
};

// A set of the given axes: one bit for each axis, by its place in the list. Ranks send one additional bit
// with it.
using AxisSet = std::uint64_t;
constexpr std::size_t kMostAxes = 63;

// Gradients one after the other in one block of shared memory, reduced by one collective over some axes.
struct Flat {
  Action action;
  AxisSet axes;
  DType dtype;
  Pieces<Member> members;
  std::int64_t count = 0;
  Tensor memory;

  TensorView part(const Member& m) const {
    const std::int64_t n = m.gradient->data.count();
    return {memory.data() + m.offset * size_bytes(dtype), dtype, memory.device(), Dims::line(n),
            Dims::line(1)};
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
    wrong(
        fmt::format("is a plain tensor; on {}={} it needs a layout, which says what part of the whole it is",
                    axis.name(), axis.size()));
  const Placement& placement = g.layout->on(axis);
  if (is_shard(placement)) return Action::leave;
  if (is_replicate(placement)) return Action::average_replicas;
  if (placement == Placement(Partial{ReduceOp::sum})) return Action::sum;
  if (placement == Placement(Partial{ReduceOp::avg})) return Action::average;
  wrong(fmt::format("is {} on {}={}; expected Shard, Replicate, Partial(sum) or Partial(avg)",
                    to_string(placement), axis.name(), axis.size()));
  return Action::leave;
}

AxisSet axes_with(const Gradient& g, const std::vector<DeviceMesh>& axes, Action action, const char* what) {
  AxisSet along = 0;
  for (std::size_t a = 0; a < axes.size(); ++a)
    if (action_for(g, axes[a], what) == action) along |= AxisSet{1} << a;
  return along;
}

ProcessGroup& group_of(const Flat& f, const std::vector<DeviceMesh>& axes) {
  std::vector<std::string> names;
  for (std::size_t a = 0; a < axes.size(); ++a)
    if ((f.axes >> a & 1) != 0) names.push_back(axes[a].name());
  return axes[0].root().submesh(names).group();
}

// Never throws, since ranks have not compared their lists yet, and a rank that threw alone would leave the
// others waiting.
dp::Replicas find_replicas(std::span<const Gradient> gradients, const DeviceMesh& axes, Compute* compute) {
  dp::Replicas replicas(axes, compute);
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const std::vector<int> along = replicated_along(gradients[i].layout, axes);
    if (!along.empty()) replicas.add(gradients[i], i, along);
  }
  return replicas;
}

bool has_axis(const DeviceMesh& mesh, const DeviceMesh& axis) {
  const std::span<const int> all = mesh.root_axes();
  return std::find(all.begin(), all.end(), axis.root_axes()[0]) != all.end();
}

// The axes of several ranks that options.data_axes names: one bit for each axis, by its place in the list.
AxisSet data_among(const std::vector<DeviceMesh>& axes, const ReduceOptions& options) {
  AxisSet data = 0;
  for (std::size_t a = 0; a < axes.size(); ++a)
    if (options.data_axes && axes[a].size() > 1 && has_axis(options.data_axes, axes[a]))
      data |= AxisSet{1} << a;
  return data;
}

void expect_reducible(std::span<const Gradient> gradients, const std::vector<DeviceMesh>& axes, AxisSet data,
                      const char* what) {
  for (const Gradient& g : gradients)
    for (std::size_t a = 0; a < axes.size(); ++a)
      if (action_for(g, axes[a], what) == Action::average_replicas && (data >> a & 1) != 0)
        throw Error(ErrorCode::layout,
                    fmt::format("{}: the gradient of \"{}\" is Replicate on {}={}; expected Partial(sum) or "
                                "Partial(avg): there is nothing to reduce",
                                what, g.name, axes[a].name(), axes[a].size()));
}

// The flat buffers of one kind of reduction, in the order in which gradients first need them. This order is
// equal on all ranks of the axes, so they make groups in one order. A gradient that is empty on this rank,
// but not on others, is still in the call. Replicas that are already equal are in the call, too. But they
// stay out of the buffer, because their average may round to another value, or overflow.
std::vector<Flat> collect(std::span<Gradient> gradients, const std::vector<DeviceMesh>& axes, Action action,
                          const dp::Replicas& replicas, const char* what) {
  std::vector<Flat> flats;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const AxisSet along = axes_with(gradients[i], axes, action, what);
    if (along == 0) continue;
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

// Copies between the gradients and their flat buffer.
void copy_members(const Flat& f, Compute* compute, bool back) {
  dp::copy_all(compute, f.members.size(), [&](std::size_t m) {
    const TensorView gradient = f.members[m].gradient->data, part = f.part(f.members[m]);
    return back ? dp::Copied{part.data, gradient.data, part.bytes()}
                : dp::Copied{gradient.data, part.data, part.bytes()};
  });
}

// Allocates a flat buffer on the device of the gradients.
void make_memory(Flat& f, Context& context, const Compute* compute) {
  f.memory = Tensor(context, {f.count}, f.dtype, Memory::shared, dp::stream_of(compute));
}

// Reduces all flat buffers at once.
void reduce(std::vector<Flat>& flats, const std::vector<DeviceMesh>& axes, Compute* compute) {
  std::vector<Work> works;
  for (Flat& f : flats) {
    if (f.count == 0) continue;
    make_memory(f, axes[0].context(), compute);
    copy_members(f, compute, false);
    works.push_back(group_of(f, axes).all_reduce(
        f.memory, f.memory,
        {.op = f.action == Action::sum ? ReduceOp::sum : ReduceOp::avg, .stream = dp::stream_of(compute)}));
  }
  for (Work& work : works) work.wait();
}

void copy_back(const std::vector<Flat>& flats, Compute* compute) {
  for (const Flat& f : flats)
    if (f.count > 0 && !(WEFT_MUTANT("reduced_in_part") && &f == &flats.back()))
      copy_members(f, compute, true);
}

std::map<std::size_t, TensorView> averages_of(const std::vector<Flat>& flats) {
  std::map<std::size_t, TensorView> averages;
  for (const Flat& f : flats)
    for (const Member& m : f.members)
      if (f.action == Action::average_replicas && f.count > 0) averages[m.index] = f.part(m);
  return averages;
}

void expect_options(const char* what, const DeviceMesh& axes, const ReduceOptions& options) {
  const auto wrong = [&](const std::string& text) {
    throw Error(ErrorCode::bad_argument, fmt::format("{}: options.{}", what, text));
  };
  if (options.tolerance && !(*options.tolerance >= 0))
    wrong(fmt::format("tolerance is {}; expected 0 or more", *options.tolerance));
  if (!options.data_axes) return;
  if (!(options.data_axes.root() == axes.root()))
    wrong(fmt::format("data_axes is {}, of another mesh; expected axes of {}",
                      to_string(options.data_axes.shape()), to_string(axes.shape())));
  for (const DeviceMesh& axis : options.data_axes.each_axis())
    if (!has_axis(axes, axis))
      wrong(fmt::format("data_axes has {}={}; expected axes of {}", axis.name(), axis.size(),
                        to_string(axes.shape())));
}

}  // namespace

void dp::reduce_as(const char* what, std::span<Gradient> gradients, const DeviceMesh& axes,
                   const ReduceOptions& options) {
  given_mesh(what, axes);
  const std::vector<DeviceMesh> list = axes.each_axis();
  if (list.size() > kMostAxes)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: axes has {} axes; expected at most {}", what, list.size(), kMostAxes));
  const std::optional<Error> fault = fault_of([&] {
    expect_options(what, axes, options);
    check_gradients(what, gradients, options.compute);
    dp::kernels_of(what, options.compute);
  });
  const AxisSet data = fault ? 0 : data_among(list, options);
  dp::Replicas replicas = find_replicas(gradients, axes, options.compute);
  replicas.compare_bits(options, data, what, gradients, fault);
  expect_reducible(gradients, list, data, what);  // from here on either all ranks throw or none does
  const bool watched = options.on_drift == OnDrift::error && !replicas.same_everywhere();
  if (watched && options.tolerance == 0) replicas.throw_other_bits();
  std::vector<std::vector<Flat>> rounds;
  for (const Action action : kReductions) rounds.push_back(collect(gradients, list, action, replicas, what));
  // All reductions run at once, unless a gradient is reduced in one way on one axis and in another way on
  // another axis. Replicas that are equal everywhere are not reduced.
  const auto in_one_way = [&](const Gradient& g) {
    return std::count_if(std::begin(kReductions), std::end(kReductions), [&](Action action) {
             return (action != Action::average_replicas || !replicas.same_everywhere()) &&
                    axes_with(g, list, action, what) != 0;
           }) <= 1;
  };
  if (std::all_of(gradients.begin(), gradients.end(), in_one_way)) {
    for (std::size_t i = 1; i < rounds.size(); ++i)
      std::move(rounds[i].begin(), rounds[i].end(), std::back_inserter(rounds[0]));
    rounds.resize(1);
  }
  for (std::vector<Flat>& flats : rounds) {
    reduce(flats, list, options.compute);
    if (watched && &flats == &rounds[0]) replicas.expect_no_drift(options, averages_of(flats));
    copy_back(flats, options.compute);
  }
  for (Gradient& g : gradients)
    for (const DeviceMesh& axis : list)
      if (g.layout != nullptr && is_partial(g.layout->on(axis))) g.layout = g.layout->with(axis, Replicate{});
}

void reduce_gradients(std::span<Gradient> gradients, const DeviceMesh& axes, const ReduceOptions& options) {
  dp::reduce_as("reduce_gradients", gradients, axes, options);
}

}  // namespace weft
