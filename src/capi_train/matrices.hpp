// Converts matrices, maps and vectors of weft_train.h to views; throws an error that says what is wrong with
// them. Included only inside capi_train.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <initializer_list>
#include <utility>
#include <vector>

#include "capi/values.hpp"
#include "capi_train/handles.hpp"
#include "weft/base/view.hpp"
#include "weft/mesh/mesh.hpp"

namespace weft::capi {

static_assert(sizeof(weft_matrix) == 32);  // has no struct_size: it stays as it is

inline TensorView view_of(const Buffer& b, const Shape& shape) {
  return {static_cast<std::byte*>(b.data), b.dtype, b.device, shape, row_major(shape)};
}

/// The data at a pointer, row-major, with the extents in these fields of `which`. `of`: the buffer with the
/// data, dtype and device.
inline TensorView elements(const char* function, const char* which, const weft_buffer& of,
                           std::initializer_list<std::pair<const char*, std::int64_t>> extents) {
  const Buffer b = buffer_of(function, &of, which);
  std::vector<std::int64_t> shape;
  for (const auto& [field, value] : extents) {
    if (value < 0)
      refuse(ErrorCode::bad_argument, function,
             fmt::format("{}->{} is {}; expected 0 or more", which, field, value));
    shape.push_back(value);
  }
  std::int64_t bytes = size_bytes(b.dtype);
  const bool none = std::find(shape.begin(), shape.end(), 0) != shape.end();
  for (const std::int64_t extent : shape)
    if (!none && __builtin_mul_overflow(bytes, extent, &bytes))
      refuse(ErrorCode::bad_argument, function,
             fmt::format("{} is {}; its bytes do not fit 64 bits", which, fmt::join(shape, " x ")));
  if (b.data == nullptr && !none)
    refuse(ErrorCode::bad_argument, function,
           fmt::format("{}->data is NULL; expected {} elements", which, fmt::join(shape, " x ")));
  return view_of(b, Shape(shape));
}

inline TensorView matrix(const char* function, const weft_matrix* m, const char* which) {
  const weft_matrix& from = given(function, m, which);
  return elements(function, which, {from.data, 0, from.dtype, from.device},
                  {{"rows", from.rows}, {"columns", from.columns}});
}

/// A row layer has no output to gather.
inline void expect_no_gather(const char* function, bool gather_output) {
  if (gather_output)
    refuse(ErrorCode::bad_argument, function,
           "options->gather_output is set; a row layer has its whole output already");
}

inline TensorView vector(const char* function, const weft_buffer* v, const char* which) {
  const Buffer b = buffer_of(function, v, which);
  if (b.data == nullptr && b.count != 0)
    refuse(ErrorCode::bad_argument, function,
           fmt::format("{}->data is NULL; expected {} elements", which, b.count));
  return view_of(b, {b.count});
}

inline TensorView matrix_or_none(const char* function, const weft_matrix* m, const char* which) {
  return m == nullptr ? TensorView{} : matrix(function, m, which);
}
inline TensorView vector_or_none(const char* function, const weft_buffer* v, const char* which) {
  return v == nullptr ? TensorView{} : vector(function, v, which);
}

/// The ranks of `group`, which the mesh borrows; null: this rank alone.
inline DeviceMesh axes_of(const char* function, Compute& compute, weft_group* group) {
  if (group == nullptr) return DeviceMesh::arithmetic(compute.context(), MeshShape{{"tp", 1}}, 0);
  ProcessGroup& g = given(function, group, "group").handle->group;
  return DeviceMesh(g, MeshShape{{"tp", g.size()}});
}

}  // namespace weft::capi
