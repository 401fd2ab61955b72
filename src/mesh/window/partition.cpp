// Partition, and the requests of WindowDim.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "mesh/axis_ranks.hpp"
#include "mesh/cut.hpp"
#include "mesh/window/segments.hpp"
#include "weft/base/error.hpp"
#include "weft/mesh/window.hpp"

namespace weft {
namespace {

[[noreturn]] void refuse(const std::string& text) { throw Error(ErrorCode::bad_argument, "window: " + text); }

// "3 (y=3)", "6 (y=2 x x=3)", "1"
std::string parts_text(const MeshShape& mesh, const PartitionDim& dim) {
  std::vector<std::string> factors;
  int count = 1;
  for (const std::string& axis : dim.axes) {
    count *= mesh.size(axis);
    factors.push_back(fmt::format("{}={}", axis, mesh.size(axis)));
  }
  return factors.empty() ? "1" : fmt::format("{} ({})", count, fmt::join(factors, " x "));
}

int count_of_parts(const MeshShape& mesh, const PartitionDim& dim) {
  int count = 1;
  for (const std::string& axis : dim.axes) count *= mesh.size(axis);
  return count;
}

// Throws unless the parts hold each index of [0, n) once.
void expect_all_once(const PartitionDim& dim, std::int64_t n) {
  IndexRanges all;
  for (std::size_t p = 0; p < dim.parts.size(); ++p)
    for (const IndexRange& r : dim.parts[p]) {
      if (r.lo < 0 || r.hi > n || r.lo > r.hi)
        refuse(fmt::format("dimension {}: part {} holds [{}, {}); expected within [0, {})", dim.dim, p, r.lo,
                           r.hi, n));
      if (r.size() > 0) all.push_back(r);
    }
  std::ranges::sort(all, {}, &IndexRange::lo);
  std::int64_t next = 0;
  for (const IndexRange& r : all) {
    if (r.lo != next) break;
    next = r.hi;
  }
  if (next != n || windows::size_of(all) != n)
    refuse(fmt::format(
        "dimension {}: the parts do not hold each index of [0, {}) once; the first that is missing, or held "
        "twice, is about {}",
        dim.dim, n, next));
}

}  // namespace

PartitionDim PartitionDim::cut_at(int dim, std::vector<std::string> axes,
                                  const std::vector<std::int64_t>& begins) {
  PartitionDim cut{dim, std::move(axes), {}};
  for (std::size_t p = 0; p + 1 < begins.size(); ++p) cut.parts.push_back({{begins[p], begins[p + 1]}});
  return cut;
}

Partition::Partition(const LayoutRef& layout) {
  if (layout == nullptr) refuse("the layout is null; expected that of the tensor");
  mesh_ = layout->mesh();
  global_ = layout->global;
  const MeshShape& shape = layout->mesh_shape();
  for (int a = 0; a < shape.axis_count(); ++a)
    if (const Placement& p = layout->placements[static_cast<std::size_t>(a)];
        shape.size(a) > 1 && is_partial(p))
      throw Error(ErrorCode::layout,
                  fmt::format("window: x is {} on {}={}; expected it reduced: a window is of whole values",
                              to_string(p), shape.name(a), shape.size(a)));
  for (int d = 0; d < global_.rank(); ++d) {
    PartitionDim dim{d, {}, {}};
    std::vector<int> axes;
    for (const int a : layout->nesting)
      if (is_shard(layout->placements[static_cast<std::size_t>(a)], d)) {
        axes.push_back(a);
        dim.axes.push_back(shape.name(a));
      }
    if (axes.empty()) continue;
    std::vector<int> at(static_cast<std::size_t>(shape.axis_count()), 0);
    const int count = count_of_parts(shape, dim);
    for (int p = 0; p < count; ++p) {
      int rest = p;
      for (auto a = axes.rbegin(); a != axes.rend(); ++a) {
        at[static_cast<std::size_t>(*a)] = rest % shape.size(*a);
        rest /= shape.size(*a);
      }
      IndexRanges part;
      for (const Chunk& run : runs_of(*layout, shape, at, d))
        part.push_back({run.offset, run.offset + run.size});
      dim.parts.push_back(std::move(part));
    }
    dims_.push_back(std::move(dim));
  }
}

Partition::Partition(const DeviceMesh& mesh, const Shape& global, std::vector<PartitionDim> dims)
    : mesh_(given_mesh("window", mesh, "mesh").root()), global_(global), dims_(std::move(dims)) {
  std::vector<std::string> used;
  for (std::size_t i = 0; i < dims_.size(); ++i) {
    const PartitionDim& dim = dims_[i];
    if (dim.dim < 0 || dim.dim >= global.rank())
      refuse(fmt::format("dimension {} of a tensor {}", dim.dim, to_string(global)));
    for (std::size_t j = 0; j < i; ++j)
      if (dims_[j].dim == dim.dim)
        refuse(fmt::format("dimension {} is cut twice; name its axes together", dim.dim));
    for (const std::string& axis : dim.axes) {
      mesh_.shape().index(axis);  // throws
      if (std::ranges::count(used, axis) > 0)
        refuse(fmt::format("axis \"{}\" cuts twice; expected one dimension", axis));
      used.push_back(axis);
    }
    if (static_cast<int>(dim.parts.size()) != count_of_parts(mesh_.shape(), dim))
      refuse(fmt::format("dimension {} has {} parts; expected {}", dim.dim, dim.parts.size(),
                         parts_text(mesh_.shape(), dim)));
    expect_all_once(dim, global[dim.dim]);
  }
}

PartitionDim Partition::dim(int dim) const {
  for (const PartitionDim& d : dims_)
    if (d.dim == dim) return d;
  if (dim < 0 || dim >= global_.rank())
    refuse(fmt::format("dimension {} of a tensor {}", dim, to_string(global_)));
  return {dim, {}, {{{0, global_[dim]}}}};
}

int Partition::part(int dim, int rank) const {
  const MeshShape& shape = mesh_.shape();
  int part = 0;
  for (const std::string& axis : this->dim(dim).axes)
    part = part * shape.size(axis) + shape.coordinate(rank, shape.index(axis));
  return part;
}

WindowDim WindowDim::ranges(int dim, const std::vector<IndexRange>& wanted, const Edge& edge) {
  WindowDim d{dim, {}, edge, edge};
  for (const IndexRange& r : wanted) d.wanted.push_back({r});
  return d;
}

WindowDim WindowDim::halo(const Partition& x, int dim, std::int64_t before, std::int64_t after,
                          const Edge& edge) {
  if (before < 0 || after < 0)
    refuse(fmt::format("dimension {}: a halo of {} before and {} after; expected at least 0", dim, before,
                       after));
  if (before > windows::kFarthest || after > windows::kFarthest)
    refuse(fmt::format("dimension {}: a halo of {} before and {} after; expected at most {}", dim, before,
                       after, windows::kFarthest));
  WindowDim d{dim, {}, edge, edge};
  const PartitionDim of = x.dim(dim);
  for (const IndexRanges& part : of.parts) {
    IndexRanges held;
    for (const IndexRange& r : part)
      if (r.size() > 0) held.push_back(r);
    if (held.size() > 1)
      refuse(fmt::format("dimension {}: part {} holds {} ranges; a halo needs one range", dim,
                         d.wanted.size(), held.size()));
    const bool fits = held.empty() || held[0].hi <= windows::kFarthest;  // else Window refuses it as it is
    if (!held.empty()) held[0] = {held[0].lo - before, held[0].hi + (fits ? after : 0)};
    d.wanted.push_back(std::move(held));
  }
  return d;
}

}  // namespace weft
