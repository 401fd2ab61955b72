/* Layouts from C, and redistribution of the caller's tensors: results against numbers computed here, and
 * every refused argument. */
#include "support.h"

static weft_mesh* mesh_of(weft_group* group, int32_t dp) {
  const weft_mesh_axis axes[] = {{"dp", dp}, {"tp", -1}};
  weft_mesh* mesh = NULL;
  OK(weft_mesh_create(group, axes, 2, &mesh, &error));
  return mesh;
}

static weft_layout* layout_of(const weft_mesh* mesh, weft_placement dp, weft_placement tp, int64_t rows,
                              int64_t columns) {
  const weft_axis_placement placements[] = {{"tp", tp}, {"dp", dp}};
  const int64_t extents[] = {rows, columns};
  weft_layout* layout = NULL;
  OK(weft_layout_create(mesh, placements, 2, extents, 2, &layout, &error));
  return layout;
}

static bool text_is(const weft_layout* layout, const char* text) {
  char got[256];
  size_t bytes = 0;
  OK(weft_layout_text(layout, got, sizeof got, &bytes, &error));
  if (strcmp(got, text) != 0) fprintf(stderr, "%s\n", got);
  return strcmp(got, text) == 0 && bytes == strlen(text) + 1;
}

/* Arithmetic ------------------------------------------------------------------------------------------------
 */

static weft_context* context;
static weft_mesh* planned; /* dp=2 x tp=2 as rank 1 sees it */

