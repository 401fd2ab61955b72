/* Meshes from C: their parts and arithmetic, the groups of axes, every refused argument, and lifetimes. */
#include "support.h"

static weft_mesh* mesh_2x2(weft_group* group) {
  const weft_mesh_axis axes[] = {{"dp", 2}, {"tp", -1}};
  weft_mesh* mesh = NULL;
  OK(weft_mesh_create(group, axes, 2, &mesh, &error));
  return mesh;
}

static weft_mesh* along(const weft_mesh* mesh, const char* axis) {
  weft_mesh* part = NULL;
  OK(weft_mesh_along(mesh, &axis, 1, &part, &error));
  return part;
}

/* The number that each rank of the mesh gives, added up over its group. */
static float sum_over(const weft_mesh* mesh, float x) {
  weft_group* group = NULL;
  const weft_buffer b = f32(&x, 1);
  OK(weft_mesh_group(mesh, &group, &error));
  OK(weft_all_reduce(group, &b, &b, NULL, NULL, &error));
  weft_group_destroy(group);
  return x;
}

static void grid(rank_args* a) {
  weft_group* world = join(a, "world", 20000 * MS);
  weft_mesh *mesh = mesh_2x2(world), *dp = along(mesh, "dp"), *tp = along(mesh, "tp"), *root = NULL;
  int32_t n = -1, ranks[4] = {-1, -1, -1, -1}, at[2] = {-1, -1};
  bool equal = false;
  weft_mesh_axis axis = {NULL, 0};

  OK(weft_mesh_size(mesh, &n, &error));
  CHECK(n == 4);
  OK(weft_mesh_rank(mesh, &n, &error));
  CHECK(n == a->rank);
  OK(weft_mesh_axis_count(mesh, &n, &error));
  CHECK(n == 2);
  OK(weft_mesh_get_axis(mesh, 1, &axis, &error));
  CHECK(strcmp(axis.name, "tp") == 0 && axis.size == 2);
  OK(weft_mesh_find_axis(mesh, "tp", &n, &error));
  CHECK(n == 1);
  OK(weft_mesh_find_axis(mesh, "pp", &n, &error));
  CHECK(n == -1);
  OK(weft_mesh_coordinate(mesh, "dp", &n, &error));
  CHECK(n == a->rank / 2);
  OK(weft_mesh_coordinates(mesh, 2, at, 2, &error));
  CHECK(at[0] == 1 && at[1] == 0);
  at[1] = 1;
  OK(weft_mesh_rank_at(mesh, at, 2, &n, &error));
  CHECK(n == 3);

  OK(weft_mesh_size(dp, &n, &error));
  CHECK(n == 2);
  OK(weft_mesh_rank(dp, &n, &error));
  CHECK(n == a->rank / 2);
  OK(weft_mesh_ranks(dp, ranks, 4, &error));
  CHECK(ranks[0] == a->rank % 2 && ranks[1] == a->rank % 2 + 2 && ranks[2] == -1);
  OK(weft_mesh_root(tp, &root, &error));
  OK(weft_mesh_equal(root, mesh, &equal, &error));
  CHECK(equal);
  OK(weft_mesh_equal(tp, dp, &equal, &error));
  CHECK(!equal);

  CHECK(sum_over(mesh, (float)a->rank) == 0 + 1 + 2 + 3);
  CHECK(sum_over(dp, (float)a->rank) == (float)(2 * (a->rank % 2) + 2));
  CHECK(sum_over(tp, (float)a->rank) == (float)(4 * (a->rank / 2) + 1));
  weft_mesh_destroy(root);
  weft_mesh_destroy(tp);
  weft_mesh_destroy(dp);
  weft_mesh_destroy(mesh);
  weft_group_destroy(world);
}
static void test_grid(void) { run_ranks(4, grid); }

/* Axes in another order, joined, and divided. */
static void other_views(rank_args* a) {
  const char* const turned[] = {"tp", "dp"};
  const weft_mesh_axis parts[] = {{"kv", 2}, {"rep", -1}};
  weft_group* world = join(a, "world", 20000 * MS);
  weft_mesh *mesh = mesh_2x2(world), *t = NULL, *flat = NULL, *divided = NULL, *again = NULL;
  int32_t n = -1, ranks[4];
  weft_mesh_axis axis;
  OK(weft_mesh_along(mesh, turned, 2, &t, &error));
  OK(weft_mesh_ranks(t, ranks, 4, &error));
  CHECK(ranks[0] == 0 && ranks[1] == 2 && ranks[2] == 1 && ranks[3] == 3);
  CHECK(sum_over(t, (float)a->rank) == 6);
  OK(weft_mesh_flatten(mesh, "all", &flat, &error));
  OK(weft_mesh_get_axis(flat, 0, &axis, &error));
  CHECK(strcmp(axis.name, "all") == 0 && axis.size == 4);
  OK(weft_mesh_unflatten(mesh, "tp", parts, 2, &divided, &error));
  OK(weft_mesh_axis_count(divided, &n, &error));
  CHECK(n == 3);
  again = along(divided, "tp"); /* its parts together */
  OK(weft_mesh_size(again, &n, &error));
  CHECK(n == 2 && sum_over(again, 1) == 2);
  weft_mesh_destroy(again);
  weft_mesh_destroy(divided);
  weft_mesh_destroy(flat);
  weft_mesh_destroy(t);
  weft_mesh_destroy(mesh);
  weft_group_destroy(world);
}
static void test_other_views(void) { run_ranks(4, other_views); }

