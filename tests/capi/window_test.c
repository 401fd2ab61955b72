/* Halos and windows from C: every element compared with the global tensor, and refused arguments. */
#include "support.h"

enum { ROWS = 7, COLUMNS = 6 };
static const weft_edge none = {WEFT_EDGE_NONE, 0, 0}, ring = {WEFT_EDGE_PERIODIC, 0, 0},
                       wall = {WEFT_EDGE_CONSTANT, 0, -3};

static weft_layout* rows_cut(weft_group* group, weft_mesh** mesh) {
  const weft_mesh_axis axes[] = {{"y", -1}};
  const weft_axis_placement cut[] = {{"y", {WEFT_SHARD, 0, WEFT_SUM}}};
  const int64_t extents[] = {ROWS, COLUMNS};
  weft_layout* layout = NULL;
  OK(weft_mesh_create(group, axes, 1, mesh, &error));
  OK(weft_layout_create(*mesh, cut, 1, extents, 2, &layout, &error));
  return layout;
}

static double value(int64_t row, int64_t column) { return (double)(row * COLUMNS + column + 1); }

/* Ghost cells: a ring of columns, a wall above, and below nothing that the exchange writes. First the rows
 * are cut evenly, then at rows that the test chooses. */
static void ghost_cells(rank_args* a) {
  weft_group* world = join(a, "world", 0);
  weft_mesh* mesh = NULL;
  weft_layout* layout = rows_cut(world, &mesh);
  const weft_halo_dim dims[] = {{0, 0, 1, 2, wall, none}, {1, 0, 1, 1, ring, ring}};
  const int64_t begins[] = {0, 1, 1, 7};
  const weft_cut cut = {0, 3, begins};
  for (int own = 0; own < 2; ++own) {
    weft_halo* halo = NULL;
    int64_t extents[2], inner[2], offsets[2], part[2];
    OK(weft_halo_create(layout, &cut, own, dims, 2, &halo, &error));
    OK(weft_halo_extents(halo, extents, 2, &error));
    OK(weft_halo_part(halo, inner, offsets, part, 2, &error));
    if (own == 1) CHECK(part[0] == (a->rank == 0 ? 1 : a->rank == 1 ? 0 : 6));
    const int64_t count = extents[0] * extents[1];
    double* cells = calloc((size_t)count + 1, sizeof *cells);
    float* more = calloc((size_t)count + 1, sizeof *more);
    CHECK(cells != NULL && more != NULL);
    for (int64_t i = 0; i < part[0]; ++i)
      for (int64_t j = 0; j < part[1]; ++j) {
        const int64_t at = (i + inner[0]) * extents[1] + j + inner[1];
        cells[at] = value(offsets[0] + i, j);
        more[at] = (float)(100 + value(offsets[0] + i, j));
      }
    const weft_buffer fields[] = {{cells, count, WEFT_F64, WEFT_CPU}, {more, count, WEFT_F32, WEFT_CPU}};
    if (own == 0) {
      OK(weft_halo_start(halo, fields, 2, NULL, &error));
    } else {
      weft_exchange* exchange = NULL;
      bool done = false;
      OK(weft_halo_start(halo, fields, 2, &exchange, &error));
      while (!done) OK(weft_exchange_done(exchange, &done, &error));
      OK(weft_exchange_finish(exchange, &error));
      CHECK_ERROR(weft_exchange_finish(exchange, &error), WEFT_BAD_ARGUMENT,
                  "weft_exchange_finish: exchange is finished already");
      weft_exchange_destroy(exchange);
    }
    for (int64_t i = 0; i < extents[0] && part[0] > 0; ++i)
      for (int64_t j = 0; j < extents[1]; ++j) {
        const int64_t row = offsets[0] + i - inner[0], column = (j - 1 + COLUMNS) % COLUMNS;
        const double expected = row < 0 ? -3 : row >= ROWS ? 0 : value(row, column);
        CHECK(cells[i * extents[1] + j] == expected);
        CHECK(more[i * extents[1] + j] == (float)(row < 0 ? -3 : row >= ROWS ? 0 : 100 + expected));
      }
    free(cells);
    free(more);
    weft_halo_destroy(halo);
  }
  weft_layout_destroy(layout);
  weft_mesh_destroy(mesh);
  weft_group_destroy(world);
}
static void test_ghost_cells(void) { run_ranks(3, ghost_cells); }

