/* Checkpoints from C: saves on one mesh, loads on another and compares values; results of reader, verify and
 * export; every refused argument. */
#include "support.h"

static char folder[64], file[128];

static void make_folder(void) {
  strcpy(folder, "/tmp/weft-checkpoint-test-XXXXXX");
  CHECK(mkdtemp(folder) != NULL);
}
static void remove_folder(void) {
  char command[128];
  snprintf(command, sizeof command, "rm -r '%s'", folder);
  CHECK(system(command) == 0);
}
static const char* in_folder(const char* name) {
  snprintf(file, sizeof file, "%s/%s", folder, name);
  return file;
}
static bool is_there(const char* name) {
  FILE* f = fopen(in_folder(name), "rb");
  if (f == NULL) return false;
  fclose(f);
  return true;
}
static void flip_last_byte(const char* name) {
  FILE* f = fopen(in_folder(name), "rb+");
  CHECK(f != NULL && fseek(f, -1, SEEK_END) == 0);
  const int byte = fgetc(f);
  CHECK(byte != EOF && fseek(f, -1, SEEK_END) == 0 && fputc(byte ^ 1, f) != EOF && fclose(f) == 0);
}

static weft_mesh* mesh_of(weft_group* group, const char* axis) {
  const weft_mesh_axis axes[] = {{axis, -1}};
  weft_mesh* mesh = NULL;
  OK(weft_mesh_create(group, axes, 1, &mesh, &error));
  return mesh;
}
static weft_layout* layout_of(const weft_mesh* mesh, const char* axis, weft_placement placement,
                              const int64_t* extents, int32_t dim_count) {
  const weft_axis_placement placements[] = {{axis, placement}};
  weft_layout* layout = NULL;
  OK(weft_layout_create(mesh, placements, 1, extents, dim_count, &layout, &error));
  return layout;
}

/* The tensors: w of 5 rows and 4 columns, w[i][j] = 10 i + j; b = {0.5, 1.5, 2.5} in f64. */
static const int64_t kW[] = {5, 4}, kB[] = {3};
static weft_buffer f64(double* data, int64_t count) {
  const weft_buffer b = {data, count, WEFT_F64, WEFT_CPU};
  return b;
}
static void fill(float* w, int first_row, int rows, double* b) {
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < 4; ++j) w[4 * i + j] = (float)(10 * (first_row + i) + j);
  for (int i = 0; i < 3; ++i) b[i] = i + 0.5;
}
static bool is_b(const double* b) { return b[0] == 0.5 && b[1] == 1.5 && b[2] == 2.5; }
static bool is_w(const float* w) {
  float expected[20];
  double b[3];
  fill(expected, 0, 5, b);
  return memcmp(w, expected, sizeof expected) == 0;
}
static void save_alone(int64_t step, const weft_checkpoint_save_options* options) {
  float w[20];
  double b[3];
  fill(w, 0, 5, b);
  const weft_tensor tensors[] = {{"w", f32(w, 20), NULL, kW, 2}, {"b", f64(b, 3), NULL, NULL, 0}};
  const weft_checkpoint_string extra[] = {{"sampler", "epoch 2"}, {"best", "0.25"}};
  OK(weft_checkpoint_save(folder, NULL, step, tensors, 2, extra, 2, options, &error));
}

/* ---- One rank ---- */

static void test_one_rank(void) {
  make_folder();
  weft_text* at = NULL;
  int64_t step = 0;
  OK(weft_checkpoint_latest(folder, &at, &step, &error));
  CHECK(at == NULL && step == -1);
  save_alone(7, NULL);
  OK(weft_checkpoint_latest(folder, &at, &step, &error));
  CHECK(step == 7 && strcmp(weft_text_data(at), in_folder("step-00000007")) == 0);
  weft_text_destroy(at);

  float w[20] = {0};
  double b[3] = {0};
  const weft_tensor tensors[] = {{"b", f64(b, 3), NULL, NULL, 0}, {"w", f32(w, 20), NULL, kW, 2}};
  OK(weft_checkpoint_load(folder, NULL, tensors, 2, NULL, &step, &at, &error));
  CHECK(is_w(w) && is_b(b) && step == 7);
  weft_checkpoint_reader* reader = NULL;
  OK(weft_checkpoint_reader_open(weft_text_data(at), &reader, &error));
  OK(weft_checkpoint_reader_step(reader, &step, &error));
  CHECK(step == 7);
  weft_checkpoint_reader_destroy(reader);
  weft_text_destroy(at);
  memset(w, 0, sizeof w);
  OK(weft_checkpoint_load(in_folder("step-00000007"), NULL, tensors, 2, NULL, NULL, NULL, &error));
  CHECK(is_w(w));

  OK(weft_checkpoint_save(folder, NULL, 8, NULL, 0, NULL, 0, NULL, &error)); /* of nothing */
  OK(weft_checkpoint_load(folder, NULL, NULL, 0, NULL, &step, NULL, &error));
  CHECK(step == 8);
  remove_folder();
}

