/* Gradients of a program's own from C: averaged, synchronised, measured, clipped, reduced in buckets;
 * samples. Results are compared with numbers that were computed by hand, on 2 and 4 ranks. Every refused
 * argument is tested, too. */
#include "support.h"

#include <math.h>

static weft_mesh* mesh_of(weft_group* group, int32_t dp) {
  const weft_mesh_axis axes[] = {{"dp", dp}, {"tp", -1}};
  weft_mesh* mesh = NULL;
  OK(weft_mesh_create(group, axes, 2, &mesh, &error));
  return mesh;
}

static weft_mesh* along(const weft_mesh* mesh, const char* axis) {
  weft_mesh* part = NULL;
  OK(weft_mesh_along(mesh, &axis, 1, &part, &error));
  return part;
}

static weft_layout* layout_of(const weft_mesh* mesh, weft_placement dp, weft_placement tp, int64_t count) {
  const weft_axis_placement placements[] = {{"dp", dp}, {"tp", tp}};
  weft_layout* layout = NULL;
  OK(weft_layout_create(mesh, placements, 2, &count, 1, &layout, &error));
  return layout;
}

static weft_layout* reduced(const weft_layout* layout, const weft_mesh* axes) {
  weft_layout* to = NULL;
  OK(weft_layout_reduced(layout, axes, &to, &error));
  return to;
}

/* ---- Lists ---- */

/* A weight cut along tp, a weight that all tp ranks hold and each uses for its own part, and a mean: the
 * gradients of a step of a host framework after backward on dp x tp. Rank (d, t) has w[i] = (d + 1) * (100 t
 * + i), u[i] = (d + 1) * (t + i) and m[i] = d + i. */
static void a_step(rank_args* a) {
  weft_group* world = join(a, "world", 20000 * MS);
  weft_mesh *mesh = mesh_of(world, 2), *dp = along(mesh, "dp"), *tp = along(mesh, "tp");
  const int n = a->size / 2, d = a->rank / n, t = a->rank % n;
  weft_layout* cut = layout_of(mesh, weft_partial(WEFT_SUM), weft_shard(0), 3 * n);
  weft_layout* used = layout_of(mesh, weft_partial(WEFT_SUM), weft_partial(WEFT_SUM), 2);
  weft_layout* mean = layout_of(mesh, weft_partial(WEFT_AVG), weft_replicate(), 2);
  weft_layout *cut_now = reduced(cut, mesh), *used_now = reduced(used, dp), *mean_now = reduced(mean, mesh);
  float w[3], u[2];
  double m[2], norm = 0, squares = 0;
  for (int i = 0; i < 3; ++i) w[i] = (float)((d + 1) * (100 * t + i));
  for (int i = 0; i < 2; ++i) u[i] = (float)((d + 1) * (t + i)), m[i] = d + i;
  weft_tensor g[] = {{"w", f32(w, 3), cut, NULL, 0},
                     {"u", f32(u, 2), used, NULL, 0},
                     {"m", {m, 2, WEFT_F64, WEFT_CPU}, mean, NULL, 0}};

  CHECK_ERROR(weft_grad_norm(g, 3, 2, &norm, &error), WEFT_LAYOUT,
              "grad_norm: the gradient of \"w\" is Partial(sum) on dp=2; it must be reduced first");
  OK(weft_average_gradients(g, 3, dp, &error));
  for (int i = 0; i < 3; ++i) CHECK(w[i] == (float)(3 * (100 * t + i)));
  for (int i = 0; i < 2; ++i) CHECK(u[i] == (float)(3 * (t + i)) && m[i] == i + 0.5);
  g[0].layout = cut_now, g[1].layout = used_now, g[2].layout = mean_now;

  OK(weft_sync_replicated_gradients(g, 3, tp, NULL, &error));
  const float u_sum[] = {n == 1 ? 0 : 3 * (0 + 1), n == 1 ? 3 : 3 * (1 + 2)};
  CHECK(u[0] == u_sum[0] && u[1] == u_sum[1] && w[1] == (float)(3 * (100 * t + 1)) && m[1] == 1.5);
  weft_layout* used_done = reduced(used_now, tp);
  g[1].layout = used_done;

  for (int k = 0; k < n; ++k)
    for (int i = 0; i < 3; ++i) squares += pow(3 * (100 * k + i), 2);
  squares += u_sum[0] * u_sum[0] + u_sum[1] * u_sum[1] + 0.5 * 0.5 + 1.5 * 1.5;
  OK(weft_grad_norm(g, 3, 2, &norm, &error));
  CHECK(fabs(norm - sqrt(squares)) <= 1e-12 * norm);
  OK(weft_grad_norm(g, 3, (double)INFINITY, &norm, &error));
  CHECK(norm == (n == 1 ? 6 : 306));

  OK(weft_clip_grad_norm(g, 3, 1e6, NULL, NULL, &error)); /* small enough: nothing changes */
  CHECK(w[2] == (float)(3 * (100 * t + 2)));
  OK(weft_clip_grad_norm(g, 3, 0.5, NULL, &norm, &error));
  const double factor = 0.5 / (norm + 1e-6);
  for (int i = 0; i < 3; ++i) CHECK(w[i] == (float)(3 * (100 * t + i) * factor));
  CHECK(u[1] == (float)((double)u_sum[1] * factor) && m[1] == 1.5 * factor);
  OK(weft_grad_norm(g, 3, 2, &norm, &error));
  CHECK(fabs(norm - 0.5) < 1e-6);

  OK(weft_average_gradients(NULL, 0, dp, &error));
  OK(weft_sync_replicated_gradients(NULL, 0, tp, NULL, &error));
  OK(weft_grad_norm(NULL, 0, 2, &norm, &error));
  CHECK(norm == 0);
  weft_layout* const layouts[] = {cut, used, mean, cut_now, used_now, mean_now, used_done};
  for (size_t i = 0; i < LENGTH(layouts); ++i) weft_layout_destroy(layouts[i]);
  weft_mesh_destroy(tp);
  weft_mesh_destroy(dp);
  weft_mesh_destroy(mesh);
  weft_group_destroy(world);
}
static void test_a_step(void) {
  run_ranks(2, a_step);
  run_ranks(4, a_step);
}

