// Meshes in C. Comments in weft/c/mesh.h say which functions block.
#include <algorithm>

#include "capi/mesh_handles.hpp"

using weft::DeviceMesh;
using weft::ErrorCode;
using weft::MeshAxis;
using weft::MeshShape;
namespace capi = weft::capi;

namespace weft::capi {

std::vector<std::string_view> names_of(const char* function, const char* const* names, std::int32_t count,
                                       const char* what, const char* count_name) {
  std::vector<std::string_view> list;
  for (const char* const& name : list_of(function, names, count, what, count_name))
    list.emplace_back(text_of(function, name, fmt::format("{}[{}]", what, list.size()).c_str()));
  return list;
}

const DeviceMesh& mesh_of(const char* function, const weft_mesh* mesh, const char* which) {
  return given(function, mesh, which).mesh;
}

}  // namespace weft::capi

namespace {

MeshShape shape_of(const char* function, const weft_mesh_axis* axes, int32_t count, const char* what,
                   const char* count_name) {
  std::vector<MeshAxis> list;
  for (const weft_mesh_axis& axis : capi::list_of(function, axes, count, what, count_name))
    list.push_back({capi::text_of(function, axis.name, fmt::format("{}[{}].name", what, list.size()).c_str()),
                    axis.size});
  return MeshShape(std::move(list));
}

weft_mesh* made(const weft_mesh& of, DeviceMesh mesh) { return new weft_mesh{of.owner, std::move(mesh)}; }

}  // namespace

weft_status weft_mesh_create(weft_group* group, const weft_mesh_axis* axes, int32_t axis_count,
                             weft_mesh** mesh, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_group& over = capi::given(function, group, "group");
    const MeshShape shape = shape_of(function, axes, axis_count, "axes", "axis_count");
    weft_mesh*& to = capi::given(function, mesh, "mesh");
    to = new weft_mesh{{over.handle->context, over.handle}, DeviceMesh(over.handle->group, shape)};
  });
}

weft_status weft_mesh_create_arithmetic(weft_context* context, const weft_mesh_axis* axes, int32_t axis_count,
                                        int32_t rank, weft_mesh** mesh, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const std::shared_ptr<capi::ContextState>& state = capi::given(function, context, "context").state;
    const MeshShape shape = shape_of(function, axes, axis_count, "axes", "axis_count");
    weft_mesh*& to = capi::given(function, mesh, "mesh");
    to = new weft_mesh{{state, nullptr}, DeviceMesh::arithmetic(state->context, shape, rank)};
  });
}

void weft_mesh_destroy(weft_mesh* mesh) { capi::destroy(__func__, mesh, "mesh"); }

weft_status weft_mesh_along(const weft_mesh* mesh, const char* const* axes, int32_t axis_count,
                            weft_mesh** along, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const DeviceMesh& of = capi::mesh_of(function, mesh, "mesh");
    const std::vector<std::string_view> names =
        capi::names_of(function, axes, axis_count, "axes", "axis_count");
    weft_mesh*& to = capi::given(function, along, "along");
    to = made(*mesh, of.submesh(std::vector<std::string>(names.begin(), names.end())));
  });
}

weft_status weft_mesh_flatten(const weft_mesh* mesh, const char* name, weft_mesh** flat, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const DeviceMesh& of = capi::mesh_of(function, mesh, "mesh");
    const char* const called = capi::text_of(function, name, "name");
    weft_mesh*& to = capi::given(function, flat, "flat");
    to = made(*mesh, of.flatten(called));
  });
}

weft_status weft_mesh_unflatten(const weft_mesh* mesh, const char* axis, const weft_mesh_axis* parts,
                                int32_t part_count, weft_mesh** divided, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const DeviceMesh& of = capi::mesh_of(function, mesh, "mesh");
    const char* const called = capi::text_of(function, axis, "axis");
    const MeshShape shape = shape_of(function, parts, part_count, "parts", "part_count");
    weft_mesh*& to = capi::given(function, divided, "divided");
    to = made(*mesh, of.unflatten(called, shape));
  });
}

