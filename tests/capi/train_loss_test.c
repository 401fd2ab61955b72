/* Losses of elements from C, on plain arrays: the parts of the ranks add up to the result of plain loops over
 * all elements. */
#define _POSIX_C_SOURCE 200809L /* barriers of pthread */
#include <math.h>

#include "support.h"
#include "weft/weft_train.h"

enum { WHOLE = 11 };

static void losses(rank_args* a) {
  weft_group* group = join(a, "dp", 0);
  weft_compute* compute = NULL;
  float y[WHOLE], target[WHOLE], dy[WHOLE];
  int own = 0;
  double squares = 0, entropies = 0, loss = -1;
  weft_element_loss_options options = WEFT_ELEMENT_LOSS_OPTIONS_INIT;
  const weft_buffer of_loss = {&loss, 1, WEFT_F64, WEFT_CPU};
  OK(weft_compute_create(a->context, NULL, &compute, &error));
  for (int i = 0; i < WHOLE; ++i) {
    const double at = 0.5 * i - 2, to = (i % 3) / 2.0, p = 1 / (1 + exp(-at));
    squares += (at - to) * (at - to) / WHOLE;
    entropies -= (to * log(p) + (1 - to) * log(1 - p)) / WHOLE;
    if (i % a->size == a->rank) {
      y[own] = (float)at;
      target[own++] = (float)to;
    }
  }
  {
    const weft_buffer of_y = {y, own, WEFT_F32, WEFT_CPU}, of_target = {target, own, WEFT_F32, WEFT_CPU},
                      of_dy = {dy, own, WEFT_F32, WEFT_CPU};
    options.count = WHOLE;
    options.scale = 2;
    OK(weft_mean_squared_error(compute, &of_y, &of_target, &options, &of_dy, &loss, &error));
    OK(weft_all_reduce(group, &of_loss, &of_loss, NULL, NULL, &error));
    CHECK(fabs(loss - squares) < 1e-12);
    for (int i = 0; i < own; ++i) CHECK(fabs(dy[i] - 4 * (double)(y[i] - target[i]) / WHOLE) < 1e-6);
    OK(weft_binary_cross_entropy(compute, &of_y, &of_target, &options, NULL, &loss, &error));
    OK(weft_all_reduce(group, &of_loss, &of_loss, NULL, NULL, &error));
    CHECK(fabs(loss - entropies) < 1e-12);
    OK(weft_binary_cross_entropy(compute, &of_y, &of_target, &options, &of_y, &loss,
                                 &error)); /* dy in y's place */

    target[0] = 2;
    CHECK_ERROR(weft_binary_cross_entropy(compute, &of_y, &of_target, &options, &of_dy, &loss, &error),
                WEFT_BAD_ARGUMENT, "binary cross entropy: element 0 has target 2; expected 0 to 1");
    options.count = 0;
    CHECK_ERROR(
        weft_mean_squared_error(compute, &of_y, &of_target, &options, NULL, &loss, &error), WEFT_BAD_ARGUMENT,
        "mean_squared_error: count is 0; expected the number of elements of the whole batch, more than 0");
    CHECK_ERROR(weft_mean_squared_error(compute, NULL, &of_target, &options, NULL, &loss, &error),
                WEFT_BAD_ARGUMENT, "weft_mean_squared_error: y is NULL");
  }
  OK(weft_barrier(group, NULL, NULL, &error));
  weft_group_destroy(group);
  weft_compute_destroy(compute);
}

int main(void) {
  for (int size = 1; size <= MAX_RANKS; ++size) run_ranks(size, losses);
  return 0;
}
