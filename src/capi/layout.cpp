// Layouts in C, and tensors of the caller's as views with layouts. Any thread.
#include "capi/mesh_handles.hpp"

#include <algorithm>
#include <cstring>

using weft::DeviceMesh;
using weft::ErrorCode;
using weft::LayoutRef;
using weft::Placement;
namespace capi = weft::capi;

static_assert(weft::Dims::kMaxDims == WEFT_MAX_DIMS);
static_assert(sizeof(weft_placement) == 12);  // have no struct_size: they stay as they are
static_assert(sizeof(weft_axis_placement) == 24);
static_assert(sizeof(weft_tensor) == 56);

namespace weft::capi {

const LayoutRef& layout_of(const char* function, const weft_layout* layout, const char* which) {
  return given(function, layout, which).layout;
}

static void check_dim_count(const char* function, std::int32_t dim_count) {
  if (dim_count < 0 || dim_count > WEFT_MAX_DIMS)
    refuse(ErrorCode::bad_argument, function,
           fmt::format("dim_count is {}; expected 0 to {}", dim_count, WEFT_MAX_DIMS));
}

Shape shape_of(const char* function, const std::int64_t* extents, std::int32_t dim_count, const char* what) {
  check_dim_count(function, dim_count);
  return Shape(std::span<const std::int64_t>(list_of(function, extents, dim_count, what, "dim_count")));
}

// Returns whether tensors of this shape have `count` elements.
static bool has_as_many(const Shape& shape, std::int64_t count) {
  std::int64_t product = 1;
  for (const std::int64_t extent : shape)
    if (extent < 0 || __builtin_mul_overflow(product, extent, &product)) return false;
  return product == count;
}

Placement placement_of(const char* function, const weft_placement& placement, const std::string& which) {
  const auto wrong = [&](const char* field, std::int32_t value, const char* expected) {
    refuse(ErrorCode::bad_argument, function,
           fmt::format("{}{} is {}; expected {}", which, field, value, expected));
  };
  switch (placement.kind) {
    case WEFT_REPLICATE: return Replicate{};
    case WEFT_SHARD: return Shard{placement.dim};
    case WEFT_PARTIAL: break;
    default: wrong("kind", placement.kind, "0 (WEFT_REPLICATE), 1 (WEFT_SHARD) or 2 (WEFT_PARTIAL)");
  }
  if (placement.op < WEFT_SUM || placement.op > WEFT_LOGICAL_XOR || placement.op == WEFT_PREMUL_SUM)
    wrong("op", placement.op, "0 (WEFT_SUM) to 11 (WEFT_LOGICAL_XOR), and not WEFT_PREMUL_SUM");
  ReduceOp op;
  op.kind = static_cast<ReduceOp::Kind>(placement.op);
  return Partial{op};
}

TensorView view_of(const Buffer& buffer, const Shape& shape) {
  const Shape has = has_as_many(shape, buffer.count) ? shape : Dims::line(buffer.count);
  return {buffer.data, buffer.dtype, buffer.device, has, row_major(has)};
}

std::vector<MutableNamedView> tensors_of(const char* function, const weft_tensor* tensors, std::int32_t count,
                                         const char* which) {
  std::vector<MutableNamedView> list;
  list.reserve(static_cast<std::size_t>(std::max(count, 0)));
  for (const weft_tensor& t : list_of(function, tensors, count, which, "count")) {
    const std::string entry = fmt::format("{}[{}]", which, list.size());
    const char* const name = text_of(function, t.name, (entry + ".name").c_str());
    const Buffer data = buffer_of(function, t.data, (entry + ".data").c_str());
    const LayoutRef layout =
        t.layout == nullptr ? nullptr : layout_of(function, t.layout, (entry + ".layout").c_str());
    Shape shape = layout != nullptr ? layout->local_shape() : Dims::line(data.count);
    if (t.extents != nullptr) {
      shape = shape_of(function, t.extents, t.dim_count, (entry + ".extents").c_str());
      if (layout == nullptr &&
          !has_as_many(shape, data.count))  // with a layout the function says it, on all ranks
        refuse(ErrorCode::bad_argument, function,
               fmt::format("{}.extents are {}; {}.data has {} elements", entry, to_string(shape), entry,
                           data.count));
    } else if (t.dim_count != 0) {
      refuse(ErrorCode::bad_argument, function,
             fmt::format("{}.extents is NULL, and dim_count is {}; expected 0", entry, t.dim_count));
    }
    list.push_back({name, view_of(data, shape), layout});
  }
  return list;
}

}  // namespace weft::capi