static void test_keep(void) {
  make_folder();
  weft_checkpoint_save_options options = WEFT_CHECKPOINT_SAVE_OPTIONS_INIT;
  for (int step = 1; step <= 3; ++step) save_alone(step, NULL);
  options.keep = 2;
  save_alone(4, &options);
  CHECK(!is_there("step-00000001/index.json") && !is_there("step-00000002/index.json"));
  CHECK(is_there("step-00000003/index.json") && is_there("step-00000004/index.json"));
  remove_folder();
}

/* Notes the stages that a save reaches. */
static void note_stage(void* data, const char* stage) {
  strcat(data, stage);
  strcat(data, " ");
}
static const char kStages[] =
    "folder data data file written file synced file named file index written index synced index named index "
    "renamed latest written latest synced latest named latest ";
static void test_stages(void) {
  char stages[256] = "";
  weft_checkpoint_save_options options = WEFT_CHECKPOINT_SAVE_OPTIONS_INIT;
  make_folder();
  options.on_stage = note_stage;
  options.data = stages;
  save_alone(1, &options);
  CHECK(strcmp(stages, kStages) == 0);
  /* A program whose options end before on_stage. */
  options.struct_size = 8;
  save_alone(2, &options);
  CHECK(strcmp(stages, kStages) == 0);
  remove_folder();
}

static void test_reader(void) {
  make_folder();
  save_alone(7, NULL);
  weft_checkpoint_reader* reader = NULL;
  OK(weft_checkpoint_reader_open(folder, &reader, &error));
  const char* text = NULL;
  int64_t step = 0;
  int32_t count = 0, index = 0;
  bool hashed = false;
  OK(weft_checkpoint_reader_step(reader, &step, &error));
  OK(weft_checkpoint_reader_hashed(reader, &hashed, &error));
  CHECK(step == 7 && hashed);
  OK(weft_checkpoint_reader_folder(reader, &text, &error));
  CHECK(strcmp(text, in_folder("step-00000007")) == 0);
  OK(weft_checkpoint_reader_mesh(reader, &text, &error));
  CHECK(strcmp(text, "") == 0);
  weft_checkpoint_string extra = {NULL, NULL};
  OK(weft_checkpoint_reader_extra_count(reader, &count, &error));
  OK(weft_checkpoint_reader_extra(reader, 1, &extra, &error));
  CHECK(count == 2 && strcmp(extra.key, "sampler") == 0 && strcmp(extra.value, "epoch 2") == 0);
  OK(weft_checkpoint_reader_extra(reader, 0, &extra, &error));
  CHECK(strcmp(extra.key, "best") == 0 && strcmp(extra.value, "0.25") == 0);
  CHECK_ERROR(weft_checkpoint_reader_extra(reader, 2, &extra, &error), WEFT_BAD_ARGUMENT,
              "weft_checkpoint_reader_extra: index is 2; expected 0 to 1");

  weft_checkpoint_tensor tensor;
  OK(weft_checkpoint_reader_tensor_count(reader, &count, &error));
  OK(weft_checkpoint_reader_find(reader, "w", &index, &error));
  OK(weft_checkpoint_reader_tensor(reader, index, &tensor, &error));
  CHECK(count == 2 && index == 1 && strcmp(tensor.name, "w") == 0 && tensor.dtype == WEFT_F32);
  CHECK(tensor.dim_count == 2 && tensor.extents[0] == 5 && tensor.extents[1] == 4 && tensor.extents[2] == 0 &&
        tensor.count == 20);
  float w[20] = {0};
  double b[3] = {0};
  weft_buffer out = f32(w, 20);
  OK(weft_checkpoint_reader_read(reader, index, &out, &error));
  CHECK(is_w(w));
  out = f64(b, 3);
  OK(weft_checkpoint_reader_read(reader, 0, &out, &error));
  CHECK(is_b(b));
  CHECK_ERROR(weft_checkpoint_reader_read(reader, 1, &out, &error), WEFT_BAD_ARGUMENT,
              "checkpoint: the memory for \"w\" is f64 (3); expected f32 (5, 4)");
  out.data = NULL;
  CHECK_ERROR(weft_checkpoint_reader_read(reader, 0, &out, &error), WEFT_BAD_ARGUMENT,
              "checkpoint: the memory for \"b\" has no memory");
  out = f64(b, 3), out.device = WEFT_CUDA(0);
  CHECK_ERROR(weft_checkpoint_reader_read(reader, 0, &out, &error), WEFT_BAD_ARGUMENT,
              "*checkpoint: the memory for \"b\" is on cuda:0; expected cpu");
  out = f64(b, -1);
  CHECK_ERROR(weft_checkpoint_reader_read(reader, 0, &out, &error), WEFT_BAD_ARGUMENT,
              "weft_checkpoint_reader_read: out->count is -1; expected 0 or more");
  CHECK_ERROR(weft_checkpoint_reader_read(reader, 2, &out, &error), WEFT_BAD_ARGUMENT,
              "weft_checkpoint_reader_read: index is 2; expected 0 to 1");
  CHECK_ERROR(weft_checkpoint_reader_tensor(reader, -1, &tensor, &error), WEFT_BAD_ARGUMENT,
              "weft_checkpoint_reader_tensor: index is -1; expected 0 to 1");
  OK(weft_checkpoint_reader_find(reader, "v", &index, &error));
  CHECK(index == -1);
  weft_checkpoint_reader_destroy(reader);
  weft_checkpoint_reader_destroy(NULL);

  OK(weft_checkpoint_save(folder, NULL, 8, NULL, 0, NULL, 0, NULL, &error));
  OK(weft_checkpoint_reader_open(folder, &reader, &error));
  CHECK_ERROR(weft_checkpoint_reader_extra(reader, 0, &extra, &error), WEFT_BAD_ARGUMENT,
              "weft_checkpoint_reader_extra: index is 0; expected none, as there are none");
  weft_checkpoint_reader_destroy(reader);
  remove_folder();
}

