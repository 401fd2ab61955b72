/* Layers whose passes are functions of a program in C: trained on meshes with the losses of one rank, and
 * with the losses of the library's own layer; their errors reach all ranks. */
#include "support.h"

#include <math.h>

#include "weft/weft_train.h"

#define REFUSED(call, words) CHECK_ERROR(call, WEFT_BAD_ARGUMENT, words)

enum { IN = 3, OUT = 2, ROWS = 4, STEPS = 4 };

/* The layer of a rank; `fails` is the pass in which it fails. */
typedef struct product {
  const char* fails;
  int passes, released;
} product;

static weft_status say(weft_error* told, const char* text) {
  snprintf(told->text, sizeof told->text, "%s", text);
  return WEFT_SYSTEM;
}

/* y = x wT */
static weft_status forward(void* user, const weft_module_pass* pass, weft_error* told) {
  product* const p = user;
  const weft_tensor x = pass->inputs[0];
  const int64_t extents[] = {x.extents[0], OUT};
  const float *const from = x.data.data, *const w = pass->parameters[0].data.data;
  weft_tensor y, kept;
  ++p->passes;
  CHECK(!pass->backward && pass->input_count == 1 && pass->parameter_count == 1 && pass->output_count == 0);
  if (p->fails != NULL && strcmp(p->fails, "silently") == 0) return WEFT_SYSTEM;
  if (p->fails != NULL && strcmp(p->fails, "forward") == 0) return say(told, "no more paper");
  if (p->fails != NULL && strcmp(p->fails, "nothing") == 0) return WEFT_OK;
  if (weft_module_output(pass, 2, extents, &y, told) != WEFT_OK) return WEFT_SYSTEM;
  if (weft_module_keep(pass, 2, x.extents, &kept, told) != WEFT_OK) return WEFT_SYSTEM;
  CHECK(y.dim_count == 2 && y.extents[1] == OUT && kept.data.count == x.data.count);
  for (int64_t i = 0; i < x.data.count; ++i) ((float*)kept.data.data)[i] = 2 * from[i];
  for (int64_t row = 0; row < x.extents[0]; ++row)
    for (int o = 0; o < OUT; ++o) {
      float sum = 0;
      for (int i = 0; i < IN; ++i) sum += from[row * IN + i] * w[o * IN + i];
      ((float*)y.data.data)[row * OUT + o] = sum;
    }
  return WEFT_OK;
}

static weft_status backward(void* user, const weft_module_pass* pass, weft_error* told) {
  const product* const p = user;
  const weft_tensor x = pass->inputs[0];
  const float *const w = pass->parameters[0].data.data, *const dy = pass->gradients[0].data.data;
  float *const dx = pass->input_gradients[0].data.data, *const dw = pass->parameter_gradients[0].data.data;
  const float* const twice = pass->kept[0].data.data;
  weft_tensor none;
  CHECK(pass->backward && pass->training && pass->output_count == 1 && pass->kept_count == 1);
  REFUSED(weft_module_output(pass, 2, x.extents, &none, &error),
          "weft_module_output: pass is not a forward pass that runs; expected the one that the function got");
  if (p->fails != NULL && strcmp(p->fails, "backward") == 0) return say(told, "no more ink");
  for (int64_t row = 0; row < x.extents[0]; ++row)
    for (int o = 0; o < OUT; ++o)
      for (int i = 0; i < IN; ++i) {
        dx[row * IN + i] += dy[row * OUT + o] * w[o * IN + i];
        if (dw != NULL) dw[o * IN + i] += dy[row * OUT + o] * twice[row * IN + i] / 2;
      }
  return WEFT_OK;
}

static void release(void* user) { ++((product*)user)->released; }

static const weft_module_parameter weight = {"weight", {OUT, IN}, 2, -1, 0, 0.3};
static const char
    *const own_recipe =
               "{\"model\": {\"layer\": \"Sequential\", \"children\": [[\"a\", {\"layer\": \"Linear\", "
               "\"in\": 3, \"out\": 3}], [\"b\", {\"layer\": \"Product\"}]]}, \"loss\": "
               "\"mean_squared_error\"}",
           *const library_recipe =
               "{\"model\": {\"layer\": \"Sequential\", \"children\": [[\"a\", {\"layer\": \"Linear\", "
               "\"in\": 3, \"out\": 3}], [\"b\", {\"layer\": \"Linear\", \"in\": 3, \"out\": 2, "
               "\"init\": 0.3}]]}, \"loss\": \"mean_squared_error\"}";

static const char* options; /* of the build */
static double expected[STEPS];

static double step(weft_trainer* trainer, const rank_args* a, int number) {
  const int rows = ROWS / a->size, first = a->rank * rows;
  float x[ROWS * IN], y[ROWS * OUT];
  const int64_t of_x[] = {rows, IN}, of_y[] = {rows, OUT};
  for (int i = 0; i < rows * IN; ++i) x[i] = (float)((first * IN + i) * (number + 3) % 7) - 3;
  for (int i = 0; i < rows * OUT; ++i) y[i] = (float)((first * OUT + i) % 3);
  const weft_tensor input = {"x", f32(x, rows * IN), NULL, of_x, 2},
                    target = {"y", f32(y, rows * OUT), NULL, of_y, 2};
  const weft_batch batch = {&input, 1, 1, &target, ROWS};
  weft_step_result result = WEFT_STEP_RESULT_INIT;
  OK(weft_trainer_step_batches(trainer, &batch, 1, 0.05, &result, &error));
  return result.loss;
}

