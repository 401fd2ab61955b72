#include "weft/mesh/reshape.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "mesh/bad_layout.hpp"
#include "mesh/cut.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

// The product of extents, limited to a value that no tensor has.
std::int64_t times(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<std::int64_t>::max() : product;
}
std::int64_t count_of(const Shape& shape, int first, int last) {
  std::int64_t count = 1;
  for (int d = first; d < last; ++d) {
    if (shape[d] == 0) return 0;
    count = times(count, shape[d]);
  }
  return count;
}
std::int64_t count_of(const Shape& shape) { return count_of(shape, 0, shape.rank()); }

// Neighbouring dimensions of one shape, [from, from_end), that hold the same elements as neighbouring
// dimensions of the other shape, [to, to_end). Each group is as small as possible. (2, 3, 32) and (6, 4, 8)
// form two groups: 2, 3 with 6, and 32 with 4, 8.
struct Group {
  int from, from_end, to, to_end;
};
std::vector<Group> groups_of(const Shape& from, const Shape& to) {
  std::vector<Group> groups;
  int i = 0, k = 0;
  while (i < from.rank() || k < to.rank()) {
    Group g{i, i, k, k};
    std::int64_t a = 1, b = 1;
    if (i < from.rank()) a = from[i++];
    if (k < to.rank()) b = to[k++];
    while (a != b && (i < from.rank() || k < to.rank()))  // both run out alike, but if there are no elements
      if (k == to.rank() || (a < b && i < from.rank()))
        a = times(a, from[i++]);
      else
        b = times(b, to[k++]);
    g.from_end = i, g.to_end = k;
    groups.push_back(g);
  }
  return groups;
}

// The dimension of `to` that is sharded if dimension `dim` of `from` is sharded. A part is a run of elements
// only if the dimensions before it, in its group, have one index each. `before`, `after`: how many elements
// of the group one index of the respective dimension has.
struct Outermost {
  int dim;
  std::int64_t before, after;
};
std::optional<Outermost> outermost(const Shape& from, const Shape& to, int dim) {
  for (const Group& g : groups_of(from, to)) {
    if (dim < g.from || dim >= g.from_end) continue;
    if (count_of(from, g.from, dim) != 1 || g.to == g.to_end) return std::nullopt;
    int other = g.to;
    while (other + 1 < g.to_end && to[other] == 1) ++other;
    return Outermost{other, count_of(from, dim + 1, g.from_end), count_of(to, other + 1, g.to_end)};
  }
  return std::nullopt;
}

// The segments of another dimension that hold equally many elements. Nothing if their borders do not lie
// between indices of that dimension.
std::optional<Segments> carried(const Segments& segments, const Outermost& o) {
  Segments other{o.dim, segments.sizes};
  for (std::int64_t& size : other.sizes) {
    const std::int64_t elements = times(size, o.before);
    if (o.after == 0 || elements % o.after != 0) return std::nullopt;
    size = elements / o.after;
  }
  return other;
}

// Returns whether the axes that shard `dim` of `from` give each of their ranks the same elements of o.dim of
// `to`.
bool cuts_alike(const LayoutSpec& from, const LayoutSpec& to, const MeshShape& mesh, int dim,
                const Outermost& o) {
  std::vector<int> axes, at(static_cast<std::size_t>(mesh.axis_count()), 0);
  for (int a = 0; a < mesh.axis_count(); ++a)
    if (is_shard(from.placements[static_cast<std::size_t>(a)], dim)) axes.push_back(a);
  while (true) {
    const std::vector<Chunk> here = runs_of(from, mesh, at, dim), there = runs_of(to, mesh, at, o.dim);
    if (!std::equal(here.begin(), here.end(), there.begin(), there.end(),
                    [&](const Chunk& x, const Chunk& y) {
                      return times(x.size, o.before) == times(y.size, o.after) &&
                             (x.size == 0 || times(x.offset, o.before) == times(y.offset, o.after));
                    }))
      return false;
    std::size_t next = 0;  // the next coordinates, as an odometer counts
    for (; next < axes.size(); ++next) {
      int& c = at[static_cast<std::size_t>(axes[next])];
      if (++c < mesh.size(axes[next])) break;
      c = 0;
    }
    if (next == axes.size()) return true;
  }
}

void check_order(const Dims& order, int rank, const std::string& of) {
  std::vector<bool> seen(static_cast<std::size_t>(rank));
  bool fits = order.rank() == rank;
  for (const std::int64_t d : order) {
    fits = fits && d >= 0 && d < rank && !seen[static_cast<std::size_t>(d)];
    if (fits) seen[static_cast<std::size_t>(d)] = true;
  }
  if (!fits)
    bad_layout(fmt::format("layout: the order {} of {}; expected each of its {} dimensions once",
                           to_string(order), of, rank));
}

}  // namespace