/* The same in one call, over all axes. A gradient that is partial on both is summed over both. */
static void a_step_at_once(rank_args* a) {
  weft_group* world = join(a, "world", 20000 * MS);
  weft_mesh *mesh = mesh_of(world, 2), *dp = along(mesh, "dp"), *tp = along(mesh, "tp");
  const int n = a->size / 2, d = a->rank / n, t = a->rank % n;
  weft_layout* cut = layout_of(mesh, weft_partial(WEFT_SUM), weft_shard(0), 3 * n);
  weft_layout* used = layout_of(mesh, weft_partial(WEFT_SUM), weft_partial(WEFT_SUM), 2);
  weft_layout* mean = layout_of(mesh, weft_partial(WEFT_AVG), weft_replicate(), 2);
  weft_layout* same = layout_of(mesh, weft_replicate(), weft_replicate(), 2);
  weft_reduce_options o = WEFT_REDUCE_OPTIONS_INIT;
  float w[3], u[2];
  double m[2];
  for (int i = 0; i < 3; ++i) w[i] = (float)((d + 1) * (100 * t + i));
  for (int i = 0; i < 2; ++i) u[i] = (float)((d + 1) * (t + i)), m[i] = d + i;
  weft_tensor g[] = {{"w", f32(w, 3), cut, NULL, 0},
                     {"u", f32(u, 2), used, NULL, 0},
                     {"m", {m, 2, WEFT_F64, WEFT_CPU}, mean, NULL, 0}};

  /* Nothing changes where it is refused. */
  g[2].layout = same;
  o.data_axes = dp;
  CHECK_ERROR(
      weft_reduce_gradients(g, 3, mesh, &o, &error), WEFT_LAYOUT,
      "reduce_gradients: the gradient of \"m\" is Replicate on dp=2; expected Partial(sum) or Partial(avg): "
      "there is nothing to reduce");
  g[2].layout = mean;
  if (n > 1) {
    weft_error e = WEFT_ERROR_INIT;
    if (a->rank == 1) m[1] += 1;
    CHECK(weft_reduce_gradients(g, 3, mesh, &o, &e) == WEFT_MISMATCH);
    CHECK(strstr(e.text,
                 "reduce_gradients: the gradient of \"m\" is Replicate on tp=2, but on dp,tp ranks 0, 1 ") ==
          e.text);
    CHECK(e.rank_count == 2 && e.ranks[1] == 1);
    if (a->rank == 1) m[1] -= 1;
  }
  CHECK_ERROR(weft_reduce_gradients(g, 3, tp, &o, &error), WEFT_BAD_ARGUMENT,
              n == 1 ? "reduce_gradients: options.data_axes has dp=2; expected axes of tp=1"
                     : "reduce_gradients: options.data_axes has dp=2; expected axes of tp=2");
  for (int i = 0; i < 3; ++i) CHECK(w[i] == (float)((d + 1) * (100 * t + i)));

  OK(weft_reduce_gradients(g, 3, mesh, &o, &error));
  const float u_sum[] = {n == 1 ? 0 : 3 * (0 + 1), n == 1 ? 3 : 3 * (1 + 2)};
  for (int i = 0; i < 3; ++i) CHECK(w[i] == (float)(3 * (100 * t + i)));
  for (int i = 0; i < 2; ++i) CHECK(u[i] == u_sum[i] && m[i] == i + 0.5);

  OK(weft_reduce_gradients(NULL, 0, mesh, NULL, &error));
  weft_layout* const layouts[] = {cut, used, mean, same};
  for (size_t i = 0; i < LENGTH(layouts); ++i) weft_layout_destroy(layouts[i]);
  weft_mesh_destroy(tp);
  weft_mesh_destroy(dp);
  weft_mesh_destroy(mesh);
  weft_group_destroy(world);
}
static void test_a_step_at_once(void) {
  run_ranks(2, a_step_at_once);
  run_ranks(4, a_step_at_once);
}

/* Replicas that have drifted, norms that are not finite, and faults on one rank only: all ranks get the
 * error. */