static void test_arithmetic(void) {
  weft_layout *l = layout_of(planned, weft_shard(0), weft_replicate(), 7, 4), *all = NULL, *other = NULL;
  const char* const tp_name = "tp";
  weft_mesh *tp = NULL, *mesh = NULL;
  int32_t n = 0;
  int64_t extents[2] = {0, 0}, offsets[2] = {-1, -1};
  bool equal = false;
  weft_placement p = weft_replicate();
  OK(weft_mesh_along(planned, &tp_name, 1, &tp, &error));
  CHECK(text_is(l, "(7, 4) as [dp: Shard(0), tp: Replicate]"));
  OK(weft_layout_dim_count(l, &n, &error));
  CHECK(n == 2);
  OK(weft_layout_extents(l, extents, 2, &error));
  CHECK(extents[0] == 7 && extents[1] == 4);
  OK(weft_layout_local_extents(l, -1, extents, 2, &error));
  CHECK(extents[0] == 4 && extents[1] == 4);
  OK(weft_layout_local_extents(l, 2, extents, 2, &error));
  CHECK(extents[0] == 3 && extents[1] == 4);
  OK(weft_layout_part_count(l, &n, &error));
  CHECK(n == 1);
  OK(weft_layout_part(l, 3, 0, offsets, extents, 2, &error));
  CHECK(offsets[0] == 4 && offsets[1] == 0 && extents[0] == 3 && extents[1] == 4);
  OK(weft_layout_on(l, tp, &p, &error));
  CHECK(p.kind == WEFT_REPLICATE);
  OK(weft_layout_mesh(l, &mesh, &error));
  OK(weft_mesh_equal(mesh, planned, &equal, &error));
  CHECK(equal);

  p = weft_partial(WEFT_AVG);
  OK(weft_layout_with(l, tp, &p, &other, &error));
  CHECK(text_is(other, "(7, 4) as [dp: Shard(0), tp: Partial(avg)]"));
  p = weft_replicate();
  OK(weft_layout_on(other, tp, &p, &error));
  CHECK(p.kind == WEFT_PARTIAL && p.op == WEFT_AVG);
  OK(weft_layout_reduced(other, planned, &all, &error));
  OK(weft_layout_equal(all, l, &equal, &error));
  CHECK(equal);
  weft_layout_destroy(all);
  weft_layout_destroy(other);

  extents[0] = 9, extents[1] = 4;
  OK(weft_layout_with_extents(l, extents, 2, &other, &error));
  CHECK(text_is(other, "(9, 4) as [dp: Shard(0), tp: Replicate]"));
  OK(weft_layout_equal(other, l, &equal, &error));
  CHECK(!equal);
  weft_layout_destroy(other);

  /* tp cuts first, dp what that leaves: rank 1 has the first half of the second half. */
  OK(weft_layout_shard_inside(l, tp, 0, &other, &error));
  CHECK(text_is(other, "(7, 4) as [dp: Shard(0), tp: Shard(0)]"));
  const char* const order[] = {"tp", "dp"};
  OK(weft_layout_nested(other, order, 2, &all, &error));
  CHECK(text_is(all, "(7, 4) as [dp: Shard(0), tp: Shard(0)] nested tp, dp"));
  OK(weft_layout_part(all, -1, 0, offsets, extents, 2, &error));
  CHECK(offsets[0] == 4 && extents[0] == 2);
  OK(weft_layout_part(other, -1, 0, offsets, extents, 2, &error));
  CHECK(offsets[0] == 2 && extents[0] == 2);
  weft_layout_destroy(all);
  weft_layout_destroy(other);

  /* Each of q, k and v is cut on its own. */
  const int64_t lengths[] = {4, 2, 1};
  OK(weft_layout_segmented(l, 0, lengths, 3, &other, &error));
  OK(weft_layout_part_count(other, &n, &error));
  CHECK(n == 3);
  OK(weft_layout_part(other, 0, 1, offsets, extents, 2, &error));
  CHECK(offsets[0] == 4 && extents[0] == 1);
  OK(weft_layout_local_extents(other, 2, extents, 2, &error));
  CHECK(extents[0] == 2 + 1 + 0);
  weft_layout_destroy(other);

  /* Features and heads; heads first. */
  const int64_t of_features[] = {3, 5, 32}, of_heads[] = {3, 5, 8, 4};
  const weft_axis_placement cut[] = {{"dp", weft_shard(0)}, {"tp", weft_shard(2)}};
  const int32_t heads_first[] = {0, 2, 1, 3};
  weft_layout* heads = NULL;
  OK(weft_layout_create(planned, cut, 2, of_features, 3, &other, &error));
  OK(weft_layout_reshape(other, of_heads, 4, &heads, &error));
  CHECK(text_is(heads, "(3, 5, 8, 4) as [dp: Shard(0), tp: Shard(2)]"));
  OK(weft_layout_transpose(heads, heads_first, 4, &all, &error));
  CHECK(text_is(all, "(3, 8, 5, 4) as [dp: Shard(0), tp: Shard(1)]"));
  weft_layout_destroy(all);
  OK(weft_layout_reshape(heads, of_features, 3, &all, &error));
  OK(weft_layout_equal(all, other, &equal, &error));
  CHECK(equal);
  weft_layout_destroy(all);
  weft_layout_destroy(heads);
  weft_layout_destroy(other);

  /* A scalar; texts that do not fit. */
  OK(weft_layout_create(tp, NULL, 0, NULL, 0, &other, &error));
  CHECK(text_is(other, "() as [dp: Replicate, tp: Replicate]"));
  OK(weft_layout_extents(other, NULL, 0, &error));
  char few[4] = "xxx";
  size_t bytes = 0;
  OK(weft_layout_text(other, few, sizeof few, &bytes, &error));
  CHECK(strcmp(few, "() ") == 0 && bytes == sizeof "() as [dp: Replicate, tp: Replicate]");
  OK(weft_layout_text(other, NULL, 0, &bytes, &error));
  weft_layout_destroy(other);
  weft_layout_destroy(l);
  weft_mesh_destroy(mesh);
  weft_mesh_destroy(tp);
}

/* Results ---------------------------------------------------------------------------------------------------
 */

enum { ROWS = 7, COLUMNS = 5, ALL = ROWS * COLUMNS };
static float value_at(int64_t row, int64_t column) { return (float)(10 * row + column + 1); }

/* This rank's part of the tensor whose elements are value_at(). For a sum, dp and tp contribute equally, plus
 * a part that cancels. Returns how many elements it has. */
static int64_t fill(const weft_layout* layout, float* to, int parts, int index) {
  int64_t at[2], n[2];
  float* next = to;
  OK(weft_layout_part(layout, -1, 0, at, n, 2, &error));
  for (int64_t i = 0; i < n[0]; ++i)
    for (int64_t j = 0; j < n[1]; ++j) {
      const float v = value_at(at[0] + i, at[1] + j);
      *next++ = parts == 1 ? v : index == 0 ? v - (float)(parts - 1) * 3 : 3;
    }
  return next - to;
}