LayoutRef Layout::reshaped(const Shape& changed) const {
  if (changed == global) return shared_from_this();
  const bool negative = std::any_of(changed.begin(), changed.end(), [](std::int64_t n) { return n < 0; });
  const std::int64_t count = count_of(global);
  if (negative || count_of(changed) != count || count == std::numeric_limits<std::int64_t>::max())
    bad_layout(fmt::format("layout: {} becomes {}; expected a shape of as many elements", to_string(*this),
                           to_string(changed)));
  const MeshShape& mesh = mesh_shape();
  LayoutSpec spec{placements, changed, nesting, {}};
  if (!segments.sizes.empty())
    if (const auto o = outermost(global, changed, segments.dim))
      if (const auto others = carried(segments, *o)) spec.segments = *others;
  const auto mapped = [&](const Placement& p) {
    return is_shard(p) ? outermost(global, changed, std::get<Shard>(p).dim) : std::nullopt;
  };
  for (std::size_t a = 0; a < placements.size(); ++a) {
    if (!is_shard(placements[a])) continue;
    const auto o = mapped(placements[a]);
    spec.placements[a] = o ? Placement(Shard{o->dim}) : Placement(Replicate{});
  }
  for (std::size_t a = 0; a < placements.size(); ++a) {
    if (!is_shard(placements[a]) || mesh.size(static_cast<int>(a)) == 1) continue;
    const auto o = mapped(placements[a]);
    if (o && cuts_alike(*this, spec, mesh, std::get<Shard>(placements[a]).dim, *o)) continue;
    bad_layout(
        fmt::format("layout: {} becomes {}, of which no dimension is cut on {}={} where that is cut: a "
                    "boundary must gather it "
                    "first",
                    to_string(*this), to_string(changed), mesh.name(static_cast<int>(a)),
                    mesh.size(static_cast<int>(a))));
  }
  return made(std::move(spec));
}

LayoutRef Layout::transposed(const Dims& order) const {
  check_order(order, global.rank(), to_string(*this));
  const auto place_of = [&](int dim) {
    return static_cast<int>(std::find(order.begin(), order.end(), dim) - order.begin());
  };
  LayoutSpec spec{placements, global, nesting, segments};
  for (int d = 0; d < global.rank(); ++d) spec.global[d] = global[static_cast<int>(order[d])];
  for (Placement& p : spec.placements)
    if (const Shard* const shard = std::get_if<Shard>(&p)) p = Shard{place_of(shard->dim)};
  if (!segments.sizes.empty()) spec.segments.dim = place_of(segments.dim);
  return made(std::move(spec));
}

Tensor reshape(const Tensor& t, const Shape& global) {
  if (t.layout() == nullptr) return t.reshape(global);
  const LayoutRef layout = t.layout()->reshaped(global);
  return t.reshape(layout->local_shape()).with_layout(layout);
}

namespace {

template <class Byte>
BasicNamedView<Byte> view_reshaped(const BasicNamedView<Byte>& v, const Shape& global) {
  if (!v.data.contiguous())
    bad_layout(fmt::format("reshape: \"{}\" is strided: shape {} has strides {}; make it contiguous first",
                           v.name, to_string(v.data.shape), to_string(v.data.strides)));
  BasicNamedView<Byte> other = v;
  if (v.layout != nullptr) other.layout = v.layout->reshaped(global);
  other.data.shape = v.layout != nullptr ? other.layout->local_shape() : global;
  if (count_of(other.data.shape) != count_of(v.data.shape))
    throw Error(ErrorCode::bad_argument, fmt::format("reshape: \"{}\" is {}; it cannot be {}", v.name,
                                                     to_string(v.data.shape), to_string(other.data.shape)));
  other.data.strides = row_major(other.data.shape);
  return other;
}

template <class Byte>
BasicNamedView<Byte> view_transposed(const BasicNamedView<Byte>& v, const Dims& order) {
  check_order(order, v.data.shape.rank(), fmt::format("\"{}\", {}", v.name, to_string(v.data.shape)));
  BasicNamedView<Byte> other = v;
  if (v.layout != nullptr) other.layout = v.layout->transposed(order);
  for (int d = 0; d < v.data.shape.rank(); ++d) {
    other.data.shape[d] = v.data.shape[static_cast<int>(order[d])];
    other.data.strides[d] = v.data.strides[static_cast<int>(order[d])];
  }
  return other;
}

}  // namespace

NamedView reshape(const NamedView& view, const Shape& global) { return view_reshaped(view, global); }
MutableNamedView reshape(const MutableNamedView& view, const Shape& global) {
  return view_reshaped(view, global);
}
NamedView transpose(const NamedView& view, const Dims& order) { return view_transposed(view, order); }
MutableNamedView transpose(const MutableNamedView& view, const Dims& order) {
  return view_transposed(view, order);
}

}  // namespace weft