/* ---- Another mesh ---- */

/* w cut along one dimension over a mesh of one axis, and b whole. */
typedef struct {
  weft_group* world;
  weft_mesh* mesh;
  weft_layout *cut, *same;
  float w[20];
  double b[3];
  weft_tensor tensors[2];
} laid_out;
/* By rows: 0 to 2 on rank 0, 3 and 4 on rank 1. If there is one rank, it has all of them. The elements
 * have the values of the rows. */
static void lay_out(laid_out* t, rank_args* a, const char* axis, int32_t dim) {
  const int rows = a->size == 1 || dim == 1 ? 5 : a->rank == 0 ? 3 : 2, columns = dim == 1 ? 4 / a->size : 4;
  t->world = join(a, "world", 20000 * MS);
  t->mesh = mesh_of(t->world, axis);
  t->cut = layout_of(t->mesh, axis, weft_shard(dim), kW, 2);
  t->same = layout_of(t->mesh, axis, weft_replicate(), kB, 1);
  fill(t->w, dim == 0 ? 3 * a->rank : 0, dim == 0 ? rows : 0, t->b);
  const weft_tensor w = {"w", f32(t->w, rows * columns), t->cut, NULL, 0},
                    b = {"b", f64(t->b, 3), t->same, NULL, 0};
  t->tensors[0] = w, t->tensors[1] = b;
}
static void let_go(laid_out* t) {
  weft_layout_destroy(t->cut);
  weft_layout_destroy(t->same);
  weft_mesh_destroy(t->mesh);
  weft_group_destroy(t->world);
}

static void save_rows(rank_args* a) {
  laid_out t;
  lay_out(&t, a, "dp", 0);
  const weft_checkpoint_string extra = {"best", "0.25"};
  OK(weft_checkpoint_save(folder, t.mesh, 3, t.tensors, 2, &extra, 1, NULL, &error));
  let_go(&t);
}

/* Each rank takes columns. */
static void load_columns(rank_args* a) {
  laid_out t;
  lay_out(&t, a, "tp", 1);
  const weft_tensor in_another_order[] = {t.tensors[1], t.tensors[0]};
  const int n = 4 / a->size;
  int64_t step = 0;
  memset(t.b, 0, sizeof t.b);
  OK(weft_checkpoint_load(folder, t.mesh, in_another_order, 2, NULL, &step, NULL, &error));
  for (int i = 0; i < 5; ++i)
    for (int j = 0; j < n; ++j) CHECK(t.w[n * i + j] == (float)(10 * i + n * a->rank + j));
  CHECK(is_b(t.b) && step == 3);
  let_go(&t);
}

static void test_another_mesh(void) {
  for (int saved = 1; saved <= 2; ++saved) {
    make_folder();
    run_ranks(saved, save_rows);
    run_ranks(1, load_columns);
    run_ranks(2, load_columns);
    float w[20] = {0};
    double b[3] = {0};
    const weft_tensor tensors[] = {{"b", f64(b, 3), NULL, NULL, 0}, {"w", f32(w, 20), NULL, kW, 2}};
    OK(weft_checkpoint_load(folder, NULL, tensors, 2, NULL, NULL, NULL, &error));
    CHECK(is_w(w) && is_b(b));
    weft_checkpoint_reader* reader = NULL;
    const char* mesh = NULL;
    const weft_buffer out = f32(w, 20);
    memset(w, 0, sizeof w);
    OK(weft_checkpoint_reader_open(folder, &reader, &error));
    OK(weft_checkpoint_reader_mesh(reader, &mesh, &error));
    CHECK(strcmp(mesh, saved == 1 ? "dp=1" : "dp=2") == 0);
    OK(weft_checkpoint_reader_read(reader, 1, &out, &error));
    CHECK(is_w(w));
    weft_checkpoint_reader_destroy(reader);
    remove_folder();
  }
}

/* ---- Errors ---- */

static bool leave_w(void* data, const char* name) {
  ++*(int*)data;
  return strcmp(name, "w") == 0;
}

