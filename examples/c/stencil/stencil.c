/* Heat on a plate whose rows are cut over the ranks, in C: each step a rank needs one row of each neighbour (a halo). The
 * result is that of one rank, bit for bit.
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

/* A band of rows, with one row of halo above and one below. */
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

/* Above the first row and below the last one, the plate goes on at its other end: a ring of rows. */
static weft_status exchange_halos(weft_group* group, int32_t above, int32_t below, band* b,
                                  weft_error* error) {
  const weft_buffer first = {b->cell[1], COLUMNS, WEFT_F64, WEFT_CPU};
  const weft_buffer last = {b->cell[b->rows], COLUMNS, WEFT_F64, WEFT_CPU};
  const weft_buffer upper_halo = {b->cell[0], COLUMNS, WEFT_F64, WEFT_CPU};
  const weft_buffer lower_halo = {b->cell[b->rows + 1], COLUMNS, WEFT_F64, WEFT_CPU};
  const weft_status sent_down = weft_send_recv(group, &last, below, &upper_halo, above, NULL, NULL, error);
  if (sent_down != WEFT_OK) return sent_down;
  return weft_send_recv(group, &first, above, &lower_halo, below, NULL, NULL, error);
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
  band mine = {0, NULL, NULL}, whole = {0, NULL, NULL};
  int32_t rank = 0, size = 1;
  int status = 1;

  TRY(weft_context_create(NULL, &context, &error));
  TRY(weft_group_from_env(context, NULL, &group, &error));
  TRY(weft_group_rank(group, &rank, &error));
  TRY(weft_group_size(group, &size, &error));
  if (ROWS % size != 0) {
    if (rank == 0) fprintf(stderr, "stencil: %d ranks do not divide the %d rows\n", (int)size, ROWS);
    goto failed;
  }
  const int rows = ROWS / size, begin = rows * rank;
  if (!band_make(&mine, begin, rows) || !band_make(&whole, 0, ROWS)) goto failed;

  for (int s = 0; s < STEPS; ++s) {
    TRY(exchange_halos(group, (rank + size - 1) % size, (rank + 1) % size, &mine, &error));
    step(&mine);
  }

  /* The same on one rank, to compare. */
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
  weft_group_destroy(group);
  weft_context_destroy(context);
  return status;
}
