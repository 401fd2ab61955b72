/* Column and row layers from C on plain arrays: the ranks together compute the results of plain loops on one
 * rank. */
#define _POSIX_C_SOURCE 200809L /* barriers of pthread */
#include "weft/weft_train.h"

#include <float.h>
#include <math.h>

#include "support.h"

enum { TOKENS = 6, IN = 12, HIDDEN = 24, OUT = 8, MOST = HIDDEN * IN };

/* ---- Plain loops ---- */

/* Small whole numbers. Products and sums are exact, in f32 and here in bf16, too, whatever their order. */
static float number(int tensor, int i) { return (float)((i * 7 + tensor * 3) % 3 - 1); }

static void fill(float* v, int tensor, int count) {
  for (int i = 0; i < count; ++i) v[i] = number(tensor, i);
}
/* y = x w^T + b */
static void times(const float* x, const float* w, const float* b, float* y, int rows, int in, int out) {
  for (int t = 0; t < rows; ++t)
    for (int o = 0; o < out; ++o) {
      y[t * out + o] = b[o];
      for (int i = 0; i < in; ++i) y[t * out + o] += x[t * in + i] * w[o * in + i];
    }
}
/* dx = dy w */
static void back(const float* dy, const float* w, float* dx, int rows, int in, int out) {
  for (int i = 0; i < rows * in; ++i) dx[i] = 0;
  for (int t = 0; t < rows; ++t)
    for (int o = 0; o < out; ++o)
      for (int i = 0; i < in; ++i) dx[t * in + i] += dy[t * out + o] * w[o * in + i];
}
/* dw = dy^T x, db = the sum of dy's rows */
static void weights(const float* dy, const float* x, float* dw, float* db, int rows, int in, int out) {
  for (int i = 0; i < out * in; ++i) dw[i] = 0;
  for (int o = 0; o < out; ++o) db[o] = 0;
  for (int t = 0; t < rows; ++t)
    for (int o = 0; o < out; ++o) {
      db[o] += dy[t * out + o];
      for (int i = 0; i < in; ++i) dw[o * in + i] += dy[t * out + o] * x[t * in + i];
    }
}

/* x, column, h, row, y, and back, on one rank. */
static struct {
  float x[TOKENS * IN], w1[HIDDEN * IN], b1[HIDDEN], h[TOKENS * HIDDEN], w2[OUT * HIDDEN], b2[OUT],
      y[TOKENS * OUT];
  float dy[TOKENS * OUT], dh[TOKENS * HIDDEN], dx[TOKENS * IN], dw1[HIDDEN * IN], db1[HIDDEN],
      dw2[OUT * HIDDEN], db2[OUT];
} one;

static void compute_serial(void) {
  fill(one.x, 0, TOKENS * IN);
  fill(one.w1, 1, HIDDEN * IN);
  fill(one.b1, 2, HIDDEN);
  fill(one.w2, 3, OUT * HIDDEN);
  fill(one.b2, 4, OUT);
  fill(one.dy, 5, TOKENS * OUT);
  times(one.x, one.w1, one.b1, one.h, TOKENS, IN, HIDDEN);
  times(one.h, one.w2, one.b2, one.y, TOKENS, HIDDEN, OUT);
  back(one.dy, one.w2, one.dh, TOKENS, HIDDEN, OUT);
  back(one.dh, one.w1, one.dx, TOKENS, IN, HIDDEN);
  weights(one.dy, one.h, one.dw2, one.db2, TOKENS, HIDDEN, OUT);
  weights(one.dh, one.x, one.dw1, one.db1, TOKENS, IN, HIDDEN);
}

/* ---- Arrays of either dtype ---- */

typedef struct array {
  weft_dtype dtype;
  int rows, columns;
  union {
    float wide[MOST];
    uint16_t narrow[MOST];
  } data;
} array;

static void set(array* a, int i, float value) { set_element(&a->data, a->dtype, i, value); }
static float get(const array* a, int i) { return get_element(&a->data, a->dtype, i); }
/* Rows [row, row + rows) and columns [column, column + columns) of `from`, which is `width` wide; NULL: all
 * 1. */
static array part(weft_dtype dtype, const float* from, int width, int row, int rows, int column,
                  int columns) {
  array a;
  a.dtype = dtype;
  a.rows = rows;
  a.columns = columns;
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < columns; ++c)
      set(&a, r * columns + c, from == NULL ? 1.0f : from[(row + r) * width + column + c]);
  return a;
}
static array ones(weft_dtype dtype, int rows, int columns) {
  return part(dtype, NULL, 0, 0, rows, 0, columns);
}
static weft_matrix matrix(array* a) {
  const weft_matrix m = {&a->data, a->rows, a->columns, a->dtype, WEFT_CPU};
  return m;
}
static weft_buffer vector(array* a) {
  const weft_buffer b = {&a->data, a->columns, a->dtype, WEFT_CPU};
  return b;
}
/* `got` is that part of `from`, plus `more`. */
static void expect(const array* got, const float* from, int width, int row, int column, float more) {
  for (int r = 0; r < got->rows; ++r)
    for (int c = 0; c < got->columns; ++c)
      CHECK(get(got, r * got->columns + c) == from[(row + r) * width + column + c] + more);
}

