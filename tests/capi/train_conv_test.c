/* Column and row convolutions from C on plain arrays: the ranks together compute the results of plain loops
 * on one rank. */
#define _POSIX_C_SOURCE 200809L /* barriers of pthread */
#include "weft/weft_train.h"

#include "support.h"

/* 7 channels between the layers, which 2 to 4 ranks do not divide. */
enum {
  BATCH = 2,
  IN = 5,
  HIDDEN = 7,
  OUT = 3,
  HEIGHT = 3,
  WIDTH = 7,
  MOST = BATCH * HIDDEN * HEIGHT * WIDTH
};

/* ---- Tensors of four dimensions, of either dtype ---- */

typedef struct tensor {
  weft_dtype dtype;
  int shape[4];
  union {
    float wide[MOST];
    uint16_t narrow[MOST];
  } data;
} tensor;

static int count(const tensor* t) { return t->shape[0] * t->shape[1] * t->shape[2] * t->shape[3]; }
static int at(const tensor* t, int a, int b, int c, int d) {
  return ((a * t->shape[1] + b) * t->shape[2] + c) * t->shape[3] + d;
}
static void set(tensor* t, int i, float value) {
  CHECK(i < MOST);
  set_element(&t->data, t->dtype, i, value);
}
static float get(const tensor* t, int i) { return get_element(&t->data, t->dtype, i); }
static tensor filled(weft_dtype dtype, int a, int b, int c, int d, float value) {
  tensor t = {dtype, {a, b, c, d}, {{0}}};
  for (int i = 0; i < count(&t); ++i) set(&t, i, value);
  return t;
}
static tensor like(const tensor* t, weft_dtype dtype, float value) {
  return filled(dtype, t->shape[0], t->shape[1], t->shape[2], t->shape[3], value);
}
/* Indices [first, first + size) of dimension `dim`; -1: all of it. */
static tensor slice(const tensor* t, weft_dtype dtype, int dim, int first, int size) {
  tensor part = *t;
  int from[4] = {0, 0, 0, 0};
  part.dtype = dtype;
  if (dim >= 0) {
    part.shape[dim] = size;
    from[dim] = first;
  }
  for (int a = 0; a < part.shape[0]; ++a)
    for (int b = 0; b < part.shape[1]; ++b)
      for (int c = 0; c < part.shape[2]; ++c)
        for (int d = 0; d < part.shape[3]; ++d)
          set(&part, at(&part, a, b, c, d),
              get(t, at(t, from[0] + a, from[1] + b, from[2] + c, from[3] + d)));
  return part;
}
static weft_maps maps(tensor* t) {
  const weft_maps m = {&t->data, {t->shape[0], t->shape[1], t->shape[2], t->shape[3]}, t->dtype, WEFT_CPU};
  return m;
}
static weft_buffer vector(tensor* t) {
  const weft_buffer b = {&t->data, count(t), t->dtype, WEFT_CPU};
  return b;
}
/* `got` is that part of `from`, plus `more`. */
static void expect(const tensor* got, const tensor* from, int dim, int first, int size, float more) {
  const tensor part = slice(from, WEFT_F32, dim, first, size);
  for (int d = 0; d < 4; ++d) CHECK(got->shape[d] == part.shape[d]);
  for (int i = 0; i < count(&part); ++i) CHECK(get(got, i) == get(&part, i) + more);
}

/* ---- Plain loops ---- */

/* x, column, h, row, y, and back, on one rank. Whole numbers that bf16 has, too. */
static struct { tensor x, w1, b1, h, w2, b2, y, dy, dh, dx, dw1, db1, dw2, db2; } one;