static void test_misfits(void) {
  make_folder();
  float x[20] = {0};
  double b[3] = {0};
  char text[512];
  weft_tensor t[] = {{"b", f32(x, 3), NULL, NULL, 0}, {"v", f32(x + 3, 2), NULL, NULL, 0}};
  snprintf(text, sizeof text, "checkpoint: %s holds no checkpoint: neither latest nor index.json", folder);
  CHECK_ERROR(weft_checkpoint_load(folder, NULL, t, 2, NULL, NULL, NULL, &error), WEFT_BAD_ARGUMENT, text);
  weft_checkpoint_reader* reader = NULL;
  CHECK_ERROR(weft_checkpoint_reader_open(folder, &reader, &error), WEFT_BAD_ARGUMENT, text);
  CHECK(reader == NULL);
  weft_text* faults = NULL;
  OK(weft_checkpoint_verify(folder, NULL, NULL, &faults, &error));
  CHECK(strcmp(weft_text_data(faults), text) == 0);
  weft_text_destroy(faults);

  save_alone(7, NULL);
  snprintf(text, sizeof text,
           "load_checkpoint: %s does not fit the list given; missing in the checkpoint (1): v f32 (2); not "
           "in the list "
           "given (1): w; of another shape or dtype (1): b f64 (3), expected f32 (3)",
           in_folder("step-00000007"));
  CHECK_ERROR(weft_checkpoint_load(folder, NULL, t, 2, NULL, NULL, NULL, &error), WEFT_BAD_ARGUMENT, text);
  const int64_t turned[] = {4, 5};
  t[0].data = f64(b, 3), t[1] = (weft_tensor){"w", f32(x, 20), NULL, turned, 2};
  snprintf(text, sizeof text,
           "load_checkpoint: %s does not fit the list given; of another shape or dtype (1): w f32 (5, 4), "
           "expected f32 (4, 5)",
           in_folder("step-00000007"));
  CHECK_ERROR(weft_checkpoint_load(folder, NULL, t, 2, NULL, NULL, NULL, &error), WEFT_BAD_ARGUMENT, text);
  CHECK(x[1] == 0 && b[0] == 0);

  int asked = 0;
  weft_checkpoint_load_options options = WEFT_CHECKPOINT_LOAD_OPTIONS_INIT;
  options.may_leave = leave_w, options.data = &asked;
  OK(weft_checkpoint_load(folder, NULL, t, 1, &options, NULL, NULL, &error));
  CHECK(asked == 1 && is_b(b));
  t[0] = (weft_tensor){"w", f32(x, 20), NULL, kW, 2};
  CHECK_ERROR(weft_checkpoint_load(folder, NULL, t, 1, &options, NULL, NULL, &error), WEFT_BAD_ARGUMENT,
              "*does not fit the list given; not in the list given (1): b");
  remove_folder();
}

static void test_arguments(void) {
  make_folder();
  float x[2] = {0};
  const weft_status bad = WEFT_BAD_ARGUMENT;
  weft_tensor t[] = {{"x", f32(x, 2), NULL, NULL, 0}, {"x", f32(x, 2), NULL, NULL, 0}};
  weft_checkpoint_string extra[] = {{"a", "1"}, {"a", "2"}};
  CHECK_ERROR(weft_checkpoint_save(folder, NULL, 1, t, 2, NULL, 0, NULL, &error), bad,
              "save_checkpoint: \"x\" is given twice");
  CHECK_ERROR(weft_checkpoint_save(folder, NULL, -1, t, 1, NULL, 0, NULL, &error), bad,
              "save_checkpoint: step is -1; expected 0 or more");
  CHECK_ERROR(weft_checkpoint_save(folder, NULL, 1, t, -1, NULL, 0, NULL, &error), bad,
              "weft_checkpoint_save: count is -1; expected 0 or more");
  CHECK_ERROR(weft_checkpoint_save(folder, NULL, 1, NULL, 1, NULL, 0, NULL, &error), bad,
              "weft_checkpoint_save: tensors is NULL");
  CHECK_ERROR(weft_checkpoint_save(folder, NULL, 1, t, 1, NULL, 1, NULL, &error), bad,
              "weft_checkpoint_save: extra is NULL");
  CHECK_ERROR(weft_checkpoint_save(folder, NULL, 1, t, 1, extra, 2, NULL, &error), bad,
              "weft_checkpoint_save: extra[1].key is \"a\", which is in the list already");
  extra[1].key = NULL;
  CHECK_ERROR(weft_checkpoint_save(folder, NULL, 1, t, 1, extra, 2, NULL, &error), bad,
              "weft_checkpoint_save: extra[1].key is NULL");
  extra[0].value = NULL;
  CHECK_ERROR(weft_checkpoint_save(folder, NULL, 1, t, 1, extra, 2, NULL, &error), bad,
              "weft_checkpoint_save: extra[0].value is NULL");
  const int64_t three = 3, huge[] = {INT64_C(1) << 33, INT64_C(1) << 31}; /* 2^64: 0, if nobody looks */
  t[0].extents = &three, t[0].dim_count = 1;
  CHECK_ERROR(weft_checkpoint_save(folder, NULL, 1, t, 1, NULL, 0, NULL, &error), bad,
              "weft_checkpoint_save: tensors[0].extents are (3); tensors[0].data has 2 elements");
  t[0].extents = huge, t[0].dim_count = 2, t[0].data.count = 0;
  CHECK_ERROR(weft_checkpoint_load(folder, NULL, t, 1, NULL, NULL, NULL, &error), bad,
              "*tensors[0].extents are (8589934592, 2147483648); tensors[0].data has 0 elements");
  t[0] = t[1];
  weft_checkpoint_save_options options = WEFT_CHECKPOINT_SAVE_OPTIONS_INIT;
  options.keep = -1;
  CHECK_ERROR(weft_checkpoint_save(folder, NULL, 1, t, 1, NULL, 0, &options, &error), bad,
              "save_checkpoint: options.keep is -1; expected 0 or more");
  t[0].data.count = -3;
  CHECK_ERROR(weft_checkpoint_save(folder, NULL, 1, t, 1, NULL, 0, NULL, &error), bad,
              "weft_checkpoint_save: tensors[0].data.count is -3; expected 0 or more");
  CHECK(!is_there("latest"));
  /* Errors of the disk, and files that are no checkpoint. */
  char path[128], text[256];
  FILE* f = fopen(in_folder("latest"), "w");
  CHECK(f != NULL && fputs("step-00000001", f) >= 0 && fclose(f) == 0);
  snprintf(text, sizeof text,
           "checkpoint: %s names \"step-00000001\", which is no checkpoint in the same folder",
           in_folder("latest"));
  weft_text* at = NULL;
  int64_t step = 0;
  CHECK_ERROR(weft_checkpoint_latest(folder, &at, &step, &error), WEFT_CORRUPT, text);
  CHECK_ERROR(weft_checkpoint_load(folder, NULL, NULL, 0, NULL, &step, &at, &error), WEFT_CORRUPT, text);
  CHECK(at == NULL && step == 0);
  t[0].data.count = 2;
  strcpy(path, in_folder("latest/run"));
  CHECK_ERROR(weft_checkpoint_save(path, NULL, 1, t, 1, NULL, 0, NULL, &error), WEFT_SYSTEM,
              "*Not a directory");
  OK(weft_checkpoint_save(folder, NULL, 1, t, 1, NULL, 0, NULL, &error));
  strcpy(path, in_folder("none/all.safetensors"));
  CHECK_ERROR(weft_checkpoint_export(folder, path, NULL, NULL, &error), WEFT_SYSTEM,
              "*No such file or directory");
  remove_folder();
}