/* From every placement to every other on each of two axes. */
static void every_pair(rank_args* a) {
  weft_group* world = join(a, "world", 20000 * MS);
  weft_mesh* mesh = mesh_of(world, 2);
  const weft_placement all[] = {weft_replicate(), weft_shard(0), weft_shard(1), weft_partial(WEFT_SUM)};
  const int tp_size = a->size / 2, dp = a->rank / tp_size, tp = a->rank % tp_size;
  for (int from = 0; from < 16; ++from)
    for (int to = 0; to < 16; ++to) {
      weft_layout* l = layout_of(mesh, all[from % 4], all[from / 4], ROWS, COLUMNS);
      weft_layout* goal = layout_of(mesh, all[to % 4], all[to / 4], ROWS, COLUMNS);
      weft_layout* whole = layout_of(mesh, weft_replicate(), weft_replicate(), ROWS, COLUMNS);
      float in[ALL], out[ALL], expected[ALL], back[ALL];
      const int dp_parts = all[from % 4].kind == WEFT_PARTIAL ? 2 : 1;
      const int tp_parts = all[from / 4].kind == WEFT_PARTIAL ? tp_size : 1;
      const int parts = dp_parts * tp_parts;
      const int index = (dp_parts == 2 ? dp : 0) * tp_parts + (tp_parts > 1 ? tp : 0);
      const weft_buffer x = f32(in, fill(l, in, parts, index));
      const weft_buffer y = f32(out, fill(goal, expected, 1, 0));
      const weft_buffer z = f32(back, ALL);
      OK(weft_redistribute(&x, l, &y, goal, NULL, NULL, &error));
      if (all[to % 4].kind != WEFT_PARTIAL && all[to / 4].kind != WEFT_PARTIAL)
        CHECK(memcmp(out, expected, (size_t)y.count * sizeof *out) == 0);
      OK(weft_redistribute(&y, goal, &z, whole, NULL, NULL, &error));
      for (int i = 0; i < ALL; ++i) CHECK(back[i] == value_at(i / COLUMNS, i % COLUMNS));
      weft_layout_destroy(whole);
      weft_layout_destroy(goal);
      weft_layout_destroy(l);
    }
  weft_mesh_destroy(mesh);
  weft_group_destroy(world);
}
static void test_every_pair(void) {
  run_ranks(2, every_pair);
  run_ranks(4, every_pair);
}

/* Two transfers in flight at once, transfers in place, and unfinished transfers. */
static void transfers(rank_args* a) {
  weft_group* world = join(a, "world", 20000 * MS);
  weft_mesh* mesh = mesh_of(world, 2);
  weft_layout* sum = layout_of(mesh, weft_partial(WEFT_SUM), weft_replicate(), 2, 2);
  weft_layout* same = layout_of(mesh, weft_replicate(), weft_replicate(), 2, 2);
  weft_transfer *first = NULL, *second = NULL;
  float x[4] = {1, 2, 3, 4}, y[4] = {5, 6, 7, (float)a->rank};
  const weft_buffer bx = f32(x, 4), by = f32(y, 4);
  bool done = false;
  OK(weft_redistribute(&bx, sum, &bx, same, NULL, &first, &error));
  OK(weft_redistribute(&by, sum, &by, same, NULL, &second, &error));
  while (!done) OK(weft_transfer_done(second, &done, &error));
  OK(weft_transfer_finish(first, &error));
  OK(weft_transfer_finish(second, &error));
  CHECK(x[0] == 2 && x[3] == 8 && y[0] == 10 && y[3] == 1);
  OK(weft_transfer_done(second, &done, &error));
  CHECK(done);
  CHECK_ERROR(weft_transfer_finish(second, &error), WEFT_BAD_ARGUMENT,
              "weft_transfer_finish: transfer is finished already");
  weft_transfer_destroy(second);
  weft_transfer_destroy(first);
  pthread_barrier_wait(a->meet);
  if (a->rank == 0) {
    first = NULL;
    OK(weft_redistribute(&bx, sum, &bx, same, NULL, &first, &error));
    weft_transfer_destroy(first);
  }
  pthread_barrier_wait(a->meet); /* earlier, rank 1's barrier would be a mismatch */
  CHECK_ERROR(weft_barrier(world, NULL, NULL, &error), WEFT_ABORTED, "*rank 0 dropped the Work of a call");
  weft_layout_destroy(same);
  weft_layout_destroy(sum);
  weft_mesh_destroy(mesh);
  weft_group_destroy(world);
}
static void test_transfers(void) { run_ranks(2, transfers); }