static tensor numbers(int which, int a, int b, int c, int d) {
  tensor t = filled(WEFT_F32, a, b, c, d, 0);
  for (int i = 0; i < count(&t); ++i) set(&t, i, (float)((i * 7 + i / 3 * 2 + which) % 3 - 1));
  return t;
}
/* One layer: y = w x + b. Then dx = w^T dy, dw and db, which are all 0 before. */
static void forward(const tensor* x, const tensor* w, const tensor* b, tensor* y) {
  for (int n = 0; n < BATCH; ++n)
    for (int o = 0; o < w->shape[0]; ++o)
      for (int r = 0; r < HEIGHT; ++r)
        for (int c = 0; c < WIDTH; ++c) {
          float sum = get(b, o);
          for (int i = 0; i < w->shape[1]; ++i) sum += get(w, at(w, o, i, 0, 0)) * get(x, at(x, n, i, r, c));
          set(y, at(y, n, o, r, c), sum);
        }
}
static void add_to(tensor* t, int i, float value) { set(t, i, get(t, i) + value); }
static void backward(const tensor* dy, const tensor* x, const tensor* w, tensor* dx, tensor* dw, tensor* db) {
  for (int n = 0; n < BATCH; ++n)
    for (int o = 0; o < w->shape[0]; ++o)
      for (int r = 0; r < HEIGHT; ++r)
        for (int c = 0; c < WIDTH; ++c) {
          const float d = get(dy, at(dy, n, o, r, c));
          add_to(db, o, d);
          for (int i = 0; i < w->shape[1]; ++i) {
            add_to(dx, at(dx, n, i, r, c), get(w, at(w, o, i, 0, 0)) * d);
            add_to(dw, at(dw, o, i, 0, 0), get(x, at(x, n, i, r, c)) * d);
          }
        }
}
static void compute_serial(void) {
  one.x = numbers(0, BATCH, IN, HEIGHT, WIDTH);
  one.w1 = numbers(1, HIDDEN, IN, 1, 1);
  one.b1 = numbers(2, HIDDEN, 1, 1, 1);
  one.h = filled(WEFT_F32, BATCH, HIDDEN, HEIGHT, WIDTH, 0);
  one.w2 = numbers(0, OUT, HIDDEN, 1, 1);
  one.b2 = numbers(1, OUT, 1, 1, 1);
  one.y = filled(WEFT_F32, BATCH, OUT, HEIGHT, WIDTH, 0);
  one.dy = numbers(2, BATCH, OUT, HEIGHT, WIDTH);
  one.dh = like(&one.h, WEFT_F32, 0);
  one.dx = like(&one.x, WEFT_F32, 0);
  one.dw1 = like(&one.w1, WEFT_F32, 0);
  one.db1 = like(&one.b1, WEFT_F32, 0);
  one.dw2 = like(&one.w2, WEFT_F32, 0);
  one.db2 = like(&one.b2, WEFT_F32, 0);
  forward(&one.x, &one.w1, &one.b1, &one.h);
  forward(&one.h, &one.w2, &one.b2, &one.y);
  backward(&one.dy, &one.h, &one.w2, &one.dh, &one.dw2, &one.db2);
  backward(&one.dh, &one.x, &one.w1, &one.dx, &one.dw1, &one.db1);
}

/* ---- On ranks ---- */

static weft_compute* compute_with(weft_context* context, int threads) {
  weft_compute_options options = WEFT_COMPUTE_OPTIONS_INIT;
  weft_compute* compute = NULL;
  options.threads = threads;
  OK(weft_compute_create(context, &options, &compute, &error));
  return compute;
}
/* This rank's part of `size` in all: the first ranks have one more. */
static void cut(int size, const rank_args* a, int* first, int* own) {
  const int each = size / a->size, more = size % a->size;
  *first = each * a->rank + (a->rank < more ? a->rank : more);
  *own = each + (a->rank < more ? 1 : 0);
}

/* x, w and dy of dtype t; what is written, and the biases, of dtype u. Maps outside of the pair are divided
 * along `dim`; -1: not. */