static void misfits(rank_args* a) {
  weft_group* world = join(a, "world", 20000 * MS);
  weft_mesh* mesh = mesh_of(world, 1);
  weft_layout *same = layout_of(mesh, weft_replicate(), weft_replicate(), 2),
              *sum = layout_of(mesh, weft_replicate(), weft_partial(WEFT_SUM), 2);
  weft_sync_options sync = WEFT_SYNC_OPTIONS_INIT;
  weft_clip_options clip = WEFT_CLIP_OPTIONS_INIT;
  float x[] = {1, 2};
  double norm = -1;
  weft_error e = WEFT_ERROR_INIT;
  weft_tensor g = {"x", f32(x, 2), same, NULL, 0};
  if (a->rank == 1) x[1] = 3;
  CHECK(weft_sync_replicated_gradients(&g, 1, mesh, NULL, &e) == WEFT_MISMATCH);
  CHECK(strstr(e.text, "sync_replicated_gradients: ") == e.text && strstr(e.text, "\"x\"") != NULL);
  CHECK(x[1] == (a->rank == 1 ? 3 : 2));
  sync.tolerance = 0.5;
  OK(weft_sync_replicated_gradients(&g, 1, mesh, &sync, &error)); /* near enough */
  CHECK(x[1] == 2.5f);
  if (a->rank == 1) x[1] = 2.75f;
  sync.tolerance = WEFT_EXACT;
  CHECK(weft_sync_replicated_gradients(&g, 1, mesh, &sync, NULL) == WEFT_MISMATCH);
  sync.tolerance = 0;
  sync.on_drift = WEFT_DRIFT_AVERAGE;
  OK(weft_sync_replicated_gradients(&g, 1, mesh, &sync, &error));
  CHECK(x[1] == 2.625f);
  CHECK_ERROR(
      weft_average_gradients(&g, 1, mesh, &error), WEFT_LAYOUT,
      "average_gradients: the gradient of \"x\" is Replicate on tp=2; expected Partial(sum) or Partial(avg): "
      "there is nothing to reduce");

  if (a->rank == 0) x[0] = NAN;
  CHECK_ERROR(weft_clip_grad_norm(&g, 1, 1, NULL, &norm, &error), WEFT_BAD_ARGUMENT,
              a->rank == 0 ? "clip_grad_norm: the norm is nan; not finite on rank 0; of this rank: \"x\""
                           : "clip_grad_norm: the norm is nan; not finite on rank 0; of this rank: none");
  CHECK(norm == -1);
  clip.non_finite = WEFT_NON_FINITE_SKIP;
  OK(weft_clip_grad_norm(&g, 1, 1, &clip, &norm, &error));
  CHECK(isnan(norm) && x[1] == 2.625f);
  x[0] = 1;
  clip.p = 1;
  OK(weft_clip_grad_norm(&g, 1, 100, &clip, &norm, &error));
  CHECK(norm == 3.625);

  /* One element too few on rank 1. */
  g.layout = sum;
  if (a->rank == 1) g.data.count = 1;
  CHECK_ERROR(
      weft_average_gradients(&g, 1, mesh, &error), WEFT_LAYOUT,
      a->rank == 1
          ? "average_gradients: the gradient of \"x\" is (1); (2) as [dp: Replicate, tp: Partial(sum)] "
            "is (2) on this rank"
          : "average_gradients: dp,tp rank 1 failed: average_gradients: the gradient of \"x\" is (1); "
            "(2) as [dp: Replicate, tp: Partial(sum)] is (2) on this rank");
  g.data.count = 2;
  if (a->rank == 1) g.name = "y";
  CHECK_ERROR(weft_average_gradients(&g, 1, mesh, &error), WEFT_MISMATCH,
              "average_gradients: gradient 0 is \"x\" (f32 (2) as [dp: Replicate, tp: Partial(sum)]) on "
              "dp,tp rank 0, "
              "but \"y\" (f32 (2) as [dp: Replicate, tp: Partial(sum)]) on dp,tp rank 1");
  weft_layout_destroy(sum);
  weft_layout_destroy(same);
  weft_mesh_destroy(mesh);
  weft_group_destroy(world);
}
static void test_misfits(void) { run_ranks(2, misfits); }

/* ---- Buckets ---- */

enum { LARGE = 500 };
static const weft_reducer_entry entries[] = {
    {"large", LARGE, WEFT_F32, WEFT_SUM}, {"small", 3, WEFT_F32, WEFT_SUM}, {"mean", 2, WEFT_F64, WEFT_AVG}};

/* "large" is reduced in the program's memory, "small" is copied from it and back, "mean" lies in its slot.
 * Each step has two micro-batches, in each of which rank r adds (r + 1) * (step + 1). The memory of
 * "large" is another one in each step. */