/* Faults on rank 1 alone, and layouts that cannot be saved: an error of both. */
static void save_misfits(rank_args* a) {
  weft_group* world = join(a, "world", 20000 * MS);
  const weft_mesh_axis axes[] = {{"dp", 2}, {"tp", 1}};
  weft_mesh *mesh = NULL, *dp = NULL;
  const char* const name = "dp";
  OK(weft_mesh_create(world, axes, 2, &mesh, &error));
  OK(weft_mesh_along(mesh, &name, 1, &dp, &error));
  const int64_t two = 2;
  weft_layout *same = layout_of(mesh, "dp", weft_replicate(), &two, 1),
              *sum = layout_of(mesh, "dp", weft_partial(WEFT_SUM), &two, 1);
  float x[2] = {1, 2};
  weft_tensor t = {"x", f32(x, a->rank == 0 ? 2 : 1), same, NULL, 0};
  weft_error e = WEFT_ERROR_INIT;
  const weft_status status = weft_checkpoint_save(folder, mesh, 1, &t, 1, NULL, 0, NULL, &e);
  CHECK(status == WEFT_LAYOUT);
  CHECK(strstr(e.text, a->rank == 0 ? "save_checkpoint: rank 1 failed: \"x\" is (1); "
                                    : "save_checkpoint: \"x\" is (1); ") != NULL);
  t.data.count = 2, t.layout = sum;
  CHECK_ERROR(weft_checkpoint_save(folder, mesh, 1, &t, 1, NULL, 0, NULL, &error), WEFT_LAYOUT,
              "*Partial(sum)");
  t.layout = NULL;
  CHECK_ERROR(weft_checkpoint_save(folder, mesh, 1, &t, 1, NULL, 0, NULL, &error), WEFT_LAYOUT,
              "save_checkpoint: \"x\" is a plain tensor; on dp=2 x tp=1 it needs a layout, which "
              "says what part of the whole it is");
  CHECK_ERROR(weft_checkpoint_save(folder, dp, 1, &t, 1, NULL, 0, NULL, &error), WEFT_BAD_ARGUMENT,
              "save_checkpoint: mesh is dp=2, a part of dp=2 x tp=1; expected the whole");
  t.name = a->rank == 0 ? "x" : "y", t.layout = same;
  CHECK_ERROR(weft_checkpoint_save(folder, mesh, 1, &t, 1, NULL, 0, NULL, &error), WEFT_MISMATCH,
              "*save_checkpoint: ");
  t.name = "x";
  const char* const steps =
      "save_checkpoint: argument 0 is step 1 on dp,tp rank 0, but step 2 on dp,tp rank 1";
  CHECK_ERROR(weft_checkpoint_save(folder, mesh, a->rank + 1, &t, 1, NULL, 0, NULL, &error), WEFT_MISMATCH,
              steps);
  weft_checkpoint_saver* saver = NULL;
  OK(weft_checkpoint_saver_create(mesh, false, &saver, &error));
  CHECK_ERROR(weft_checkpoint_saver_save(saver, folder, a->rank + 1, &t, 1, NULL, 0, NULL, NULL, &error),
              WEFT_MISMATCH, steps);
  weft_checkpoint_saver_destroy(saver);
  weft_layout_destroy(same);
  weft_layout_destroy(sum);
  weft_mesh_destroy(dp);
  weft_mesh_destroy(mesh);
  weft_group_destroy(world);
}
static void test_misfits_of_ranks(void) {
  make_folder();
  run_ranks(2, save_misfits);
  CHECK(!is_there("latest"));
  remove_folder();
}

