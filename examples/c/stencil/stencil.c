/* Heat on a plate whose rows are divided over the ranks, in C: in each step a rank needs one row of each
 * neighbour (a halo). The result equals that of one rank, bit for bit.
 *
 *   weft run -n 4 -- ./stencil_in_c */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <weft/weft.h>

enum { ROWS = 60, COLUMNS = 64, STEPS = 100 };

/* Ends main() with the error's text. */
#define TRY(call) \
  if ((call) != WEFT_OK) goto failed

/* A band of rows, with one halo row above it and one below it. */
typedef struct band {
  int rows;
  double (*cell)[COLUMNS], (*next)[COLUMNS];
} band;

/* Each cell moves towards the mean of its four neighbours. The left and right edges keep their heat. */
static void step(band* b) {
  for (int i = 1; i <= b->rows; ++i)
    for (int j = 1; j < COLUMNS - 1; ++j)
      b->next[i][j] = b->cell[i][j] + 0.2 * (b->cell[i - 1][j] + b->cell[i + 1][j] + b->cell[i][j - 1] +
                                             b->cell[i][j + 1] - 4 * b->cell[i][j]);
  double(*const before)[COLUMNS] = b->cell;
  b->cell = b->next;
  b->next = before;
}

/* Above the first row and below the last one, the plate continues at its other end: the rows form a ring. */
static weft_status plan_halo(weft_mesh* mesh, weft_halo** halo, int64_t* begin, int64_t* rows,
                             weft_error* error) {
  const weft_axis_placement by_rows[] = {{"y", {WEFT_SHARD, 0, WEFT_SUM}}};
  const int64_t plate[] = {ROWS, COLUMNS};
  const weft_edge ring = {WEFT_EDGE_PERIODIC, 0, 0};
  const weft_halo_dim dims[] = {{0, 0, 1, 1, ring, ring}};
  weft_layout* layout = NULL;
  int64_t inner[2] = {0, 0}, offsets[2] = {0, 0}, extents[2] = {0, 0};
  weft_status status = weft_layout_create(mesh, by_rows, 1, plate, 2, &layout, error);
  if (status == WEFT_OK) status = weft_halo_create(layout, NULL, 0, dims, 1, halo, error);
  if (status == WEFT_OK) status = weft_halo_part(*halo, inner, offsets, extents, 2, error);
  weft_layout_destroy(layout);
  *begin = offsets[0];
  *rows = extents[0];
  return status;
}

/* Rows [begin, begin + rows) of the plate before the first step; false: out of memory. */
static bool band_make(band* b, int begin, int rows) {
  b->rows = rows;
  b->cell = calloc((size_t)rows + 2, sizeof *b->cell);
  b->next = calloc((size_t)rows + 2, sizeof *b->next);
  if (b->cell == NULL || b->next == NULL) return false;
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < COLUMNS; ++j)
      b->cell[i + 1][j] = b->next[i + 1][j] = (begin + i) % 20 < 10 && j < 32 ? 1 : 0;
  return true;
}

int main(void) {
  weft_error error = WEFT_ERROR_INIT;
  weft_context* context = NULL;
  weft_group* group = NULL;
  weft_mesh* mesh = NULL;
  weft_halo* halo = NULL;
  int64_t begin = 0, rows = 0;
  band mine = {0, NULL, NULL}, whole = {0, NULL, NULL};
  int32_t rank = 0;
  int status = 1;

  TRY(weft_context_create(NULL, &context, &error));
  TRY(weft_group_from_env(context, NULL, &group, &error));
  TRY(weft_group_rank(group, &rank, &error));
  const weft_mesh_axis axes[] = {{"y", -1}};
  TRY(weft_mesh_create(group, axes, 1, &mesh, &error));
  TRY(plan_halo(mesh, &halo, &begin, &rows, &error));
  if (!band_make(&mine, (int)begin, (int)rows) || !band_make(&whole, 0, ROWS)) goto failed;

  for (int s = 0; s < STEPS; ++s) {
    const weft_buffer field = {mine.cell, (rows + 2) * COLUMNS, WEFT_F64, WEFT_CPU};
    TRY(weft_halo_start(halo, &field, 1, NULL, &error));
    step(&mine);
  }

  /* Computes the same steps on one rank, to compare. */
  for (int s = 0; s < STEPS; ++s) {
    memcpy(whole.cell[0], whole.cell[ROWS], sizeof whole.cell[0]);
    memcpy(whole.cell[ROWS + 1], whole.cell[1], sizeof whole.cell[0]);
    step(&whole);
  }
  int64_t different = 0;
  double heat = 0;
  for (int i = 1; i <= mine.rows; ++i)
    for (int j = 0; j < COLUMNS; ++j) {
      different += mine.cell[i][j] != whole.cell[begin + i][j];
      heat += mine.cell[i][j];
    }
  const weft_buffer differences = {&different, 1, WEFT_I64, WEFT_CPU}, heats = {&heat, 1, WEFT_F64, WEFT_CPU};
  TRY(weft_all_reduce(group, &differences, &differences, NULL, NULL, &error));
  TRY(weft_all_reduce(group, &heats, &heats, NULL, NULL, &error));
  if (rank == 0)
    printf("%d steps: heat %.6f, %lld cells differ from one rank's\n", STEPS, heat, (long long)different);
  status = different == 0 ? 0 : 1;

failed:
  if (error.code != WEFT_OK) fprintf(stderr, "%s: %s\n", weft_status_name(error.code), error.text);
  free(mine.cell);
  free(mine.next);
  free(whole.cell);
  free(whole.next);
  weft_halo_destroy(halo);
  weft_mesh_destroy(mesh);
  weft_group_destroy(group);
  weft_context_destroy(context);
  return status;
}