/* ---- On ranks ---- */

static weft_compute* compute_with(weft_context* context, int threads) {
  weft_compute_options options = WEFT_COMPUTE_OPTIONS_INIT;
  weft_compute* compute = NULL;
  options.threads = threads;
  OK(weft_compute_create(context, &options, &compute, &error));
  return compute;
}

/* x, w and dy of dtype t; what is written, and the biases, of dtype u. */
static void expect_serial(weft_compute* compute, weft_group* group, int rank, int size, weft_dtype t,
                          weft_dtype u, bool accumulate) {
  const int features = HIDDEN / size, first = features * rank;
  const float more = accumulate ? 1 : 0;
  array x = part(t, one.x, IN, 0, TOKENS, 0, IN), w1 = part(t, one.w1, IN, first, features, 0, IN),
        b1 = part(u, one.b1, HIDDEN, 0, 1, first, features), h = ones(u, TOKENS, features),
        w2 = part(t, one.w2, HIDDEN, 0, OUT, first, features), b2 = part(u, one.b2, OUT, 0, 1, 0, OUT),
        y = ones(u, TOKENS, OUT), dy = part(t, one.dy, OUT, 0, TOKENS, 0, OUT);
  array dh = ones(u, TOKENS, features), dx = ones(u, TOKENS, IN), dw1 = ones(u, features, IN),
        db1 = ones(u, 1, features), dw2 = ones(u, OUT, features), db2 = ones(u, 1, OUT), h_in, dh_in;
  weft_matrix of_x = matrix(&x), of_w1 = matrix(&w1), of_h = matrix(&h), of_w2 = matrix(&w2),
              of_y = matrix(&y), of_dy = matrix(&dy), of_dh = matrix(&dh), of_dx = matrix(&dx),
              of_dw1 = matrix(&dw1), of_dw2 = matrix(&dw2);
  weft_buffer of_b1 = vector(&b1), of_b2 = vector(&b2), of_db1 = vector(&db1), of_db2 = vector(&db2);

  OK(weft_column_linear_forward(compute, group, &of_x, &of_w1, &of_b1, &of_h, NULL, &error));
  expect(&h, one.h, HIDDEN, 0, first, 0);
  h_in = part(t, one.h, HIDDEN, 0, TOKENS, first, features);
  of_h = matrix(&h_in);
  OK(weft_row_linear_forward(compute, group, &of_h, &of_w2, &of_b2, &of_y, NULL, &error));
  expect(&y, one.y, OUT, 0, 0, 0);

  OK(weft_row_linear_backward(compute, group, &of_dy, &of_h, &of_w2, &of_dh, &of_dw2, &of_db2, accumulate,
                              NULL, &error));
  expect(&dh, one.dh, HIDDEN, 0, first, 0);
  expect(&dw2, one.dw2, HIDDEN, 0, first, more);
  expect(&db2, one.db2, OUT, 0, 0, more);
  dh_in = part(t, one.dh, HIDDEN, 0, TOKENS, first, features);
  of_dh = matrix(&dh_in);
  OK(weft_column_linear_backward(compute, group, &of_dh, &of_x, &of_w1, &of_dx, &of_dw1, &of_db1, accumulate,
                                 NULL, &error));
  expect(&dx, one.dx, IN, 0, 0, 0);
  expect(&dw1, one.dw1, IN, first, 0, more);
  expect(&db1, one.db1, HIDDEN, 0, first, more);
}

static void equal_serial(rank_args* a) {
  weft_group* group = join(a, "tp", 0);
  weft_compute* compute = compute_with(a->context, 2);
  int32_t threads = 0;
  OK(weft_compute_threads(compute, &threads, &error));
  CHECK(threads == 2);
  for (int accumulate = 0; accumulate < 2; ++accumulate) {
    expect_serial(compute, group, a->rank, a->size, WEFT_F32, WEFT_F32, accumulate != 0);
    expect_serial(compute, group, a->rank, a->size, WEFT_BF16, WEFT_F32, accumulate != 0);
    expect_serial(compute, group, a->rank, a->size, WEFT_BF16, WEFT_BF16, accumulate != 0);
  }
  weft_group_destroy(group);
  weft_compute_destroy(compute);
}

