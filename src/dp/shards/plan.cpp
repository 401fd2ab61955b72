#include "dp/shards/plan.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/floating.hpp"
#include "mesh/axis_ranks.hpp"
#include "weft/base/error.hpp"

namespace weft::dp {
namespace {

constexpr std::int64_t kAlignment = 64;  // bytes: each tensor begins a cache line

[[noreturn]] void bad(const std::string& text) {
  throw Error(ErrorCode::bad_argument, "sharded_parameters: " + text);
}

std::int64_t aligned(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

void expect_disjoint(const DeviceMesh& shard, const DeviceMesh& replicate) {
  if (!replicate) return;
  if (!(replicate.root() == shard.root()))
    throw Error(ErrorCode::layout,
                fmt::format("sharded_parameters: options.replicate is {} of another mesh than {}",
                            replicate.name(), shard.name()));
  for (const int a : shard.root_axes())
    if (std::ranges::count(replicate.root_axes(), a) > 0)
      bad(fmt::format("options.replicate is {}, of which {} is to be cut; expected other axes",
                      replicate.name(), shard.root().shape().name(a)));
}

void expect_whole(const ShardEntry& e, const DeviceMesh& axes, const char* which) {
  if (!axes) return;
  for (const DeviceMesh& axis : axes.each_axis())
    if (axis.size() > 1 && !is_replicate(e.layout->on(axis)))
      throw Error(
          ErrorCode::layout,
          fmt::format("sharded_parameters: \"{}\" is {} on {}={}; expected Replicate on the axes that {}",
                      e.name, to_string(e.layout->on(axis)), axis.name(), axis.size(), which));
}

void check(const ShardEntry& e, const DeviceMesh& axes, const DeviceMesh& replicate) {
  if (e.layout == nullptr)
    throw Error(ErrorCode::layout,
                fmt::format("sharded_parameters: \"{}\" has no layout; expected that of the whole", e.name));
  if (!(e.layout->mesh() == axes.root()))
    throw Error(
        ErrorCode::layout,
        fmt::format("sharded_parameters: \"{}\" lies over {}, the axes {} belong to {}: "
                    "not the same DeviceMesh; use one for both",
                    e.name, to_string(e.layout->mesh_shape()), axes.name(), to_string(axes.root().shape())));
  if (e.layout->global.rank() == 0)
    bad(fmt::format("\"{}\" is a scalar; it has no dimension to cut", e.name));
  if (e.layout->partial())
    throw Error(ErrorCode::layout, fmt::format("sharded_parameters: \"{}\" is {}; expected whole values",
                                               e.name, to_string(*e.layout)));
  expect_whole(e, axes, "cut it");
  expect_whole(e, replicate, "replicate it");
}

// The rows of dimension 0 that a rank of the root has under a layout, one range for each segment of that
// dimension.
std::vector<Chunk> rows(const Layout& layout, int rank) {
  std::vector<Chunk> all;
  for (const Box& box : layout.parts(rank)) {
    all.push_back({box.offset[0], box.shape[0]});
    if (layout.segments.sizes.empty() || layout.segments.dim != 0) break;  // all boxes have the same rows
  }
  return all;
}

ShardItem item_of(ShardEntry entry, const DeviceMesh& axes) {
  ShardItem item;
  item.shard = axes.size() == 1 ? entry.layout : entry.layout->shard_inside(axes, 0);
  item.count = entry.layout->local_shape().count();
  const std::int64_t own_rows = entry.layout->local_shape()[0],
                     row = own_rows == 0 ? 0 : item.count / own_rows;
  std::int64_t begin = 0;
  for (const Chunk& whole : rows(*entry.layout, axes.root().rank())) {
    item.segments.push_back({begin * row, whole.size * row, {}, {}, true});
    begin += whole.size;
  }
  for (const int rank : axes.ranks()) {
    const std::vector<Chunk> part = rows(*item.shard, rank), whole = rows(*entry.layout, rank);
    std::int64_t sum = 0;
    for (std::size_t s = 0; s < part.size(); ++s) {
      ShardSegment& segment = item.segments[s];
      segment.counts.push_back(part[s].size * row);
      segment.offsets.push_back((part[s].offset - whole[s].offset) * row);
      segment.even = segment.even && segment.counts.back() == segment.counts.front();
      sum += segment.counts.back();
    }
    item.shard_counts.push_back(sum);
  }
  item.entry = std::move(entry);
  return item;
}

// `size_of(item)`: the size of an element in the unit that is counted.
template <class SizeOf>
Packing pack(const ShardPlan& plan, const SizeOf& size_of) {
  Packing packing;
  const auto ranks = static_cast<std::size_t>(plan.axes.size());
  packing.counts.assign(ranks, 0);
  for (const std::size_t i : plan.packed) {
    packing.at.push_back(packing.counts);
    for (std::size_t r = 0; r < ranks; ++r)
      packing.counts[r] += plan.items[i].shard_counts[r] * size_of(plan.items[i]);
  }
  for (const std::int64_t count : packing.counts) {
    packing.offsets.push_back(packing.total);
    packing.total += count;
  }
  return packing;
}

}  // namespace

ShardPlan::ShardPlan(DeviceMesh axes_in, std::vector<ShardEntry> entries,
                     const ShardedParametersOptions& options_in)
    : axes(given_mesh("sharded_parameters", axes_in, "shard")), options(options_in) {
  if (options.alone_bytes < 1)
    bad(fmt::format("options.alone_bytes is {}; expected 1 or more", options.alone_bytes));
  for (const DType t : {options.reduce, options.gradient})
    if (!is_floating(t))
      bad(fmt::format("options.{} is {}; expected {}", t == options.reduce ? "reduce" : "gradient", name(t),
                      kFloatingNames));
  expect_disjoint(axes, options.replicate);
  for (ShardEntry& entry : entries) {
    check(entry, axes, options.replicate);
    ShardItem item = item_of(std::move(entry), axes);
    const std::int64_t value = size_bytes(item.entry.dtype), grain = kAlignment / size_bytes(options.reduce);
    item.packed = axes.size() > 1 && item.count * value < options.alone_bytes;
    item.whole_at = whole_bytes;
    item.gradient_at = gradient_count;
    item.shard_at = shard_count;
    whole_bytes += aligned(item.count * value, kAlignment);
    gradient_count += aligned(item.count, grain);
    shard_count += aligned(item.shard_counts[static_cast<std::size_t>(axes.rank())], kAlignment);
    if (item.packed) packed.push_back(items.size());
    items.push_back(std::move(item));
  }
  bytes = pack(*this, [](const ShardItem& item) { return std::int64_t{size_bytes(item.entry.dtype)}; });
  elements = pack(*this, [](const ShardItem&) { return std::int64_t{1}; });
}

}  // namespace weft::dp
