/* Numbers of eight bits on the caller's memory: scales, casts that saturate, and the casts back, with the
 * bits of torchao. The functions of weft/nn/float8.hpp; docs/float8.md. They run on the CPU. */
#ifndef WEFT_C_TRAIN_FLOAT8_H
#define WEFT_C_TRAIN_FLOAT8_H

#include "weft/c_train/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Which elements of a matrix share a scale. */
typedef int32_t weft_float8_granularity;
enum {
  WEFT_SCALE_OF_TENSOR = 0,  /* all: one scale */
  WEFT_SCALE_OF_ROWS = 1,    /* those of a row: a scale for each row */
  WEFT_SCALE_OF_COLUMNS = 2, /* those of a column: a scale for each column */
};

/* Rules for all functions of this header: `x` is WEFT_F32 or WEFT_BF16; codes are WEFT_F8E4M3 or WEFT_F8E5M2;
 * `amax` and `scales` are WEFT_F32, with one element for each group of elements that share a scale. They fail
 * with WEFT_BAD_ARGUMENT, before they write anything, if sizes or dtypes do not fit; the text names the
 * argument.
 *
 * Writes the largest magnitude of each group. A NaN in a group gives a NaN; an empty group gives 0. For a
 * matrix that is cut over ranks take the largest of all parts (WEFT_MAX) before weft_float8_scale. */
weft_status weft_float8_amax(weft_compute* compute, const weft_matrix* x, weft_float8_granularity granularity,
                             const weft_buffer* amax, weft_error* error);
/* *scale = the factor that brings a tensor with the largest magnitude `amax` into the range of `format`: its
 * largest value (448, 57344) / max(amax, 1e-12), divided in f64 and rounded to f32; with `power_of_two` the
 * power of two below. */
weft_status weft_float8_scale(float amax, weft_dtype format, bool power_of_two, float* scale,
                              weft_error* error);
/* codes = x * scale, rounded to nearest, ties to even; the product is rounded to f32 first. Values beyond the
 * largest finite value become that value. codes: of the size of x. */
weft_status weft_float8_quantise(weft_compute* compute, const weft_matrix* x,
                                 weft_float8_granularity granularity, const weft_buffer* scales,
                                 const weft_matrix* codes, weft_error* error);
/* The values of codes, exactly; divide by the scales to come back to x. values: WEFT_F32 or WEFT_BF16, of the
 * size of codes. */
weft_status weft_float8_widen(weft_compute* compute, const weft_matrix* codes, const weft_matrix* values,
                              weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_TRAIN_FLOAT8_H */
