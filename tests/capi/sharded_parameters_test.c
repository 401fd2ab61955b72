/* Sharded parameters from C: every element against the whole, and what is refused. */
#include "support.h"

enum { TENSORS = 3, ROWS = 7, COLUMNS = 5, MOST = ROWS * COLUMNS };
/* Uneven rows, one row more than nothing, fewer rows than ranks. */
static const int64_t shapes[TENSORS][2] = {{ROWS, COLUMNS}, {1, 3}, {2, 2}};
static const char* const names[TENSORS] = {"w", "one", "two"};

static float value(int tensor, int64_t at) { return (float)(tensor * 100 + at * 3 % 17); }

static void transfers(rank_args* a) {
  weft_group* world = join(a, "world", 0);
  weft_mesh* mesh = NULL;
  const weft_mesh_axis axes[] = {{"dp", -1}};
  OK(weft_mesh_create(world, axes, 1, &mesh, &error));
  weft_shard_entry entries[TENSORS];
  weft_layout* layouts[TENSORS];
  for (int t = 0; t < TENSORS; ++t) {
    OK(weft_layout_create(mesh, NULL, 0, shapes[t], 2, &layouts[t], &error));
    entries[t] = (weft_shard_entry){names[t], layouts[t], WEFT_F32};
  }
  weft_sharded_parameters_options options = WEFT_SHARDED_PARAMETERS_OPTIONS_INIT;
  options.alone_bytes = 64; /* the first travels alone, the others together */
  weft_sharded_parameters* shards = NULL;
  OK(weft_sharded_parameters_create(mesh, entries, TENSORS, &options, &shards, &error));

  float whole[TENSORS][MOST], part[TENSORS][MOST], gathered[TENSORS][MOST];
  weft_buffer wholes[TENSORS], parts[TENSORS], to[TENSORS];
  int64_t received = 0, total = 0, unshard_bytes = 0, reduce_bytes = 0;
  for (int t = 0; t < TENSORS; ++t) {
    const int64_t count = shapes[t][0] * shapes[t][1];
    for (int64_t i = 0; i < count; ++i) whole[t][i] = value(t, i);
    weft_layout* shard = NULL;
    int64_t extents[2], offset = -1, size = -1;
    int32_t ranges = 0;
    OK(weft_sharded_parameters_layout(shards, t, &shard, &error));
    OK(weft_layout_local_extents(shard, -1, extents, 2, &error));
    OK(weft_sharded_parameters_range(shards, t, a->rank, 0, &offset, &size, &ranges, &error));
    CHECK(ranges == 1 && size == extents[0] * extents[1]);
    const int64_t rows = shapes[t][0] / 3 + (a->rank < shapes[t][0] % 3);
    CHECK(extents[0] == rows && extents[1] == shapes[t][1]);
    if (t == 0) CHECK(offset == (a->rank == 0 ? 0 : a->rank == 1 ? 15 : 25));
    wholes[t] = (weft_buffer){whole[t], count, WEFT_F32, WEFT_CPU};
    parts[t] = (weft_buffer){part[t], size, WEFT_F32, WEFT_CPU};
    to[t] = (weft_buffer){gathered[t], count, WEFT_F32, WEFT_CPU};
    received += 4 * (count - size);
    total += count;
    weft_layout_destroy(shard);
  }
  OK(weft_sharded_parameters_bytes(shards, &unshard_bytes, &reduce_bytes, &error));
  CHECK(unshard_bytes == received && reduce_bytes == received && total == 42);
  OK(weft_sharded_parameters_reshard(shards, wholes, parts, TENSORS, &error));

  OK(weft_sharded_parameters_unshard(shards, parts, to, TENSORS, NULL, &error));
  for (int t = 0; t < TENSORS; ++t)
    for (int64_t i = 0; i < to[t].count; ++i) CHECK(gathered[t][i] == whole[t][i]);

  /* Rank r contributes r + 1 times the whole. A transfer, finished later. */
  for (int t = 0; t < TENSORS; ++t)
    for (int64_t i = 0; i < to[t].count; ++i) gathered[t][i] = (float)(a->rank + 1) * whole[t][i];
  weft_transfer* transfer = NULL;
  OK(weft_sharded_parameters_reduce_scatter(shards, to, parts, TENSORS, WEFT_SUM, &transfer, &error));
  OK(weft_transfer_finish(transfer, &error));
  weft_transfer_destroy(transfer);
  for (int t = 0; t < TENSORS; ++t) {
    int64_t offset = 0, size = 0;
    OK(weft_sharded_parameters_range(shards, t, a->rank, 0, &offset, &size, NULL, &error));
    for (int64_t i = 0; i < size; ++i) CHECK(part[t][i] == 6 * whole[t][offset + i]);
  }
  OK(weft_sharded_parameters_reduce_scatter(shards, to, parts, TENSORS, WEFT_AVG, NULL, &error));
  for (int64_t i = 0; i < parts[0].count; ++i)
    CHECK(part[0][i] == 2 * value(0, (a->rank == 0 ? 0 : a->rank == 1 ? 15 : 25) + i));

#define REFUSED(call, text) CHECK_ERROR(call, WEFT_BAD_ARGUMENT, text)
  int64_t offset = 0, size = 0;
  REFUSED(weft_sharded_parameters_range(shards, 3, 0, 0, &offset, &size, NULL, &error),
          "weft_sharded_parameters_range: i is 3; expected 0 to 2");
  REFUSED(weft_sharded_parameters_range(shards, 0, 3, 0, &offset, &size, NULL, &error),
          "weft_sharded_parameters_range: rank is 3; expected 0 to 2");
  REFUSED(weft_sharded_parameters_range(shards, 0, 0, 1, &offset, &size, NULL, &error),
          "weft_sharded_parameters_range: index is 1; expected 0 to 0");
  REFUSED(weft_sharded_parameters_reduce_scatter(shards, to, parts, TENSORS, WEFT_MAX, NULL, &error),
          "*op is 3; expected 0 (WEFT_SUM) or 1 (WEFT_AVG)");
  REFUSED(weft_sharded_parameters_unshard(shards, parts, to, 2, NULL, &error),
          "*sharded_parameters: shards are 2; expected one for each of 3 entries");
  to[0].count = 1;
  REFUSED(weft_sharded_parameters_unshard(shards, parts, to, TENSORS, NULL, &error),
          "*sharded_parameters: the whole of \"w\" is f32 (1); expected f32 (7, 5)");
  weft_sharded_parameters* none = NULL;
  entries[1].name = NULL;
  REFUSED(weft_sharded_parameters_create(mesh, entries, TENSORS, NULL, &none, &error),
          "weft_sharded_parameters_create: entries[1].name is NULL");
  options.reduce = WEFT_I32;
  REFUSED(weft_sharded_parameters_create(mesh, entries, 1, &options, &none, &error),
          "*sharded_parameters: options.reduce is i32; expected f64, f32, bf16 or f16");

  for (int t = 0; t < TENSORS; ++t) weft_layout_destroy(layouts[t]);
  weft_sharded_parameters_destroy(shards);
  weft_mesh_destroy(mesh);
  weft_group_destroy(world);
}
static void test_transfers(void) { run_ranks(3, transfers); }

int main(int argc, char** argv) {
  const named_test tests[] = {{"transfers", test_transfers}};
  return run_tests(tests, LENGTH(tests), argc, argv);
}
