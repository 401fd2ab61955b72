/* The gradients of a host framework's own buffers, in C, on dp x tp ranks: averaged over dp while backward
 * runs, reduced over tp, normed and clipped. weft owns none of the memory.
 *
 *   weft run -n 4 -- ./gradients_in_c */
#include <stdio.h>
#include <weft/weft.h>

enum { ROWS = 6, COLUMNS = 4, WEIGHT = 0, BIAS = 1, COUNT = 2, STEPS = 3 };

/* Ends main() with the error's text. */
#define TRY(call) \
  if ((call) != WEFT_OK) goto failed

int main(void) {
  weft_error error = WEFT_ERROR_INIT;
  weft_context* context = NULL;
  weft_group* group = NULL;
  weft_mesh *mesh = NULL, *dp = NULL, *tp = NULL;
  weft_layout *raw[COUNT] = {NULL, NULL}, *averaged[COUNT] = {NULL, NULL}, *reduced = NULL;
  weft_reducer* reducer = NULL;
  int32_t rank = 0, size = 0, d = 0, t = 0;
  const char *const dp_name = "dp", *const tp_name = "tp";

  TRY(weft_context_create(NULL, &context, &error));
  TRY(weft_group_from_env(context, NULL, &group, &error));
  TRY(weft_group_rank(group, &rank, &error));
  TRY(weft_group_size(group, &size, &error));
  const weft_mesh_axis axes[] = {{"dp", size % 2 == 0 ? 2 : 1}, {"tp", -1}};
  TRY(weft_mesh_create(group, axes, 2, &mesh, &error));
  TRY(weft_mesh_along(mesh, &dp_name, 1, &dp, &error));
  TRY(weft_mesh_along(mesh, &tp_name, 1, &tp, &error));
  TRY(weft_mesh_rank(dp, &d, &error));
  TRY(weft_mesh_rank(tp, &t, &error));

  /* The framework's tensors: a weight cut into rows over tp, and a bias that every tp rank holds whole and
   * uses for its own part of the work. Ranks along dp see different data, so all gradients are WEFT_PARTIAL
   * on dp. */
  float weight[ROWS * COLUMNS], bias[ROWS];
  const weft_axis_placement of_weight[] = {{"dp", weft_partial(WEFT_SUM)}, {"tp", weft_shard(0)}};
  const weft_axis_placement of_bias[] = {{"dp", weft_partial(WEFT_SUM)}, {"tp", weft_partial(WEFT_SUM)}};
  const int64_t extents[] = {ROWS, COLUMNS};
  int64_t local[2] = {0, 0};
  TRY(weft_layout_create(mesh, of_weight, 2, extents, 2, &raw[WEIGHT], &error));
  TRY(weft_layout_create(mesh, of_bias, 2, extents, 1, &raw[BIAS], &error));
  TRY(weft_layout_local_extents(raw[WEIGHT], -1, local, 2, &error));
  /* The layouts of the gradients after the average over dp; they do not change from step to step. */
  TRY(weft_layout_reduced(raw[WEIGHT], dp, &averaged[WEIGHT], &error));
  TRY(weft_layout_reduced(raw[BIAS], dp, &averaged[BIAS], &error));
  TRY(weft_layout_reduced(averaged[BIAS], tp, &reduced, &error));

  const weft_buffer memory[COUNT] = {{weight, local[0] * COLUMNS, WEFT_F32, WEFT_CPU},
                                     {bias, ROWS, WEFT_F32, WEFT_CPU}};
  const weft_reducer_entry entries[COUNT] = {{"bias", ROWS, WEFT_F32, WEFT_SUM},
                                             {"weight", local[0] * COLUMNS, WEFT_F32, WEFT_SUM}};
  TRY(weft_reducer_create(dp, entries, COUNT, NULL, &reducer, &error)); /* in backward's order */
  TRY(weft_reducer_bind(reducer, 0, &memory[BIAS], &error));
  TRY(weft_reducer_bind(reducer, 1, &memory[WEIGHT], &error));

  for (int step = 0; step < STEPS; ++step) {
    const float g = (float)(1 + d + 10 * t + step); /* backward */
    for (int i = 0; i < ROWS; ++i) bias[i] = g;
    TRY(weft_reducer_ready(reducer, 0, &error));
    for (int64_t i = 0; i < memory[WEIGHT].count; ++i) weight[i] = g;
    TRY(weft_reducer_ready(reducer, 1, &error));
    TRY(weft_reducer_finish(reducer, &error));

    weft_tensor gradients[COUNT] = {WEFT_TENSOR_INIT("weight", memory[WEIGHT], averaged[WEIGHT]),
                                    WEFT_TENSOR_INIT("bias", memory[BIAS], averaged[BIAS])};
    double norm = 0;
    TRY(weft_reduce_gradients(gradients, COUNT, tp, NULL, &error));
    gradients[BIAS].layout = reduced;
    TRY(weft_clip_grad_norm(gradients, COUNT, 1.0, NULL, &norm, &error));
    TRY(weft_check_replicas(&gradients[BIAS], 1, mesh, &error)); /* names a rank with other bits */
    if (rank == 0)
      printf("step %d: norm %.6f, bias gradient %.6f after clipping\n", step, norm, (double)bias[0]);
  }

failed:
  if (error.code != WEFT_OK) fprintf(stderr, "%s: %s\n", weft_status_name(error.code), error.text);
  weft_reducer_destroy(reducer);
  weft_layout_destroy(reduced);
  for (int i = 0; i < COUNT; ++i) {
    weft_layout_destroy(raw[i]);
    weft_layout_destroy(averaged[i]);
  }
  weft_mesh_destroy(tp);
  weft_mesh_destroy(dp);
  weft_mesh_destroy(mesh);
  weft_group_destroy(group);
  weft_context_destroy(context);
  return error.code == WEFT_OK ? 0 : 1;
}
