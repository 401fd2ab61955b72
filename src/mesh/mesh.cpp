#include "weft/mesh/mesh.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "mesh/mesh_state.hpp"
#include "weft/base/error.hpp"

namespace weft {

namespace {

[[noreturn]] void bad(const std::string& text) { throw Error(ErrorCode::bad_argument, "mesh: " + text); }

/// "tensor=4 x domain=1"
std::string product_text(std::span<const MeshAxis> axes) {
  std::string text;
  for (const MeshAxis& a : axes) text += fmt::format("{}{}={}", text.empty() ? "" : " x ", a.name, a.size);
  return text;
}

}  // namespace

MeshShape::MeshShape(std::initializer_list<MeshAxis> axes) : MeshShape(std::vector<MeshAxis>(axes)) {}

MeshShape::MeshShape(std::vector<MeshAxis> axes) : axes_(std::move(axes)) {
  std::int64_t ranks = 1;
  const MeshAxis* open = nullptr;  // the axis whose size is -1
  for (const MeshAxis& a : axes_) {
    if (a.name.empty()) bad(fmt::format("an axis without a name in {}", product_text(axes_)));
    if (std::count_if(axes_.begin(), axes_.end(), [&](const MeshAxis& b) { return b.name == a.name; }) > 1)
      bad(fmt::format("axis \"{}\" stands twice in {}", a.name, product_text(axes_)));
    if (a.size == -1) {
      if (open != nullptr)
        bad(fmt::format("two sizes are left open in {}; expected at most one -1", product_text(axes_)));
      open = &a;
      continue;
    }
    if (a.size < 1)
      bad(fmt::format("axis \"{}\" has size {}; expected 1 or more, or -1 for what is left", a.name, a.size));
    ranks *= a.size;
    if (ranks > std::numeric_limits<int>::max())
      bad(fmt::format("{} is more than 2^31 - 1 ranks", product_text(axes_)));
  }
}

MeshShape MeshShape::fit(int ranks) const {
  if (axes_.empty()) bad("no axes");
  MeshShape fitted = *this;
  std::vector<MeshAxis> known;
  MeshAxis* open = nullptr;
  int known_ranks = 1;
  for (MeshAxis& a : fitted.axes_) {
    if (a.size == -1) {
      open = &a;
    } else {
      known.push_back(a);
      known_ranks *= a.size;
    }
  }
  if (open != nullptr) {
    if (ranks % known_ranks != 0)
      bad(fmt::format("{} ranks do not divide into {}", ranks, product_text(known)));
    open->size = ranks / known_ranks;
  } else if (known_ranks != ranks) {
    bad(fmt::format("{} = {} ranks; the group has {}", product_text(axes_), known_ranks, ranks));
  }
  return fitted;
}

int MeshShape::size() const noexcept {
  return std::accumulate(axes_.begin(), axes_.end(), 1, [](int n, const MeshAxis& a) { return n * a.size; });
}

bool MeshShape::has(std::string_view axis) const noexcept {
  return std::any_of(axes_.begin(), axes_.end(), [&](const MeshAxis& a) { return a.name == axis; });
}

int MeshShape::index(std::string_view axis) const {
  for (std::size_t i = 0; i < axes_.size(); ++i)
    if (axes_[i].name == axis) return static_cast<int>(i);
  bad(fmt::format("no axis \"{}\" in {}", axis, product_text(axes_)));
}

std::vector<int> MeshShape::coordinates(int rank) const {
  if (rank < 0 || rank >= size())
    bad(fmt::format("rank {}; expected 0 to {} ({})", rank, size() - 1, product_text(axes_)));
  std::vector<int> at(axes_.size());
  for (std::size_t i = axes_.size(); i-- > 0;) {
    at[i] = rank % axes_[i].size;
    rank /= axes_[i].size;
  }
  return at;
}

int MeshShape::coordinate(int rank, int axis) const {
  return coordinates(rank)[static_cast<std::size_t>(axis)];
}

int MeshShape::rank(std::span<const int> coordinates) const {
  if (coordinates.size() != axes_.size())
    bad(fmt::format("{} coordinates; expected {} ({})", coordinates.size(), axes_.size(),
                    product_text(axes_)));
  int rank = 0;
  for (std::size_t i = 0; i < axes_.size(); ++i) {
    if (coordinates[i] < 0 || coordinates[i] >= axes_[i].size)
      bad(fmt::format("coordinate {} on axis \"{}\"; expected 0 to {}", coordinates[i], axes_[i].name,
                      axes_[i].size - 1));
    rank = rank * axes_[i].size + coordinates[i];
  }
  return rank;
}

std::string to_string(const MeshShape& shape) { return product_text(shape.axes()); }

// ---- what handles share ----

MeshState::MeshState(Context& context, ProcessGroup* group, MeshShape shape, int rank)
    : context_(context), root_(group), shape_(std::move(shape)), rank_(rank) {}

MeshState::MeshState(ProcessGroup&& group, const MeshShape& shape)
    : context_(group.context()),
      owned_(std::move(group)),
      root_(&owned_),
      shape_(shape.fit(owned_.size())),
      rank_(owned_.rank()) {}

std::vector<int> MeshState::ranks_along(const std::vector<int>& axes) const {
  std::vector<int> at = shape_.coordinates(rank_);
  int count = 1;
  for (const int a : axes) count *= shape_.size(a);
  std::vector<int> ranks;
  ranks.reserve(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) {
    int rest = i;
    for (std::size_t k = axes.size(); k-- > 0;) {
      at[static_cast<std::size_t>(axes[k])] = rest % shape_.size(axes[k]);
      rest /= shape_.size(axes[k]);
    }
    ranks.push_back(shape_.rank(at));
  }
  return ranks;
}

ProcessGroup& MeshState::group_along(const std::vector<int>& axes) {
  if (root_ == nullptr)
    throw Error(ErrorCode::unsupported,
                fmt::format("mesh: {} is arithmetic only; without a process group it cannot communicate",
                            to_string(shape_)));
  // Axes of one rank change neither the ranks nor their order: without them more sub-meshes share a group.
  std::vector<int> longer;
  for (const int a : axes)
    if (shape_.size(a) > 1) longer.push_back(a);
  const std::vector<int> ranks = ranks_along(longer);
  if (std::is_sorted(ranks.begin(), ranks.end()) && static_cast<int>(ranks.size()) == root_->size())
    return *root_;

  LazyGroup* lazy = nullptr;
  {
    const std::lock_guard lock(groups_mutex_);
    std::unique_ptr<LazyGroup>& entry = groups_[longer];
    if (entry == nullptr) entry = std::make_unique<LazyGroup>();
    lazy = entry.get();
  }
  const std::lock_guard lock(lazy->making);
  if (!lazy->group) {
    std::vector<std::string> names;
    for (const int a : longer) names.push_back(shape_.name(a));
    lazy->group = root_->subgroup(names.empty() ? "self" : fmt::format("{}", fmt::join(names, ",")), ranks);
  }
  return lazy->group;
}

// ---- the handle ----

struct DeviceMesh::Node {
  std::shared_ptr<MeshState> state;
  MeshShape shape;        // of this sub-mesh; one axis where flattened
  std::vector<int> axes;  // of the root, in this sub-mesh's order
  bool whole;             // a root handle
};

namespace {

std::vector<int> all_axes(const MeshShape& shape) {
  std::vector<int> axes(static_cast<std::size_t>(shape.axis_count()));
  std::iota(axes.begin(), axes.end(), 0);
  return axes;
}

}  // namespace

DeviceMesh::DeviceMesh(std::shared_ptr<MeshState> state)
    : node_(std::make_shared<Node>(Node{state, state->shape(), all_axes(state->shape()), true})) {}

DeviceMesh::DeviceMesh(ProcessGroup&& group, const MeshShape& shape)
    : DeviceMesh(std::make_shared<MeshState>(std::move(group), shape)) {}

DeviceMesh::DeviceMesh(ProcessGroup& group, const MeshShape& shape)
    : DeviceMesh(
          std::make_shared<MeshState>(group.context(), &group, shape.fit(group.size()), group.rank())) {}

DeviceMesh DeviceMesh::arithmetic(Context& context, const MeshShape& shape, int rank) {
  for (const MeshAxis& a : shape.axes())
    if (a.size == -1)
      bad(fmt::format("axis \"{}\" has no size, and there is no group to work it out from", a.name));
  MeshShape fitted = shape.fit(shape.size());
  fitted.coordinates(rank);  // checks it
  return DeviceMesh(std::make_shared<MeshState>(context, nullptr, std::move(fitted), rank));
}

DeviceMesh DeviceMesh::operator[](std::string_view axis) const {
  const std::string names[] = {std::string(axis)};
  return submesh(names);
}

DeviceMesh DeviceMesh::operator[](std::initializer_list<const char*> axes) const {
  return submesh(std::vector<std::string>(axes.begin(), axes.end()));
}

DeviceMesh DeviceMesh::submesh(std::span<const std::string> axes) const {
  if (axes.empty()) bad(fmt::format("a sub-mesh of no axes was asked for, of {}", to_string(shape())));
  // A flattened mesh has one axis of its own that stands for several of the root's: it can be
  // returned as a whole, never in part.
  const bool flat = shape().axis_count() == 1 && node_->axes.size() > 1;
  std::vector<MeshAxis> kept;
  std::vector<int> root_indices;
  for (const std::string& name : axes) {
    const int i = shape().index(name);
    if (std::any_of(kept.begin(), kept.end(), [&](const MeshAxis& a) { return a.name == name; }))
      bad(fmt::format("axis \"{}\" is asked for twice", name));
    kept.push_back(shape().axes()[static_cast<std::size_t>(i)]);
    if (flat) return *this;
    root_indices.push_back(node_->axes[static_cast<std::size_t>(i)]);
  }
  return DeviceMesh(
      std::make_shared<Node>(Node{node_->state, MeshShape(std::move(kept)), std::move(root_indices), false}));
}

DeviceMesh DeviceMesh::flatten(std::string name) const {
  return DeviceMesh(std::make_shared<Node>(
      Node{node_->state, MeshShape({MeshAxis{std::move(name), size()}}), node_->axes, false}));
}

DeviceMesh DeviceMesh::root() const { return is_root() ? *this : DeviceMesh(node_->state); }
bool DeviceMesh::is_root() const noexcept { return node_->whole; }
const MeshShape& DeviceMesh::shape() const noexcept { return node_->shape; }

int DeviceMesh::rank() const noexcept {
  const MeshShape& whole = node_->state->shape();
  int rank = 0;
  for (const int a : node_->axes) rank = rank * whole.size(a) + whole.coordinate(node_->state->rank(), a);
  return rank;
}

int DeviceMesh::coordinate(std::string_view axis) const {
  return shape().coordinate(rank(), shape().index(axis));
}

std::string DeviceMesh::name() const {
  std::string text;
  for (const MeshAxis& a : shape().axes()) text += (text.empty() ? "" : ",") + a.name;
  return text;
}

std::vector<int> DeviceMesh::ranks() const { return node_->state->ranks_along(node_->axes); }

int DeviceMesh::root_axis() const {
  if (node_->axes.size() != 1)
    bad(fmt::format("{} is {} axes of its root; expected one", name(), node_->axes.size()));
  return node_->axes.front();
}

std::span<const int> DeviceMesh::root_axes() const noexcept { return node_->axes; }
ProcessGroup& DeviceMesh::group() const { return node_->state->group_along(node_->axes); }
Context& DeviceMesh::context() const noexcept { return node_->state->context(); }
MeshState& DeviceMesh::state() const noexcept { return *node_->state; }

bool operator==(const DeviceMesh& a, const DeviceMesh& b) noexcept {
  if (a.node_ == b.node_) return true;
  if (a.node_ == nullptr || b.node_ == nullptr) return false;
  return a.node_->state == b.node_->state && a.node_->axes == b.node_->axes &&
         a.node_->shape == b.node_->shape;
}

}  // namespace weft