/* A step that fails, with this text. */
static void fails(weft_trainer* trainer, const rank_args* a, const char* words) {
  const int rows = ROWS / a->size;
  float x[ROWS * IN] = {0}, y[ROWS * OUT] = {0};
  const int64_t of_x[] = {rows, IN}, of_y[] = {rows, OUT};
  const weft_tensor input = {"x", f32(x, rows * IN), NULL, of_x, 2},
                    target = {"y", f32(y, rows * OUT), NULL, of_y, 2};
  const weft_batch batch = {&input, 1, 1, &target, ROWS};
  weft_error error = WEFT_ERROR_INIT;
  const weft_status got = weft_trainer_step_batches(trainer, &batch, 1, 0.05, NULL, &error);
  CHECK(got != WEFT_OK);
  check_error(__FILE__, __LINE__, got, &error, got, words);
}

static void trains(rank_args* a) {
  product of = {NULL, 0, 0};
  weft_module m = WEFT_MODULE_INIT;
  weft_group* group = join(a, "world", 0);
  const weft_mesh_axis axes[] = {{"dp", a->size}, {"tp", 1}};
  weft_mesh* mesh = NULL;
  weft_compute* compute = NULL;
  weft_model *model = NULL, *library = NULL, *none = NULL;
  weft_trainer *trainer = NULL, *of_library = NULL;
  m.name = "Product", m.parameters = &weight, m.parameter_count = 1;
  m.user = &of, m.forward = forward, m.backward = backward, m.release = release;
  OK(weft_mesh_create(group, axes, 2, &mesh, &error));
  OK(weft_compute_create(a->context, NULL, &compute, &error));
  OK(weft_model_create_with_modules(mesh, compute, own_recipe, options, &m, 1, &model, &error));
  OK(weft_model_create(mesh, compute, library_recipe, options, &library, &error));
  OK(weft_trainer_create_from_json(model, NULL, &trainer, &error));
  OK(weft_trainer_create_from_json(library, NULL, &of_library, &error));
  for (int i = 0; i < STEPS; ++i) {
    const double loss = step(trainer, a, i);
    CHECK(fabs(loss - step(of_library, a, i)) < 1e-5);
    if (a->size == 1 && options == NULL) expected[i] = loss;
    CHECK(fabs(loss - expected[i]) < 1e-5);
  }
  CHECK(of.passes >= STEPS && of.released == 0);
  /* an error of one rank is one of all, and nobody waits */
  const char* const passes[] = {"forward", "backward", "silently", "nothing"};
  const char* const texts[] = {
      "*\"b\": forward failed: no more paper", "*\"b\": backward failed: no more ink",
      "*\"b\": forward failed, and says nothing more", "*\"b\": forward made no output; expected 1 or more"};
  for (size_t i = 0; i < LENGTH(passes); ++i) {
    if (a->rank == a->size - 1) of.fails = passes[i];
    fails(trainer, a,
          of.fails != NULL ? texts[i]
                           : (i == 1 ? "*\"b\": backward failed on another rank of dp=2"
                                     : "*\"b\": forward failed on another rank of dp=2"));
    of.fails = NULL;
  }
  step(trainer, a, STEPS);
  weft_trainer_destroy(of_library);
  weft_model_destroy(library);
  weft_model_destroy(model);
  CHECK(of.released == 0);
  weft_trainer_destroy(trainer);
  CHECK(of.released == 1);

  /* descriptions that are wrong; each is released */
  weft_module two[] = {m, m};
  REFUSED(
      weft_model_create_with_modules(mesh, compute, own_recipe, NULL, two, 2, &none, &error),
      "recipe: a layer of the program is called \"Product\"; expected a name that no layer of the library "
      "and no other of these has");
  CHECK(of.released == 3);
  m.name = "Linear";
  REFUSED(weft_model_create_with_modules(mesh, compute, own_recipe, NULL, &m, 1, &none, &error),
          "recipe: a layer of the program is called \"Linear\"; expected a name that no layer of the library "
          "and no other of these has");
  m.name = "Products";
  REFUSED(weft_model_create_with_modules(mesh, compute, own_recipe, NULL, &m, 1, &none, &error),
          "*recipe: model.b.layer is \"Product\"; expected one of Products, ");
  m.name = NULL;
  REFUSED(weft_model_create_with_modules(mesh, compute, own_recipe, NULL, &m, 1, &none, &error),
          "weft_model_create_with_modules: modules[0].name is NULL");
  m.name = "Product", m.backward = NULL;
  REFUSED(weft_model_create_with_modules(mesh, compute, own_recipe, NULL, &m, 1, &none, &error),
          "weft_model_create_with_modules: modules[0].backward is NULL; expected a function");
  CHECK(of.released == 7 && none == NULL);
  weft_compute_destroy(compute);
  weft_mesh_destroy(mesh);
  weft_group_destroy(group);
}

static void test_trains(void) {
  options = NULL;
  run_ranks(1, trains);
  run_ranks(2, trains);
  options = "{\"data\": \"fsdp\"}";
  run_ranks(2, trains);
  options = "{\"ac\": \"selective\", \"ac_modules\": [\"b\"]}";
  run_ranks(2, trains);
}

int main(int argc, char** argv) {
  static const named_test tests[] = {{"trains", test_trains}};
  return run_tests(tests, LENGTH(tests), argc, argv);
}