namespace {

weft_layout* made(const weft_layout& of, LayoutRef layout) {
  return new weft_layout{of.owner, std::move(layout)};
}

weft_placement in_c(const Placement& placement) {
  if (const auto* shard = std::get_if<weft::Shard>(&placement)) return weft_shard(shard->dim);
  if (const auto* partial = std::get_if<weft::Partial>(&placement))
    return weft_partial(static_cast<weft_reduce_op>(partial->op.kind));
  return weft_replicate();
}

int this_or(const weft::Layout& layout, int32_t rank) { return rank == -1 ? layout.mesh().rank() : rank; }

}  // namespace

weft_status weft_layout_create(const weft_mesh* mesh, const weft_axis_placement* placements,
                               int32_t placement_count, const int64_t* extents, int32_t dim_count,
                               weft_layout** layout, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const DeviceMesh root = capi::mesh_of(function, mesh, "mesh").root();
    weft::Placements all(static_cast<std::size_t>(root.shape().axis_count()));
    std::vector<bool> stated(all.size());
    int index = 0;
    for (const weft_axis_placement& p :
         capi::list_of(function, placements, placement_count, "placements", "placement_count")) {
      const std::string entry = fmt::format("placements[{}]", index++);
      const char* const axis = capi::text_of(function, p.axis, (entry + ".axis").c_str());
      const auto at = static_cast<std::size_t>(root.shape().index(axis));
      if (stated[at])
        capi::refuse(ErrorCode::bad_argument, function,
                     fmt::format("{}.axis is \"{}\", which is in the list already", entry, axis));
      stated[at] = true;
      all[at] = capi::placement_of(function, p.placement, entry + ".placement.");
    }
    const weft::Shape global = capi::shape_of(function, extents, dim_count, "extents");
    weft_layout*& to = capi::given(function, layout, "layout");
    to = new weft_layout{mesh->owner, weft::make_layout(root, std::move(all), global)};
  });
}

void weft_layout_destroy(weft_layout* layout) { capi::destroy(__func__, layout, "layout"); }

weft_status weft_layout_with(const weft_layout* layout, const weft_mesh* axes,
                             const weft_placement* placement, weft_layout** changed, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const LayoutRef& of = capi::layout_of(function, layout, "layout");
    const DeviceMesh& on = capi::mesh_of(function, axes, "axes");
    const Placement goal =
        capi::placement_of(function, capi::given(function, placement, "placement"), "placement->");
    weft_layout*& to = capi::given(function, changed, "changed");
    to = made(*layout, of->with(on, goal));
  });
}

weft_status weft_layout_with_extents(const weft_layout* layout, const int64_t* extents, int32_t dim_count,
                                     weft_layout** changed, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const LayoutRef& of = capi::layout_of(function, layout, "layout");
    const weft::Shape global = capi::shape_of(function, extents, dim_count, "extents");
    weft_layout*& to = capi::given(function, changed, "changed");
    to = made(*layout, of->with_global(global));
  });
}

weft_status weft_layout_shard_inside(const weft_layout* layout, const weft_mesh* axes, int32_t dim,
                                     weft_layout** changed, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const LayoutRef& of = capi::layout_of(function, layout, "layout");
    const DeviceMesh& on = capi::mesh_of(function, axes, "axes");
    weft_layout*& to = capi::given(function, changed, "changed");
    to = made(*layout, of->shard_inside(on, dim));
  });
}

weft_status weft_layout_nested(const weft_layout* layout, const char* const* axes, int32_t axis_count,
                               weft_layout** changed, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const LayoutRef& of = capi::layout_of(function, layout, "layout");
    const std::vector<std::string_view> order =
        capi::names_of(function, axes, axis_count, "axes", "axis_count");
    weft_layout*& to = capi::given(function, changed, "changed");
    to = made(*layout, of->nested(order));
  });
}

weft_status weft_layout_segmented(const weft_layout* layout, int32_t dim, const int64_t* lengths,
                                  int32_t segment_count, weft_layout** changed, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const LayoutRef& of = capi::layout_of(function, layout, "layout");
    const std::span<const std::int64_t> all =
        capi::list_of(function, lengths, segment_count, "lengths", "segment_count");
    weft_layout*& to = capi::given(function, changed, "changed");
    to = made(*layout, of->segmented(dim, {all.begin(), all.end()}));
  });
}

weft_status weft_layout_reshape(const weft_layout* layout, const int64_t* extents, int32_t dim_count,
                                weft_layout** changed, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const LayoutRef& of = capi::layout_of(function, layout, "layout");
    const weft::Shape global = capi::shape_of(function, extents, dim_count, "extents");
    weft_layout*& to = capi::given(function, changed, "changed");
    to = made(*layout, of->reshaped(global));
  });
}

