/* Loss scaling and conversions from C, on plain arrays. The scale moves as torch's does, all ranks skip a
 * step or none, and a run continues from its text. Elements are rounded once, on any number of threads.
 * Every refused argument is tested. */
#define _POSIX_C_SOURCE 200809L /* barriers of pthread */
#include <math.h>

#include "support.h"
#include "weft/weft_train.h"

static weft_mesh* mesh_of(weft_group* group) {
  const weft_mesh_axis axes[] = {{"dp", -1}};
  weft_mesh* mesh = NULL;
  OK(weft_mesh_create(group, axes, 1, &mesh, &error));
  return mesh;
}
static double scale_of(const weft_loss_scaler* scaler) {
  double scale = 0;
  OK(weft_loss_scaler_scale(scaler, &scale, &error));
  return scale;
}

/* A gradient of 3 in a run in which rank `bad` overflows. */
static void a_run(rank_args* a) {
  weft_group* group = join(a, "dp", 0);
  weft_mesh* mesh = mesh_of(group);
  weft_loss_scaler* scaler = NULL;
  weft_loss_scaler_options options = WEFT_LOSS_SCALER_OPTIONS_INIT;
  /* The scales of torch.amp.GradScaler(init_scale=1024, growth_factor=2, backoff_factor=0.5,
   * growth_interval=3). */
  const bool good[] = {true, true, true, true, false, true, true, false, false, true, true, true};
  const double after[] = {1024, 1024, 2048, 2048, 1024, 1024, 1024, 512, 256, 256, 256, 512};
  options.scale = 1024;
  options.interval = 3;
  OK(weft_loss_scaler_create(&options, &scaler, &error));
  for (size_t step = 0; step < LENGTH(good); ++step) {
    const double scale = scale_of(scaler);
    const bool overflows = !good[step] && (int)step % a->size == a->rank;
    float w[2] = {3 * (float)scale, overflows ? INFINITY : (float)scale};
    const weft_tensor gradients[] = {{"w", f32(w, 2), NULL, NULL, 0}};
    bool finite = !good[step];
    OK(weft_loss_scaler_unscale(scaler, gradients, 1, mesh, NULL, &finite, &error));
    CHECK(finite == good[step]);
    CHECK(w[0] == (finite ? 3 : 3 * (float)scale)); /* a step that is skipped changes nothing */
    OK(weft_loss_scaler_update(scaler, &error));
    CHECK(scale_of(scaler) == after[step]);
  }

  /* The state is saved and restored; a text that is no state is refused and changes nothing. */
  weft_text* text = NULL;
  weft_loss_scaler* again = NULL;
  OK(weft_loss_scaler_state(scaler, &text, &error));
  CHECK(strcmp(weft_text_data(text), "512 0") == 0);
  OK(weft_loss_scaler_create(NULL, &again, &error));
  CHECK(scale_of(again) == 65536);
  CHECK_ERROR(
      weft_loss_scaler_set_state(again, "512", &error), WEFT_BAD_ARGUMENT,
      "loss_scaler: \"512\" is no state; expected a scale and a number of steps, as to_text() writes them");
  CHECK(scale_of(again) == 65536);
  OK(weft_loss_scaler_set_state(again, weft_text_data(text), &error));
  CHECK(scale_of(again) == 512);
  weft_text_destroy(text);

  CHECK_ERROR(weft_loss_scaler_update(again, &error), WEFT_BAD_ARGUMENT,
              "loss_scaler: update() without unscale(); one comes before the other in each step");
  /* Gradients that are given up. */
  bool finite = false;
  OK(weft_loss_scaler_unscale(again, NULL, 0, mesh, NULL, &finite, &error));
  CHECK(finite);
  OK(weft_loss_scaler_discard(again, &error));
  CHECK_ERROR(weft_loss_scaler_update(again, &error), WEFT_BAD_ARGUMENT,
              "loss_scaler: update() without unscale(); one comes before the other in each step");
  weft_loss_scaler_destroy(again);

  /* A gradient of f16 on one rank. That rank gets the reason, and the others get an error that another
   * rank failed. */
  uint16_t half[1] = {0x3c00};
  float one[1] = {1};
  const weft_tensor f16 = {"h", {half, 1, WEFT_F16, WEFT_CPU}, NULL, NULL, 0},
                    own = {"h", f32(one, 1), NULL, NULL, 0};
  CHECK_ERROR(weft_loss_scaler_unscale(scaler, a->rank == 0 ? &f16 : &own, 1, mesh, NULL, &finite, &error),
              WEFT_BAD_ARGUMENT,
              a->rank == 0
                  ? "loss_scaler: the gradient of \"h\" is f16; expected f64, f32 or bf16: divided by the "
                    "scale its small elements would vanish"
                  : "*loss_scaler: ");
  /* Ranks that have drifted. */
  if (a->size > 1) {
    OK(weft_loss_scaler_set_state(scaler, a->rank == 0 ? "1024 1" : "512 0", &error));
    CHECK_ERROR(
        weft_loss_scaler_unscale(scaler, &own, 1, mesh, NULL, &finite, &error), WEFT_MISMATCH,
        "loss_scaler: the scale is 1024 after 1 good steps on dp rank 0, but 512 after 0 on dp rank 1");
  }
  weft_loss_scaler_destroy(scaler);
  weft_mesh_destroy(mesh);
  weft_group_destroy(group);
}