/* A changed byte of rank 1's file: all ranks report it. */
static void load_flipped(rank_args* a) {
  laid_out t;
  lay_out(&t, a, "dp", 0);
  weft_error e = WEFT_ERROR_INIT;
  const weft_status got = weft_checkpoint_load(folder, t.mesh, t.tensors, 2, NULL, NULL, NULL, &e);
  CHECK(got == WEFT_CORRUPT);
  CHECK(strstr(e.text, "step-00000003/rank-00001.safetensors: bytes ") != NULL);
  CHECK(strstr(e.text, ", of \"w\", are not those that were written") != NULL);
  if (a->rank == 0) {
    CHECK(e.rank_count == 1 && e.ranks[0] == 1);
    CHECK(strncmp(e.text, "load_checkpoint: rank 1 failed: checkpoint: ", 44) == 0);
    CHECK(strstr(e.text, "; the values are undefined") != NULL);
  }
  let_go(&t);
}

static void count_bytes(void* data, int64_t bytes, int64_t all) {
  int64_t* const seen = data;
  CHECK(bytes > seen[0] && bytes <= all);
  seen[0] = bytes, seen[1] = all;
}

static void test_a_flipped_byte(void) {
  make_folder();
  run_ranks(2, save_rows);
  weft_text* faults = NULL;
  int64_t seen[2] = {0, 0};
  OK(weft_checkpoint_verify(folder, count_bytes, seen, &faults, &error));
  CHECK(weft_text_size(faults) == 0 && seen[0] == 20 * 4 + 3 * 8 && seen[1] == seen[0]);
  weft_text_destroy(faults);
  flip_last_byte("step-00000003/rank-00001.safetensors");
  run_ranks(2, load_flipped);

  weft_checkpoint_reader* reader = NULL;
  float w[20];
  const weft_buffer out = f32(w, 20);
  OK(weft_checkpoint_reader_open(folder, &reader, &error));
  CHECK_ERROR(weft_checkpoint_reader_read(reader, 1, &out, &error), WEFT_CORRUPT,
              "*, of \"w\", are not those that were written (their hash is not ");
  weft_checkpoint_reader_destroy(reader);
  OK(weft_checkpoint_verify(folder, NULL, NULL, &faults, &error));
  CHECK(strstr(weft_text_data(faults), "rank-00001.safetensors: bytes ") != NULL);
  CHECK(strchr(weft_text_data(faults), '\n') == NULL); /* one fault */
  weft_text_destroy(faults);
  flip_last_byte("step-00000003/rank-00000.safetensors");
  OK(weft_checkpoint_verify(folder, NULL, NULL, &faults, &error));
  CHECK(strchr(weft_text_data(faults), '\n') != NULL); /* two */
  weft_text_destroy(faults);
  remove_folder();
}

/* ---- In the background, and whole ---- */

static void tell_of_data(void* data, const char* stage) {
  if (strcmp(stage, "data") == 0) *(bool*)data = true;
}

/* The tensors change after the call has returned, and the file has their earlier values. */
static void save_in_background(rank_args* a) {
  laid_out t;
  lay_out(&t, a, "dp", 0);
  weft_checkpoint_saver* saver = NULL;
  OK(weft_checkpoint_saver_create(t.mesh, false, &saver, &error));
  bool begun = false, told = false;
  weft_checkpoint_save_options options = WEFT_CHECKPOINT_SAVE_OPTIONS_INIT;
  options.on_stage = tell_of_data;
  options.data = &told;
  OK(weft_checkpoint_saver_save(saver, folder, 3, t.tensors, 2, NULL, 0, &options, &begun, &error));
  CHECK(begun);
  memset(t.w, 0, sizeof t.w);
  memset(t.b, 0, sizeof t.b);
  OK(weft_checkpoint_saver_wait(saver, &error));
  CHECK(told);
  OK(weft_checkpoint_load(folder, t.mesh, t.tensors, 2, NULL, NULL, NULL, &error));
  OK(weft_checkpoint_saver_save(saver, folder, 4, t.tensors, 2, NULL, 0, NULL, NULL, &error));
  weft_checkpoint_saver_destroy(saver);
  /* If nothing can be written, the next call returns the error. */
  saver = NULL;
  OK(weft_checkpoint_saver_create(t.mesh, true, &saver, &error));
  OK(weft_checkpoint_saver_save(saver, "/dev/null/x", 5, t.tensors, 2, NULL, 0, NULL, NULL, &error));
  CHECK_ERROR(weft_checkpoint_saver_wait(saver, &error), WEFT_SYSTEM,
              a->rank == 0
                  ? "*the save of step 5 in the background: save_checkpoint: /dev/null"
                  : "*the save of step 5 in the background: save_checkpoint: rank 0 failed: /dev/null");
  weft_checkpoint_saver_destroy(saver);
  let_go(&t);
}