/* A group of an axis still works after everything else is destroyed. */
static void lifetimes(rank_args* a) {
  weft_group *world = join(a, "world", 20000 * MS), *group = NULL;
  weft_mesh *mesh = mesh_2x2(world), *tp = along(mesh, "tp");
  float x = (float)a->rank;
  const weft_buffer b = f32(&x, 1);
  weft_group_destroy(world);
  weft_mesh_destroy(mesh);
  OK(weft_mesh_group(tp, &group, &error));
  weft_mesh_destroy(tp);
  OK(weft_all_reduce(group, &b, &b, NULL, NULL, &error));
  CHECK(x == (float)(4 * (a->rank / 2) + 1));
  weft_group_destroy(group);
}
static void test_lifetimes(void) { run_ranks(4, lifetimes); }

static weft_context* context;
static weft_mesh* planned; /* dp=2 x tp=3 as rank 4 sees it */

static void test_arithmetic(void) {
  int32_t n = -1, ranks[3];
  weft_mesh* tp = along(planned, "tp");
  weft_group* group = NULL;
  OK(weft_mesh_rank(planned, &n, &error));
  CHECK(n == 4);
  OK(weft_mesh_ranks(tp, ranks, 3, &error));
  CHECK(ranks[0] == 3 && ranks[1] == 4 && ranks[2] == 5);
  CHECK_ERROR(weft_mesh_group(tp, &group, &error), WEFT_UNSUPPORTED,
              "mesh: dp=2 x tp=3 is arithmetic only; without a process group it cannot communicate");
  CHECK(group == NULL);
  weft_mesh_destroy(tp);
}

#define REFUSED(call, text) CHECK_ERROR(call, WEFT_BAD_ARGUMENT, text)

