#include "weft/mesh/layout.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "mesh/axis_ranks.hpp"
#include "mesh/bad_layout.hpp"
#include "mesh/cut.hpp"
#include "mesh/mesh_state.hpp"
#include "weft/base/error.hpp"

namespace weft {

namespace {

/// Sums and averages commute with each other. min and max commute only with themselves.
bool commute(ReduceOp a, ReduceOp b) {
  const auto linear = [](ReduceOp op) { return op == ReduceOp::sum || op == ReduceOp::avg; };
  return a == b || (linear(a) && linear(b));
}

void check_segments(const Segments& segments, const Shape& global) {
  if (segments.sizes.empty()) return;
  const auto text = [&] { return fmt::format("{}", fmt::join(segments.sizes, ", ")); };
  if (segments.dim < 0 || segments.dim >= global.rank())
    bad_layout(fmt::format("layout: segments {} of dimension {}; the tensor is {}", text(), segments.dim,
                           to_string(global)));
  std::int64_t sum = 0;
  for (const std::int64_t n : segments.sizes) {
    if (n < 0) bad_layout(fmt::format("layout: segments {}: a size below 0", text()));
    if (__builtin_add_overflow(sum, n, &sum))
      bad_layout(fmt::format("layout: segments {}: their sum does not fit 64 bits", text()));
  }
  if (sum != global[segments.dim])
    bad_layout(fmt::format("layout: segments {} add up to {}; dimension {} of {} has {}", text(), sum,
                           segments.dim, to_string(global), global[segments.dim]));
}

void check(const MeshShape& mesh, const LayoutSpec& spec) {
  const Placements& placements = spec.placements;
  const Shape& global = spec.global;
  if (static_cast<int>(placements.size()) != mesh.axis_count())
    bad_layout(fmt::format("layout: {} placements {}; expected one for each axis of {}", placements.size(),
                           to_string(placements), to_string(mesh)));
  int reducing = -1;  // the first axis with a Partial
  for (int a = 0; a < mesh.axis_count(); ++a) {
    const Placement& p = placements[static_cast<std::size_t>(a)];
    if (const Shard* s = std::get_if<Shard>(&p); s != nullptr && (s->dim < 0 || s->dim >= global.rank()))
      bad_layout(fmt::format(
          "layout: {} on {}; the tensor {} {}", to_string(p), mesh.name(a), to_string(global),
          global.rank() == 0 ? "is a scalar" : fmt::format("has dimensions 0 to {}", global.rank() - 1)));
    if (const Partial* q = std::get_if<Partial>(&p)) {
      if (reducing < 0) reducing = a;
      const Placement& first = placements[static_cast<std::size_t>(reducing)];
      if (!commute(std::get<Partial>(first).op, q->op))
        bad_layout(fmt::format(
            "layout: {} on {} and {} on {} do not commute: the value would depend on which is reduced first",
            to_string(first), mesh.name(reducing), to_string(p), mesh.name(a)));
    }
  }
  for (const std::int64_t n : global)
    if (n < 0) bad_layout(fmt::format("layout: the shape {} has a negative size", to_string(global)));
  check_segments(spec.segments, global);
}

/// Gives specs with equal meaning an equal form. Axes that share no dimension with another axis are put in
/// the root's order, and a dimension of one segment has no segments.
void normalise(const MeshShape& mesh, LayoutSpec& spec) {
  const int axes = mesh.axis_count();
  std::vector<int> given = std::move(spec.nesting);
  spec.nesting.resize(static_cast<std::size_t>(axes));
  std::iota(spec.nesting.begin(), spec.nesting.end(), 0);
  if (spec.segments.sizes.size() <= 1) spec.segments = {};
  if (given.empty()) return;
  for (int dim = 0; dim < spec.global.rank(); ++dim) {
    const auto shares = [&](int a) {
      return mesh.size(a) > 1 && is_shard(spec.placements[static_cast<std::size_t>(a)], dim);
    };
    auto next = given.begin();
    for (int place = 0; place < axes; ++place) {
      if (!shares(place)) continue;
      next = std::find_if(next, given.end(), shares);
      spec.nesting[static_cast<std::size_t>(place)] = *next++;
    }
  }
}

/// The indices of the given axes in the mesh, in the given order. Throws bad_argument for a name that does
/// not exist or occurs twice.
std::vector<int> indices_of(const MeshShape& mesh, std::span<const std::string_view> axes) {
  std::vector<int> indices;
  for (const std::string_view axis : axes) {
    const int index = mesh.index(axis);
    if (std::find(indices.begin(), indices.end(), index) != indices.end())
      bad_layout(fmt::format("layout: axis \"{}\" is given twice in a nesting", axis));
    indices.push_back(index);
  }
  return indices;
}

/// Reorders these axes among the places that they occupy now. All other axes stay in place.
void put_in_order(std::vector<int>& nesting, std::span<const int> axes) {
  auto next = axes.begin();
  for (int& place : nesting)
    if (std::find(axes.begin(), axes.end(), place) != axes.end()) place = *next++;
}

/// The placements of a layout on these axes: "Replicate on tp=2"; "Shard(0) on dp=2 and Replicate on tp=2"
std::string placements_text(const Layout& layout, const DeviceMesh& axes) {
  std::string text;
  const MeshShape& mesh = layout.mesh_shape();
  const std::span<const int> indices = axes.root_axes();
  const auto placement = [&](int a) { return layout.placements[static_cast<std::size_t>(a)]; };
  if (std::all_of(indices.begin(), indices.end(),
                  [&](int a) { return placement(a) == placement(indices[0]); }))
    return fmt::format("{} on {}", to_string(placement(indices[0])), axis_text(axes));
  for (const int a : indices)
    text += fmt::format("{}{} on {}={}", text.empty() ? "" : " and ", to_string(placement(a)), mesh.name(a),
                        mesh.size(a));
  return text;
}

}  // namespace

std::vector<Chunk> runs_of(const LayoutSpec& spec, const MeshShape& mesh, std::span<const int> coordinates,
                           int dim, int skip) {
  std::vector<Chunk> runs;
  if (spec.segments.dim == dim)
    for (const std::int64_t size : spec.segments.sizes)
      runs.push_back({runs.empty() ? 0 : runs.back().offset + runs.back().size, size});
  if (runs.empty()) runs.push_back({0, spec.global[dim]});
  for (const int a : spec.nesting) {
    if (a == skip || !is_shard(spec.placements[static_cast<std::size_t>(a)], dim)) continue;
    for (Chunk& run : runs) {
      const Chunk part = chunk_of(run.size, mesh.size(a), coordinates[static_cast<std::size_t>(a)]);
      run = {run.offset + part.offset, part.size};
    }
  }
  return runs;
}

std::string to_string(const Placement& placement) {
  if (const Shard* s = std::get_if<Shard>(&placement)) return fmt::format("Shard({})", s->dim);
  if (const Partial* p = std::get_if<Partial>(&placement)) return fmt::format("Partial({})", name(p->op));
  return "Replicate";
}

std::string to_string(const Placements& placements) {
  std::vector<std::string> texts;
  for (const Placement& p : placements) texts.push_back(to_string(p));
  return fmt::format("[{}]", fmt::join(texts, ", "));
}

std::string to_string(const Layout& layout) {
  const MeshShape& mesh = layout.mesh_shape();
  std::vector<std::string> texts, nested;
  for (std::size_t a = 0; a < layout.placements.size(); ++a)
    texts.push_back(fmt::format("{}: {}", mesh.name(static_cast<int>(a)), to_string(layout.placements[a])));
  for (const int a : layout.nesting)
    if (is_shard(layout.placements[static_cast<std::size_t>(a)])) nested.push_back(mesh.name(a));
  std::string text = fmt::format("{} as [{}]", to_string(layout.global), fmt::join(texts, ", "));
  if (!std::is_sorted(layout.nesting.begin(), layout.nesting.end()))
    text += fmt::format(" nested {}", fmt::join(nested, ", "));
  if (!layout.segments.sizes.empty())
    text += fmt::format(" in segments {} of dimension {}", fmt::join(layout.segments.sizes, ", "),
                        layout.segments.dim);
  return text;
}

Layout::Layout(std::shared_ptr<MeshState> state, LayoutSpec spec)
    : LayoutSpec(std::move(spec)), state_(std::move(state)), local_(local_shape(state_->rank())) {}

DeviceMesh Layout::mesh() const { return detail::MeshAccess::root(state_); }
const MeshShape& Layout::mesh_shape() const noexcept { return state_->shape(); }

std::vector<Box> Layout::parts(int rank) const {
  const std::vector<int> at = mesh_shape().coordinates(rank);
  std::vector<Box> boxes;
  const int dims = global.rank();
  const auto put = [&](int dim, std::size_t box, const Chunk& run) {
    boxes[box].offset[dim] = run.offset;
    boxes[box].shape[dim] = run.size;
  };
  const bool cut = !segments.sizes.empty();
  boxes.assign(cut ? segments.sizes.size() : 1, Box{global, global});
  for (int d = 0; d < dims; ++d) {
    const std::vector<Chunk> runs = runs_of(*this, mesh_shape(), at, d);
    for (std::size_t i = 0; i < boxes.size(); ++i) put(d, i, runs[runs.size() > 1 ? i : 0]);
  }
  return boxes;
}

Shape Layout::local_shape(int rank) const {
  const std::vector<int> at = mesh_shape().coordinates(rank);
  Shape shape = global;
  for (int d = 0; d < global.rank(); ++d) {
    shape[d] = 0;
    for (const Chunk& run : runs_of(*this, mesh_shape(), at, d)) shape[d] += run.size;
  }
  return shape;
}

std::vector<Box> Layout::parts() const { return parts(state_->rank()); }

const Placement& Layout::on(std::string_view axis) const {
  return placements[static_cast<std::size_t>(mesh_shape().index(axis))];
}

void Layout::check_root(const DeviceMesh& axes) const {
  given_mesh("layout", axes);
  if (&detail::MeshAccess::state(axes) != state_.get())
    bad_layout(
        fmt::format("layout: axis {} belongs to another mesh than {}", axis_text(axes), to_string(*this)));
}

const Placement& Layout::on(const DeviceMesh& axes) const {
  check_root(axes);
  const std::span<const int> indices = axes.root_axes();
  const auto longer = [&](int a) { return mesh_shape().size(a) > 1; };
  const auto first = std::find_if(indices.begin(), indices.end(), longer);
  const Placement& found =
      placements[static_cast<std::size_t>(first == indices.end() ? indices.front() : *first)];
  for (const int a : indices)
    if (longer(a) && placements[static_cast<std::size_t>(a)] != found)
      bad_layout(
          fmt::format("layout: {}; expected one placement on {}", placements_text(*this, axes), axes.name()));
  return found;
}

bool Layout::replicated() const noexcept {
  return std::all_of(placements.begin(), placements.end(), is_replicate);
}
bool Layout::partial() const noexcept {
  return std::any_of(placements.begin(), placements.end(), is_partial);
}

LayoutRef Layout::made(LayoutSpec spec) const {
  check(mesh_shape(), spec);
  normalise(mesh_shape(), spec);
  if (spec == *this) return shared_from_this();
  return state_->layouts().intern(state_, std::move(spec));
}

LayoutRef Layout::with(std::string_view axis, const Placement& placement) const {
  const auto index = static_cast<std::size_t>(mesh_shape().index(axis));
  if (placements[index] == placement) return shared_from_this();
  LayoutSpec spec = *this;
  spec.placements[index] = placement;
  return made(std::move(spec));
}

LayoutRef Layout::with(const DeviceMesh& axes, const Placement& placement) const {
  check_root(axes);
  if (axes.root_axes().size() == 1 && placements[static_cast<std::size_t>(axes.root_axes()[0])] == placement)
    return shared_from_this();
  LayoutSpec spec = *this;
  for (const int a : axes.root_axes()) spec.placements[static_cast<std::size_t>(a)] = placement;
  put_in_order(spec.nesting, axes.root_axes());
  return made(std::move(spec));
}

LayoutRef Layout::with(Placements changed) const {
  LayoutSpec spec{std::move(changed), global, nesting, segments};
  return made(std::move(spec));
}

LayoutRef Layout::with_global(const Shape& changed) const {
  if (changed == global) return shared_from_this();
  if (!segments.sizes.empty() &&
      (segments.dim >= changed.rank() || changed[segments.dim] != global[segments.dim]))
    bad_layout(fmt::format("layout: {} becomes {}, which would remove its segments", to_string(*this),
                           to_string(changed)));
  return made({placements, changed, nesting, segments});
}

LayoutRef Layout::shard_inside(const DeviceMesh& axes, int dim) const {
  check_root(axes);
  LayoutSpec spec = *this;
  for (const int a : axes.root_axes()) {
    spec.placements[static_cast<std::size_t>(a)] = Shard{dim};
    std::erase(spec.nesting, a);
    spec.nesting.push_back(a);
  }
  return made(std::move(spec));
}

LayoutRef Layout::nested(std::initializer_list<std::string_view> axes) const {
  return nested(std::span(axes.begin(), axes.size()));
}

LayoutRef Layout::nested(std::span<const std::string_view> axes) const {
  LayoutSpec spec = *this;
  put_in_order(spec.nesting, indices_of(mesh_shape(), axes));
  return made(std::move(spec));
}

LayoutRef Layout::segmented(int dim, std::vector<std::int64_t> sizes) const {
  return made({placements, global, nesting, {dim, std::move(sizes)}});
}

namespace {

LayoutRef interned(const DeviceMesh& mesh, Placements placements, const Shape& global) {
  MeshState& state = detail::MeshAccess::state(mesh);
  LayoutSpec spec{std::move(placements), global, {}, {}};
  check(state.shape(), spec);
  normalise(state.shape(), spec);
  return state.layouts().intern(state.shared_from_this(), std::move(spec));
}

}  // namespace

LayoutRef make_layout(const DeviceMesh& mesh, Placements placements, const Shape& global) {
  given_mesh("make_layout", mesh, "mesh");
  if (!mesh.is_root())
    bad_layout(fmt::format("layout: the mesh {} is a part of {}; a layout spans the root",
                           to_string(mesh.shape()), to_string(mesh.root().shape())));
  return interned(mesh, std::move(placements), global);
}

LayoutRef make_layout(const DeviceMesh& mesh,
                      std::initializer_list<std::pair<std::string_view, Placement>> placements,
                      const Shape& global) {
  const MeshShape& shape = detail::MeshAccess::state(given_mesh("make_layout", mesh, "mesh")).shape();
  Placements all(static_cast<std::size_t>(shape.axis_count()));
  for (const auto& [axis, placement] : placements)
    all[static_cast<std::size_t>(shape.index(axis))] = placement;
  return interned(mesh, std::move(all), global);
}

LayoutRef replicated_layout(const DeviceMesh& mesh, const Shape& global) {
  return make_layout(given_mesh("replicated_layout", mesh, "mesh"), {}, global);
}

Tensor as_layout(const Tensor& local, const LayoutRef& layout) {
  if (layout == nullptr)
    throw Error(ErrorCode::bad_argument,
                "as_layout: layout is null; a plain tensor is x.with_layout(nullptr)");
  const Shape& expected = layout->local_shape();
  if (local.shape() != expected)
    bad_layout(fmt::format("as_layout: the tensor is {}; rank {} of {} holds {}", to_string(local.shape()),
                           layout->mesh().rank(), to_string(*layout), to_string(expected)));
  if (!local && local.count() > 0)
    throw Error(ErrorCode::bad_argument,
                fmt::format("as_layout: the tensor {} has no memory: it is empty or was moved from",
                            to_string(local.shape())));
  return local.with_layout(layout);
}

Placement placement_on(const LayoutRef& layout, const DeviceMesh& axes, const TensorName& what) {
  given_mesh("placement_on", axes);
  if (layout != nullptr) return layout->on(axes);
  if (axes.size() == 1) return Replicate{};
  bad_layout(
      fmt::format("{} is a plain tensor; on {} it needs a layout, which says what part of the whole it is",
                  what.text(), axis_text(axes)));
}

void expect_layout(const LayoutRef& layout, const DeviceMesh& axes, const Placement& expected,
                   const TensorName& what) {
  if (given_mesh("expect_layout", axes).size() == 1) return;
  if (layout == nullptr) placement_on(layout, axes, what);  // throws
  if (&detail::MeshAccess::state(layout->mesh()) != &detail::MeshAccess::state(axes))
    bad_layout(fmt::format(
        "{} lies over {}, axis {} belongs to {}: not the same DeviceMesh; use one for both", what.text(),
        to_string(layout->mesh_shape()), axis_text(axes), to_string(axes.root().shape())));
  const std::span<const int> indices = axes.root_axes();
  const auto differs = [&](int a) {
    return layout->mesh_shape().size(a) > 1 && layout->placements[static_cast<std::size_t>(a)] != expected;
  };
  if (std::any_of(indices.begin(), indices.end(), differs))
    bad_layout(fmt::format("{} is {}; expected {}", what.text(), placements_text(*layout, axes),
                           to_string(expected)));
  // Only shards nest. Without the test for a shard an axis of one rank, whose placement has no effect, would
  // nest, too.
  if (is_shard(expected) && indices.size() > 1 && layout->with(axes, expected) != layout)
    bad_layout(fmt::format("{} is {}, whose axes nest in another order than {}", what.text(),
                           to_string(*layout), axes.name()));
}

}  // namespace weft