static void in_buckets(rank_args* a) {
  weft_group* world = join(a, "world", 20000 * MS);
  weft_mesh* mesh = mesh_of(world, 2);
  weft_reducer_options options = WEFT_REDUCER_OPTIONS_INIT;
  weft_reducer* r = NULL;
  weft_buffer slot;
  int32_t buckets = 0;
  int64_t bytes = 0, early = -1;
  bool ready = true;
  static _Thread_local float large[2][LARGE];
  float small[3];
  const float ranks = (float)(a->size * (a->size + 1) / 2);
  options.bucket_bytes = 1000;
  OK(weft_reducer_create(mesh, entries, 3, &options, &r, &error));
  const weft_buffer small_buffer = f32(small, 3);
  OK(weft_reducer_bind(r, 1, &small_buffer, &error));
  OK(weft_reducer_slot(r, 2, &slot, &error));
  CHECK(slot.count == 2 && slot.dtype == WEFT_F64 && slot.device == WEFT_CPU);
  double* const mean = slot.data;
  CHECK(mean[0] == 0 && mean[1] == 0);
  OK(weft_reducer_bucket_count(r, &buckets, &error));
  OK(weft_reducer_bucket_bytes(r, 0, &bytes, &error));
  CHECK(buckets == 3 && bytes == 2048); /* 500 floats, on whole cache lines */
  for (int step = 0; step < 3; ++step) {
    float* const l = large[step % 2];
    const weft_buffer large_buffer = f32(l, LARGE);
    const float own = (float)((a->rank + 1) * (step + 1));
    OK(weft_reducer_bind(r, 0, &large_buffer, &error));
    for (int i = 0; i < LARGE; ++i) l[i] = 0;
    small[0] = small[1] = small[2] = 0;
    mean[0] = mean[1] = 0;
    OK(weft_reducer_begin_no_sync(r, &error));
    for (int pass = 0; pass < 2; ++pass) {
      if (pass == 1) OK(weft_reducer_end_no_sync(r, &error));
      for (int i = 0; i < LARGE; ++i) l[i] += own;
      OK(weft_reducer_ready(r, 0, &error));
      for (int i = 0; i < 3; ++i) small[i] += own;
      OK(weft_reducer_ready(r, 1, &error));
      mean[0] += own, mean[1] -= own;
      OK(weft_reducer_ready(r, 2, &error));
    }
    OK(weft_reducer_is_ready(r, 2, &ready, &error));
    CHECK(ready);
    OK(weft_reducer_finish(r, &error));
    OK(weft_reducer_is_ready(r, 2, &ready, &error));
    CHECK(!ready);
    const float sum = ranks * 2 * (float)(step + 1);
    for (int i = 0; i < LARGE; ++i) CHECK(l[i] == sum);
    CHECK(small[0] == sum && small[2] == sum);
    CHECK(mean[0] == (double)sum / a->size && mean[1] == (double)-sum / a->size);
  }
  OK(weft_reducer_sent_early(r, &early, &error));
  CHECK(early == 9);
  weft_mesh_destroy(mesh); /* the reducer keeps what it needs */
  weft_group_destroy(world);
  weft_reducer_destroy(r);
}
static void test_in_buckets(void) {
  run_ranks(2, in_buckets);
  run_ranks(4, in_buckets);
}

/* A reduction of the program's own: begun over a group of its own, ended in weft_reducer_finish. */
typedef struct own_reduction {
  weft_group* group;
  weft_work* works[3];
  int begun, ended;
  int32_t fails_at;
} own_reduction;
static weft_status begin_own(void* data, const weft_ready_bucket* bucket, weft_error* e) {
  own_reduction* const own = data;
  ++own->begun;
  if (bucket->number == own->fails_at) {
    strcpy(e->text, "no more room");
    return WEFT_SYSTEM;
  }
  return weft_all_reduce(own->group, &bucket->data, &bucket->data, NULL, &own->works[bucket->number], e);
}
static weft_status end_own(void* data, const weft_ready_bucket* bucket, weft_error* e) {
  own_reduction* const own = data;
  CHECK(bucket->number == own->ended && bucket->member_count == 1 && bucket->members[0] == own->ended);
  CHECK(bucket->op == (bucket->number == 2 ? WEFT_AVG : WEFT_SUM));
  ++own->ended;
  const weft_status status = weft_work_wait(own->works[bucket->number], e);
  weft_work_destroy(own->works[bucket->number]);
  own->works[bucket->number] = NULL;
  return status;
}

static void bucket_hooks(rank_args* a) {
  weft_group *world = join(a, "world", 20000 * MS), *over = NULL;
  weft_mesh* mesh = mesh_of(world, 2);
  weft_reducer_options options = WEFT_REDUCER_OPTIONS_INIT;
  weft_reducer* r = NULL;
  weft_buffer slot;
  const weft_reducer_entry third = {"third", 1, WEFT_F32, WEFT_SUM};
  OK(weft_mesh_group(mesh, &over, &error));

  options.compression = WEFT_BUCKETS_BF16;
  OK(weft_reducer_create(mesh, &third, 1, &options, &r, &error));
  OK(weft_reducer_slot(r, 0, &slot, &error));
  *(float*)slot.data = 1.0f / 3;
  OK(weft_reducer_ready(r, 0, &error));
  OK(weft_reducer_finish(r, &error));
  CHECK(*(float*)slot.data == 2 * 0.333984375f); /* a third as bf16 */
  weft_reducer_destroy(r);

  own_reduction own = {over, {NULL, NULL, NULL}, 0, 0, -1};
  const weft_bucket_hook hook = {"own", NULL, end_own, &own};
  options.hook = hook;
  CHECK_ERROR(
      weft_reducer_create(mesh, entries, 3, &options, &r, &error), WEFT_BAD_ARGUMENT,
      "weft_reducer_create: options->compression is 1 (WEFT_BUCKETS_BF16) together with the hook \"own\"; "
      "expected one "
      "of them");
  options.compression = 2;
  CHECK_ERROR(weft_reducer_create(mesh, entries, 3, &options, &r, &error), WEFT_BAD_ARGUMENT,
              "weft_reducer_create: options->compression is 2; expected 0 (WEFT_BUCKETS_AS_THEY_ARE) or 1 "
              "(WEFT_BUCKETS_BF16)");
  options.compression = WEFT_BUCKETS_AS_THEY_ARE;
  options.hook.end = NULL;
  CHECK_ERROR(weft_reducer_create(mesh, entries, 3, &options, &r, &error), WEFT_BAD_ARGUMENT,
              "weft_reducer_create: options->hook.begin and .end of \"own\" are NULL; expected one of them");
  options.hook.begin = begin_own;
  options.hook.name = NULL;
  CHECK_ERROR(weft_reducer_create(mesh, entries, 3, &options, &r, &error), WEFT_BAD_ARGUMENT,
              "weft_reducer_create: options->hook.name is NULL; expected a name");
  options.hook.name = "own";
  options.hook.end = end_own;
  options.bucket_bytes = 1; /* each gradient is a bucket */
  for (int fails = 0; fails < 2; ++fails) {
    if (fails == 1 && a->rank == 1) own.fails_at = 1;
    own.begun = own.ended = 0;
    OK(weft_reducer_create(mesh, entries, 3, &options, &r, &error));
    OK(weft_reducer_slot(r, 1, &slot, &error));
    ((float*)slot.data)[2] = (float)(a->rank + 1);
    OK(weft_reducer_ready(r, 0, &error));
    if (fails == 0) {
      for (int32_t i = 1; i < 3; ++i) OK(weft_reducer_ready(r, i, &error));
      OK(weft_reducer_finish(r, &error));
      CHECK(((float*)slot.data)[2] == 3);
      CHECK(own.begun == 3 && own.ended == 3);
    } else if (a->rank == 1) {
      CHECK_ERROR(weft_reducer_ready(r, 1, &error), WEFT_SYSTEM, "begin: no more room");
      CHECK_ERROR(weft_reducer_finish(r, &error), WEFT_SYSTEM,
                  "bucket_reducer: an earlier reduction failed: begin: no more room");
    } else {
      weft_reducer_ready(r, 1, NULL); /* the other's abort may have come already */
      CHECK_ERROR(weft_reducer_finish(r, &error), WEFT_ABORTED,
                  "*the hook \"own\" failed: begin: no more room");
    }
    for (int i = 0; i < 3; ++i) {
      if (own.works[i] != NULL) weft_work_destroy(own.works[i]);
      own.works[i] = NULL;
    }
    weft_reducer_destroy(r);
  }
  weft_group_destroy(over);
  weft_mesh_destroy(mesh);
  weft_group_destroy(world);
}
static void test_bucket_hooks(void) { run_ranks(2, bucket_hooks); }