static void test_null_arguments(void) {
  const weft_mesh_axis axes[] = {{"dp", 1}}, unnamed[] = {{"dp", 1}, {NULL, 1}};
  const char *const names[] = {"dp", NULL}, *const dp[] = {"dp"};
  weft_group* group = NULL;
  weft_mesh* m = NULL;
  weft_mesh_axis axis;
  int32_t n = 0, at[2] = {0, 0};
  bool equal = false;
  OK(weft_group_create(context, NULL, 0, 1, NULL, &group, &error));
  REFUSED(weft_mesh_create(NULL, axes, 1, &m, &error), "weft_mesh_create: group is NULL");
  REFUSED(weft_mesh_create(group, NULL, 1, &m, &error), "weft_mesh_create: axes is NULL");
  REFUSED(weft_mesh_create(group, unnamed, 2, &m, &error), "weft_mesh_create: axes[1].name is NULL");
  REFUSED(weft_mesh_create(group, axes, 1, NULL, &error), "weft_mesh_create: mesh is NULL");
  REFUSED(weft_mesh_create_arithmetic(NULL, axes, 1, 0, &m, &error),
          "weft_mesh_create_arithmetic: context is NULL");
  REFUSED(weft_mesh_create_arithmetic(context, NULL, 1, 0, &m, &error),
          "weft_mesh_create_arithmetic: axes is NULL");
  REFUSED(weft_mesh_create_arithmetic(context, axes, 1, 0, NULL, &error),
          "weft_mesh_create_arithmetic: mesh is NULL");
  REFUSED(weft_mesh_along(NULL, dp, 1, &m, &error), "weft_mesh_along: mesh is NULL");
  REFUSED(weft_mesh_along(planned, NULL, 1, &m, &error), "weft_mesh_along: axes is NULL");
  REFUSED(weft_mesh_along(planned, names, 2, &m, &error), "weft_mesh_along: axes[1] is NULL");
  REFUSED(weft_mesh_along(planned, dp, 1, NULL, &error), "weft_mesh_along: along is NULL");
  REFUSED(weft_mesh_flatten(NULL, "x", &m, &error), "weft_mesh_flatten: mesh is NULL");
  REFUSED(weft_mesh_flatten(planned, NULL, &m, &error), "weft_mesh_flatten: name is NULL");
  REFUSED(weft_mesh_flatten(planned, "x", NULL, &error), "weft_mesh_flatten: flat is NULL");
  REFUSED(weft_mesh_unflatten(NULL, "dp", axes, 1, &m, &error), "weft_mesh_unflatten: mesh is NULL");
  REFUSED(weft_mesh_unflatten(planned, NULL, axes, 1, &m, &error), "weft_mesh_unflatten: axis is NULL");
  REFUSED(weft_mesh_unflatten(planned, "dp", NULL, 1, &m, &error), "weft_mesh_unflatten: parts is NULL");
  REFUSED(weft_mesh_unflatten(planned, "dp", axes, 1, NULL, &error), "weft_mesh_unflatten: divided is NULL");
  REFUSED(weft_mesh_root(NULL, &m, &error), "weft_mesh_root: mesh is NULL");
  REFUSED(weft_mesh_root(planned, NULL, &error), "weft_mesh_root: root is NULL");
  REFUSED(weft_mesh_equal(NULL, planned, &equal, &error), "weft_mesh_equal: a is NULL");
  REFUSED(weft_mesh_equal(planned, NULL, &equal, &error), "weft_mesh_equal: b is NULL");
  REFUSED(weft_mesh_equal(planned, planned, NULL, &error), "weft_mesh_equal: equal is NULL");
  REFUSED(weft_mesh_size(NULL, &n, &error), "weft_mesh_size: mesh is NULL");
  REFUSED(weft_mesh_size(planned, NULL, &error), "weft_mesh_size: size is NULL");
  REFUSED(weft_mesh_rank(NULL, &n, &error), "weft_mesh_rank: mesh is NULL");
  REFUSED(weft_mesh_rank(planned, NULL, &error), "weft_mesh_rank: rank is NULL");
  REFUSED(weft_mesh_axis_count(NULL, &n, &error), "weft_mesh_axis_count: mesh is NULL");
  REFUSED(weft_mesh_axis_count(planned, NULL, &error), "weft_mesh_axis_count: count is NULL");
  REFUSED(weft_mesh_get_axis(NULL, 0, &axis, &error), "weft_mesh_get_axis: mesh is NULL");
  REFUSED(weft_mesh_get_axis(planned, 0, NULL, &error), "weft_mesh_get_axis: axis is NULL");
  REFUSED(weft_mesh_find_axis(NULL, "dp", &n, &error), "weft_mesh_find_axis: mesh is NULL");
  REFUSED(weft_mesh_find_axis(planned, NULL, &n, &error), "weft_mesh_find_axis: axis is NULL");
  REFUSED(weft_mesh_find_axis(planned, "dp", NULL, &error), "weft_mesh_find_axis: index is NULL");
  REFUSED(weft_mesh_coordinate(NULL, "dp", &n, &error), "weft_mesh_coordinate: mesh is NULL");
  REFUSED(weft_mesh_coordinate(planned, NULL, &n, &error), "weft_mesh_coordinate: axis is NULL");
  REFUSED(weft_mesh_coordinate(planned, "dp", NULL, &error), "weft_mesh_coordinate: coordinate is NULL");
  REFUSED(weft_mesh_coordinates(NULL, 0, at, 2, &error), "weft_mesh_coordinates: mesh is NULL");
  REFUSED(weft_mesh_coordinates(planned, 0, NULL, 2, &error), "weft_mesh_coordinates: coordinates is NULL");
  REFUSED(weft_mesh_rank_at(NULL, at, 2, &n, &error), "weft_mesh_rank_at: mesh is NULL");
  REFUSED(weft_mesh_rank_at(planned, NULL, 2, &n, &error), "weft_mesh_rank_at: coordinates is NULL");
  REFUSED(weft_mesh_rank_at(planned, at, 2, NULL, &error), "weft_mesh_rank_at: rank is NULL");
  REFUSED(weft_mesh_ranks(NULL, at, 6, &error), "weft_mesh_ranks: mesh is NULL");
  REFUSED(weft_mesh_ranks(planned, NULL, 6, &error), "weft_mesh_ranks: ranks is NULL");
  REFUSED(weft_mesh_group(NULL, &group, &error), "weft_mesh_group: mesh is NULL");
  REFUSED(weft_mesh_group(planned, NULL, &error), "weft_mesh_group: group is NULL");
  weft_mesh_destroy(NULL);
  CHECK(m == NULL);
  weft_group_destroy(group);
}