/* Replicas: the same, then one that drifted. Rank 3 has another bit in "w", which dp shards, so that its peer
 * is rank 2. */
static void replicas(rank_args* a) {
  weft_group* world = join(a, "world", 20000 * MS);
  weft_mesh *mesh = mesh_of(world, 2), *tp = NULL;
  weft_layout* cut = layout_of(mesh, weft_shard(0), weft_replicate(), 4, 2);
  weft_layout* same = layout_of(mesh, weft_replicate(), weft_replicate(), 3, 1);
  const char* const tp_name = "tp";
  const int64_t extents[] = {2, 2};
  float w[4] = {1, 2, 3, (float)(a->rank / 2)}, b[3] = {1, 2, 3};
  const weft_tensor tensors[] = {{"b", f32(b, 3), same, NULL, 0}, {"w", f32(w, 4), cut, extents, 2}};
  weft_error e = WEFT_ERROR_INIT;
  OK(weft_mesh_along(mesh, &tp_name, 1, &tp, &error));
  OK(weft_check_replicas(tensors, 2, mesh, &error));
  OK(weft_check_replicas(NULL, 0, tp, &error));
  if (a->rank == 3) w[1] = -2;
  CHECK(weft_check_replicas(tensors, 2, mesh, &e) == WEFT_MISMATCH);
  CHECK(strstr(e.text,
               "check_replicas: \"w\" is Replicate on tp=2, but on dp,tp ranks 2, 3 it has other bits") ==
        e.text);
  CHECK(e.rank_count == 2 && e.ranks[0] == 2 && e.ranks[1] == 3);
  /* Only one rank has another tensor, or a tensor that does not fit. All ranks get the error. */
  weft_tensor one = tensors[0];
  if (a->rank == 1) one.data.count = 2;
  CHECK_ERROR(weft_check_replicas(&one, 1, mesh, &error), WEFT_LAYOUT,
              a->rank == 1
                  ? "check_replicas: \"b\" is (2); (3, 1) as [dp: Replicate, tp: Replicate] is (3, 1) "
                    "on this rank"
                  : "check_replicas: dp,tp rank 1 failed: check_replicas: \"b\" is (2); (3, 1) as [dp: "
                    "Replicate, tp: Replicate] is (3, 1) on this rank");
  one = tensors[0];
  one.layout = NULL;
  CHECK_ERROR(weft_check_replicas(&one, 1, mesh, &error), WEFT_LAYOUT,
              "check_replicas: \"b\" is a plain tensor; on dp,tp=4 it needs a layout, which says what part "
              "of the whole it is");
  weft_layout_destroy(same);
  weft_layout_destroy(cut);
  weft_mesh_destroy(tp);
  weft_mesh_destroy(mesh);
  weft_group_destroy(world);
}
static void test_replicas(void) { run_ranks(4, replicas); }

/* ---- Arguments ---- */

#define REFUSED(call, text) CHECK_ERROR(call, WEFT_BAD_ARGUMENT, text)