/* A gradient that is not ready on rank 1, other entries on rank 1, and calls in the wrong order. */
static void bucket_errors(rank_args* a) {
  weft_group* world = join(a, "world", 20000 * MS);
  weft_mesh* mesh = mesh_of(world, 2);
  weft_reducer_options options = WEFT_REDUCER_OPTIONS_INIT;
  weft_reducer *r = NULL, *other = NULL;
  weft_reducer_entry changed[] = {entries[0], entries[1], entries[2]};
  weft_buffer slot;
  OK(weft_reducer_create(mesh, entries, 3, NULL, &r, &error));
  for (int32_t i = 0; i < 3; ++i)
    if (a->rank == 0 || i != 1) OK(weft_reducer_ready(r, i, &error));
  CHECK_ERROR(weft_reducer_finish(r, &error), WEFT_BAD_ARGUMENT,
              "*bucket_reducer: ready() was not called for \"small\" on dp,tp rank 1");
  CHECK_ERROR(weft_reducer_end_no_sync(r, &error), WEFT_BAD_ARGUMENT,
              "weft_reducer_end_no_sync: no weft_reducer_begin_no_sync came before it");
  OK(weft_reducer_begin_no_sync(r, &error));
  CHECK_ERROR(weft_reducer_finish(r, &error), WEFT_BAD_ARGUMENT,
              "bucket_reducer: finish() inside no_sync(); end that scope before the last pass");
  OK(weft_reducer_end_no_sync(r, &error));
  OK(weft_reducer_ready(r, 0, &error));
  CHECK_ERROR(weft_reducer_ready(r, 0, &error), WEFT_BAD_ARGUMENT,
              "bucket_reducer: \"large\" is ready twice; call finish() between two steps");
  CHECK_ERROR(weft_reducer_begin_no_sync(r, &error), WEFT_BAD_ARGUMENT,
              "bucket_reducer: no_sync() after \"large\" became ready; call finish() first");
  weft_reducer_destroy(r);

  options.unused = WEFT_UNUSED_ZEROS;
  OK(weft_reducer_create(mesh, entries, 3, &options, &other, &error));
  OK(weft_reducer_slot(other, 1, &slot, &error));
  ((float*)slot.data)[0] = 5;
  if (a->rank == 0) OK(weft_reducer_ready(other, 1, &error));
  OK(weft_reducer_finish(other, &error));
  CHECK(((float*)slot.data)[0] == 5);
  weft_reducer_destroy(other);

  if (a->rank == 1) changed[2].op = WEFT_SUM;
  OK(weft_reducer_create(mesh, changed, 3, NULL, &r, &error));
  CHECK_ERROR(weft_reducer_finish(r, &error), WEFT_MISMATCH,
              "bucket_reducer: gradient 2 is \"mean\" (f64 x2 avg) on dp,tp rank 0, but \"mean\" (f64 x2 "
              "sum) on dp,tp "
              "rank 1");
  weft_reducer_destroy(r);
  weft_mesh_destroy(mesh);
  weft_group_destroy(world);
}
static void test_bucket_errors(void) { run_ranks(2, bucket_errors); }

/* ---- Samples ---- */

static weft_context* context;

/* Two rounds of 10 samples, 5 a step. Each sample occurs once in a round. Parts of the data ranks in order
 * make the batch that one rank would read, and tensor ranks read the same samples. */
