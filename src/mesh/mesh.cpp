#include "weft/mesh/mesh.hpp"

#include <fmt/format.h>

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
      bad(fmt::format("axis \"{}\" is given twice in {}", a.name, product_text(axes_)));
    if (a.size == -1) {
      if (open != nullptr)
        bad(fmt::format("two sizes are -1 in {}; expected at most one -1", product_text(axes_)));
      open = &a;
      continue;
    }
    if (a.size < 1)
      bad(fmt::format("axis \"{}\" has size {}; expected 1 or more, or -1 for the remaining ranks", a.name,
                      a.size));
    ranks *= a.size;
    if (ranks > std::numeric_limits<int>::max())
      bad(fmt::format("{} is more than 2^31 - 1 ranks", product_text(axes_)));
  }
}

void MeshShape::throw_no_axis(int axis) const {
  if (axes_.empty()) bad(fmt::format("axis {}; there are no axes", axis));
  bad(fmt::format("axis {}; expected 0 to {} ({})", axis, axes_.size() - 1, product_text(axes_)));
}

MeshShape MeshShape::fit(int ranks) const {
  if (axes_.empty()) bad("no axes");
  if (ranks < 1) bad(fmt::format("{} ranks for {}; expected 1 or more", ranks, product_text(axes_)));
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
  checked(axis);
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

struct DeviceMesh::Node {
  MeshState* state;
  MeshShape shape;                       // of this mesh
  std::vector<std::vector<int>> stands;  // for which axes of the root each of its own stands
  std::vector<int> axes;                 // all of these axes, in order
  bool whole;                            // a root handle
  std::shared_ptr<MeshState> keeps;      // null in the node that the state itself owns

  static Node of(MeshState& state, MeshShape shape, std::vector<std::vector<int>> stands, bool whole,
                 std::shared_ptr<MeshState> keeps) {
    std::vector<int> axes;
    for (const std::vector<int>& own : stands) axes.insert(axes.end(), own.begin(), own.end());
    return {&state, std::move(shape), std::move(stands), std::move(axes), whole, std::move(keeps)};
  }
  static std::shared_ptr<const Node> of_part(MeshState& state, MeshShape shape,
                                             std::vector<std::vector<int>> stands) {
    return std::make_shared<const Node>(
        of(state, std::move(shape), std::move(stands), false, state.shared_from_this()));
  }
};

// Handles of the root share one node, which the state owns and the handles keep alive with the state. So a
// layout returns a handle at no cost.
DeviceMesh::DeviceMesh(const std::shared_ptr<MeshState>& state)
    : node_(state, static_cast<const Node*>(state->root_node([&] {
              std::vector<std::vector<int>> each_alone;
              for (int a = 0; a < state->shape().axis_count(); ++a) each_alone.push_back({a});
              return std::make_shared<const Node>(
                  Node::of(*state, state->shape(), std::move(each_alone), true, nullptr));
            }))) {}

DeviceMesh::DeviceMesh(ProcessGroup&& group, const MeshShape& shape)
    : DeviceMesh(std::make_shared<MeshState>(std::move(group), shape)) {}

DeviceMesh::DeviceMesh(ProcessGroup& group, const MeshShape& shape)
    : DeviceMesh(
          std::make_shared<MeshState>(group.context(), &group, shape.fit(group.size()), group.rank())) {}

DeviceMesh DeviceMesh::arithmetic(Context& context, const MeshShape& shape, int rank) {
  for (const MeshAxis& a : shape.axes())
    if (a.size == -1)
      bad(fmt::format("axis \"{}\" has no size, and there is no group from which to compute it", a.name));
  MeshShape fitted = shape.fit(shape.size());
  fitted.coordinates(rank);  // checks it
  return DeviceMesh(std::make_shared<MeshState>(context, nullptr, std::move(fitted), rank));
}

namespace {

// This is a separate function, so that node() needs no room on the stack for the text.
[[noreturn, gnu::cold, gnu::noinline]] void throw_empty(std::string_view what) {
  throw Error(ErrorCode::bad_argument,
              fmt::format("DeviceMesh::{}: empty DeviceMesh: it was made by default or moved from", what));
}

}  // namespace

const DeviceMesh::Node& DeviceMesh::node(std::string_view what) const {
  if (node_ == nullptr) [[unlikely]]
    throw_empty(what);
  return *node_;
}

DeviceMesh DeviceMesh::operator[](std::string_view axis) const {
  node("operator[]");
  const std::string names[] = {std::string(axis)};
  return submesh(names);
}

DeviceMesh DeviceMesh::operator[](std::initializer_list<const char*> axes) const {
  node("operator[]");
  return submesh(std::vector<std::string>(axes.begin(), axes.end()));
}

DeviceMesh DeviceMesh::submesh(std::span<const std::string> axes) const {
  node("submesh");
  if (axes.empty()) bad(fmt::format("a sub-mesh without axes was requested, of {}", to_string(shape())));
  std::vector<MeshAxis> kept;
  std::vector<std::vector<int>> stands;
  std::vector<int> used;
  for (const std::string& name : axes) {
    std::vector<int> own = axes_called(name);
    if (std::any_of(kept.begin(), kept.end(), [&](const MeshAxis& a) { return a.name == name; }))
      bad(fmt::format("axis \"{}\" is requested twice", name));
    int size = 1;
    for (const int a : own) {
      size *= node_->state->shape().size(a);
      if (std::find(used.begin(), used.end(), a) != used.end())
        bad(fmt::format("axis \"{}\" is requested twice: it is a part of another", name));
      used.push_back(a);
    }
    kept.push_back({name, size});
    stands.push_back(std::move(own));
  }
  return DeviceMesh(Node::of_part(*node_->state, MeshShape(std::move(kept)), std::move(stands)));
}

// The axes of the root mesh for which an axis of this mesh stands. If this mesh has all parts of an axis that
// unflatten() divided, these are the parts.
std::vector<int> DeviceMesh::axes_called(const std::string& name) const {
  if (shape().has(name)) return node_->stands[static_cast<std::size_t>(shape().index(name))];
  const std::vector<int>* const apart = node_->state->axes_taken_apart(name);
  const auto here = [&](int a) {
    return std::find(node_->stands.begin(), node_->stands.end(), std::vector<int>{a}) != node_->stands.end();
  };
  if (apart != nullptr && std::all_of(apart->begin(), apart->end(), here)) return *apart;
  shape().index(name);  // throws
  return {};
}

DeviceMesh DeviceMesh::flatten(std::string name) const {
  node("flatten");
  return DeviceMesh(
      Node::of_part(*node_->state, MeshShape({MeshAxis{std::move(name), size()}}), {node_->axes}));
}

DeviceMesh DeviceMesh::unflatten(std::string_view axis, const MeshShape& parts) const {
  node("unflatten");
  if (!is_root())
    bad(fmt::format("unflatten of {}, a part of {}; only a root can be divided anew", to_string(shape()),
                    to_string(root().shape())));
  return DeviceMesh(MeshState::unflattened(node_->state->shared_from_this(), shape().index(axis), parts));
}

std::vector<DeviceMesh> DeviceMesh::each_axis() const {
  std::vector<DeviceMesh> list;
  for (const int a : node("each_axis").axes) list.push_back(root()[node_->state->shape().name(a)]);
  return list;
}

DeviceMesh DeviceMesh::root() const {
  return node("root").whole ? *this : DeviceMesh(node_->state->shared_from_this());
}
bool DeviceMesh::is_root() const { return node("is_root").whole; }
const MeshShape& DeviceMesh::shape() const { return node("shape").shape; }

int DeviceMesh::rank() const {
  const MeshShape& whole = node("rank").state->shape();
  int rank = 0;
  for (const int a : node_->axes) rank = rank * whole.size(a) + whole.coordinate(node_->state->rank(), a);
  return rank;
}

int DeviceMesh::coordinate(std::string_view axis) const {
  node("coordinate");
  return shape().coordinate(rank(), shape().index(axis));
}

std::string DeviceMesh::name() const {
  std::string text;
  for (const MeshAxis& a : node("name").shape.axes()) text += (text.empty() ? "" : ",") + a.name;
  return text;
}

std::vector<int> DeviceMesh::ranks() const { return node("ranks").state->ranks_along(node_->axes); }

std::span<const int> DeviceMesh::root_axes() const { return node("root_axes").axes; }
ProcessGroup& DeviceMesh::group() const { return node("group").state->group_along(node_->axes); }
Context& DeviceMesh::context() const { return node("context").state->context(); }
MeshState& detail::MeshAccess::state(const DeviceMesh& mesh) { return *mesh.node("state").state; }

bool operator==(const DeviceMesh& a, const DeviceMesh& b) noexcept {
  if (a.node_ == b.node_) return true;
  if (a.node_ == nullptr || b.node_ == nullptr) return false;
  return a.node_->state == b.node_->state && a.node_->axes == b.node_->axes &&
         a.node_->shape == b.node_->shape;
}

}  // namespace weft