/* Real numbers: within what f32 may lose, and the same bits on all ranks and for every number of threads. */
enum { REAL_TOKENS = 40, REAL_IN = 300, REAL_OUT = 200 };
static void real_numbers(rank_args* a) {
  static float x[REAL_TOKENS * REAL_IN], w[REAL_OUT * REAL_IN], b[REAL_OUT];
  const int features = REAL_IN / a->size, first = features * a->rank;
  float *own_x, *own_w, *y[2];
  weft_group* group = join(a, "tp", 0);
  if (a->rank == 0) {
    for (int i = 0; i < REAL_TOKENS * REAL_IN; ++i) x[i] = sinf((float)(i * 37));
    for (int i = 0; i < REAL_OUT * REAL_IN; ++i) w[i] = cosf((float)(i * 11));
    for (int i = 0; i < REAL_OUT; ++i) b[i] = sinf((float)i);
  }
  OK(weft_barrier(group, NULL, NULL, &error));
  own_x = malloc(sizeof(float) * (size_t)(REAL_TOKENS * features));
  own_w = malloc(sizeof(float) * (size_t)(REAL_OUT * features));
  CHECK(own_x != NULL && own_w != NULL);
  for (int t = 0; t < REAL_TOKENS; ++t)
    memcpy(own_x + t * features, x + t * REAL_IN + first, sizeof(float) * (size_t)features);
  for (int o = 0; o < REAL_OUT; ++o)
    memcpy(own_w + o * features, w + o * REAL_IN + first, sizeof(float) * (size_t)features);
  for (int threads = 1; threads <= 2; ++threads) {
    weft_compute* compute = compute_with(a->context, threads);
    float* const to = y[threads - 1] = malloc(sizeof(float) * REAL_TOKENS * REAL_OUT);
    const weft_matrix of_x = {own_x, REAL_TOKENS, features, WEFT_F32, WEFT_CPU},
                      of_w = {own_w, REAL_OUT, features, WEFT_F32, WEFT_CPU},
                      of_y = {to, REAL_TOKENS, REAL_OUT, WEFT_F32, WEFT_CPU};
    const weft_buffer of_b = f32(b, REAL_OUT);
    CHECK(to != NULL);
    OK(weft_row_linear_forward(compute, group, &of_x, &of_w, &of_b, &of_y, NULL, &error));
    weft_compute_destroy(compute);
  }
  CHECK(memcmp(y[0], y[1], sizeof(float) * REAL_TOKENS * REAL_OUT) == 0);
  for (int t = 0; t < REAL_TOKENS; ++t)
    for (int o = 0; o < REAL_OUT; ++o) {
      double sum = b[o], size = fabs(sum);
      for (int i = 0; i < REAL_IN; ++i) {
        const double product = (double)x[t * REAL_IN + i] * w[o * REAL_IN + i];
        sum += product;
        size += fabs(product);
      }
      /* each of the sums rounds once, and their errors are no larger than a walk's of so many steps */
      CHECK(fabs(y[0][t * REAL_OUT + o] - sum) <= size * FLT_EPSILON * sqrt(REAL_IN));
    }
  free(own_x);
  free(own_w);
  free(y[0]);
  free(y[1]);
  weft_group_destroy(group);
}

/* ---- Divided sequences, gathered outputs ---- */

/* This rank's positions of `size` in all: the first ranks have one more. */
static void cut(int size, int ranks, int rank, int* first, int* count) {
  const int each = size / ranks, more = size % ranks;
  *first = each * rank + (rank < more ? rank : more);
  *count = each + (rank < more ? 1 : 0);
}
/* The positions [first, first + count) of each of `batch` sequences, which `from` has one after the other. */
static array positions(const float* from, int width, int batch, int first, int count) {
  const int sequence = TOKENS / batch;
  array a;
  a.dtype = WEFT_F32;
  a.rows = batch * count;
  a.columns = width;
  for (int b = 0; b < batch; ++b)
    for (int p = 0; p < count; ++p)
      for (int c = 0; c < width; ++c)
        set(&a, (b * count + p) * width + c, from[(b * sequence + first + p) * width + c]);
  return a;
}
static void same(const array* a, const array* b) {
  CHECK(a->rows == b->rows && a->columns == b->columns);
  for (int i = 0; i < a->rows * a->columns; ++i) CHECK(get(a, i) == get(b, i));
}