static void test_samples(void) {
  int64_t alone[4][5], parts[4][5], offset = -1, count = -1;
  const weft_mesh_axis one[] = {{"dp", 1}}, four[] = {{"dp", 2}, {"tp", 2}};
  for (int32_t rank = -1; rank < 4; ++rank) {
    weft_mesh *mesh = NULL, *dp = NULL;
    weft_sampler* sampler = NULL;
    OK(weft_mesh_create_arithmetic(context, rank < 0 ? one : four, rank < 0 ? 1 : 2, rank < 0 ? 0 : rank,
                                   &mesh, &error));
    dp = along(mesh, "dp");
    OK(weft_sampler_create(dp, 10, 5, 42, &sampler, &error));
    OK(weft_sampler_part(sampler, &offset, &count, &error));
    CHECK(rank < 0 ? offset == 0 && count == 5 : offset == (rank / 2) * 3 && count == 3 - rank / 2);
    for (int64_t step = 0; step < 4; ++step) {
      OK(weft_sampler_batch(sampler, step, rank < 0 ? alone[step] : parts[step], 5, &error));
      for (int64_t i = 0; rank >= 0 && i < count; ++i) CHECK(parts[step][i] == alone[step][offset + i]);
    }
    weft_sampler_destroy(sampler);
    weft_mesh_destroy(dp);
    weft_mesh_destroy(mesh);
  }
  for (int round = 0; round < 2; ++round) {
    bool seen[10] = {false};
    for (int i = 0; i < 10; ++i) seen[alone[2 * round + i / 5][i % 5]] = true;
    for (int i = 0; i < 10; ++i) CHECK(seen[i]);
  }
}

/* ---- Arguments ---- */

#define REFUSED(call, text) CHECK_ERROR(call, WEFT_BAD_ARGUMENT, text)

static void test_null_arguments(void) {
  const weft_mesh_axis one[] = {{"dp", 1}};
  const weft_reducer_entry nameless[] = {{NULL, 1, WEFT_F32, WEFT_SUM}};
  weft_mesh* mesh = NULL;
  weft_reducer *r = NULL, *none = NULL;
  weft_sampler *sampler = NULL, *no_sampler = NULL;
  weft_buffer slot;
  int64_t number = 0, samples[4];
  int32_t n = 0;
  bool flag = false;
  double norm = 0;
  OK(weft_mesh_create_arithmetic(context, one, 1, 0, &mesh, &error));
  OK(weft_reducer_create(mesh, entries, 3, NULL, &r, &error));
  OK(weft_sampler_create(mesh, 10, 4, 1, &sampler, &error));
  REFUSED(weft_reduce_gradients(NULL, 1, mesh, NULL, &error), "weft_reduce_gradients: gradients is NULL");
  REFUSED(weft_reduce_gradients(NULL, 0, NULL, NULL, &error), "weft_reduce_gradients: axes is NULL");
  REFUSED(weft_average_gradients(NULL, 1, mesh, &error), "weft_average_gradients: gradients is NULL");
  REFUSED(weft_average_gradients(NULL, 0, NULL, &error), "weft_average_gradients: axes is NULL");
  REFUSED(weft_sync_replicated_gradients(NULL, 1, mesh, NULL, &error),
          "weft_sync_replicated_gradients: gradients is NULL");
  REFUSED(weft_sync_replicated_gradients(NULL, 0, NULL, NULL, &error),
          "weft_sync_replicated_gradients: axes is NULL");
  REFUSED(weft_grad_norm(NULL, 1, 2, &norm, &error), "weft_grad_norm: gradients is NULL");
  REFUSED(weft_grad_norm(NULL, 0, 2, NULL, &error), "weft_grad_norm: norm is NULL");
  REFUSED(weft_clip_grad_norm(NULL, 1, 1, NULL, &norm, &error), "weft_clip_grad_norm: gradients is NULL");
  REFUSED(weft_reducer_create(NULL, entries, 3, NULL, &none, &error), "weft_reducer_create: axes is NULL");
  REFUSED(weft_reducer_create(mesh, NULL, 3, NULL, &none, &error), "weft_reducer_create: entries is NULL");
  REFUSED(weft_reducer_create(mesh, nameless, 1, NULL, &none, &error),
          "weft_reducer_create: entries[0].name is NULL");
  REFUSED(weft_reducer_create(mesh, entries, 3, NULL, NULL, &error), "weft_reducer_create: reducer is NULL");
  REFUSED(weft_reducer_slot(NULL, 0, &slot, &error), "weft_reducer_slot: reducer is NULL");
  REFUSED(weft_reducer_slot(r, 0, NULL, &error), "weft_reducer_slot: slot is NULL");
  REFUSED(weft_reducer_bind(NULL, 0, &slot, &error), "weft_reducer_bind: reducer is NULL");
  REFUSED(weft_reducer_bind(r, 0, NULL, &error), "weft_reducer_bind: data is NULL");
  REFUSED(weft_reducer_ready(NULL, 0, &error), "weft_reducer_ready: reducer is NULL");
  REFUSED(weft_reducer_is_ready(NULL, 0, &flag, &error), "weft_reducer_is_ready: reducer is NULL");
  REFUSED(weft_reducer_is_ready(r, 0, NULL, &error), "weft_reducer_is_ready: ready is NULL");
  REFUSED(weft_reducer_begin_no_sync(NULL, &error), "weft_reducer_begin_no_sync: reducer is NULL");
  REFUSED(weft_reducer_end_no_sync(NULL, &error), "weft_reducer_end_no_sync: reducer is NULL");
  REFUSED(weft_reducer_finish(NULL, &error), "weft_reducer_finish: reducer is NULL");
  REFUSED(weft_reducer_bucket_count(NULL, &n, &error), "weft_reducer_bucket_count: reducer is NULL");
  REFUSED(weft_reducer_bucket_count(r, NULL, &error), "weft_reducer_bucket_count: count is NULL");
  REFUSED(weft_reducer_bucket_bytes(NULL, 0, &number, &error), "weft_reducer_bucket_bytes: reducer is NULL");
  REFUSED(weft_reducer_bucket_bytes(r, 0, NULL, &error), "weft_reducer_bucket_bytes: bytes is NULL");
  REFUSED(weft_reducer_sent_early(NULL, &number, &error), "weft_reducer_sent_early: reducer is NULL");
  REFUSED(weft_reducer_sent_early(r, NULL, &error), "weft_reducer_sent_early: count is NULL");
  REFUSED(weft_sampler_create(NULL, 10, 4, 1, &no_sampler, &error), "weft_sampler_create: axis is NULL");
  REFUSED(weft_sampler_create(mesh, 10, 4, 1, NULL, &error), "weft_sampler_create: sampler is NULL");
  REFUSED(weft_sampler_part(NULL, &number, &number, &error), "weft_sampler_part: sampler is NULL");
  REFUSED(weft_sampler_part(sampler, NULL, &number, &error), "weft_sampler_part: offset is NULL");
  REFUSED(weft_sampler_part(sampler, &number, NULL, &error), "weft_sampler_part: count is NULL");
  REFUSED(weft_sampler_batch(NULL, 0, samples, 4, &error), "weft_sampler_batch: sampler is NULL");
  REFUSED(weft_sampler_batch(sampler, 0, NULL, 4, &error), "weft_sampler_batch: samples is NULL");
  weft_reducer_destroy(NULL);
  weft_sampler_destroy(NULL);
  CHECK(none == NULL && no_sampler == NULL);
  weft_sampler_destroy(sampler);
  weft_reducer_destroy(r);
  weft_mesh_destroy(mesh);
}