static void test_null_arguments(void) {
  weft_layout *l = layout_of(planned, weft_shard(0), weft_replicate(), 4, 4), *to = NULL;
  const weft_axis_placement unnamed[] = {{NULL, {WEFT_REPLICATE, 0, 0}}};
  const weft_placement p = weft_replicate();
  const int64_t four[] = {4, 4};
  const int32_t order[] = {1, 0};
  const char *const names[] = {"dp", NULL}, *const dp[] = {"dp"};
  int64_t extents[2], offsets[2];
  int32_t n = 0;
  bool flag = false;
  weft_placement read;
  weft_mesh* mesh = NULL;
  weft_transfer* transfer = NULL;
  char text[8];
  size_t bytes = 0;
  float x[16] = {0};
  const weft_buffer b = f32(x, 16);
  const weft_tensor nameless = {NULL, b, NULL, NULL, 0};
  REFUSED(weft_layout_create(NULL, NULL, 0, four, 2, &to, &error), "weft_layout_create: mesh is NULL");
  REFUSED(weft_layout_create(planned, NULL, 1, four, 2, &to, &error),
          "weft_layout_create: placements is NULL");
  REFUSED(weft_layout_create(planned, unnamed, 1, four, 2, &to, &error),
          "weft_layout_create: placements[0].axis is NULL");
  REFUSED(weft_layout_create(planned, NULL, 0, NULL, 2, &to, &error), "weft_layout_create: extents is NULL");
  REFUSED(weft_layout_create(planned, NULL, 0, four, 2, NULL, &error), "weft_layout_create: layout is NULL");
  REFUSED(weft_layout_with(NULL, planned, &p, &to, &error), "weft_layout_with: layout is NULL");
  REFUSED(weft_layout_with(l, NULL, &p, &to, &error), "weft_layout_with: axes is NULL");
  REFUSED(weft_layout_with(l, planned, NULL, &to, &error), "weft_layout_with: placement is NULL");
  REFUSED(weft_layout_with(l, planned, &p, NULL, &error), "weft_layout_with: changed is NULL");
  REFUSED(weft_layout_with_extents(NULL, four, 2, &to, &error), "weft_layout_with_extents: layout is NULL");
  REFUSED(weft_layout_with_extents(l, NULL, 2, &to, &error), "weft_layout_with_extents: extents is NULL");
  REFUSED(weft_layout_with_extents(l, four, 2, NULL, &error), "weft_layout_with_extents: changed is NULL");
  REFUSED(weft_layout_shard_inside(NULL, planned, 0, &to, &error),
          "weft_layout_shard_inside: layout is NULL");
  REFUSED(weft_layout_shard_inside(l, NULL, 0, &to, &error), "weft_layout_shard_inside: axes is NULL");
  REFUSED(weft_layout_shard_inside(l, planned, 0, NULL, &error), "weft_layout_shard_inside: changed is NULL");
  REFUSED(weft_layout_nested(NULL, dp, 1, &to, &error), "weft_layout_nested: layout is NULL");
  REFUSED(weft_layout_nested(l, NULL, 1, &to, &error), "weft_layout_nested: axes is NULL");
  REFUSED(weft_layout_nested(l, names, 2, &to, &error), "weft_layout_nested: axes[1] is NULL");
  REFUSED(weft_layout_nested(l, dp, 1, NULL, &error), "weft_layout_nested: changed is NULL");
  REFUSED(weft_layout_reshape(NULL, four, 2, &to, &error), "weft_layout_reshape: layout is NULL");
  REFUSED(weft_layout_reshape(l, NULL, 2, &to, &error), "weft_layout_reshape: extents is NULL");
  REFUSED(weft_layout_reshape(l, four, 2, NULL, &error), "weft_layout_reshape: changed is NULL");
  REFUSED(weft_layout_transpose(NULL, order, 2, &to, &error), "weft_layout_transpose: layout is NULL");
  REFUSED(weft_layout_transpose(l, NULL, 2, &to, &error), "weft_layout_transpose: order is NULL");
  REFUSED(weft_layout_transpose(l, order, 2, NULL, &error), "weft_layout_transpose: changed is NULL");
  REFUSED(weft_layout_segmented(NULL, 0, four, 1, &to, &error), "weft_layout_segmented: layout is NULL");
  REFUSED(weft_layout_segmented(l, 0, NULL, 1, &to, &error), "weft_layout_segmented: lengths is NULL");
  REFUSED(weft_layout_segmented(l, 0, four, 1, NULL, &error), "weft_layout_segmented: changed is NULL");
  REFUSED(weft_layout_reduced(NULL, planned, &to, &error), "weft_layout_reduced: layout is NULL");
  REFUSED(weft_layout_reduced(l, NULL, &to, &error), "weft_layout_reduced: axes is NULL");
  REFUSED(weft_layout_reduced(l, planned, NULL, &error), "weft_layout_reduced: reduced is NULL");
  REFUSED(weft_layout_mesh(NULL, &mesh, &error), "weft_layout_mesh: layout is NULL");
  REFUSED(weft_layout_mesh(l, NULL, &error), "weft_layout_mesh: mesh is NULL");
  REFUSED(weft_layout_on(NULL, planned, &read, &error), "weft_layout_on: layout is NULL");
  REFUSED(weft_layout_on(l, NULL, &read, &error), "weft_layout_on: axes is NULL");
  REFUSED(weft_layout_on(l, planned, NULL, &error), "weft_layout_on: placement is NULL");
  REFUSED(weft_layout_dim_count(NULL, &n, &error), "weft_layout_dim_count: layout is NULL");
  REFUSED(weft_layout_dim_count(l, NULL, &error), "weft_layout_dim_count: dim_count is NULL");
  REFUSED(weft_layout_extents(NULL, extents, 2, &error), "weft_layout_extents: layout is NULL");
  REFUSED(weft_layout_extents(l, NULL, 2, &error), "weft_layout_extents: extents is NULL");
  REFUSED(weft_layout_local_extents(NULL, 0, extents, 2, &error),
          "weft_layout_local_extents: layout is NULL");
  REFUSED(weft_layout_local_extents(l, 0, NULL, 2, &error), "weft_layout_local_extents: extents is NULL");
  REFUSED(weft_layout_part_count(NULL, &n, &error), "weft_layout_part_count: layout is NULL");
  REFUSED(weft_layout_part_count(l, NULL, &error), "weft_layout_part_count: count is NULL");
  REFUSED(weft_layout_part(NULL, 0, 0, offsets, extents, 2, &error), "weft_layout_part: layout is NULL");
  REFUSED(weft_layout_part(l, 0, 0, NULL, extents, 2, &error), "weft_layout_part: offsets is NULL");
  REFUSED(weft_layout_part(l, 0, 0, offsets, NULL, 2, &error), "weft_layout_part: extents is NULL");
  REFUSED(weft_layout_equal(NULL, l, &flag, &error), "weft_layout_equal: a is NULL");
  REFUSED(weft_layout_equal(l, NULL, &flag, &error), "weft_layout_equal: b is NULL");
  REFUSED(weft_layout_equal(l, l, NULL, &error), "weft_layout_equal: equal is NULL");
  REFUSED(weft_layout_text(NULL, text, 8, &bytes, &error), "weft_layout_text: layout is NULL");
  REFUSED(weft_layout_text(l, NULL, 8, &bytes, &error), "weft_layout_text: text is NULL");
  REFUSED(weft_layout_text(l, text, 8, NULL, &error), "weft_layout_text: bytes is NULL");
  REFUSED(weft_redistribute(NULL, l, &b, l, NULL, NULL, &error), "weft_redistribute: in is NULL");
  REFUSED(weft_redistribute(&b, NULL, &b, l, NULL, NULL, &error), "weft_redistribute: from is NULL");
  REFUSED(weft_redistribute(&b, l, NULL, l, NULL, NULL, &error), "weft_redistribute: out is NULL");
  REFUSED(weft_redistribute(&b, l, &b, NULL, NULL, NULL, &error), "weft_redistribute: to is NULL");
  REFUSED(weft_transfer_done(NULL, &flag, &error), "weft_transfer_done: transfer is NULL");
  REFUSED(weft_transfer_finish(NULL, &error), "weft_transfer_finish: transfer is NULL");
  REFUSED(weft_check_replicas(NULL, 1, planned, &error), "weft_check_replicas: tensors is NULL");
  REFUSED(weft_check_replicas(&nameless, 1, planned, &error), "weft_check_replicas: tensors[0].name is NULL");
  REFUSED(weft_check_replicas(NULL, 0, NULL, &error), "weft_check_replicas: axes is NULL");
  weft_layout_destroy(NULL);
  weft_transfer_destroy(NULL);

  weft_layout* part = layout_of(planned, weft_shard(0), weft_replicate(), 8, 4);
  OK(weft_redistribute(&b, part, &b, part, NULL, &transfer, &error)); /* nothing moves */
  REFUSED(weft_transfer_done(transfer, NULL, &error), "weft_transfer_done: done is NULL");
  weft_transfer_destroy(transfer);
  weft_layout_destroy(part);
  weft_layout_destroy(l);
  CHECK(to == NULL && mesh == NULL);
}