static void test_wrong_arguments(void) {
  const weft_mesh_axis one[] = {{"dp", 1}}, two[] = {{"dp", 2}}, open[] = {{"dp", -1}}, five[] = {{"a", 5}};
  const char *const none[] = {"pp"}, *const twice[] = {"tp", "tp"};
  weft_group* group = NULL;
  weft_mesh *m = NULL, *tp = along(planned, "tp");
  weft_mesh_axis axis;
  int32_t n = 0, at[2] = {0, 3};
  OK(weft_group_create(context, NULL, 0, 1, NULL, &group, &error));
  REFUSED(weft_mesh_create(group, one, -1, &m, &error),
          "weft_mesh_create: axis_count is -1; expected 0 or more");
  REFUSED(weft_mesh_create(group, NULL, 0, &m, &error), "mesh: no axes");
  REFUSED(weft_mesh_create(group, two, 1, &m, &error), "mesh: dp=2 = 2 ranks; the group has 1");
  REFUSED(weft_mesh_create_arithmetic(context, open, 1, 0, &m, &error),
          "mesh: axis \"dp\" has no size, and there is no group from which to compute it");
  REFUSED(weft_mesh_create_arithmetic(context, two, 1, 2, &m, &error),
          "mesh: rank 2; expected 0 to 1 (dp=2)");
  REFUSED(weft_mesh_along(planned, none, 1, &m, &error), "mesh: no axis \"pp\" in dp=2 x tp=3");
  REFUSED(weft_mesh_along(planned, twice, 2, &m, &error), "mesh: axis \"tp\" is requested twice");
  REFUSED(weft_mesh_along(planned, NULL, 0, &m, &error),
          "mesh: a sub-mesh without axes was requested, of dp=2 x tp=3");
  REFUSED(weft_mesh_along(planned, none, -2, &m, &error),
          "weft_mesh_along: axis_count is -2; expected 0 or more");
  REFUSED(weft_mesh_flatten(planned, "", &m, &error), "*an axis without a name");
  REFUSED(weft_mesh_unflatten(planned, "tp", five, 1, &m, &error),
          "mesh: tp=3 cannot be divided into a=5 = 5 ranks");
  REFUSED(weft_mesh_unflatten(tp, "tp", five, 1, &m, &error),
          "mesh: unflatten of tp=3, a part of dp=2 x tp=3; only a root can be divided anew");
  REFUSED(weft_mesh_unflatten(planned, "tp", five, -1, &m, &error),
          "weft_mesh_unflatten: part_count is -1; expected 0 or more");
  REFUSED(weft_mesh_get_axis(planned, 2, &axis, &error), "mesh: axis 2; expected 0 to 1 (dp=2 x tp=3)");
  REFUSED(weft_mesh_coordinate(planned, "pp", &n, &error), "mesh: no axis \"pp\" in dp=2 x tp=3");
  REFUSED(weft_mesh_coordinates(planned, 6, at, 2, &error), "mesh: rank 6; expected 0 to 5 (dp=2 x tp=3)");
  REFUSED(weft_mesh_coordinates(planned, 0, at, 1, &error),
          "weft_mesh_coordinates: axis_count is 1; expected 2, the number of axes");
  REFUSED(weft_mesh_rank_at(planned, at, 1, &n, &error), "mesh: 1 coordinates; expected 2 (dp=2 x tp=3)");
  REFUSED(weft_mesh_rank_at(planned, at, 2, &n, &error),
          "mesh: coordinate 3 on axis \"tp\"; expected 0 to 2");
  REFUSED(weft_mesh_rank_at(planned, at, -1, &n, &error),
          "weft_mesh_rank_at: axis_count is -1; expected 0 or more");
  REFUSED(weft_mesh_ranks(planned, at, 2, &error), "weft_mesh_ranks: room is 2; ranks needs 6");
  CHECK(m == NULL);
  weft_mesh_destroy(tp);
  weft_group_destroy(group);
}

int main(int argc, char** argv) {
  static const named_test tests[] = {
      {"arithmetic", test_arithmetic},           {"null_arguments", test_null_arguments},
      {"wrong_arguments", test_wrong_arguments}, {"grid", test_grid},
      {"other_views", test_other_views},         {"lifetimes", test_lifetimes},
  };
  const weft_mesh_axis axes[] = {{"dp", 2}, {"tp", 3}};
  OK(weft_context_create(NULL, &context, &error));
  OK(weft_mesh_create_arithmetic(context, axes, 2, 4, &planned, &error));
  const int result = run_tests(tests, LENGTH(tests), argc, argv);
  weft_mesh_destroy(planned);
  weft_context_destroy(context);
  return result;
}