static void test_wrong_arguments(void) {
  const weft_mesh_axis one[] = {{"dp", 1}};
  weft_reducer_entry e[] = {{"x", 2, WEFT_F32, WEFT_SUM}};
  weft_reduce_options reduce = WEFT_REDUCE_OPTIONS_INIT;
  weft_sync_options sync = WEFT_SYNC_OPTIONS_INIT;
  weft_clip_options clip = WEFT_CLIP_OPTIONS_INIT;
  weft_reducer_options options = WEFT_REDUCER_OPTIONS_INIT;
  weft_mesh* mesh = NULL;
  weft_reducer *r = NULL, *none = NULL;
  weft_sampler* sampler = NULL;
  weft_buffer slot;
  int64_t samples[4], number = 0;
  float x[4] = {0};
  const weft_buffer b = f32(x, 2), three = f32(x, 3), overlapping = f32(x + 1, 3);
  int32_t whole_numbers[2] = {0, 0};
  weft_tensor g[] = {{"a", {whole_numbers, 2, WEFT_I32, WEFT_CPU}, NULL, NULL, 0},
                     {"b", f32(x, 4), NULL, NULL, 0}};
  double norm = 0;
  bool flag = false;
  OK(weft_mesh_create_arithmetic(context, one, 1, 0, &mesh, &error));
  OK(weft_reducer_create(mesh, entries, 3, NULL, &r, &error));
  REFUSED(weft_average_gradients(g, 1, mesh, &error),
          "average_gradients: the gradient of \"a\" is i32; expected f64, f32, bf16 or f16");
  REFUSED(weft_average_gradients(g, -1, mesh, &error),
          "weft_average_gradients: count is -1; expected 0 or more");
  g[0].data = f32(x + 2, 2);
  REFUSED(weft_grad_norm(g, 2, 2, &norm, &error),
          "grad_norm: the gradients of \"b\" and \"a\" overlap; give each once");
  REFUSED(weft_grad_norm(g, 1, 0.5, &norm, &error), "grad_norm: p is 0.5; expected 1 or more");
  REFUSED(weft_grad_norm(g, -1, 2, &norm, &error), "weft_grad_norm: count is -1; expected 0 or more");
  REFUSED(weft_clip_grad_norm(g, 1, 0, NULL, &norm, &error),
          "clip_grad_norm: max_norm is 0; expected more than 0");
  clip.p = -1;
  REFUSED(weft_clip_grad_norm(g, 1, 1, &clip, &norm, &error), "clip_grad_norm: p is -1; expected 1 or more");
  clip.non_finite = 2;
  REFUSED(weft_clip_grad_norm(g, 1, 1, &clip, &norm, &error),
          "weft_clip_grad_norm: options->non_finite is 2; expected 0 (WEFT_NON_FINITE_ERROR) or 1 "
          "(WEFT_NON_FINITE_SKIP)");
  clip.struct_size = 0;
  REFUSED(weft_clip_grad_norm(g, 1, 1, &clip, &norm, &error),
          "weft_clip_grad_norm: options->struct_size is 0; expected 16: initialise it with "
          "WEFT_CLIP_OPTIONS_INIT");
  reduce.tolerance = -2;
  REFUSED(weft_reduce_gradients(NULL, 0, mesh, &reduce, &error),
          "reduce_gradients: options.tolerance is -2; expected 0 or more");
  reduce.on_drift = 2;
  REFUSED(weft_reduce_gradients(NULL, 0, mesh, &reduce, &error),
          "weft_reduce_gradients: options->on_drift is 2; expected 0 (WEFT_DRIFT_ERROR) or 1 "
          "(WEFT_DRIFT_AVERAGE)");
  reduce.on_drift = WEFT_DRIFT_ERROR;
  reduce.data_axes = (const weft_mesh*)r;
  REFUSED(weft_reduce_gradients(NULL, 0, mesh, &reduce, &error),
          "weft_reduce_gradients: options->data_axes is a weft_reducer; expected a weft_mesh");
  reduce.struct_size = 8;
  REFUSED(weft_reduce_gradients(NULL, 0, mesh, &reduce, &error),
          "weft_reduce_gradients: options->struct_size is 8; expected 24: initialise it with "
          "WEFT_REDUCE_OPTIONS_INIT");
  sync.tolerance = -2;
  REFUSED(weft_sync_replicated_gradients(NULL, 0, mesh, &sync, &error),
          "sync_replicated_gradients: options.tolerance is -2; expected 0 or more");
  sync.on_drift = -1;
  REFUSED(weft_sync_replicated_gradients(NULL, 0, mesh, &sync, &error),
          "weft_sync_replicated_gradients: options->on_drift is -1; expected 0 (WEFT_DRIFT_ERROR) or 1 "
          "(WEFT_DRIFT_AVERAGE)");
  sync.struct_size = 4;
  REFUSED(weft_sync_replicated_gradients(NULL, 0, mesh, &sync, &error),
          "weft_sync_replicated_gradients: options->struct_size is 4; expected 16: initialise it with "
          "WEFT_SYNC_OPTIONS_INIT");

  REFUSED(weft_reducer_create(mesh, e, -1, NULL, &none, &error),
          "weft_reducer_create: count is -1; expected 0 or more");
  e[0].count = -1;
  REFUSED(weft_reducer_create(mesh, e, 1, NULL, &none, &error),
          "bucket_reducer: \"x\" has count -1; expected 0 or more");
  e[0].op = WEFT_MAX;
  REFUSED(weft_reducer_create(mesh, e, 1, NULL, &none, &error),
          "weft_reducer_create: entries[0].op is 3; expected 0 (WEFT_SUM) or 1 (WEFT_AVG)");
  e[0].dtype = 99;
  REFUSED(weft_reducer_create(mesh, e, 1, NULL, &none, &error),
          "weft_reducer_create: entries[0].dtype is 99; expected 0 (WEFT_F64) to 16 (WEFT_C128)");
  options.bucket_bytes = -1;
  REFUSED(weft_reducer_create(mesh, entries, 3, &options, &none, &error),
          "bucket_reducer: options.bucket_bytes is -1; expected 1 or more");
  options.unused = 2;
  REFUSED(
      weft_reducer_create(mesh, entries, 3, &options, &none, &error),
      "weft_reducer_create: options->unused is 2; expected 0 (WEFT_UNUSED_ERROR) or 1 (WEFT_UNUSED_ZEROS)");
  options.struct_size = 1;
  REFUSED(weft_reducer_create(mesh, entries, 3, &options, &none, &error),
          "weft_reducer_create: options->struct_size is 1; expected 56: initialise it with "
          "WEFT_REDUCER_OPTIONS_INIT");
  REFUSED(weft_reducer_slot(r, 3, &slot, &error), "weft_reducer_slot: i is 3; expected 0 to 2");
  REFUSED(weft_reducer_bind(r, -1, &b, &error), "weft_reducer_bind: i is -1; expected 0 to 2");
  REFUSED(weft_reducer_bind(r, 1, &b, &error),
          "bucket_reducer: bind of \"small\": data is f32 x2; expected f32 x3, contiguous");
  OK(weft_reducer_bind(r, 1, &three, &error));
  REFUSED(weft_reducer_bind(r, 2, &overlapping, &error),
          "bucket_reducer: bind of \"mean\": data is f32 x3; expected f64 x2, contiguous");
  REFUSED(weft_reducer_ready(r, 3, &error), "weft_reducer_ready: i is 3; expected 0 to 2");
  REFUSED(weft_reducer_is_ready(r, 3, &flag, &error), "weft_reducer_is_ready: i is 3; expected 0 to 2");
  REFUSED(weft_reducer_bucket_bytes(r, 2, &number, &error),
          "weft_reducer_bucket_bytes: bucket is 2; expected 0 to 1");
  OK(weft_reducer_create(mesh, NULL, 0, NULL, &none, &error));
  REFUSED(weft_reducer_ready(none, 0, &error),
          "weft_reducer_ready: i is 0; expected none, as there are none");
  weft_reducer_destroy(none);

  REFUSED(weft_sampler_create(mesh, 0, 4, 1, &sampler, &error),
          "sampler: the population is 0; expected at least 1");
  REFUSED(weft_sampler_create(mesh, 10, 0, 1, &sampler, &error),
          "sampler: the global batch is 0; expected at least 1");
  OK(weft_sampler_create(mesh, 10, 4, 1, &sampler, &error));
  REFUSED(weft_sampler_batch(sampler, 0, samples, 3, &error),
          "weft_sampler_batch: room is 3; samples needs 4");
  REFUSED(weft_sampler_batch(sampler, -1, samples, 4, &error), "sampler: step -1; expected 0 or more");
  weft_sampler_destroy(sampler);
  weft_reducer_destroy(r);
  weft_mesh_destroy(mesh);
}

int main(int argc, char** argv) {
  static const named_test tests[] = {
      {"samples", test_samples},
      {"null_arguments", test_null_arguments},
      {"wrong_arguments", test_wrong_arguments},
      {"a_step", test_a_step},
      {"a_step_at_once", test_a_step_at_once},
      {"misfits", test_misfits},
      {"in_buckets", test_in_buckets},
      {"bucket_hooks", test_bucket_hooks},
      {"bucket_errors", test_bucket_errors},
  };
  OK(weft_context_create(NULL, &context, &error));
  const int result = run_tests(tests, LENGTH(tests), argc, argv);
  weft_context_destroy(context);
  return result;
}