static void expect_serial(weft_compute* compute, weft_group* group, const rank_args* a, weft_dtype t,
                          weft_dtype u, int dim, bool accumulate) {
  weft_conv2d_options options = WEFT_CONV2D_OPTIONS_INIT;
  const float before = accumulate ? 1 : 3, more = accumulate ? 1 : 0;
  int first, own, begin = 0, here = 0;
  options.sequence_dim = dim;
  cut(HIDDEN, a, &first, &own);
  if (dim >= 0) cut(one.x.shape[dim], a, &begin, &here);
  tensor x = slice(&one.x, t, dim, begin, here), w1 = slice(&one.w1, t, 0, first, own),
         b1 = slice(&one.b1, u, 0, first, own), h = slice(&one.h, u, 1, first, own),
         h_in = slice(&one.h, t, 1, first, own), w2 = slice(&one.w2, t, 1, first, own),
         b2 = slice(&one.b2, u, -1, 0, 0), dy = slice(&one.dy, t, dim, begin, here), y = like(&dy, u, 3),
         dh = like(&h, u, 3), dh_in = slice(&one.dh, t, 1, first, own), dx = like(&x, u, 3),
         dw1 = like(&w1, u, before), db1 = like(&b1, u, before), dw2 = like(&w2, u, before),
         db2 = like(&b2, u, before);
  const weft_maps of_x = maps(&x), of_w1 = maps(&w1), of_h = maps(&h), of_h_in = maps(&h_in),
                  of_w2 = maps(&w2), of_y = maps(&y), of_dy = maps(&dy), of_dh = maps(&dh),
                  of_dh_in = maps(&dh_in), of_dx = maps(&dx), of_dw1 = maps(&dw1), of_dw2 = maps(&dw2);
  const weft_buffer of_b1 = vector(&b1), of_b2 = vector(&b2), of_db1 = vector(&db1), of_db2 = vector(&db2);
  h = like(&h, u, 3);

  OK(weft_column_conv2d_forward(compute, group, &of_x, &of_w1, &of_b1, &of_h, &options, &error));
  expect(&h, &one.h, 1, first, own, 0);
  OK(weft_row_conv2d_forward(compute, group, &of_h_in, &of_w2, &of_b2, &of_y, &options, &error));
  expect(&y, &one.y, dim, begin, here, 0);
  OK(weft_row_conv2d_backward(compute, group, &of_dy, &of_h_in, &of_w2, &of_dh, &of_dw2, &of_db2, accumulate,
                              &options, &error));
  expect(&dh, &one.dh, 1, first, own, 0);
  expect(&dw2, &one.dw2, 1, first, own, more);
  expect(&db2, &one.db2, -1, 0, 0, more);
  OK(weft_column_conv2d_backward(compute, group, &of_dh_in, &of_x, &of_w1, &of_dx, &of_dw1, &of_db1,
                                 accumulate, &options, &error));
  expect(&dx, &one.dx, dim, begin, here, 0);
  expect(&dw1, &one.dw1, 0, first, own, more);
  expect(&db1, &one.db1, 0, first, own, more);
}

static void equal_serial(rank_args* a) {
  weft_group* group = join(a, "tp", 0);
  weft_compute* compute = compute_with(a->context, 2);
  for (int accumulate = 0; accumulate < 2; ++accumulate)
    for (int dim = -1; dim < 4; ++dim) {
      if (dim == 1) continue; /* the channels */
      expect_serial(compute, group, a, WEFT_F32, WEFT_F32, dim, accumulate != 0);
      expect_serial(compute, group, a, WEFT_BF16, WEFT_F32, dim, accumulate != 0);
      expect_serial(compute, group, a, WEFT_BF16, WEFT_BF16, dim, accumulate != 0);
    }
  weft_group_destroy(group);
  weft_compute_destroy(compute);
}

