// Column and row layers in C: each makes views of its arguments and calls the function of weft/tp/linear.hpp.
#include "weft/tp/linear.hpp"

#include "capi/values.hpp"
#include "capi_train/handles.hpp"

namespace weft::capi {
namespace {

static_assert(sizeof(weft_matrix) == 32);  // has no struct_size: it stays as it is

TensorView view_of(const Buffer& b, const Shape& shape) {
  return {static_cast<std::byte*>(b.data), b.dtype, b.device, shape, row_major(shape)};
}

TensorView matrix(const char* function, const weft_matrix* m, const char* which) {
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

TensorView vector(const char* function, const weft_buffer* v, const char* which) {
  const Buffer b = buffer_of(function, v, which);
  if (b.data == nullptr && b.count != 0)
    refuse(ErrorCode::bad_argument, function,
           fmt::format("{}->data is NULL; expected {} elements", which, b.count));
  return view_of(b, {b.count});
}

TensorView matrix_or_none(const char* function, const weft_matrix* m, const char* which) {
  return m == nullptr ? TensorView{} : matrix(function, m, which);
}
TensorView vector_or_none(const char* function, const weft_buffer* v, const char* which) {
  return v == nullptr ? TensorView{} : vector(function, v, which);
}

// The ranks of `group`, which the mesh borrows; null: this one alone.
DeviceMesh axes_of(const char* function, Compute& compute, weft_group* group) {
  if (group == nullptr) return DeviceMesh::arithmetic(compute.context(), MeshShape{{"tp", 1}}, 0);
  ProcessGroup& g = given(function, group, "group").handle->group;
  return DeviceMesh(g, MeshShape{{"tp", g.size()}});
}

// The arguments of a backward function.
struct Backward {
  Backward(const char* function, const weft_matrix* dy_in, const weft_matrix* x_in, const weft_matrix* w_in,
           const weft_matrix* dx, const weft_matrix* dw, const weft_buffer* db, bool accumulate)
      : dy(matrix(function, dy_in, "dy")),
        x(matrix(function, x_in, "x")),
        w(matrix(function, w_in, "w")),
        gradients{matrix_or_none(function, dx, "dx"), matrix_or_none(function, dw, "dw"),
                  vector_or_none(function, db, "db"), accumulate} {}
  ConstTensorView dy, x, w;
  LinearGradients gradients;
};

}  // namespace
}  // namespace weft::capi

namespace capi = weft::capi;

weft_status weft_column_linear_forward(weft_compute* compute, const weft_matrix* x, const weft_matrix* w,
                                       const weft_buffer* b, const weft_matrix* y, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft::Compute& with = capi::compute_of(function, compute);
    weft::column_linear_forward(with, capi::matrix(function, x, "x"), capi::matrix(function, w, "w"),
                                capi::vector_or_none(function, b, "b"), capi::matrix(function, y, "y"));
  });
}

weft_status weft_column_linear_backward(weft_compute* compute, weft_group* group, const weft_matrix* dy,
                                        const weft_matrix* x, const weft_matrix* w, const weft_matrix* dx,
                                        const weft_matrix* dw, const weft_buffer* db, bool accumulate,
                                        weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft::Compute& with = capi::compute_of(function, compute);
    const capi::Backward a(function, dy, x, w, dx, dw, db, accumulate);
    weft::column_linear_backward(with, capi::axes_of(function, with, group), a.dy, a.x, a.w, a.gradients);
  });
}

weft_status weft_row_linear_forward(weft_compute* compute, weft_group* group, const weft_matrix* x,
                                    const weft_matrix* w, const weft_buffer* b, const weft_matrix* y,
                                    weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft::Compute& with = capi::compute_of(function, compute);
    const weft::TensorView of_x = capi::matrix(function, x, "x"), of_w = capi::matrix(function, w, "w"),
                           of_b = capi::vector_or_none(function, b, "b"),
                           of_y = capi::matrix(function, y, "y");
    weft::row_linear_forward(with, capi::axes_of(function, with, group), of_x, of_w, of_b, of_y);
  });
}

weft_status weft_row_linear_backward(weft_compute* compute, const weft_matrix* dy, const weft_matrix* x,
                                     const weft_matrix* w, const weft_matrix* dx, const weft_matrix* dw,
                                     const weft_buffer* db, bool accumulate, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft::Compute& with = capi::compute_of(function, compute);
    const capi::Backward a(function, dy, x, w, dx, dw, db, accumulate);
    weft::row_linear_backward(with, a.dy, a.x, a.w, a.gradients);
  });
}
