// Column and row convolutions in C: each function makes views of its arguments and calls the function of
// weft/tp/conv.hpp.
#include "weft/tp/conv.hpp"

#include "capi_train/matrices.hpp"

namespace weft::capi {
namespace {

constexpr std::size_t kConv2dOptionsFirstBytes = 12;
static_assert(sizeof(weft_conv2d_options) == kConv2dOptionsFirstBytes);
static_assert(sizeof(weft_maps) == 48);  // has no struct_size: it stays as it is

TensorView maps(const char* function, const weft_maps* m, const char* which) {
  const weft_maps& from = given(function, m, which);
  return elements(function, which, {from.data, 0, from.dtype, from.device},
                  {{"shape[0]", from.shape[0]},
                   {"shape[1]", from.shape[1]},
                   {"shape[2]", from.shape[2]},
                   {"shape[3]", from.shape[3]}});
}
TensorView maps_or_none(const char* function, const weft_maps* m, const char* which) {
  return m == nullptr ? TensorView{} : maps(function, m, which);
}

weft_maps maps_from(const char* function, const weft_dl_tensor& t) {
  const weft_buffer b = dl_buffer_of(function, t);
  if (t.ndim != 4)
    refuse(ErrorCode::bad_argument, function,
           fmt::format("the tensor has {} dimension{}; expected 4", t.ndim, t.ndim == 1 ? "" : "s"));
  weft_maps m = {b.data, {t.shape[0], t.shape[1], t.shape[2], t.shape[3]}, b.dtype, b.device};
  // If a dtype has several lanes, each lane is an element: lanes are the innermost dimension.
  if (__builtin_mul_overflow(m.shape[3], std::int64_t{t.dtype.lanes}, &m.shape[3]))  // it has no elements
    refuse(ErrorCode::bad_argument, function, "the tensor's width does not fit 64 bits");
  return m;
}

weft_conv2d_options how_of(const char* function, const weft_conv2d_options* options) {
  return read(function, options, weft_conv2d_options WEFT_CONV2D_OPTIONS_INIT, kConv2dOptionsFirstBytes,
              "WEFT_CONV2D_OPTIONS_INIT");
}
ColumnOptions column_options(const char* function, const weft_conv2d_options* options) {
  const weft_conv2d_options o = how_of(function, options);
  return {o.gather_output, o.sequence_dim};
}
RowOptions row_options(const char* function, const weft_conv2d_options* options) {
  const weft_conv2d_options o = how_of(function, options);
  expect_no_gather(function, o.gather_output);
  return {o.sequence_dim};
}

// The arguments of a forward function, and of a backward one.
struct Forward {
  Forward(const char* function, const weft_maps* x_in, const weft_maps* w_in, const weft_buffer* b_in,
          const weft_maps* y_in)
      : x(maps(function, x_in, "x")),
        w(maps(function, w_in, "w")),
        b(vector_or_none(function, b_in, "b")),
        y(maps(function, y_in, "y")) {}
  TensorView x, w, b, y;
};
struct Backward {
  Backward(const char* function, const weft_maps* dy_in, const weft_maps* x_in, const weft_maps* w_in,
           const weft_maps* dx, const weft_maps* dw, const weft_buffer* db, bool accumulate)
      : dy(maps(function, dy_in, "dy")),
        x(maps(function, x_in, "x")),
        w(maps(function, w_in, "w")),
        gradients{maps_or_none(function, dx, "dx"), maps_or_none(function, dw, "dw"),
                  vector_or_none(function, db, "db"), accumulate} {}
  TensorView dy, x, w;
  LinearGradients gradients;
};

}  // namespace
}  // namespace weft::capi

namespace capi = weft::capi;

weft_status weft_maps_from_dltensor(const void* tensor, weft_maps* maps, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_dl_tensor& t = capi::dl_tensor_of(function, tensor, "tensor");
    weft_maps& to = capi::given(function, maps, "maps");
    to = capi::maps_from(function, t);
  });
}

weft_status weft_maps_from_dlpack(const DLManagedTensor* managed, weft_maps* maps, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_dl_tensor& t = capi::dl_tensor_of(function, managed, "managed");
    weft_maps& to = capi::given(function, maps, "maps");
    to = capi::maps_from(function, t);
  });
}

weft_status weft_maps_from_dlpack_versioned(const DLManagedTensorVersioned* managed, bool writes,
                                            weft_maps* maps, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_dl_tensor& t = capi::dl_tensor_of(function, managed, writes, "managed");
    weft_maps& to = capi::given(function, maps, "maps");
    to = capi::maps_from(function, t);
  });
}

weft_status weft_column_conv2d_forward(weft_compute* compute, weft_group* group, const weft_maps* x,
                                       const weft_maps* w, const weft_buffer* b, const weft_maps* y,
                                       const weft_conv2d_options* options, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft::Compute& with = capi::compute_of(function, compute);
    const weft::ColumnOptions how = capi::column_options(function, options);
    const capi::Forward a(function, x, w, b, y);
    weft::column_conv2d_forward(with, capi::axes_of(function, with, group), a.x, a.w, a.b, a.y, how);
  });
}

weft_status weft_column_conv2d_backward(weft_compute* compute, weft_group* group, const weft_maps* dy,
                                        const weft_maps* x, const weft_maps* w, const weft_maps* dx,
                                        const weft_maps* dw, const weft_buffer* db, bool accumulate,
                                        const weft_conv2d_options* options, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft::Compute& with = capi::compute_of(function, compute);
    const weft::ColumnOptions how = capi::column_options(function, options);
    const capi::Backward a(function, dy, x, w, dx, dw, db, accumulate);
    weft::column_conv2d_backward(with, capi::axes_of(function, with, group), a.dy, a.x, a.w, a.gradients,
                                 how);
  });
}

weft_status weft_row_conv2d_forward(weft_compute* compute, weft_group* group, const weft_maps* x,
                                    const weft_maps* w, const weft_buffer* b, const weft_maps* y,
                                    const weft_conv2d_options* options, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft::Compute& with = capi::compute_of(function, compute);
    const weft::RowOptions how = capi::row_options(function, options);
    const capi::Forward a(function, x, w, b, y);
    weft::row_conv2d_forward(with, capi::axes_of(function, with, group), a.x, a.w, a.b, a.y, how);
  });
}

weft_status weft_row_conv2d_backward(weft_compute* compute, weft_group* group, const weft_maps* dy,
                                     const weft_maps* x, const weft_maps* w, const weft_maps* dx,
                                     const weft_maps* dw, const weft_buffer* db, bool accumulate,
                                     const weft_conv2d_options* options, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft::Compute& with = capi::compute_of(function, compute);
    const weft::RowOptions how = capi::row_options(function, options);
    const capi::Backward a(function, dy, x, w, dx, dw, db, accumulate);
    weft::row_conv2d_backward(with, capi::axes_of(function, with, group), a.dy, a.x, a.w, a.gradients, how);
  });
}