/* Nodes and cells of a ring, whose ghost cells are filled by one exchange, and added back in place. */
static void together(rank_args* a) {
  weft_group* world = join(a, "world", 0);
  weft_mesh* mesh = NULL;
  weft_layout* layout = rows_cut(world, &mesh);
  const weft_halo_dim near = {0, 0, 1, 1, ring, ring}, behind = {0, 0, 0, 2, ring, ring};
  weft_halo *one = NULL, *two = NULL;
  OK(weft_halo_create(layout, NULL, 0, &near, 1, &one, &error));
  OK(weft_halo_create(layout, NULL, 0, &behind, 1, &two, &error));
  const int64_t rows = a->rank == 0 ? 3 : 2, first = a->rank == 0 ? 0 : a->rank == 1 ? 3 : 5;
  int32_t u[5 * COLUMNS], v[5 * COLUMNS];
  for (int64_t i = 0; i < 5 * COLUMNS; ++i) u[i] = v[i] = -1;
  for (int64_t i = 0; i < rows * COLUMNS; ++i) {
    u[COLUMNS + i] = (int32_t)value(first, i);
    v[i] = (int32_t)value(first, i) + 1000;
  }
  const weft_buffer of_u = {u, (rows + 2) * COLUMNS, WEFT_I32, WEFT_CPU},
                    of_v = {v, (rows + 2) * COLUMNS, WEFT_I32, WEFT_CPU};
  weft_halo_fields both[] = {{one, &of_u, 1, 0}, {two, &of_v, 1, 0}};
  weft_exchange* exchange = NULL;
  OK(weft_halo_start_together(both, 2, &exchange, &error));
  OK(weft_exchange_finish(exchange, &error));
  weft_exchange_destroy(exchange);
  for (int64_t i = 0; i < rows + 2; ++i) {
    CHECK(u[i * COLUMNS] == (int32_t)value((first + i - 1 + ROWS) % ROWS, 0));
    CHECK(v[i * COLUMNS] == (int32_t)value((first + i) % ROWS, 0) + 1000);
  }
  both[1].reserved = 1;
  CHECK_ERROR(weft_halo_start_together(both, 2, NULL, &error), WEFT_UNSUPPORTED,
              "weft_halo_start_together: halos[1].reserved is 1; expected 0");
  CHECK_ERROR(weft_halo_start_together(both, 0, NULL, &error), WEFT_BAD_ARGUMENT,
              "weft_halo_start_together: halo_count is 0; expected at least 1");
  both[1] = both[0];
  CHECK_ERROR(weft_halo_start_together(both, 2, NULL, &error), WEFT_BAD_ARGUMENT,
              "halo: halo 1 is halo 0; expected each once");

  for (int64_t i = 0; i < 5 * COLUMNS; ++i) u[i] = 1;
  OK(weft_halo_start_add(one, &of_u, 1, NULL, &error));
  for (int64_t i = 0; i < rows + 2; ++i) CHECK(u[i * COLUMNS] == (i == 1 || i == rows ? 2 : 1));

  const weft_range wanted[] = {{2, 4}, {-1, 1}, {2, 4}};
  const weft_window_dim dim = {0, 3, wanted, ring, none};
  weft_window *here = NULL, *there = NULL;
  OK(weft_window_create(layout, NULL, 0, &dim, 1, &here, &error));
  OK(weft_window_create(layout, NULL, 0, &dim, 1, &there, &error));
  int32_t in[3 * COLUMNS], out[2 * COLUMNS], out2[2 * COLUMNS];
  for (int64_t i = 0; i < rows * COLUMNS; ++i) in[i] = (int32_t)value(first, i);
  const weft_buffer from = {in, rows * COLUMNS, WEFT_I32, WEFT_CPU},
                    to = {out, 2 * COLUMNS, WEFT_I32, WEFT_CPU},
                    to2 = {out2, 2 * COLUMNS, WEFT_I32, WEFT_CPU};
  weft_window_fields windows[] = {{here, &from, &to, 1, 0}, {there, &from, &to2, 1, 0}};
  OK(weft_window_start_together(windows, 2, NULL, NULL, &error));
  for (int64_t i = 0; i < 2 * COLUMNS; ++i) {
    CHECK(out[i] == (int32_t)value((wanted[a->rank].lo + i / COLUMNS + ROWS) % ROWS, i % COLUMNS));
    CHECK(out2[i] == out[i]);
  }
  windows[1].out = &to;
  CHECK_ERROR(weft_window_start_together(windows, 2, NULL, NULL, &error), WEFT_BAD_ARGUMENT,
              "window: fields of window 0 and of window 1 overlap; expected disjoint memory");
  weft_window_destroy(here);
  weft_window_destroy(there);
  weft_halo_destroy(one);
  weft_halo_destroy(two);
  weft_layout_destroy(layout);
  weft_mesh_destroy(mesh);
  weft_group_destroy(world);
}
static void test_together(void) { run_ranks(3, together); }