/* The column layer alone, whose output all ranks have. */
static void gathered(rank_args* a) {
  weft_group* group = join(a, "tp", 0);
  weft_compute* compute = compute_with(a->context, 1);
  weft_conv2d_options options = WEFT_CONV2D_OPTIONS_INIT;
  int first, own;
  options.gather_output = true;
  cut(HIDDEN, a, &first, &own);
  tensor x = one.x, w = slice(&one.w1, WEFT_F32, 0, first, own), b = slice(&one.b1, WEFT_F32, 0, first, own),
         y = like(&one.h, WEFT_F32, 3), dy = one.dh, dx = like(&x, WEFT_F32, 3), dw = like(&w, WEFT_F32, 3),
         db = like(&b, WEFT_F32, 3);
  const weft_maps of_x = maps(&x), of_w = maps(&w), of_y = maps(&y), of_dy = maps(&dy), of_dx = maps(&dx),
                  of_dw = maps(&dw);
  const weft_buffer of_b = vector(&b), of_db = vector(&db);
  OK(weft_column_conv2d_forward(compute, group, &of_x, &of_w, &of_b, &of_y, &options, &error));
  expect(&y, &one.h, -1, 0, 0, 0);
  OK(weft_column_conv2d_backward(compute, group, &of_dy, &of_x, &of_w, &of_dx, &of_dw, &of_db, false,
                                 &options, &error));
  expect(&dx, &one.dx, -1, 0, 0, 0);
  expect(&dw, &one.dw1, 0, first, own, 0);
  expect(&db, &one.db1, 0, first, own, 0);
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
  float x[2 * 3 * 1 * 2], w[3] = {1, 10, 100}, y[2 * 2];
  int64_t of_x[] = {2, 3, 1, 2}, of_w[] = {1, 3, 1, 1}, of_y[] = {2, 1, 1, 2}, channels_last[] = {6, 1, 6, 3},
          empty[] = {3, 0, 1, INT64_MAX};
  weft_maps a, b, c;
  weft_dl_tensor t = dl_tensor(x, of_x, 4);
  weft_dl_managed_tensor managed = {{0}, NULL, NULL};
  weft_dl_managed_tensor_versioned versioned = {{1, 1}, NULL, NULL, 0, {0}};
  OK(weft_context_create(NULL, &context, &error));
  compute = compute_with(context, 1);
  for (int i = 0; i < 12; ++i) x[i] = (float)i;

  OK(weft_maps_from_dltensor(&t, &a, &error));
  CHECK(a.data == x && a.dtype == WEFT_F32 && a.device == WEFT_CPU);
  for (int d = 0; d < 4; ++d) CHECK(a.shape[d] == of_x[d]);
  managed.dl_tensor = dl_tensor(w, of_w, 4);
  OK(weft_maps_from_dlpack((const struct DLManagedTensor*)(const void*)&managed, &b, &error));
  versioned.dl_tensor = dl_tensor(y, of_y, 4);
#define VERSIONED(writes)                                                                                  \
  weft_maps_from_dlpack_versioned((const struct DLManagedTensorVersioned*)(const void*)&versioned, writes, \
                                  &c, &error)
  OK(VERSIONED(true));
  OK(weft_column_conv2d_forward(compute, NULL, &a, &b, NULL, &c, NULL, &error));
  CHECK(y[0] == 420 && y[1] == 531 && y[2] == 1086 && y[3] == 1197);

  versioned.flags = WEFT_DL_READ_ONLY;
  OK(VERSIONED(false));
  CHECK_ERROR(
      VERSIONED(true), WEFT_BAD_ARGUMENT,
      "weft_maps_from_dlpack_versioned: the tensor is read-only, but the call writes it; pass a copy");
  versioned.version.major = 2;
  CHECK_ERROR(VERSIONED(false), WEFT_UNSUPPORTED,
              "weft_maps_from_dlpack_versioned: the tensor is of DLPack 2.1; expected 1.x");
  t.strides = channels_last;
  CHECK_ERROR(weft_maps_from_dltensor(&t, &a, &error), WEFT_LAYOUT,
              "weft_maps_from_dltensor: the tensor is strided: shape (2, 3, 1, 2) has strides (6, 1, 6, 3); "
              "make it contiguous first");
  t = dl_tensor(x, of_x, 3);
  CHECK_ERROR(weft_maps_from_dltensor(&t, &a, &error), WEFT_BAD_ARGUMENT,
              "weft_maps_from_dltensor: the tensor has 3 dimensions; expected 4");
  t = dl_tensor(x, of_x, 1);
  CHECK_ERROR(weft_maps_from_dltensor(&t, &a, &error), WEFT_BAD_ARGUMENT,
              "weft_maps_from_dltensor: the tensor has 1 dimension; expected 4");
  CHECK_ERROR(weft_maps_from_dltensor(NULL, &a, &error), WEFT_BAD_ARGUMENT,
              "weft_maps_from_dltensor: tensor is NULL");
  t = dl_tensor(x, of_x, 4);
  CHECK_ERROR(weft_maps_from_dltensor(&t, NULL, &error), WEFT_BAD_ARGUMENT,
              "weft_maps_from_dltensor: maps is NULL");
  t.dtype.lanes = 2; /* pairs of elements: as wide again */
  OK(weft_maps_from_dltensor(&t, &a, &error));
  CHECK(a.shape[2] == 1 && a.shape[3] == 4);
  t = dl_tensor(NULL, empty, 4);
  t.dtype.lanes = 4;
  CHECK_ERROR(weft_maps_from_dltensor(&t, &a, &error), WEFT_BAD_ARGUMENT,
              "weft_maps_from_dltensor: the tensor's width does not fit 64 bits");
  weft_compute_destroy(compute);
  weft_context_destroy(context);
}

