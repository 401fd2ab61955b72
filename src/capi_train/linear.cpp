// Column and row layers in C: each function makes views of its arguments and calls the function of
// weft/tp/linear.hpp.
#include "weft/tp/linear.hpp"

#include "capi_train/matrices.hpp"

namespace weft::capi {
namespace {

constexpr std::size_t kLinearOptionsFirstBytes = 16;
static_assert(sizeof(weft_linear_options) == kLinearOptionsFirstBytes);

// The dimension of the sequence in the tensor that tokens() makes of a matrix.
constexpr int kSequenceDim = 1;

struct How {
  bool gather_output = false;
  bool divided = false;
  std::int64_t batch = 1;
  int sequence_dim() const { return divided ? kSequenceDim : -1; }
};

How how_of(const char* function, const weft_linear_options* options, bool column) {
  const weft_linear_options o = read(function, options, weft_linear_options WEFT_LINEAR_OPTIONS_INIT,
                                     kLinearOptionsFirstBytes, "WEFT_LINEAR_OPTIONS_INIT");
  if (!column) expect_no_gather(function, o.gather_output);
  if (o.batch < 1)
    refuse(ErrorCode::bad_argument, function,
           fmt::format("options->batch is {}; expected 1 or more", o.batch));
  return {o.gather_output, o.divide_sequence, o.batch};
}

// A matrix of tokens as a view: (rows, columns), or (batch, positions, columns) if the sequence is divided.
TensorView tokens(const char* function, const weft_matrix* m, const char* which, const How& how) {
  const TensorView v = matrix(function, m, which);
  if (!how.divided) return v;
  if (v.shape[0] % how.batch != 0)
    refuse(ErrorCode::bad_argument, function,
           fmt::format("{}->rows is {}; expected a multiple of options->batch, which is {}", which,
                       v.shape[0], how.batch));
  const Shape shape{how.batch, v.shape[0] / how.batch, v.shape[1]};
  return {v.data, v.dtype, v.device, shape, row_major(shape)};
}
TensorView tokens_or_none(const char* function, const weft_matrix* m, const char* which, const How& how) {
  return m == nullptr ? TensorView{} : tokens(function, m, which, how);
}

weft_matrix matrix_from(const char* function, const weft_dl_tensor& t) {
  const weft_buffer b = dl_buffer_of(function, t);
  if (t.ndim == 0)
    refuse(ErrorCode::bad_argument, function, "the tensor has no dimension; expected 1 or more");
  // If a dtype has several lanes, each lane is an element: lanes are the innermost dimension.
  std::int64_t rows = 1, columns = t.dtype.lanes;
  bool fits = !__builtin_mul_overflow(columns, t.shape[t.ndim - 1], &columns);
  for (int d = 0; d + 1 < t.ndim; ++d) fits = !__builtin_mul_overflow(rows, t.shape[d], &rows) && fits;
  if (!fits)  // it has no elements
    refuse(ErrorCode::bad_argument, function, "the tensor's rows or columns do not fit 64 bits");
  return {b.data, rows, columns, b.dtype, b.device};
}

// The arguments of a backward function.
struct LinearBackward {
  LinearBackward(const char* function, const How& how, const weft_matrix* dy_in, const weft_matrix* x_in,
                 const weft_matrix* w_in, const weft_matrix* dx, const weft_matrix* dw, const weft_buffer* db,
                 bool accumulate)
      : dy(tokens(function, dy_in, "dy", how)),
        x(tokens(function, x_in, "x", how)),
        w(matrix(function, w_in, "w")),
        gradients{tokens_or_none(function, dx, "dx", how), matrix_or_none(function, dw, "dw"),
                  vector_or_none(function, db, "db"), accumulate} {}
  ConstTensorView dy, x, w;
  LinearGradients gradients;
};

}  // namespace
}  // namespace weft::capi

namespace capi = weft::capi;

weft_status weft_matrix_from_dltensor(const void* tensor, weft_matrix* matrix, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_dl_tensor& t = capi::dl_tensor_of(function, tensor, "tensor");
    capi::given(function, matrix, "matrix") = capi::matrix_from(function, t);
  });
}

weft_status weft_matrix_from_dlpack(const DLManagedTensor* managed, weft_matrix* matrix, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_dl_tensor& t = capi::dl_tensor_of(function, managed, "managed");
    capi::given(function, matrix, "matrix") = capi::matrix_from(function, t);
  });
}

weft_status weft_matrix_from_dlpack_versioned(const DLManagedTensorVersioned* managed, bool writes,
                                              weft_matrix* matrix, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_dl_tensor& t = capi::dl_tensor_of(function, managed, writes, "managed");
    capi::given(function, matrix, "matrix") = capi::matrix_from(function, t);
  });
}

weft_status weft_column_linear_forward(weft_compute* compute, weft_group* group, const weft_matrix* x,
                                       const weft_matrix* w, const weft_buffer* b, const weft_matrix* y,
                                       const weft_linear_options* options, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft::Compute& with = capi::compute_of(function, compute);
    const capi::How how = capi::how_of(function, options, true);
    const weft::TensorView of_x = capi::tokens(function, x, "x", how), of_w = capi::matrix(function, w, "w"),
                           of_b = capi::vector_or_none(function, b, "b"),
                           of_y = capi::tokens(function, y, "y", how);
    weft::column_linear_forward(with, capi::axes_of(function, with, group), of_x, of_w, of_b, of_y,
                                {how.gather_output, how.sequence_dim()});
  });
}

weft_status weft_column_linear_backward(weft_compute* compute, weft_group* group, const weft_matrix* dy,
                                        const weft_matrix* x, const weft_matrix* w, const weft_matrix* dx,
                                        const weft_matrix* dw, const weft_buffer* db, bool accumulate,
                                        const weft_linear_options* options, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft::Compute& with = capi::compute_of(function, compute);
    const capi::How how = capi::how_of(function, options, true);
    const capi::LinearBackward a(function, how, dy, x, w, dx, dw, db, accumulate);
    weft::column_linear_backward(with, capi::axes_of(function, with, group), a.dy, a.x, a.w, a.gradients,
                                 {how.gather_output, how.sequence_dim()});
  });
}

weft_status weft_row_linear_forward(weft_compute* compute, weft_group* group, const weft_matrix* x,
                                    const weft_matrix* w, const weft_buffer* b, const weft_matrix* y,
                                    const weft_linear_options* options, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft::Compute& with = capi::compute_of(function, compute);
    const capi::How how = capi::how_of(function, options, false);
    const weft::TensorView of_x = capi::tokens(function, x, "x", how), of_w = capi::matrix(function, w, "w"),
                           of_b = capi::vector_or_none(function, b, "b"),
                           of_y = capi::tokens(function, y, "y", how);
    weft::row_linear_forward(with, capi::axes_of(function, with, group), of_x, of_w, of_b, of_y,
                             {how.sequence_dim()});
  });
}

weft_status weft_row_linear_backward(weft_compute* compute, weft_group* group, const weft_matrix* dy,
                                     const weft_matrix* x, const weft_matrix* w, const weft_matrix* dx,
                                     const weft_matrix* dw, const weft_buffer* db, bool accumulate,
                                     const weft_linear_options* options, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft::Compute& with = capi::compute_of(function, compute);
    const capi::How how = capi::how_of(function, options, false);
    const capi::LinearBackward a(function, how, dy, x, w, dx, dw, db, accumulate);
    weft::row_linear_backward(with, capi::axes_of(function, with, group), a.dy, a.x, a.w, a.gradients,
                              {how.sequence_dim()});
  });
}