static void divided(rank_args* a) {
  weft_group* group = join(a, "tp", 0);
  weft_compute* compute = compute_with(a->context, 1);
  const int features = HIDDEN / a->size, begin = features * a->rank;
  for (int batch = 1; batch <= 3; ++batch) { /* of 6, 3 and 2 positions: over 4 ranks some have none */
    weft_linear_options options = WEFT_LINEAR_OPTIONS_INIT;
    int first, count;
    options.divide_sequence = true;
    options.batch = batch;
    cut(TOKENS / batch, a->size, a->rank, &first, &count);
    array x = positions(one.x, IN, batch, first, count), dy = positions(one.dy, OUT, batch, first, count),
          w1 = part(WEFT_F32, one.w1, IN, begin, features, 0, IN),
          b1 = part(WEFT_F32, one.b1, HIDDEN, 0, 1, begin, features), h = ones(WEFT_F32, TOKENS, features),
          w2 = part(WEFT_F32, one.w2, HIDDEN, 0, OUT, begin, features),
          b2 = part(WEFT_F32, one.b2, OUT, 0, 1, 0, OUT), y = ones(WEFT_F32, batch * count, OUT);
    array dh = ones(WEFT_F32, TOKENS, features), dx = ones(WEFT_F32, batch * count, IN),
          dw1 = ones(WEFT_F32, features, IN), db1 = ones(WEFT_F32, 1, features),
          dw2 = ones(WEFT_F32, OUT, features), db2 = ones(WEFT_F32, 1, OUT);
    const weft_matrix of_x = matrix(&x), of_w1 = matrix(&w1), of_h = matrix(&h), of_w2 = matrix(&w2),
                      of_y = matrix(&y), of_dy = matrix(&dy), of_dh = matrix(&dh), of_dx = matrix(&dx),
                      of_dw1 = matrix(&dw1), of_dw2 = matrix(&dw2);
    const weft_buffer of_b1 = vector(&b1), of_b2 = vector(&b2), of_db1 = vector(&db1), of_db2 = vector(&db2);
    OK(weft_column_linear_forward(compute, group, &of_x, &of_w1, &of_b1, &of_h, &options, &error));
    expect(&h, one.h, HIDDEN, 0, begin, 0);
    OK(weft_row_linear_forward(compute, group, &of_h, &of_w2, &of_b2, &of_y, &options, &error));
    const array expected_y = positions(one.y, OUT, batch, first, count),
                expected_dx = positions(one.dx, IN, batch, first, count);
    same(&y, &expected_y);
    OK(weft_row_linear_backward(compute, group, &of_dy, &of_h, &of_w2, &of_dh, &of_dw2, &of_db2, false,
                                &options, &error));
    expect(&dh, one.dh, HIDDEN, 0, begin, 0);
    expect(&dw2, one.dw2, HIDDEN, 0, begin, 0);
    expect(&db2, one.db2, OUT, 0, 0, 0);
    OK(weft_column_linear_backward(compute, group, &of_dh, &of_x, &of_w1, &of_dx, &of_dw1, &of_db1, false,
                                   &options, &error));
    same(&dx, &expected_dx);
    expect(&dw1, one.dw1, IN, begin, 0, 0);
    expect(&db1, one.db1, HIDDEN, 0, begin, 0);
  }
  weft_group_destroy(group);
  weft_compute_destroy(compute);
}

/* The column layer alone, whose output all ranks have: 24 features over 1 to 4 ranks, and 8 over 3. */
static void gathered(rank_args* a) {
  weft_group* group = join(a, "tp", 0);
  weft_compute* compute = compute_with(a->context, 1);
  weft_linear_options options = WEFT_LINEAR_OPTIONS_INIT;
  options.gather_output = true;
  int first, count;
  cut(HIDDEN, a->size, a->rank, &first, &count);
  array x = part(WEFT_F32, one.x, IN, 0, TOKENS, 0, IN), w = part(WEFT_F32, one.w1, IN, first, count, 0, IN),
        b = part(WEFT_F32, one.b1, HIDDEN, 0, 1, first, count), y = ones(WEFT_F32, TOKENS, HIDDEN),
        dy = part(WEFT_F32, one.dh, HIDDEN, 0, TOKENS, 0, HIDDEN), dx = ones(WEFT_F32, TOKENS, IN),
        dw = ones(WEFT_F32, count, IN), db = ones(WEFT_F32, 1, count);
  const weft_matrix of_x = matrix(&x), of_w = matrix(&w), of_y = matrix(&y), of_dy = matrix(&dy),
                    of_dx = matrix(&dx), of_dw = matrix(&dw);
  const weft_buffer of_b = vector(&b), of_db = vector(&db);
  OK(weft_column_linear_forward(compute, group, &of_x, &of_w, &of_b, &of_y, &options, &error));
  expect(&y, one.h, HIDDEN, 0, 0, 0);
  OK(weft_column_linear_backward(compute, group, &of_dy, &of_x, &of_w, &of_dx, &of_dw, &of_db, false,
                                 &options, &error));
  expect(&dx, one.dx, IN, 0, 0, 0);
  expect(&dw, one.dw1, IN, first, 0, 0);
  expect(&db, one.db1, HIDDEN, 0, first, 0);

  cut(OUT, a->size, a->rank, &first, &count); /* another layer, of 8 features: uneven over 3 ranks */
  array w8 = part(WEFT_F32, one.w1, IN, first, count, 0, IN), y8 = ones(WEFT_F32, TOKENS, OUT);
  const weft_matrix of_w8 = matrix(&w8), of_y8 = matrix(&y8);
  OK(weft_column_linear_forward(compute, group, &of_x, &of_w8, NULL, &of_y8, &options, &error));
  for (int t = 0; t < TOKENS; ++t)
    for (int o = 0; o < OUT; ++o) CHECK(get(&y8, t * OUT + o) == one.h[t * HIDDEN + o] - one.b1[o]);
  weft_group_destroy(group);
  weft_compute_destroy(compute);
}

