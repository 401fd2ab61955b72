#include "weft/mesh/layout.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/hash.hpp"
#include "mesh/mesh_state.hpp"
#include "weft/base/error.hpp"

namespace weft {

namespace {

[[noreturn]] void bad_layout(const std::string& text) { throw Error(ErrorCode::layout, text); }

std::size_t hash_of(const Placements& placements, const Shape& global) {
  Fnv1a hash;
  const auto mix = [&hash](std::size_t value) { hash.add_at_once(value); };
  for (const Placement& p : placements) {
    mix(p.index());
    if (const Shard* s = std::get_if<Shard>(&p)) mix(static_cast<std::size_t>(s->dim));
    if (const Partial* q = std::get_if<Partial>(&p)) mix(static_cast<std::size_t>(q->op.kind));
  }
  for (const std::int64_t n : global) mix(static_cast<std::size_t>(n));
  return hash.value;
}

/// Sums and averages commute with each other; min and max only with themselves.
bool commute(ReduceOp a, ReduceOp b) {
  const auto linear = [](ReduceOp op) { return op == ReduceOp::sum || op == ReduceOp::avg; };
  return a == b || (linear(a) && linear(b));
}

void check(const MeshShape& mesh, const Placements& placements, const Shape& global) {
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
}

/// This rank's part: where it begins and how long it is, in each dimension.
struct Part {
  Dims offsets;
  Shape shape;
};

Part part_of(const Layout& layout, int rank) {
  const std::vector<int> at = layout.mesh_shape().coordinates(rank);
  Part part{layout.global, layout.global};
  for (int d = 0; d < layout.global.rank(); ++d) part.offsets[d] = 0;
  // Left to right: each axis cuts what the axes before it left of its dimension.
  for (std::size_t a = 0; a < layout.placements.size(); ++a) {
    const Shard* shard = std::get_if<Shard>(&layout.placements[a]);
    if (shard == nullptr) continue;
    const Chunk chunk =
        chunk_of(part.shape[shard->dim], layout.mesh_shape().size(static_cast<int>(a)), at[a]);
    part.offsets[shard->dim] += chunk.offset;
    part.shape[shard->dim] = chunk.size;
  }
  return part;
}

/// "tp=2"
std::string axis_text(const DeviceMesh& axis) { return fmt::format("{}={}", axis.name(), axis.size()); }

}  // namespace

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
  std::vector<std::string> texts;
  for (std::size_t a = 0; a < layout.placements.size(); ++a)
    texts.push_back(fmt::format("{}: {}", layout.mesh_shape().name(static_cast<int>(a)),
                                to_string(layout.placements[a])));
  return fmt::format("{} as [{}]", to_string(layout.global), fmt::join(texts, ", "));
}

DeviceMesh Layout::mesh() const { return DeviceMesh(state_->shared_from_this()); }
const MeshShape& Layout::mesh_shape() const noexcept { return state_->shape(); }
Shape Layout::local_shape(int rank) const { return part_of(*this, rank).shape; }
Dims Layout::local_offsets(int rank) const { return part_of(*this, rank).offsets; }
Shape Layout::local_shape() const { return local_shape(state_->rank()); }
Dims Layout::local_offsets() const { return local_offsets(state_->rank()); }

const Placement& Layout::on(std::string_view axis) const {
  return placements[static_cast<std::size_t>(mesh_shape().index(axis))];
}

const Placement& Layout::on(const DeviceMesh& axis) const {
  return placements[static_cast<std::size_t>(index_of(axis))];
}

int Layout::index_of(const DeviceMesh& axis) const {
  if (&axis.state() != state_)
    bad_layout(
        fmt::format("layout: axis {} belongs to another mesh than {}", axis_text(axis), to_string(*this)));
  return axis.root_axis();
}

bool Layout::replicated() const noexcept {
  return std::all_of(placements.begin(), placements.end(), is_replicate);
}
bool Layout::partial() const noexcept {
  return std::any_of(placements.begin(), placements.end(), is_partial);
}

LayoutRef Layout::with(std::string_view axis, const Placement& placement) const {
  return with(mesh_shape().index(axis), placement);
}

LayoutRef Layout::with(const DeviceMesh& axis, const Placement& placement) const {
  return with(index_of(axis), placement);
}

LayoutRef Layout::with(int axis, const Placement& placement) const {
  if (placements[static_cast<std::size_t>(axis)] == placement) return this;
  Placements changed = placements;
  changed[static_cast<std::size_t>(axis)] = placement;
  return with(std::move(changed));
}

LayoutRef Layout::with(Placements changed) const {
  check(mesh_shape(), changed, global);
  return state_->intern(std::move(changed), global);
}

LayoutRef Layout::with_global(const Shape& changed) const {
  check(mesh_shape(), placements, changed);
  return state_->intern(placements, changed);
}

LayoutRef MeshState::intern(Placements placements, const Shape& global) {
  const std::size_t hash = hash_of(placements, global);
  const std::lock_guard lock(layouts_mutex_);
  const auto [begin, end] = layouts_.equal_range(hash);
  for (auto i = begin; i != end; ++i)
    if (i->second->placements == placements && i->second->global == global) return i->second.get();
  std::unique_ptr<const Layout> made(new Layout(this, std::move(placements), global));
  return layouts_.emplace(hash, std::move(made))->second.get();
}

LayoutRef make_layout(const DeviceMesh& mesh, Placements placements, const Shape& global) {
  if (!mesh.is_root())
    bad_layout(fmt::format("layout: the mesh {} is a part of {}; a layout spans the root",
                           to_string(mesh.shape()), to_string(mesh.root().shape())));
  check(mesh.shape(), placements, global);
  return mesh.state().intern(std::move(placements), global);
}

LayoutRef make_layout(const DeviceMesh& mesh,
                      std::initializer_list<std::pair<std::string_view, Placement>> placements,
                      const Shape& global) {
  const MeshShape& shape = mesh.state().shape();
  Placements all(static_cast<std::size_t>(shape.axis_count()));
  for (const auto& [axis, placement] : placements)
    all[static_cast<std::size_t>(shape.index(axis))] = placement;
  check(shape, all, global);
  return mesh.state().intern(std::move(all), global);
}

LayoutRef replicated_layout(const DeviceMesh& mesh, const Shape& global) {
  return make_layout(mesh, {}, global);
}

Tensor as_layout(const Tensor& local, LayoutRef layout) {
  const Shape expected = layout->local_shape();
  if (local.shape() != expected)
    bad_layout(fmt::format("as_layout: the tensor is {}; rank {} of {} holds {}", to_string(local.shape()),
                           layout->mesh().rank(), to_string(*layout), to_string(expected)));
  return local.with_layout(layout);
}

Placement placement_on(const Tensor& t, const DeviceMesh& axis, std::string_view what) {
  if (t.layout() != nullptr) return t.layout()->on(axis);
  if (axis.size() == 1) return Replicate{};
  bad_layout(fmt::format("{} is a plain tensor; on {} it needs a layout", what, axis_text(axis)));
}

void expect_layout(const Tensor& t, const DeviceMesh& axis, const Placement& expected,
                   std::string_view what) {
  const Placement found = placement_on(t, axis, what);
  if (axis.size() > 1 && found != expected)
    bad_layout(fmt::format("{} is {} on {}; expected {}", what, to_string(found), axis_text(axis),
                           to_string(expected)));
}

}  // namespace weft
