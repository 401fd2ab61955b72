// The types behind the handles of weft/c/mesh.h and weft/c/layout.h, and their arguments as C++ values. Each
// conversion throws bad_argument naming `function` and the argument.
#pragma once

#include <array>
#include <span>
#include <string_view>
#include <vector>

#include "capi/handles.hpp"
#include "capi/values.hpp"
#include "weft/dp/gradient.hpp"
#include "weft/mesh/layout.hpp"
#include "weft/mesh/mesh.hpp"
#include "weft/mesh/named_view.hpp"

namespace weft::capi {

/// Objects that a mesh and its layouts need: mesh and layouts are destroyed first.
struct MeshOwner {
  std::shared_ptr<ContextState> context;
  std::shared_ptr<GroupHandle> group;  // null: a mesh that cannot communicate
};

/// An array with its number of entries; may be NULL if that is 0.
template <class T>
std::span<T> list_of(const char* function, T* data, std::int32_t count, const char* what,
                     const char* count_name) {
  if (count < 0)
    refuse(ErrorCode::bad_argument, function, fmt::format("{} is {}; expected 0 or more", count_name, count));
  if (count > 0) given(function, data, what);
  return {data, static_cast<std::size_t>(count)};
}

/// An array that is to be filled with `needed` entries.
template <class T>
T* room_for(const char* function, T* data, std::int32_t room, std::int32_t needed, const char* what) {
  if (room < needed)
    refuse(ErrorCode::bad_argument, function, fmt::format("room is {}; {} needs {}", room, what, needed));
  return needed == 0 ? data : &given(function, data, what);
}

inline const char* text_of(const char* function, const char* text, const char* what) {
  return &given(function, text, what);
}
/// Entries of an array of strings.
std::vector<std::string_view> names_of(const char* function, const char* const* names, std::int32_t count,
                                       const char* what, const char* count_name);

const DeviceMesh& mesh_of(const char* function, const weft_mesh* mesh, const char* which);
const LayoutRef& layout_of(const char* function, const weft_layout* layout, const char* which);
Shape shape_of(const char* function, const std::int64_t* extents, std::int32_t dim_count, const char* what);
/// `which` ends in "->" or ".".
Placement placement_of(const char* function, const weft_placement& placement, const std::string& which);

/// A buffer of the caller's as a view of this shape if that has as many elements. Otherwise it is a view of
/// one dimension, and the function that gets it then says which shape it expected.
TensorView view_of(const Buffer& buffer, const Shape& shape);

/// Tensors of the caller's: the memory, and the names, are theirs.
std::vector<MutableNamedView> tensors_of(const char* function, const weft_tensor* tensors, std::int32_t count,
                                         const char* which);
/// The argument "gradients" of functions that take a list of tensors.
inline std::vector<Gradient> gradients_of(const char* function, const weft_tensor* gradients,
                                          std::int32_t count) {
  std::vector<Gradient> list;
  for (const MutableNamedView& v : tensors_of(function, gradients, count, "gradients"))
    list.push_back({v.name, v.data, v.layout});
  return list;
}

}  // namespace weft::capi

struct weft_mesh : weft::capi::Handle<weft_mesh> {
  static constexpr const char* kKind = "weft_mesh";
  weft_mesh(weft::capi::MeshOwner owner_in, weft::DeviceMesh mesh_in)
      : owner(std::move(owner_in)), mesh(std::move(mesh_in)) {}
  weft::capi::MeshOwner owner;
  weft::DeviceMesh mesh;
};

struct weft_layout : weft::capi::Handle<weft_layout> {
  static constexpr const char* kKind = "weft_layout";
  weft_layout(weft::capi::MeshOwner owner_in, weft::LayoutRef layout_in)
      : owner(std::move(owner_in)), layout(std::move(layout_in)) {}
  weft::capi::MeshOwner owner;
  weft::LayoutRef layout;
};