/* ---- Tensors of DLPack ---- */

static weft_dl_tensor dl_tensor(float* data, int64_t* shape, int32_t ndim) {
  const weft_dl_tensor t = {data, {WEFT_DL_CPU, 0}, ndim, {WEFT_DL_FLOAT, 32, 1}, shape, NULL, 0};
  return t;
}

static void of_dlpack(void) {
  weft_context* context = NULL;
  weft_compute* compute = NULL;
  float x[2 * 3 * 4], w[2 * 4] = {1, 0, 0, 0, 0, 1, 0, 0}, y[2 * 3 * 2];
  int64_t of_x[] = {2, 3, 4}, of_w[] = {2, 4}, of_y[] = {6, 2}, strides[] = {1, 2},
          empty[] = {3, 0, INT64_MAX};
  weft_matrix a, b, c;
  weft_dl_tensor t = dl_tensor(x, of_x, 3);
  weft_dl_managed_tensor managed = {{0}, NULL, NULL};
  weft_dl_managed_tensor_versioned versioned = {{1, 1}, NULL, NULL, 0, {0}};
  OK(weft_context_create(NULL, &context, &error));
  compute = compute_with(context, 1);
  for (int i = 0; i < 24; ++i) x[i] = (float)i;

  OK(weft_matrix_from_dltensor(&t, &a, &error));
  CHECK(a.data == x && a.rows == 6 && a.columns == 4 && a.dtype == WEFT_F32 && a.device == WEFT_CPU);
  managed.dl_tensor = dl_tensor(w, of_w, 2);
  OK(weft_matrix_from_dlpack((const struct DLManagedTensor*)(const void*)&managed, &b, &error));
  CHECK(b.data == w && b.rows == 2 && b.columns == 4);
  versioned.dl_tensor = dl_tensor(y, of_y, 2);
#define VERSIONED(writes)                                                                                    \
  weft_matrix_from_dlpack_versioned((const struct DLManagedTensorVersioned*)(const void*)&versioned, writes, \
                                    &c, &error)
  OK(VERSIONED(true));
  OK(weft_column_linear_forward(compute, NULL, &a, &b, NULL, &c, NULL, &error));
  for (int r = 0; r < 6; ++r) CHECK(y[2 * r] == (float)(4 * r) && y[2 * r + 1] == (float)(4 * r + 1));

  t = dl_tensor(x, of_x, 1); /* a vector is one row */
  OK(weft_matrix_from_dltensor(&t, &a, &error));
  CHECK(a.rows == 1 && a.columns == 2);
  versioned.flags = WEFT_DL_READ_ONLY;
  OK(VERSIONED(false));
  CHECK_ERROR(
      VERSIONED(true), WEFT_BAD_ARGUMENT,
      "weft_matrix_from_dlpack_versioned: the tensor is read-only, but the call writes it; pass a copy");
  versioned.version.major = 2;
  CHECK_ERROR(VERSIONED(false), WEFT_UNSUPPORTED,
              "weft_matrix_from_dlpack_versioned: the tensor is of DLPack 2.1; expected 1.x");
  t = dl_tensor(w, of_w, 2);
  t.strides = strides;
  CHECK_ERROR(weft_matrix_from_dltensor(&t, &a, &error), WEFT_LAYOUT,
              "weft_matrix_from_dltensor: the tensor is strided: shape (2, 4) has strides (1, 2); make it "
              "contiguous first");
  t = dl_tensor(w, of_w, 0);
  CHECK_ERROR(weft_matrix_from_dltensor(&t, &a, &error), WEFT_BAD_ARGUMENT,
              "weft_matrix_from_dltensor: the tensor has no dimension; expected 1 or more");
  t = dl_tensor(NULL, empty, 2);
  OK(weft_matrix_from_dltensor(&t, &a, &error));
  CHECK(a.rows == 3 && a.columns == 0);
  t = dl_tensor(NULL, empty, 3);
  t.dtype.lanes = 4;
  CHECK_ERROR(weft_matrix_from_dltensor(&t, &a, &error), WEFT_BAD_ARGUMENT,
              "weft_matrix_from_dltensor: the tensor's rows or columns do not fit 64 bits");
  weft_compute_destroy(compute);
  weft_context_destroy(context);
}

/* ---- Errors ---- */