static void test_a_run(void) {
  for (int size = 1; size <= MAX_RANKS; ++size) run_ranks(size, a_run);
}

static void test_options(void) {
  weft_loss_scaler* scaler = NULL;
  weft_loss_scaler_options options = WEFT_LOSS_SCALER_OPTIONS_INIT;
  options.scale = -1;
  CHECK_ERROR(weft_loss_scaler_create(&options, &scaler, &error), WEFT_BAD_ARGUMENT,
              "loss_scaler: scale is -1; expected a finite number above 0");
  options.scale = 1, options.growth = 0.5;
  CHECK_ERROR(weft_loss_scaler_create(&options, &scaler, &error), WEFT_BAD_ARGUMENT,
              "loss_scaler: growth is 0.5; expected a finite number of 1 or more");
  options.growth = 2, options.backoff = 1;
  CHECK_ERROR(weft_loss_scaler_create(&options, &scaler, &error), WEFT_BAD_ARGUMENT,
              "loss_scaler: backoff is 1; expected more than 0, and less than 1");
  options.backoff = 0.5, options.interval = 0;
  CHECK_ERROR(weft_loss_scaler_create(&options, &scaler, &error), WEFT_BAD_ARGUMENT,
              "loss_scaler: interval is 0; expected 1 or more");
  options.interval = 1, options.least = 0;
  CHECK_ERROR(weft_loss_scaler_create(&options, &scaler, &error), WEFT_BAD_ARGUMENT,
              "loss_scaler: least is 0; expected a finite number above 0");
  CHECK(scaler == NULL);
  weft_loss_scaler_destroy(NULL);
}

/* ---- Conversions ---- */

enum { COUNT = 100003 };
static weft_buffer of(void* data, int64_t count, weft_dtype dtype) {
  const weft_buffer b = {data, count, dtype, WEFT_CPU};
  return b;
}
static weft_compute* compute_of(weft_context* context, int32_t threads) {
  weft_compute* compute = NULL;
  weft_compute_options options = WEFT_COMPUTE_OPTIONS_INIT;
  options.threads = threads;
  OK(weft_compute_create(context, &options, &compute, &error));
  return compute;
}