/* ---- Errors ---- */

static void refuses(void) {
  weft_context* context = NULL;
  weft_compute* compute = NULL;
  OK(weft_context_create(NULL, &context, &error));
  compute = compute_with(context, 1);

  /* One sample of 3 channels in and 2 out, of 1 x 2 pixels. */
  float x[6] = {0}, w[54] = {0}, b[3] = {0}, y[4] = {7, 7, 7, 7}, dx[6], dw[6];
  const weft_maps of_x = {x, {1, 3, 1, 2}, WEFT_F32, WEFT_CPU}, of_w = {w, {2, 3, 1, 1}, WEFT_F32, WEFT_CPU},
                  of_y = {y, {1, 2, 1, 2}, WEFT_F32, WEFT_CPU},
                  of_dx = {dx, {1, 3, 1, 2}, WEFT_F32, WEFT_CPU},
                  of_dw = {dw, {2, 3, 1, 1}, WEFT_F32, WEFT_CPU};
  const weft_buffer of_b = f32(b, 2), wrong_b = f32(b, 3);
  weft_maps wrong = of_w;

#define ROW(x_given, w_given, b_given, y_given) \
  weft_row_conv2d_forward(compute, NULL, x_given, w_given, b_given, y_given, NULL, &error)
#define REFUSED(call, text) CHECK_ERROR(call, WEFT_BAD_ARGUMENT, text)
  REFUSED(weft_row_conv2d_forward(NULL, NULL, &of_x, &of_w, &of_b, &of_y, NULL, &error),
          "weft_row_conv2d_forward: compute is NULL");
  REFUSED(ROW(NULL, &of_w, &of_b, &of_y), "weft_row_conv2d_forward: x is NULL");
  REFUSED(ROW(&of_x, NULL, &of_b, &of_y), "weft_row_conv2d_forward: w is NULL");
  REFUSED(ROW(&of_x, &of_w, &of_b, NULL), "weft_row_conv2d_forward: y is NULL");
  wrong.shape[2] = wrong.shape[3] = 3;
  REFUSED(ROW(&of_x, &wrong, &of_b, &of_y),
          "row_conv2d_forward: w is (2, 3, 3, 3); expected (out, in, 1, 1): a 1x1 convolution");
  wrong = of_w;
  wrong.shape[1] = 4;
  REFUSED(ROW(&of_x, &wrong, &of_b, &of_y),
          "row_conv2d_forward: w is (2, 4, 1, 1); expected (2, 3, 1, 1), from x (1, 3, 1, 2)");
  wrong.shape[1] = -1;
  REFUSED(ROW(&of_x, &wrong, &of_b, &of_y), "weft_row_conv2d_forward: w->shape[1] is -1; expected 0 or more");
  wrong.shape[1] = INT64_MAX;
  REFUSED(ROW(&of_x, &wrong, &of_b, &of_y),
          "weft_row_conv2d_forward: w is 2 x 9223372036854775807 x 1 x 1; its bytes do not fit 64 bits");
  wrong = of_w;
  wrong.data = NULL;
  REFUSED(ROW(&of_x, &wrong, &of_b, &of_y),
          "weft_row_conv2d_forward: w->data is NULL; expected 2 x 3 x 1 x 1 elements");
  wrong = of_w;
  wrong.dtype = 99;
  REFUSED(ROW(&of_x, &wrong, &of_b, &of_y),
          "weft_row_conv2d_forward: w->dtype is 99; expected 0 (WEFT_F64) to 16 (WEFT_C128)");
  wrong.dtype = WEFT_BF16;
  REFUSED(ROW(&of_x, &wrong, &of_b, &of_y), "row_conv2d_forward: w is bf16; expected f32, as x");
  wrong = of_x;
  wrong.device = -3;
  REFUSED(ROW(&wrong, &of_w, &of_b, &of_y),
          "weft_row_conv2d_forward: x->device is -3; expected WEFT_CPU or WEFT_CUDA(index)");
  REFUSED(ROW(&of_x, &of_w, &wrong_b, &of_y),
          "row_conv2d_forward: b is (3); expected (2), from x (1, 3, 1, 2) and w (2, 3, 1, 1)");
  wrong = of_y;
  wrong.data = x;
  REFUSED(ROW(&of_x, &of_w, &of_b, &wrong), "row_conv2d_forward: y overlaps x; expected memory of its own");
  wrong = of_y;
  wrong.shape[3] = 1;
  REFUSED(
      weft_column_conv2d_forward(compute, NULL, &of_x, &of_w, &of_b, &wrong, NULL, &error),
      "column_conv2d_forward: y is (1, 2, 1, 1); expected (1, 2, 1, 2), from x (1, 3, 1, 2) and w (2, 3, 1, "
      "1)");
  REFUSED(weft_column_conv2d_forward(NULL, NULL, &of_x, &of_w, &of_b, &of_y, NULL, &error),
          "weft_column_conv2d_forward: compute is NULL");
  for (int i = 0; i < 4; ++i) CHECK(y[i] == 7); /* nothing was written */

  REFUSED(
      weft_column_conv2d_backward(compute, NULL, NULL, &of_x, &of_w, &of_dx, NULL, NULL, false, NULL, &error),
      "weft_column_conv2d_backward: dy is NULL");
  REFUSED(
      weft_column_conv2d_backward(compute, NULL, &of_x, &of_x, &of_w, &of_dx, NULL, NULL, false, NULL,
                                  &error),
      "column_conv2d_backward: dy is (1, 3, 1, 2); expected (1, 2, 1, 2), from x (1, 3, 1, 2) and w (2, 3, "
      "1, 1)");
  wrong = of_dw;
  wrong.shape[0] = 1;
  REFUSED(
      weft_row_conv2d_backward(compute, NULL, &of_y, &of_x, &of_w, NULL, &wrong, NULL, false, NULL, &error),
      "row_conv2d_backward: dw is (1, 3, 1, 1); expected (2, 3, 1, 1), from x (1, 3, 1, 2) and w (2, 3, 1, "
      "1)");
  wrong.shape[0] = -1;
  REFUSED(
      weft_row_conv2d_backward(compute, NULL, &of_y, &of_x, &of_w, NULL, &wrong, NULL, false, NULL, &error),
      "weft_row_conv2d_backward: dw->shape[0] is -1; expected 0 or more");
  REFUSED(
      weft_row_conv2d_backward(compute, NULL, &of_y, &of_x, &of_w, NULL, NULL, &wrong_b, false, NULL, &error),
      "row_conv2d_backward: db is (3); expected (2), from x (1, 3, 1, 2) and w (2, 3, 1, 1)");
  REFUSED(
      weft_row_conv2d_backward(compute, NULL, &of_y, &of_x, &of_w, &of_x, NULL, NULL, false, NULL, &error),
      "row_conv2d_backward: dx overlaps x; expected memory of its own");

  weft_conv2d_options how = WEFT_CONV2D_OPTIONS_INIT;
  how.struct_size = 3;
  REFUSED(weft_row_conv2d_forward(compute, NULL, &of_x, &of_w, &of_b, &of_y, &how, &error),
          "weft_row_conv2d_forward: options->struct_size is 3; expected 12: initialise it with "
          "WEFT_CONV2D_OPTIONS_INIT");
  how.struct_size = sizeof(how);
  how.gather_output = true;
  REFUSED(weft_row_conv2d_forward(compute, NULL, &of_x, &of_w, &of_b, &of_y, &how, &error),
          "weft_row_conv2d_forward: options->gather_output is set; a row layer has its whole output already");
  how.gather_output = false;
  how.sequence_dim = 1;
  REFUSED(weft_row_conv2d_forward(compute, NULL, &of_x, &of_w, &of_b, &of_y, &how, &error),
          "row_conv2d_forward: sequence_dim is 1; expected 0, 2 or 3, as x is (1, 3, 1, 2), or -1: none");

  /* No error and no gradients are requested. The context may be destroyed first. */
  weft_context_destroy(context);
  CHECK(weft_row_conv2d_backward(compute, NULL, &of_y, &of_x, &of_w, NULL, NULL, NULL, false, NULL, NULL) ==
        WEFT_OK);
  CHECK(weft_row_conv2d_forward(compute, NULL, &of_x, &of_w, NULL, &of_y, NULL, NULL) == WEFT_OK);
  CHECK(y[0] == 0 && y[3] == 0);
  weft_compute_destroy(compute);
}

