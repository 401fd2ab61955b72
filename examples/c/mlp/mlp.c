/* A program's own MLP, divided over the ranks: y = row(relu(column(x))), forward and backward on the
 * program's arrays. The program prints the same numbers on one rank.
 *
 *   cc mlp.c -o mlp $(pkg-config --cflags --libs weft_train) -lm
 *   weft run -n 4 -- ./mlp */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <weft/weft_train.h>

enum { TOKENS = 64, IN = 96, HIDDEN = 192, OUT = 48 };

static weft_error error = WEFT_ERROR_INIT;

static float* numbers(int count) {
  float* v = calloc((size_t)count, sizeof(float));
  if (v == NULL) abort();
  return v;
}

/* Element (row, column) of a matrix of the undivided MLP. */
static float element(int matrix, int row, int column) {
  return sinf((float)(row * 61 + column * 37 + matrix));
}

/* The hidden features [first, first + features), which this rank holds; the other ranks of `group` hold the
 * rest. */
typedef struct mlp {
  int features;
  float *x, *w1, *b1, *h, *w2, *b2, *y;
  float *dh, *dx, *dw1, *dw2, *db1, *db2;
} mlp;

static mlp mlp_make(int first, int features) {
  mlp m = {features,
           numbers(TOKENS * IN),
           numbers(features * IN),
           numbers(features),
           numbers(TOKENS * features),
           numbers(OUT * features),
           numbers(OUT),
           numbers(TOKENS * OUT),
           numbers(TOKENS * features),
           numbers(TOKENS * IN),
           numbers(features * IN),
           numbers(OUT * features),
           numbers(features),
           numbers(OUT)};
  for (int t = 0; t < TOKENS; ++t)
    for (int i = 0; i < IN; ++i) m.x[t * IN + i] = element(1, t, i);
  for (int f = 0; f < features; ++f) {
    m.b1[f] = element(2, 0, first + f);
    for (int i = 0; i < IN; ++i) m.w1[f * IN + i] = element(3, first + f, i);
  }
  for (int o = 0; o < OUT; ++o) {
    m.b2[o] = element(4, 0, o);
    for (int f = 0; f < features; ++f) m.w2[o * features + f] = element(5, o, first + f);
  }
  return m;
}

static void mlp_free(mlp* m) {
  float* const all[] = {m->x,  m->w1, m->b1,  m->h,   m->w2,  m->b2, m->y,
                        m->dh, m->dx, m->dw1, m->dw2, m->db1, m->db2};
  for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); ++i) free(all[i]);
}

/* One forward and one backward pass, with dy = y. */
static weft_status mlp_step(mlp* m, weft_compute* compute, weft_group* group) {
  const int n = m->features;
  const weft_matrix x = {m->x, TOKENS, IN, WEFT_F32, WEFT_CPU}, w1 = {m->w1, n, IN, WEFT_F32, WEFT_CPU},
                    h = {m->h, TOKENS, n, WEFT_F32, WEFT_CPU}, w2 = {m->w2, OUT, n, WEFT_F32, WEFT_CPU},
                    y = {m->y, TOKENS, OUT, WEFT_F32, WEFT_CPU}, dh = {m->dh, TOKENS, n, WEFT_F32, WEFT_CPU},
                    dx = {m->dx, TOKENS, IN, WEFT_F32, WEFT_CPU}, dw1 = {m->dw1, n, IN, WEFT_F32, WEFT_CPU},
                    dw2 = {m->dw2, OUT, n, WEFT_F32, WEFT_CPU};
  const weft_buffer b1 = {m->b1, n, WEFT_F32, WEFT_CPU}, b2 = {m->b2, OUT, WEFT_F32, WEFT_CPU},
                    db1 = {m->db1, n, WEFT_F32, WEFT_CPU}, db2 = {m->db2, OUT, WEFT_F32, WEFT_CPU};
  weft_status s = weft_column_linear_forward(compute, group, &x, &w1, &b1, &h, NULL, &error);
  if (s != WEFT_OK) return s;
  for (int i = 0; i < TOKENS * n; ++i)
    if (m->h[i] < 0) m->h[i] = 0;
  s = weft_row_linear_forward(compute, group, &h, &w2, &b2, &y, NULL, &error);
  if (s != WEFT_OK) return s;
  s = weft_row_linear_backward(compute, group, &y, &h, &w2, &dh, &dw2, &db2, false, NULL, &error);
  if (s != WEFT_OK) return s;
  for (int i = 0; i < TOKENS * n; ++i)
    if (m->h[i] == 0) m->dh[i] = 0;
  return weft_column_linear_backward(compute, group, &dh, &x, &w1, &dx, &dw1, &db1, false, NULL, &error);
}

/* Returns whether `a` equals `b`, up to rounding. */
static int same(const float* a, const float* b, int count) {
  double most = 0, largest = 0;
  for (int i = 0; i < count; ++i) {
    most = fmax(most, fabs((double)a[i] - (double)b[i]));
    largest = fmax(largest, fabs((double)b[i]));
  }
  return most <= 1e-5 * largest;
}

int main(void) {
  weft_context* context = NULL;
  weft_group* group = NULL;
  weft_compute* compute = NULL;
  int32_t rank = 0, size = 0;
  int equal = 0;

  if (weft_context_create(NULL, &context, &error) != WEFT_OK) goto done;
  if (weft_group_from_env(context, NULL, &group, &error) != WEFT_OK) goto done;
  if (weft_group_rank(group, &rank, &error) != WEFT_OK) goto done;
  if (weft_group_size(group, &size, &error) != WEFT_OK) goto done;
  if (weft_compute_create(context, NULL, &compute, &error) != WEFT_OK) goto done;
  if (HIDDEN % size != 0) {
    if (rank == 0) printf("mlp: %d ranks do not divide the %d hidden features\n", size, HIDDEN);
    goto done;
  }

  const int features = HIDDEN / size, first = features * rank;
  mlp parallel = mlp_make(first, features), serial = mlp_make(0, HIDDEN);
  if (mlp_step(&parallel, compute, group) == WEFT_OK && mlp_step(&serial, compute, NULL) == WEFT_OK) {
    equal = same(parallel.y, serial.y, TOKENS * OUT) && same(parallel.dx, serial.dx, TOKENS * IN) &&
            same(parallel.db2, serial.db2, OUT) && same(parallel.db1, serial.db1 + first, features) &&
            same(parallel.dw1, serial.dw1 + first * IN, features * IN);
    if (rank == 0)
      printf("%d ranks: y, dx, dw and db %s the serial ones\n", size, equal ? "equal" : "differ from");
  }
  mlp_free(&parallel);
  mlp_free(&serial);

done:
  if (error.code != WEFT_OK) fprintf(stderr, "%s: %s\n", weft_status_name(error.code), error.text);
  weft_compute_destroy(compute);
  weft_group_destroy(group);
  weft_context_destroy(context);
  return equal ? 0 : 1;
}