weft_status weft_mesh_root(const weft_mesh* mesh, weft_mesh** root, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const DeviceMesh& of = capi::mesh_of(function, mesh, "mesh");
    weft_mesh*& to = capi::given(function, root, "root");
    to = made(*mesh, of.root());
  });
}

weft_status weft_mesh_equal(const weft_mesh* a, const weft_mesh* b, bool* equal, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const DeviceMesh &first = capi::mesh_of(function, a, "a"), &second = capi::mesh_of(function, b, "b");
    capi::given(function, equal, "equal") = first == second;
  });
}

weft_status weft_mesh_size(const weft_mesh* mesh, int32_t* size, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const DeviceMesh& of = capi::mesh_of(function, mesh, "mesh");
    capi::given(function, size, "size") = of.size();
  });
}

weft_status weft_mesh_rank(const weft_mesh* mesh, int32_t* rank, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const DeviceMesh& of = capi::mesh_of(function, mesh, "mesh");
    capi::given(function, rank, "rank") = of.rank();
  });
}

weft_status weft_mesh_axis_count(const weft_mesh* mesh, int32_t* count, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const DeviceMesh& of = capi::mesh_of(function, mesh, "mesh");
    capi::given(function, count, "count") = of.shape().axis_count();
  });
}

weft_status weft_mesh_get_axis(const weft_mesh* mesh, int32_t index, weft_mesh_axis* axis,
                               weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const DeviceMesh& of = capi::mesh_of(function, mesh, "mesh");
    weft_mesh_axis& to = capi::given(function, axis, "axis");
    to = {of.shape().name(index).c_str(), of.shape().size(index)};
  });
}

weft_status weft_mesh_find_axis(const weft_mesh* mesh, const char* axis, int32_t* index, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const DeviceMesh& of = capi::mesh_of(function, mesh, "mesh");
    const char* const called = capi::text_of(function, axis, "axis");
    capi::given(function, index, "index") = of.has(called) ? of.shape().index(called) : -1;
  });
}

weft_status weft_mesh_coordinate(const weft_mesh* mesh, const char* axis, int32_t* coordinate,
                                 weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const DeviceMesh& of = capi::mesh_of(function, mesh, "mesh");
    const char* const called = capi::text_of(function, axis, "axis");
    capi::given(function, coordinate, "coordinate") = of.coordinate(called);
  });
}

weft_status weft_mesh_coordinates(const weft_mesh* mesh, int32_t rank, int32_t* coordinates,
                                  int32_t axis_count, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const DeviceMesh& of = capi::mesh_of(function, mesh, "mesh");
    const std::vector<int> at = of.shape().coordinates(rank);
    if (axis_count != of.shape().axis_count())
      capi::refuse(ErrorCode::bad_argument, function,
                   fmt::format("axis_count is {}; expected {}, the number of axes", axis_count,
                               of.shape().axis_count()));
    std::copy(at.begin(), at.end(), &capi::given(function, coordinates, "coordinates"));
  });
}

weft_status weft_mesh_rank_at(const weft_mesh* mesh, const int32_t* coordinates, int32_t axis_count,
                              int32_t* rank, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const DeviceMesh& of = capi::mesh_of(function, mesh, "mesh");
    const std::span<const int> at =
        capi::list_of(function, coordinates, axis_count, "coordinates", "axis_count");
    capi::given(function, rank, "rank") = of.shape().rank(at);
  });
}

weft_status weft_mesh_ranks(const weft_mesh* mesh, int32_t* ranks, int32_t room, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const DeviceMesh& of = capi::mesh_of(function, mesh, "mesh");
    const std::vector<int> all = of.ranks();
    std::copy(all.begin(), all.end(), capi::room_for(function, ranks, room, of.size(), "ranks"));
  });
}

weft_status weft_mesh_group(const weft_mesh* mesh, weft_group** group, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const DeviceMesh& of = capi::mesh_of(function, mesh, "mesh");
    weft_group*& to = capi::given(function, group, "group");
    weft::ProcessGroup& along = of.group();
    to = new weft_group{std::make_shared<capi::GroupHandle>(mesh->owner.context,
                                                            std::make_shared<const weft_mesh>(*mesh), along)};
  });
}