/* Maps that are not divided in the expected way: each rank gets its own error before anything is sent. */
static void wrong_part(rank_args* a) {
  weft_group* group = join(a, "tp", 0);
  weft_compute* compute = compute_with(a->context, 1);
  weft_conv2d_options options = WEFT_CONV2D_OPTIONS_INIT;
  float x[20] = {0}, w[8] = {0}, y[20] = {0};
  const weft_maps of_x = {x, {1, 4, 5, 1}, WEFT_F32, WEFT_CPU}, of_w = {w, {2, 4, 1, 1}, WEFT_F32, WEFT_CPU},
                  of_y = {y, {1, 2, 4, 1}, WEFT_F32, WEFT_CPU};
  options.sequence_dim = 2;
  CHECK_ERROR(
      weft_row_conv2d_forward(compute, group, &of_x, &of_w, NULL, &of_y, &options, &error), WEFT_BAD_ARGUMENT,
      a->rank == 0
          ? "row_conv2d_forward: y is (1, 2, 4, 1); expected (1, 2, 3, 1), what rank 0 of 2 has of the "
            "sequence of x (1, 4, 5, 1)"
          : "row_conv2d_forward: y is (1, 2, 4, 1); expected (1, 2, 2, 1), what rank 1 of 2 has of the "
            "sequence of x (1, 4, 5, 1)");
  weft_group_destroy(group);
  weft_compute_destroy(compute);
}

/* Ranks whose maps have different sizes. */
static void mismatch(rank_args* a) {
  weft_group* group = join(a, "tp", 0);
  weft_compute* compute = compute_with(a->context, 1);
  float x[8] = {0}, w[8] = {0}, y[8] = {0};
  const weft_maps of_x = {x, {1, 4, 1, 1 + a->rank}, WEFT_F32, WEFT_CPU},
                  of_w = {w, {2, 4, 1, 1}, WEFT_F32, WEFT_CPU},
                  of_y = {y, {1, 2, 1, 1 + a->rank}, WEFT_F32, WEFT_CPU};
  CHECK_ERROR(weft_row_conv2d_forward(compute, group, &of_x, &of_w, NULL, &of_y, NULL, &error), WEFT_MISMATCH,
              "*all_reduce f32 x2 sum [call 0]");
  weft_group_destroy(group);
  weft_compute_destroy(compute);
}

int main(void) {
  compute_serial();
  for (int size = 1; size <= 4; ++size) {
    run_ranks(size, equal_serial);
    run_ranks(size, gathered);
  }
  of_dlpack();
  refuses();
  run_ranks(2, wrong_part);
  run_ranks(2, mismatch);
  return 0;
}