static void refuses(void) {
  weft_context* context = NULL;
  weft_compute *compute = NULL, *none = NULL;
  weft_compute_options options = WEFT_COMPUTE_OPTIONS_INIT;
  int32_t threads = 0;
  OK(weft_context_create(NULL, &context, &error));

  CHECK_ERROR(weft_compute_create(NULL, NULL, &none, &error), WEFT_BAD_ARGUMENT,
              "weft_compute_create: context is NULL");
  CHECK_ERROR(weft_compute_create(context, NULL, NULL, &error), WEFT_BAD_ARGUMENT,
              "weft_compute_create: compute is NULL");
  options.struct_size = 0;
  CHECK_ERROR(weft_compute_create(context, &options, &none, &error), WEFT_BAD_ARGUMENT,
              "weft_compute_create: options->struct_size is 0; expected 12: initialise it with "
              "WEFT_COMPUTE_OPTIONS_INIT");
  options.struct_size = sizeof(options);
  options.threads = 0;
  CHECK_ERROR(weft_compute_create(context, &options, &none, &error), WEFT_BAD_ARGUMENT,
              "compute: threads is 0; expected at least 1");
  options.threads = 5000;
  CHECK_ERROR(weft_compute_create(context, &options, &none, &error), WEFT_BAD_ARGUMENT,
              "compute: threads is 5000; expected at most 4096");
  options.threads = 1;
  options.device = -1;
  CHECK_ERROR(weft_compute_create(context, &options, &none, &error), WEFT_BAD_ARGUMENT,
              "weft_compute_create: options->device is -1; expected WEFT_CPU or WEFT_CUDA(index)");
  CHECK(none == NULL);
  CHECK_ERROR(weft_compute_threads(NULL, &threads, &error), WEFT_BAD_ARGUMENT,
              "weft_compute_threads: compute is NULL");
  OK(weft_compute_create(context, NULL, &compute, &error));
  CHECK_ERROR(weft_compute_threads(compute, NULL, &error), WEFT_BAD_ARGUMENT,
              "weft_compute_threads: threads is NULL");

  /* Two tokens, three features in, two out. */
  float x[6] = {0}, w[8] = {0}, b[3] = {0}, y[6] = {7, 7, 7, 7, 7, 7}, dx[6], dw[6];
  const weft_matrix of_x = {x, 2, 3, WEFT_F32, WEFT_CPU}, of_w = {w, 2, 3, WEFT_F32, WEFT_CPU},
                    of_y = {y, 2, 2, WEFT_F32, WEFT_CPU}, of_dx = {dx, 2, 3, WEFT_F32, WEFT_CPU},
                    of_dw = {dw, 2, 3, WEFT_F32, WEFT_CPU};
  const weft_buffer of_b = f32(b, 2);
  weft_buffer wrong_b = f32(b, 3);
  weft_matrix wrong = of_w;

#define ROW(x_given, w_given, b_given, y_given) \
  weft_row_linear_forward(compute, NULL, x_given, w_given, b_given, y_given, NULL, &error)
#define REFUSED(call, text) CHECK_ERROR(call, WEFT_BAD_ARGUMENT, text)
  REFUSED(weft_row_linear_forward(NULL, NULL, &of_x, &of_w, &of_b, &of_y, NULL, &error),
          "weft_row_linear_forward: compute is NULL");
  REFUSED(ROW(NULL, &of_w, &of_b, &of_y), "weft_row_linear_forward: x is NULL");
  REFUSED(ROW(&of_x, NULL, &of_b, &of_y), "weft_row_linear_forward: w is NULL");
  REFUSED(ROW(&of_x, &of_w, &of_b, NULL), "weft_row_linear_forward: y is NULL");
  wrong.columns = 4;
  REFUSED(ROW(&of_x, &wrong, &of_b, &of_y),
          "row_linear_forward: w is (2, 4); expected (2, 3), from x (2, 3)");
  wrong.columns = -1;
  REFUSED(ROW(&of_x, &wrong, &of_b, &of_y), "weft_row_linear_forward: w->columns is -1; expected 0 or more");
  wrong.columns = 3;
  wrong.rows = -2;
  REFUSED(ROW(&of_x, &wrong, &of_b, &of_y), "weft_row_linear_forward: w->rows is -2; expected 0 or more");
  wrong.rows = INT64_MAX;
  REFUSED(ROW(&of_x, &wrong, &of_b, &of_y),
          "weft_row_linear_forward: w is 9223372036854775807 x 3; its bytes do not fit 64 bits");
  wrong = of_w;
  wrong.data = NULL;
  REFUSED(ROW(&of_x, &wrong, &of_b, &of_y),
          "weft_row_linear_forward: w->data is NULL; expected 2 x 3 elements");
  wrong = of_w;
  wrong.dtype = 99;
  REFUSED(ROW(&of_x, &wrong, &of_b, &of_y),
          "weft_row_linear_forward: w->dtype is 99; expected 0 (WEFT_F64) to 16 (WEFT_C128)");
  wrong.dtype = WEFT_BF16;
  REFUSED(ROW(&of_x, &wrong, &of_b, &of_y), "row_linear_forward: w is bf16; expected f32, as x");
  wrong = of_x;
  wrong.dtype = WEFT_F64;
  wrong.columns = 1;
  REFUSED(ROW(&wrong, &of_w, &of_b, &of_y), "row_linear_forward: x is f64; expected f32 or bf16");
  wrong = of_y;
  wrong.dtype = WEFT_BF16;
  REFUSED(ROW(&of_x, &of_w, &of_b, &wrong), "row_linear_forward: y is bf16; expected f32");
  wrong = of_x;
  wrong.device = -3;
  REFUSED(ROW(&wrong, &of_w, &of_b, &of_y),
          "weft_row_linear_forward: x->device is -3; expected WEFT_CPU or WEFT_CUDA(index)");
  wrong.device = WEFT_CUDA(0);
  REFUSED(ROW(&wrong, &of_w, &of_b, &of_y),
          "row_linear_forward: x is on cuda:0; expected cpu, the device of the Compute");
  REFUSED(ROW(&of_x, &of_w, &wrong_b, &of_y),
          "row_linear_forward: b is (3); expected (2), from x (2, 3) and w (2, 3)");
  wrong_b.count = -1;
  REFUSED(ROW(&of_x, &of_w, &wrong_b, &of_y), "weft_row_linear_forward: b->count is -1; expected 0 or more");
  wrong_b = f32(NULL, 2);
  REFUSED(ROW(&of_x, &of_w, &wrong_b, &of_y),
          "weft_row_linear_forward: b->data is NULL; expected 2 elements");
  wrong = of_y;
  wrong.data = x;
  REFUSED(ROW(&of_x, &of_w, &of_b, &wrong), "row_linear_forward: y overlaps x; expected memory of its own");
  for (int i = 0; i < 6; ++i) CHECK(y[i] == 7); /* nothing was written */

  REFUSED(weft_column_linear_forward(NULL, NULL, &of_x, &of_w, &of_b, &of_y, NULL, &error),
          "weft_column_linear_forward: compute is NULL");
  REFUSED(weft_column_linear_forward(compute, NULL, NULL, &of_w, &of_b, &of_y, NULL, &error),
          "weft_column_linear_forward: x is NULL");
  REFUSED(weft_column_linear_forward(compute, NULL, &of_x, NULL, &of_b, &of_y, NULL, &error),
          "weft_column_linear_forward: w is NULL");
  REFUSED(weft_column_linear_forward(compute, NULL, &of_x, &of_w, &of_b, NULL, NULL, &error),
          "weft_column_linear_forward: y is NULL");
  wrong = of_y;
  wrong.columns = 3;
  REFUSED(weft_column_linear_forward(compute, NULL, &of_x, &of_w, &of_b, &wrong, NULL, &error),
          "column_linear_forward: y is (2, 3); expected (2, 2), from x (2, 3) and w (2, 3)");

  REFUSED(
      weft_column_linear_backward(NULL, NULL, &of_y, &of_x, &of_w, &of_dx, NULL, NULL, false, NULL, &error),
      "weft_column_linear_backward: compute is NULL");
  REFUSED(
      weft_column_linear_backward(compute, NULL, NULL, &of_x, &of_w, &of_dx, NULL, NULL, false, NULL, &error),
      "weft_column_linear_backward: dy is NULL");
  REFUSED(weft_column_linear_backward(compute, NULL, &of_x, &of_x, &of_w, &of_dx, NULL, NULL, false, NULL,
                                      &error),
          "column_linear_backward: dy is (2, 3); expected (2, 2), from x (2, 3) and w (2, 3)");
  wrong = of_dw;
  wrong.rows = 1;
  REFUSED(weft_column_linear_backward(compute, NULL, &of_y, &of_x, &of_w, &of_dx, &wrong, NULL, false, NULL,
                                      &error),
          "column_linear_backward: dw is (1, 3); expected (2, 3), from x (2, 3) and w (2, 3)");
  wrong.rows = -1;
  REFUSED(weft_column_linear_backward(compute, NULL, &of_y, &of_x, &of_w, &wrong, NULL, NULL, false, NULL,
                                      &error),
          "weft_column_linear_backward: dx->rows is -1; expected 0 or more");
  REFUSED(weft_row_linear_backward(NULL, NULL, &of_y, &of_x, &of_w, &of_dx, NULL, NULL, false, NULL, &error),
          "weft_row_linear_backward: compute is NULL");
  REFUSED(
      weft_row_linear_backward(compute, NULL, &of_y, NULL, &of_w, &of_dx, NULL, NULL, false, NULL, &error),
      "weft_row_linear_backward: x is NULL");
  REFUSED(
      weft_row_linear_backward(compute, NULL, &of_y, &of_x, NULL, &of_dx, NULL, NULL, false, NULL, &error),
      "weft_row_linear_backward: w is NULL");
  wrong_b = f32(b, 3);
  REFUSED(
      weft_row_linear_backward(compute, NULL, &of_y, &of_x, &of_w, NULL, NULL, &wrong_b, false, NULL, &error),
      "row_linear_backward: db is (3); expected (2), from x (2, 3) and w (2, 3)");
  REFUSED(
      weft_row_linear_backward(compute, NULL, &of_y, &of_x, &of_w, &of_x, NULL, NULL, false, NULL, &error),
      "row_linear_backward: dx overlaps x; expected memory of its own");

  weft_linear_options how = WEFT_LINEAR_OPTIONS_INIT;
  how.struct_size = 3;
  REFUSED(weft_row_linear_forward(compute, NULL, &of_x, &of_w, &of_b, &of_y, &how, &error),
          "weft_row_linear_forward: options->struct_size is 3; expected 16: initialise it with "
          "WEFT_LINEAR_OPTIONS_INIT");
  how.struct_size = sizeof(how);
  how.gather_output = true;
  REFUSED(weft_row_linear_forward(compute, NULL, &of_x, &of_w, &of_b, &of_y, &how, &error),
          "weft_row_linear_forward: options->gather_output is set; a row layer has its whole output already");
  how.gather_output = false;
  how.divide_sequence = true;
  how.batch = 0;
  REFUSED(weft_row_linear_forward(compute, NULL, &of_x, &of_w, &of_b, &of_y, &how, &error),
          "weft_row_linear_forward: options->batch is 0; expected 1 or more");
  how.batch = 4;
  REFUSED(weft_row_linear_forward(compute, NULL, &of_x, &of_w, &of_b, &of_y, &how, &error),
          "weft_row_linear_forward: x->rows is 2; expected a multiple of options->batch, which is 4");

  /* No error and no gradients are requested. The context may be destroyed first. */
  weft_context_destroy(context);
  CHECK(weft_row_linear_backward(compute, NULL, &of_y, &of_x, &of_w, NULL, NULL, NULL, false, NULL, NULL) ==
        WEFT_OK);
  CHECK(weft_row_linear_forward(compute, NULL, &of_x, &of_w, NULL, &of_y, NULL, NULL) == WEFT_OK);
  CHECK(y[0] == 0);
  weft_compute_destroy(compute);
  weft_compute_destroy(NULL);
}