/* Each rank takes two rows anywhere, the adjoint gives back how often each row was taken. */
static void any_rows(rank_args* a) {
  weft_group* world = join(a, "world", 0);
  weft_mesh* mesh = NULL;
  weft_layout* layout = rows_cut(world, &mesh); /* rows 0-2, 3-4, 5-6 */
  const weft_range wanted[] = {{2, 4}, {-1, 1}, {2, 4}};
  const weft_window_dim dim = {0, 3, wanted, ring, none};
  weft_window* window = NULL;
  int64_t part[2], extents[2];
  weft_range own = {-1, -1};
  OK(weft_window_create(layout, NULL, 0, &dim, 1, &window, &error));
  OK(weft_window_extents(window, part, extents, 2, &error));
  CHECK(extents[0] == 2 && extents[1] == COLUMNS && part[0] == (a->rank == 0 ? 3 : 2));
  OK(weft_window_own(window, 0, &own, &error));
  CHECK(own.lo == 0 && own.hi == (a->rank == 0 ? 1 : 0));
  const int64_t first = a->rank == 0 ? 0 : a->rank == 1 ? 3 : 5;
  int32_t in[3 * COLUMNS], out[2 * COLUMNS], uses[3 * COLUMNS];
  for (int64_t i = 0; i < part[0] * COLUMNS; ++i) in[i] = (int32_t)value(first, i);
  const weft_buffer from = {in, part[0] * COLUMNS, WEFT_I32, WEFT_CPU},
                    to = {out, 2 * COLUMNS, WEFT_I32, WEFT_CPU};
  OK(weft_window_start(window, &from, &to, 1, NULL, NULL, &error));
  for (int64_t i = 0; i < 2; ++i)
    for (int64_t j = 0; j < COLUMNS; ++j)
      CHECK(out[i * COLUMNS + j] == (int32_t)value((wanted[a->rank].lo + i + ROWS) % ROWS, j));
  for (int i = 0; i < 2 * COLUMNS; ++i) out[i] = a->rank + 1;
  const weft_buffer back = {uses, part[0] * COLUMNS, WEFT_I32, WEFT_CPU};
  weft_exchange* exchange = NULL;
  OK(weft_window_start_adjoint(window, &to, &back, 1, &exchange, &error));
  CHECK_ERROR(weft_window_start(window, &from, &to, 1, NULL, NULL, &error), WEFT_BAD_ARGUMENT,
              "window: out is still read by an exchange in flight; finish that one first");
  OK(weft_exchange_finish(exchange, &error));
  weft_exchange_destroy(exchange);
  const int32_t expected[ROWS] = {2, 0, 4, 4, 0, 0, 2}; /* ranks 0 and 2 took 2 and 3, rank 1 took 6 and 0 */
  for (int64_t i = 0; i < part[0]; ++i) CHECK(uses[i * COLUMNS] == expected[first + i]);
  const weft_buffer few = {out, 3, WEFT_I32, WEFT_CPU};
  CHECK_ERROR(weft_window_start(window, &from, &few, 1, NULL, NULL, &error), WEFT_BAD_ARGUMENT,
              "*window: out is (3); expected (2, 6)");
  weft_window_destroy(window);
  weft_layout_destroy(layout);
  weft_mesh_destroy(mesh);
  weft_group_destroy(world);
}
static void test_any_rows(void) { run_ranks(3, any_rows); }