typedef struct {
  int calls;
  bool stops;
} whole_args;
static bool see_whole(void* data, const char* name, const weft_buffer* whole) {
  whole_args* const a = data;
  if (a->calls++ == 0) {
    CHECK(strcmp(name, "w") == 0 && whole->count == 20 && whole->dtype == WEFT_F32 && is_w(whole->data));
  } else {
    CHECK(strcmp(name, "b") == 0 && whole->count == 3 && whole->dtype == WEFT_F64 && is_b(whole->data));
  }
  return !a->stops;
}
static bool give_whole(void* data, const char* name, const weft_buffer* whole) {
  float w[20];
  double b[3];
  (void)data;
  fill(w, 0, 5, b);
  if (strcmp(name, "w") == 0) {
    memcpy(whole->data, w, sizeof w);
  } else {
    memcpy(whole->data, b, sizeof b);
  }
  return true;
}

static void whole_tensors(rank_args* a) {
  laid_out t;
  lay_out(&t, a, "dp", 0);
  for (int32_t root = WEFT_EVERY_RANK; root < 2; ++root) {
    memset(t.w, 0, sizeof t.w);
    memset(t.b, 0, sizeof t.b);
    OK(weft_set_full_state(t.mesh, t.tensors, 2, root, give_whole, NULL, &error));
    whole_args seen = {0, false};
    OK(weft_gather_full_state(t.mesh, t.tensors, 2, root, see_whole, &seen, &error));
    CHECK(seen.calls == (root == WEFT_EVERY_RANK || root == a->rank ? 2 : 0));
  }
  whole_args stops = {0, true};
  CHECK_ERROR(weft_gather_full_state(t.mesh, t.tensors, 2, 0, see_whole, &stops, &error), WEFT_SYSTEM,
              a->rank == 0
                  ? "weft_gather_full_state: see returned false for \"w\""
                  : "gather_full_state: rank 0 failed: weft_gather_full_state: see returned false for \"w\"; "
                    "tensors after \"w\" were not moved");
  CHECK_ERROR(weft_set_full_state(t.mesh, t.tensors, 2, 2, give_whole, NULL, &error), WEFT_BAD_ARGUMENT,
              "set_full_state: root is 2; expected 0 to 1, or -1 for every rank");
  let_go(&t);
}

static void test_background(void) {
  make_folder();
  run_ranks(2, save_in_background);
  for (int step = 3; step < 5; ++step) {
    weft_checkpoint_reader* reader = NULL;
    float w[20];
    const weft_buffer out = f32(w, 20);
    OK(weft_checkpoint_reader_open(in_folder(step == 3 ? "step-00000003" : "step-00000004"), &reader,
                                   &error));
    OK(weft_checkpoint_reader_read(reader, 1, &out, &error));
    CHECK(is_w(w));
    weft_checkpoint_reader_destroy(reader);
  }
  remove_folder();
}

static void test_whole(void) { run_ranks(2, whole_tensors); }

/* ---- Export ---- */

static const char* only_w(void* data, const char* name) {
  (void)data;
  return strcmp(name, "w") == 0 ? "model.w" : NULL;
}
static const char* nothing(void* data, const char* name) {
  (void)data, (void)name;
  return "";
}
static const char* one_name(void* data, const char* name) {
  (void)name;
  return data;
}

static void test_export(void) {
  make_folder();
  run_ranks(2, save_rows);
  char to[128], text[256], header[4096];
  int64_t written = 0;
  weft_checkpoint_export_options options = WEFT_CHECKPOINT_EXPORT_OPTIONS_INIT;
  strcpy(to, in_folder("all.safetensors"));
  OK(weft_checkpoint_export(folder, to, NULL, &written, &error));
  CHECK(written == 2);
  OK(weft_checkpoint_export(folder, to, NULL, NULL, &error));
  options.rename = only_w;
  OK(weft_checkpoint_export(folder, to, &options, &written, &error));
  CHECK(written == 1);
  FILE* f = fopen(to, "rb");
  CHECK(f != NULL);
  const size_t bytes = fread(header, 1, sizeof header - 1, f);
  fclose(f);
  CHECK(bytes > 8 + 80 && is_w((const float*)(const void*)(header + bytes - 80)));
  header[bytes] = '\0';
  CHECK(strstr(header + 8, "\"model.w\"") != NULL && strstr(header + 8, "\"b\"") == NULL);
  CHECK(strstr(header + 8, "\"weft_step\":\"3\"") != NULL && strstr(header + 8, "\"best\":\"0.25\"") != NULL);

  options.rename = nothing;
  snprintf(text, sizeof text, "export_checkpoint: of the 2 tensors of %s none is left",
           in_folder("step-00000003"));
  CHECK_ERROR(weft_checkpoint_export(folder, to, &options, &written, &error), WEFT_BAD_ARGUMENT, text);
  char name[] = "x";
  options.rename = one_name, options.data = name;
  CHECK_ERROR(weft_checkpoint_export(folder, to, &options, &written, &error), WEFT_BAD_ARGUMENT,
              "export_checkpoint: \"b\" and \"w\" would both be called \"x\"");
  CHECK(written == 1);
  remove_folder();
}