/* A sequence that is not divided in the expected way: each rank gets its own error before anything is
 * sent. */
static void wrong_part(rank_args* a) {
  weft_group* group = join(a, "tp", 0);
  weft_compute* compute = compute_with(a->context, 1);
  weft_linear_options options = WEFT_LINEAR_OPTIONS_INIT;
  float x[20] = {0}, w[8] = {0}, y[20] = {0};
  const weft_matrix of_x = {x, 5, 4, WEFT_F32, WEFT_CPU}, of_w = {w, 2, 4, WEFT_F32, WEFT_CPU},
                    of_y = {y, 4, 2, WEFT_F32, WEFT_CPU};
  options.divide_sequence = true;
  CHECK_ERROR(
      weft_row_linear_forward(compute, group, &of_x, &of_w, NULL, &of_y, &options, &error), WEFT_BAD_ARGUMENT,
      a->rank == 0 ? "row_linear_forward: y is (1, 4, 2); expected (1, 3, 2), what rank 0 of 2 has of the "
                     "sequence of x (1, 5, 4)"
                   : "row_linear_forward: y is (1, 4, 2); expected (1, 2, 2), what rank 1 of 2 has of the "
                     "sequence of x (1, 5, 4)");
  weft_group_destroy(group);
  weft_compute_destroy(compute);
}

