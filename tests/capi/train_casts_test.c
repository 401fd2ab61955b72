/* Numbers of eight bits from C: codes and values that are easy to follow, and the largest magnitudes of a
 * matrix that is cut over ranks. */
#define _POSIX_C_SOURCE 200809L /* barriers of pthread */
#include <math.h>
#include <string.h>

#include "support.h"
#include "weft/weft_train.h"

static void cast_and_back(rank_args* a) {
  weft_group* group = join(a, "dp", 0);
  weft_compute* compute = NULL;
  /* Row 0: 448 is the largest value of e4m3; 17 is in the middle of 16 and 18, and 16 is even. */
  float x[6] = {448, 17, -0.0F, 3, -1.5F, 0}, values[6], amax[3], scales[3];
  uint8_t codes[6];
  const weft_matrix of_x = {x, 2, 3, WEFT_F32, WEFT_CPU}, of_values = {values, 2, 3, WEFT_F32, WEFT_CPU},
                    of_codes = {codes, 2, 3, WEFT_F8E4M3, WEFT_CPU},
                    of_short = {codes, 1, 3, WEFT_F8E4M3, WEFT_CPU},
                    of_integers = {values, 2, 3, WEFT_I32, WEFT_CPU};
  const weft_buffer by_tensor = {amax, 1, WEFT_F32, WEFT_CPU}, by_row = {amax, 2, WEFT_F32, WEFT_CPU},
                    by_column = {amax, 3, WEFT_F32, WEFT_CPU}, of_scales = {scales, 2, WEFT_F32, WEFT_CPU};
  OK(weft_compute_create(a->context, NULL, &compute, &error));
  OK(weft_float8_amax(compute, &of_x, WEFT_SCALE_OF_COLUMNS, &by_column, &error));
  CHECK(amax[0] == 448 && amax[1] == 17 && amax[2] == 0);
  OK(weft_float8_amax(compute, &of_x, WEFT_SCALE_OF_ROWS, &by_row, &error));
  CHECK(amax[0] == 448 && amax[1] == 3);
  for (int row = 0; row < 2; ++row) OK(weft_float8_scale(amax[row], WEFT_F8E4M3, true, &scales[row], &error));
  CHECK(scales[0] == 1 && scales[1] == 128);
  OK(weft_float8_scale(3, WEFT_F8E5M2, false, &scales[0], &error));
  CHECK(scales[0] == (float)(57344.0 / 3));
  scales[0] = 1;
  OK(weft_float8_quantise(compute, &of_x, WEFT_SCALE_OF_ROWS, &of_scales, &of_codes, &error));
  OK(weft_float8_widen(compute, &of_codes, &of_values, &error));
  CHECK(codes[0] == 0x7e && codes[2] == 0x80);
  CHECK(values[0] == 448 && values[1] == 16 && values[3] == 384 && values[4] == -192 && values[5] == 0);

  /* Each rank has a part. The largest magnitude of the whole is the largest of the parts. */
  for (int i = 0; i < 6; ++i) x[i] = (float)(a->rank == a->size - 1 ? -9 : a->rank);
  OK(weft_float8_amax(compute, &of_x, WEFT_SCALE_OF_TENSOR, &by_tensor, &error));
  {
    weft_call_options options = WEFT_CALL_OPTIONS_INIT;
    options.reduce_op = WEFT_MAX;
    OK(weft_all_reduce(group, &by_tensor, &by_tensor, &options, NULL, &error));
  }
  CHECK(amax[0] == 9);

  CHECK_ERROR(weft_float8_amax(compute, &of_x, 3, &by_tensor, &error), WEFT_BAD_ARGUMENT,
              "weft_float8_amax: granularity is 3; expected 0 (WEFT_SCALE_OF_TENSOR) to 2 "
              "(WEFT_SCALE_OF_COLUMNS)");
  CHECK_ERROR(weft_float8_amax(compute, &of_x, WEFT_SCALE_OF_ROWS, &by_column, &error), WEFT_BAD_ARGUMENT,
              "weft_float8_amax: amax has 3 elements of f32 on cpu; expected 2 of f32 on the CPU");
  CHECK_ERROR(weft_float8_amax(compute, &of_integers, WEFT_SCALE_OF_TENSOR, &by_tensor, &error),
              WEFT_BAD_ARGUMENT, "float8: x is i32; expected f32 or bf16");
  CHECK_ERROR(weft_float8_quantise(compute, &of_x, WEFT_SCALE_OF_COLUMNS, &of_scales, &of_codes, &error),
              WEFT_BAD_ARGUMENT,
              "weft_float8_quantise: scales has 2 elements of f32 on cpu; expected 3 of f32 on the CPU");
  CHECK_ERROR(weft_float8_quantise(compute, &of_x, WEFT_SCALE_OF_ROWS, &of_scales, &of_integers, &error),
              WEFT_BAD_ARGUMENT, "float8: the format is i32; expected f8e4m3 or f8e5m2");
  CHECK_ERROR(weft_float8_widen(compute, &of_codes, &of_integers, &error), WEFT_BAD_ARGUMENT,
              "float8: values are i32; expected bf16 or f32");
  CHECK_ERROR(weft_float8_quantise(compute, &of_x, WEFT_SCALE_OF_ROWS, &of_scales, &of_short, &error),
              WEFT_BAD_ARGUMENT, "float8: codes is (1, 3); expected (2, 3)");
  CHECK_ERROR(weft_float8_scale(1, WEFT_F32, false, &scales[0], &error), WEFT_BAD_ARGUMENT,
              "float8: the format is f32; expected f8e4m3 or f8e5m2");
  CHECK_ERROR(weft_float8_widen(compute, &of_values, &of_codes, &error), WEFT_BAD_ARGUMENT,
              "float8: the format is f32; expected f8e4m3 or f8e5m2");
  OK(weft_barrier(group, NULL, NULL, &error));
  weft_group_destroy(group);
  weft_compute_destroy(compute);
}

int main(void) {
  for (int size = 1; size <= MAX_RANKS; ++size) run_ranks(size, cast_and_back);
  return 0;
}
