// Matrices and vectors of weft_train.h as views; throws what is wrong with them. Inside capi_train.
#pragma once

#include <fmt/format.h>

#include <utility>

#include "capi/values.hpp"
#include "capi_train/handles.hpp"
#include "weft/base/view.hpp"
#include "weft/mesh/mesh.hpp"

namespace weft::capi {

static_assert(sizeof(weft_matrix) == 32);  // has no struct_size: it stays as it is

inline TensorView view_of(const Buffer& b, const Shape& shape) {
  return {static_cast<std::byte*>(b.data), b.dtype, b.device, shape, row_major(shape)};
}

inline TensorView matrix(const char* function, const weft_matrix* m, const char* which) {
  const weft_matrix& from = given(function, m, which);
  const weft_buffer elements = {from.data, 0, from.dtype, from.device};
  const Buffer b = buffer_of(function, &elements, which);
  for (const auto& [field, value] : {std::pair{"rows", from.rows}, std::pair{"columns", from.columns}})
    if (value < 0)
      refuse(ErrorCode::bad_argument, function,
             fmt::format("{}->{} is {}; expected 0 or more", which, field, value));
  std::int64_t bytes = size_bytes(b.dtype);
  if (from.columns != 0 && (__builtin_mul_overflow(bytes, from.rows, &bytes) ||
                            __builtin_mul_overflow(bytes, from.columns, &bytes)))
    refuse(ErrorCode::bad_argument, function,
           fmt::format("{} is {} x {}; its bytes do not fit 64 bits", which, from.rows, from.columns));
  TensorView view = view_of(b, {from.rows, from.columns});
  if (view.data == nullptr && view.count() != 0)
    refuse(ErrorCode::bad_argument, function,
           fmt::format("{}->data is NULL; expected {} x {} elements", which, from.rows, from.columns));
  return view;
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

/// The ranks of `group`, which the mesh borrows; null: this one alone.
inline DeviceMesh axes_of(const char* function, Compute& compute, weft_group* group) {
  if (group == nullptr) return DeviceMesh::arithmetic(compute.context(), MeshShape{{"tp", 1}}, 0);
  ProcessGroup& g = given(function, group, "group").handle->group;
  return DeviceMesh(g, MeshShape{{"tp", g.size()}});
}

}  // namespace weft::capi