/* Ranks whose layers have different sizes. */
static void mismatch(rank_args* a) {
  weft_group* group = join(a, "tp", 0);
  weft_compute* compute = compute_with(a->context, 1);
  float x[8] = {0}, w[8] = {0}, y[8] = {0};
  const weft_matrix of_x = {x, 1 + a->rank, 4, WEFT_F32, WEFT_CPU}, of_w = {w, 2, 4, WEFT_F32, WEFT_CPU},
                    of_y = {y, 1 + a->rank, 2, WEFT_F32, WEFT_CPU};
  CHECK_ERROR(weft_row_linear_forward(compute, group, &of_x, &of_w, NULL, &of_y, NULL, &error), WEFT_MISMATCH,
              "*all_reduce f32 x2 sum [call 0]");
  weft_group_destroy(group);
  weft_compute_destroy(compute);
}

int main(void) {
  compute_serial();
  run_ranks(1, equal_serial);
  run_ranks(2, equal_serial);
  run_ranks(4, equal_serial);
  for (int size = 1; size <= 4; size *= 2) run_ranks(size, real_numbers);
  for (int size = 1; size <= 4; ++size) {
    if (HIDDEN % size == 0) run_ranks(size, divided);
    run_ranks(size, gathered);
  }
  of_dlpack();
  refuses();
  run_ranks(2, wrong_part);
  run_ranks(2, mismatch);
  return 0;
}