static void test_convert(void) {
  weft_context* context = NULL;
  OK(weft_context_create(NULL, &context, &error));
  /* Ties to even, overflow, what vanishes, a NaN; in f64 also what a float in between would round a second
   * time. */
  const float x[] = {1.00390625f, 1.01171875f, 3.4e38f, 65519, 65520, 1e-9f, -2, NAN};
  const uint16_t as_bf16[] = {0x3f80, 0x3f82, 0x7f80, 0x4780, 0x4780, 0x3089, 0xc000, 0x7fc0},
                 as_f16[] = {0x3c04, 0x3c0c, 0x7c00, 0x7bff, 0x7c00, 0, 0xc000, 0x7e00};
  const double between[] = {1.00390625 + 1e-12, 1.0 + 1.0 / 2048 + 1e-12, 1e300};
  const uint16_t between_bf16[] = {0x3f81, 0x3f80, 0x7f80}, between_f16[] = {0x3c04, 0x3c01, 0x7c00};
  uint16_t half[8];
  float back[8];
  for (int32_t threads = 1; threads <= 3; threads += 2) {
    weft_compute* compute = compute_of(context, threads);
    const weft_buffer floats = of((void*)(uintptr_t)x, 8, WEFT_F32), bf16 = of(half, 8, WEFT_BF16),
                      f16 = of(half, 8, WEFT_F16), wide = of(back, 8, WEFT_F32),
                      doubles = of((void*)(uintptr_t)between, 3, WEFT_F64);
    OK(weft_convert(compute, &floats, &bf16, &error));
    CHECK(memcmp(half, as_bf16, sizeof half) == 0);
    OK(weft_convert(compute, &bf16, &wide, &error));
    CHECK(back[0] == 1 && back[2] == INFINITY && back[6] == -2 && isnan(back[7]));
    OK(weft_convert(compute, &floats, &f16, &error));
    CHECK(memcmp(half, as_f16, sizeof half) == 0);
    OK(weft_convert(compute, &f16, &wide, &error)); /* exact */
    CHECK(back[3] == 65504 && back[5] == 0 && back[0] == 1.00390625f);
    OK(weft_convert(compute, &floats, &wide, &error)); /* a copy */
    CHECK(memcmp(back, x, sizeof x) == 0);
    const weft_buffer three_bf16 = of(half, 3, WEFT_BF16), three_f16 = of(half, 3, WEFT_F16);
    OK(weft_convert(compute, &doubles, &three_bf16, &error));
    CHECK(memcmp(half, between_bf16, sizeof between_bf16) == 0);
    OK(weft_convert(compute, &doubles, &three_f16, &error));
    CHECK(memcmp(half, between_f16, sizeof between_f16) == 0);

    /* More than one thread's worth. */
    float *many = malloc(sizeof(float) * COUNT), *again = malloc(sizeof(float) * COUNT);
    uint16_t* rounded = malloc(sizeof(uint16_t) * COUNT);
    CHECK(many != NULL && again != NULL && rounded != NULL);
    for (int i = 0; i < COUNT; ++i) many[i] = (float)(i % 256 - 128);
    const weft_buffer from = of(many, COUNT, WEFT_F32), to = of(rounded, COUNT, WEFT_BF16),
                      home = of(again, COUNT, WEFT_F32), none = of(NULL, 0, WEFT_F32),
                      none_bf16 = of(NULL, 0, WEFT_BF16);
    OK(weft_convert(compute, &from, &to, &error));
    OK(weft_convert(compute, &to, &home, &error));
    CHECK(memcmp(many, again, sizeof(float) * COUNT) == 0);
    OK(weft_convert(compute, &none, &none_bf16, &error));

    const weft_buffer few = of(rounded, 7, WEFT_BF16), ints = of(again, 8, WEFT_I32),
                      nothing = of(NULL, 8, WEFT_BF16), over = of(many + 4, 8, WEFT_BF16),
                      odd = of((char*)rounded + 1, 8, WEFT_BF16);
    weft_buffer elsewhere = bf16;
    const weft_buffer eight = of(many, 8, WEFT_F32);
    elsewhere.device = WEFT_CUDA(0);
    CHECK_ERROR(weft_convert(compute, &eight, &few, &error), WEFT_BAD_ARGUMENT,
                "convert: out has 7 elements; expected 8, as in");
    CHECK_ERROR(weft_convert(compute, &ints, &bf16, &error), WEFT_BAD_ARGUMENT,
                "convert: in is i32; expected f64, f32, bf16 or f16");
    CHECK_ERROR(weft_convert(compute, &eight, &nothing, &error), WEFT_BAD_ARGUMENT,
                "convert: out has no memory for its 8 elements");
    CHECK_ERROR(weft_convert(compute, &eight, &over, &error), WEFT_BAD_ARGUMENT,
                "convert: in and out overlap; expected memory apart");
    CHECK_ERROR(weft_convert(compute, &eight, &odd, &error), WEFT_BAD_ARGUMENT,
                "convert: out's memory is not aligned for bf16");
    CHECK_ERROR(weft_convert(compute, &eight, &elsewhere, &error), WEFT_BAD_ARGUMENT,
                "*convert: out is on cuda:0; expected cpu, as compute");
    free(many);
    free(again);
    free(rounded);
    weft_compute_destroy(compute);
  }
  weft_context_destroy(context);
}

int main(int argc, char** argv) {
  static const named_test tests[] = {
      {"a_run", test_a_run}, {"options", test_options}, {"convert", test_convert}};
  return run_tests(tests, LENGTH(tests), argc, argv);
}
