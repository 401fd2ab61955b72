// Numbers of eight bits in C: each function makes views of its arguments and calls the function of
// weft/nn/float8.hpp.
#include "weft/nn/float8.hpp"

#include "capi_train/matrices.hpp"
#include "weft/nn/frame.hpp"

namespace capi = weft::capi;

namespace {

weft::float8::Granularity granularity_of(const char* function, weft_float8_granularity granularity) {
  using weft::float8::Granularity;
  switch (granularity) {
    case WEFT_SCALE_OF_TENSOR: return Granularity::tensorwise;
    case WEFT_SCALE_OF_ROWS: return Granularity::rowwise;
    case WEFT_SCALE_OF_COLUMNS: return Granularity::columnwise;
  }
  capi::refuse(
      weft::ErrorCode::bad_argument, function,
      fmt::format("granularity is {}; expected 0 (WEFT_SCALE_OF_TENSOR) to 2 (WEFT_SCALE_OF_COLUMNS)",
                  granularity));
}

// `numbers` as f32, one for each group of x.
float* groups_of(const char* function, const weft_buffer* numbers, const char* which,
                 const weft::TensorView& x, weft::float8::Granularity granularity) {
  const weft::TensorView v = capi::vector(function, numbers, which);
  const std::int64_t expected = weft::float8::scale_count(x.shape, granularity);
  if (v.dtype != weft::DType::f32 || v.device != weft::Device{} || v.count() != expected)
    capi::refuse(weft::ErrorCode::bad_argument, function,
                 fmt::format("{} has {} elements of {} on {}; expected {} of f32 on the CPU", which,
                             v.count(), name(v.dtype), to_string(v.device), expected));
  return reinterpret_cast<float*>(v.data);
}

weft::kernels::KernelContext& kernels_of(const char* function, const weft_compute* compute) {
  return weft::kernels_of(capi::compute_of(function, compute));
}

}  // namespace

weft_status weft_float8_amax(weft_compute* compute, const weft_matrix* x, weft_float8_granularity granularity,
                             const weft_buffer* amax, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft::kernels::KernelContext& ctx = kernels_of(function, compute);
    const weft::TensorView of_x = capi::matrix(function, x, "x");
    const weft::float8::Granularity by = granularity_of(function, granularity);
    weft::float8::amax(ctx, of_x, by, groups_of(function, amax, "amax", of_x, by));
  });
}

weft_status weft_float8_scale(float amax, weft_dtype format, bool power_of_two, float* scale,
                              weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    float& to = capi::given(function, scale, "scale");
    to = weft::float8::scale_of(amax, capi::dtype_of(function, format, "format"), power_of_two);
  });
}

weft_status weft_float8_quantise(weft_compute* compute, const weft_matrix* x,
                                 weft_float8_granularity granularity, const weft_buffer* scales,
                                 const weft_matrix* codes, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft::kernels::KernelContext& ctx = kernels_of(function, compute);
    const weft::TensorView of_x = capi::matrix(function, x, "x"),
                           of_codes = capi::matrix(function, codes, "codes");
    const weft::float8::Granularity by = granularity_of(function, granularity);
    weft::float8::quantise(ctx, of_x, by, groups_of(function, scales, "scales", of_x, by), of_codes);
  });
}

weft_status weft_float8_widen(weft_compute* compute, const weft_matrix* codes, const weft_matrix* values,
                              weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft::kernels::KernelContext& ctx = kernels_of(function, compute);
    weft::float8::widen(ctx, capi::matrix(function, codes, "codes"),
                        capi::matrix(function, values, "values"));
  });
}