weft_status weft_layout_transpose(const weft_layout* layout, const int32_t* order, int32_t dim_count,
                                  weft_layout** changed, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const LayoutRef& of = capi::layout_of(function, layout, "layout");
    capi::check_dim_count(function, dim_count);
    weft::Dims all;
    for (const std::int32_t dim : capi::list_of(function, order, dim_count, "order", "dim_count"))
      all.push_back(dim);
    weft_layout*& to = capi::given(function, changed, "changed");
    to = made(*layout, of->transposed(all));
  });
}

weft_status weft_layout_reduced(const weft_layout* layout, const weft_mesh* axes, weft_layout** reduced,
                                weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    LayoutRef now = capi::layout_of(function, layout, "layout");
    for (const DeviceMesh& axis : capi::mesh_of(function, axes, "axes").each_axis())
      if (weft::is_partial(now->on(axis))) now = now->with(axis, weft::Replicate{});
    weft_layout*& to = capi::given(function, reduced, "reduced");
    to = made(*layout, std::move(now));
  });
}

weft_status weft_layout_mesh(const weft_layout* layout, weft_mesh** mesh, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const LayoutRef& of = capi::layout_of(function, layout, "layout");
    weft_mesh*& to = capi::given(function, mesh, "mesh");
    to = new weft_mesh{layout->owner, of->mesh()};
  });
}

weft_status weft_layout_on(const weft_layout* layout, const weft_mesh* axes, weft_placement* placement,
                           weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const LayoutRef& of = capi::layout_of(function, layout, "layout");
    const DeviceMesh& on = capi::mesh_of(function, axes, "axes");
    weft_placement& to = capi::given(function, placement, "placement");
    to = in_c(of->on(on));
  });
}

weft_status weft_layout_dim_count(const weft_layout* layout, int32_t* dim_count, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const LayoutRef& of = capi::layout_of(function, layout, "layout");
    capi::given(function, dim_count, "dim_count") = of->global.rank();
  });
}

weft_status weft_layout_extents(const weft_layout* layout, int64_t* extents, int32_t room,
                                weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft::Shape& global = capi::layout_of(function, layout, "layout")->global;
    std::copy(global.begin(), global.end(),
              capi::room_for(function, extents, room, global.rank(), "extents"));
  });
}

weft_status weft_layout_local_extents(const weft_layout* layout, int32_t rank, int64_t* extents, int32_t room,
                                      weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const LayoutRef& of = capi::layout_of(function, layout, "layout");
    const weft::Shape local = of->local_shape(this_or(*of, rank));
    std::copy(local.begin(), local.end(), capi::room_for(function, extents, room, local.rank(), "extents"));
  });
}

weft_status weft_layout_part_count(const weft_layout* layout, int32_t* count, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const LayoutRef& of = capi::layout_of(function, layout, "layout");
    capi::given(function, count, "count") = static_cast<int32_t>(of->parts().size());
  });
}

weft_status weft_layout_part(const weft_layout* layout, int32_t rank, int32_t index, int64_t* offsets,
                             int64_t* extents, int32_t room, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const LayoutRef& of = capi::layout_of(function, layout, "layout");
    const std::vector<weft::Box> parts = of->parts(this_or(*of, rank));
    if (index < 0 || static_cast<std::size_t>(index) >= parts.size())
      capi::refuse(ErrorCode::bad_argument, function,
                   fmt::format("index is {}; expected 0 to {}", index, parts.size() - 1));
    const weft::Box& box = parts[static_cast<std::size_t>(index)];
    const int dims = of->global.rank();
    int64_t* const at = capi::room_for(function, offsets, room, dims, "offsets");
    int64_t* const size = capi::room_for(function, extents, room, dims, "extents");
    std::copy(box.offset.begin(), box.offset.end(), at);
    std::copy(box.shape.begin(), box.shape.end(), size);
  });
}

weft_status weft_layout_equal(const weft_layout* a, const weft_layout* b, bool* equal, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const LayoutRef &first = capi::layout_of(function, a, "a"), &second = capi::layout_of(function, b, "b");
    capi::given(function, equal, "equal") = first == second;
  });
}

weft_status weft_layout_text(const weft_layout* layout, char* text, size_t room, size_t* bytes,
                             weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const std::string all = to_string(*capi::layout_of(function, layout, "layout"));
    if (room > 0) capi::given(function, text, "text");
    capi::given(function, bytes, "bytes") = all.size() + 1;
    if (room == 0) return;
    const std::size_t n = std::min(all.size(), room - 1);
    std::memcpy(text, all.data(), n);
    text[n] = '\0';
  });
}