static void test_wrong_arguments(void) {
  weft_layout *l = layout_of(planned, weft_shard(0), weft_replicate(), 4, 4), *to = NULL;
  const weft_axis_placement pp[] = {{"pp", {WEFT_REPLICATE, 0, 0}}}, kind[] = {{"dp", {3, 0, 0}}},
                            scaled[] = {{"dp", {WEFT_PARTIAL, 0, WEFT_PREMUL_SUM}}},
                            deep[] = {{"dp", {WEFT_SHARD, 2, 0}}},
                            twice[] = {{"dp", {WEFT_SHARD, 0, 0}}, {"dp", {WEFT_SHARD, 1, 0}}};
  const int64_t four[] = {4, 4}, negative[] = {4, -4}, nine[9] = {1}, odd[] = {3, 5};
  const int32_t order[] = {1, 0}, one_twice[] = {1, 1};
  const char* const names[] = {"dp", "dp"};
  int64_t extents[2], offsets[2];
  weft_placement read;
  float x[16] = {0};
  double wide[8] = {0};
  const weft_buffer b = f32(x, 16);
  weft_tensor t = {"t", b, NULL, NULL, 2};
  REFUSED(weft_layout_create(planned, pp, 1, four, 2, &to, &error), "mesh: no axis \"pp\" in dp=2 x tp=2");
  REFUSED(weft_layout_create(planned, pp, -1, four, 2, &to, &error),
          "weft_layout_create: placement_count is -1; expected 0 or more");
  REFUSED(weft_layout_create(planned, kind, 1, four, 2, &to, &error),
          "weft_layout_create: placements[0].placement.kind is 3; expected 0 (WEFT_REPLICATE), 1 "
          "(WEFT_SHARD) or 2 "
          "(WEFT_PARTIAL)");
  REFUSED(weft_layout_create(planned, scaled, 1, four, 2, &to, &error),
          "weft_layout_create: placements[0].placement.op is 5; expected 0 (WEFT_SUM) to 11 "
          "(WEFT_LOGICAL_XOR), and "
          "not WEFT_PREMUL_SUM");
  REFUSED(weft_layout_create(planned, twice, 2, four, 2, &to, &error),
          "weft_layout_create: placements[1].axis is \"dp\", which is in the list already");
  CHECK_ERROR(weft_layout_create(planned, deep, 1, four, 2, &to, &error), WEFT_LAYOUT,
              "layout: Shard(2) on dp; the tensor (4, 4) has dimensions 0 to 1");
  CHECK_ERROR(weft_layout_create(planned, NULL, 0, negative, 2, &to, &error), WEFT_LAYOUT,
              "layout: the shape (4, -4) has a negative size");
  REFUSED(weft_layout_create(planned, NULL, 0, nine, 9, &to, &error),
          "weft_layout_create: dim_count is 9; expected 0 to 8");
  REFUSED(weft_layout_with_extents(l, four, -1, &to, &error),
          "weft_layout_with_extents: dim_count is -1; expected 0 to 8");
  REFUSED(weft_layout_with(l, planned, &kind[0].placement, &to, &error),
          "weft_layout_with: placement->kind is 3; expected 0 (WEFT_REPLICATE), 1 (WEFT_SHARD) or 2 "
          "(WEFT_PARTIAL)");
  CHECK_ERROR(weft_layout_shard_inside(l, planned, 5, &to, &error), WEFT_LAYOUT,
              "layout: Shard(5) on dp; the tensor (4, 4) has dimensions 0 to 1");
  CHECK_ERROR(weft_layout_nested(l, names, 2, &to, &error), WEFT_LAYOUT,
              "layout: axis \"dp\" is given twice in a nesting");
  REFUSED(weft_layout_nested(l, names, -1, &to, &error),
          "weft_layout_nested: axis_count is -1; expected 0 or more");
  CHECK_ERROR(
      weft_layout_reshape(l, odd, 2, &to, &error), WEFT_LAYOUT,
      "layout: (4, 4) as [dp: Shard(0), tp: Replicate] becomes (3, 5); expected a shape of as many elements");
  REFUSED(weft_layout_reshape(l, nine, 9, &to, &error),
          "weft_layout_reshape: dim_count is 9; expected 0 to 8");
  CHECK_ERROR(weft_layout_transpose(l, one_twice, 2, &to, &error), WEFT_LAYOUT,
              "layout: the order (1, 1) of (4, 4) as [dp: Shard(0), tp: Replicate]; expected each of its 2 "
              "dimensions "
              "once");
  REFUSED(weft_layout_transpose(l, order, -1, &to, &error),
          "weft_layout_transpose: dim_count is -1; expected 0 to 8");
  CHECK_ERROR(weft_layout_segmented(l, 0, four, 2, &to, &error), WEFT_LAYOUT,
              "layout: segments 4, 4 add up to 8; dimension 0 of (4, 4) has 4");
  REFUSED(weft_layout_segmented(l, 0, four, -1, &to, &error),
          "weft_layout_segmented: segment_count is -1; expected 0 or more");
  CHECK_ERROR(weft_layout_on(l, planned, &read, &error), WEFT_LAYOUT,
              "layout: Shard(0) on dp=2 and Replicate on tp=2; expected one placement on dp,tp");
  REFUSED(weft_layout_extents(l, extents, 1, &error), "weft_layout_extents: room is 1; extents needs 2");
  REFUSED(weft_layout_local_extents(l, 4, extents, 2, &error), "mesh: rank 4; expected 0 to 3 (dp=2 x tp=2)");
  REFUSED(weft_layout_local_extents(l, 0, extents, 1, &error),
          "weft_layout_local_extents: room is 1; extents needs 2");
  REFUSED(weft_layout_part(l, -2, 0, offsets, extents, 2, &error),
          "mesh: rank -2; expected 0 to 3 (dp=2 x tp=2)");
  REFUSED(weft_layout_part(l, 0, 1, offsets, extents, 2, &error),
          "weft_layout_part: index is 1; expected 0 to 0");
  REFUSED(weft_layout_part(l, 0, 0, offsets, extents, 1, &error),
          "weft_layout_part: room is 1; offsets needs 2");

  weft_layout* all = layout_of(planned, weft_replicate(), weft_replicate(), 4, 4);
  const weft_buffer half = f32(x, 8), other = {wide, 8, WEFT_F64, WEFT_CPU},
                    none = {NULL, 8, WEFT_F32, WEFT_CPU}, inside = f32(x + 4, 8);
  CHECK_ERROR(weft_redistribute(&half, all, &half, l, NULL, NULL, &error), WEFT_LAYOUT,
              "redistribute: in is (8); rank 1 of (4, 4) as [dp: Replicate, tp: Replicate] holds (4, 4)");
  REFUSED(weft_redistribute(&b, all, &other, l, NULL, NULL, &error),
          "redistribute: out is f64; expected f32 as in");
  REFUSED(weft_redistribute(&b, all, &none, l, NULL, NULL, &error), "redistribute: out has no memory");
  REFUSED(weft_redistribute(&b, all, &inside, l, NULL, NULL, &error),
          "redistribute: in and out overlap; expected disjoint memory, or the same first address");
  CHECK_ERROR(weft_redistribute(&half, l, &b, all, NULL, NULL, &error), WEFT_UNSUPPORTED,
              "mesh: dp=2 x tp=2 is arithmetic only; without a process group it cannot communicate");
  REFUSED(weft_check_replicas(&t, 1, planned, &error),
          "weft_check_replicas: tensors[0].extents is NULL, and dim_count is 2; expected 0");
  t.dim_count = 0;
  t.data.dtype = 17;
  REFUSED(weft_check_replicas(&t, 1, planned, &error),
          "weft_check_replicas: tensors[0].data.dtype is 17; expected 0 (WEFT_F64) to 16 (WEFT_C128)");
  REFUSED(weft_check_replicas(&t, -1, planned, &error),
          "weft_check_replicas: count is -1; expected 0 or more");
  weft_layout_destroy(all);
  weft_layout_destroy(l);
  CHECK(to == NULL);
}

int main(int argc, char** argv) {
  static const named_test tests[] = {
      {"arithmetic", test_arithmetic},
      {"null_arguments", test_null_arguments},
      {"wrong_arguments", test_wrong_arguments},
      {"every_pair", test_every_pair},
      {"transfers", test_transfers},
      {"replicas", test_replicas},
  };
  const weft_mesh_axis axes[] = {{"dp", 2}, {"tp", 2}};
  OK(weft_context_create(NULL, &context, &error));
  OK(weft_mesh_create_arithmetic(context, axes, 2, 1, &planned, &error));
  const int result = run_tests(tests, LENGTH(tests), argc, argv);
  weft_mesh_destroy(planned);
  weft_context_destroy(context);
  return result;
}