static weft_dtype w_to_bf16(void* data, const char* name, weft_dtype stored) {
  if (strcmp(name, "w") != 0 && strcmp(name, "model.w") != 0) return WEFT_I8; /* b is f64: nobody asks */
  *(int*)data += stored == WEFT_F32 ? 1 : 100;
  return WEFT_BF16;
}
static weft_dtype to_f16(void* data, const char* name, weft_dtype stored) {
  (void)data, (void)name, (void)stored;
  return WEFT_F16;
}
static weft_dtype to_none(void* data, const char* name, weft_dtype stored) {
  (void)data, (void)name, (void)stored;
  return 77;
}

static void test_convert(void) {
  make_folder();
  run_ranks(2, save_rows);
  char to[128], step[160], text[512];
  int64_t written = 0;
  int asked = 0;
  weft_checkpoint_convert_options options = WEFT_CHECKPOINT_CONVERT_OPTIONS_INIT;
  strcpy(to, in_folder("other"));
  options.dtype = w_to_bf16, options.data = &asked, options.files = 3;
  OK(weft_checkpoint_convert(folder, to, &options, &written, &error));
  CHECK(written == 2 && asked == 1);
  /* Converted into three files, with the same step and strings; numbers of 8 bits stay as they are. */
  CHECK(is_there("other/step-00000003/rank-00002.safetensors") &&
        !is_there("other/step-00000003/rank-00003.safetensors"));
  weft_checkpoint_reader* reader = NULL;
  weft_checkpoint_string extra = {NULL, NULL};
  weft_checkpoint_tensor w, b;
  uint16_t rounded[20];
  double halves[3];
  const weft_buffer of_w = {rounded, 20, WEFT_BF16, WEFT_CPU}, of_b = f64(halves, 3);
  OK(weft_checkpoint_reader_open(to, &reader, &error));
  OK(weft_checkpoint_reader_extra(reader, 0, &extra, &error));
  OK(weft_checkpoint_reader_tensor(reader, 0, &b, &error));
  OK(weft_checkpoint_reader_tensor(reader, 1, &w, &error));
  OK(weft_checkpoint_reader_read(reader, 0, &of_b, &error));
  OK(weft_checkpoint_reader_read(reader, 1, &of_w, &error));
  CHECK(strcmp(extra.value, "0.25") == 0 && w.dtype == WEFT_BF16 && b.dtype == WEFT_F64 && is_b(halves));
  CHECK(rounded[0] == 0 && rounded[1] == 0x3f80 && rounded[17] == 0x4224); /* 0, 1, 41 */
  weft_checkpoint_reader_destroy(reader);

  /* Converted back, from the folder of a step, under another name. */
  strcpy(step, in_folder("other/step-00000003"));
  strcpy(to, in_folder("back"));
  options = (weft_checkpoint_convert_options)WEFT_CHECKPOINT_CONVERT_OPTIONS_INIT;
  options.rename = only_w, options.old_names = true;
  OK(weft_checkpoint_convert(step, to, &options, NULL, &error));
  OK(weft_checkpoint_reader_open(to, &reader, &error));
  OK(weft_checkpoint_reader_tensor(reader, 0, &w, &error));
  CHECK(strcmp(w.name, "model.w") == 0 && w.dtype == WEFT_BF16);
  weft_checkpoint_reader_destroy(reader);

  options = (weft_checkpoint_convert_options)WEFT_CHECKPOINT_CONVERT_OPTIONS_INIT;
  options.files = -1;
  CHECK_ERROR(weft_checkpoint_convert(folder, to, &options, NULL, &error), WEFT_BAD_ARGUMENT,
              "convert_checkpoint: options.files is -1; expected 1 to 99999");
  options.files = 0, options.dtype = to_f16;
  CHECK_ERROR(weft_checkpoint_convert(folder, to, &options, NULL, &error), WEFT_BAD_ARGUMENT,
              "convert_checkpoint: options.dtype of \"w\" is f16; expected f32 or bf16");
  options.dtype = to_none;
  CHECK_ERROR(weft_checkpoint_convert(folder, to, &options, NULL, &error), WEFT_BAD_ARGUMENT,
              "weft_checkpoint_convert: what options->dtype gave for \"w\" is 77; expected 0 (WEFT_F64) to "
              "16 (WEFT_C128)");
  options.dtype = NULL, options.rename = nothing;
  CHECK_ERROR(weft_checkpoint_convert(folder, to, &options, NULL, &error), WEFT_BAD_ARGUMENT,
              "convert_checkpoint: of the 2 tensors none is left");
  snprintf(text, sizeof text, "convert_checkpoint: %s lies in %s; expected another folder to write to",
           folder, folder);
  CHECK_ERROR(weft_checkpoint_convert(folder, folder, NULL, NULL, &error), WEFT_BAD_ARGUMENT, text);
  remove_folder();
}

int main(int argc, char** argv) {
  static const named_test tests[] = {
      {"one_rank", test_one_rank},
      {"keep", test_keep},
      {"stages", test_stages},
      {"reader", test_reader},
      {"another_mesh", test_another_mesh},
      {"misfits", test_misfits},
      {"arguments", test_arguments},
      {"misfits_of_ranks", test_misfits_of_ranks},
      {"background", test_background},
      {"whole", test_whole},
      {"export", test_export},
      {"convert", test_convert},
      {"a_flipped_byte", test_a_flipped_byte},
  };
  return run_tests(tests, LENGTH(tests), argc, argv);
}