static void test_refused(void) {
  weft_context* context = NULL;
  weft_mesh* mesh = NULL;
  weft_layout* layout = NULL;
  weft_halo* halo = NULL;
  weft_window* window = NULL;
  const weft_mesh_axis axes[] = {{"y", 2}};
  const weft_axis_placement shard[] = {{"y", {WEFT_SHARD, 0, WEFT_SUM}}};
  const int64_t four[] = {4, 2}, begins[] = {0, 3, 4};
  OK(weft_context_create(NULL, &context, &error));
  OK(weft_mesh_create_arithmetic(context, axes, 1, 0, &mesh, &error));
  OK(weft_layout_create(mesh, shard, 1, four, 2, &layout, &error));
  weft_halo_dim dim = {0, 0, 1, 1, {9, 0, 0}, none};
#define REFUSED(call, text) CHECK_ERROR(call, WEFT_BAD_ARGUMENT, text)
  REFUSED(
      weft_halo_create(layout, NULL, 0, &dim, 1, &halo, &error),
      "weft_halo_create: dims[0].before_edge.kind is 9; expected 0 (WEFT_EDGE_NONE) to 6 (WEFT_EDGE_POLE)");
  dim.before_edge = (weft_edge){WEFT_EDGE_PERIODIC, 0, 2};
  REFUSED(weft_halo_create(layout, NULL, 0, &dim, 1, &halo, &error),
          "weft_halo_create: dims[0].before_edge.value is 2; expected 0: only WEFT_EDGE_CONSTANT has one");
  dim.before_edge = (weft_edge){WEFT_EDGE_ZERO, 1, 0};
  REFUSED(weft_halo_create(layout, NULL, 0, &dim, 1, &halo, &error),
          "weft_halo_create: dims[0].before_edge.longitude is 1; expected 0: only WEFT_EDGE_POLE has one");
  dim.before_edge = none;
  dim.before = -1;
  REFUSED(weft_halo_create(layout, NULL, 0, &dim, 1, &halo, &error),
          "halo: dimension 0: a halo of -1 before and 1 after; expected at least 0");
  dim.before = 1, dim.dim = 5;
  REFUSED(weft_halo_create(layout, NULL, 0, &dim, 1, &halo, &error), "halo: dimension 5 of a tensor (4, 2)");
  dim.dim = 0, dim.before_edge = (weft_edge){WEFT_EDGE_REFLECT, 0, 0}, dim.before = 4;
  REFUSED(weft_halo_create(layout, NULL, 0, &dim, 1, &halo, &error),
          "halo: dimension 0: part 0 wants [-4, 3) of 4: 4 beyond the beginning; edge reflect has at most 3 "
          "there");
  dim.before = 1, dim.before_edge = none;
  dim.reserved = 1;
  CHECK_ERROR(weft_halo_create(layout, NULL, 0, &dim, 1, &halo, &error), WEFT_UNSUPPORTED,
              "weft_halo_create: dims[0].reserved is 1; expected 0");
  dim.reserved = 0;
  weft_cut cut = {1, 2, begins};
  REFUSED(weft_halo_create(layout, &cut, 1, &dim, 1, &halo, &error),
          "weft_halo_create: cuts[0].dim is 1; expected a dimension that the layout cuts");
  cut.dim = 0, cut.part_count = 0;
  REFUSED(weft_halo_create(layout, &cut, 1, &dim, 1, &halo, &error),
          "weft_halo_create: cuts[0].part_count is 0; expected 1 to 16777216");
  cut.part_count = 1;
  REFUSED(weft_halo_create(layout, &cut, 1, &dim, 1, &halo, &error),
          "halo: dimension 0 has 1 parts; expected 2 (y=2)");
  cut.begins = NULL;
  REFUSED(weft_halo_create(layout, &cut, 1, &dim, 1, &halo, &error),
          "weft_halo_create: cuts[0].begins is NULL");
  const weft_range wanted[] = {{0, 2}, {2, 5}};
  weft_window_dim want = {0, 2, wanted, none, none};
  REFUSED(weft_window_create(layout, NULL, 0, &want, 1, &window, &error),
          "*window: dimension 0: part 1 wants [2, 5) of 4; with edge none expected within [0, 4)");
  want.wanted = NULL;
  REFUSED(weft_window_create(layout, NULL, 0, &want, 1, &window, &error),
          "weft_window_create: dims[0].wanted is NULL");
  weft_layout_destroy(layout);
  weft_mesh_destroy(mesh);
  weft_context_destroy(context);
}

int main(int argc, char** argv) {
  const named_test tests[] = {{"ghost_cells", test_ghost_cells},
                              {"any_rows", test_any_rows},
                              {"together", test_together},
                              {"refused", test_refused}};
  return run_tests(tests, LENGTH(tests), argc, argv);
}
