/* A transformer from C: its logits equal those of plain loops, and a training run has the bits of a run from
 * C++. */
#define _POSIX_C_SOURCE 200809L /* barriers of pthread, mkdtemp */
#include "weft/weft_train.h"

#include <math.h>

#include "support.h"
#include "train_data.h"

/* dp x tp ranks, and what they share. */
static struct {
  int dp, tp;
  bool split; /* sequence_parallel and split_vocab */
  double losses[TRAIN_STEPS];
  const char* folder;
  float whole[TRAIN_ROWS * TRAIN_SEQUENCE * TRAIN_VOCAB]; /* scores of the untrained model */
  int64_t expected_tokens[8];                             /* of generates() on one rank */
} run;

typedef struct parts {
  weft_group* group;
  weft_mesh* mesh;
  weft_compute* compute;
  weft_model* model;
  int first, rows; /* of a batch: this rank's */
} parts;

static weft_data_form form = WEFT_DATA_DDP;
static int32_t after_forward = WEFT_RESHARD;
static weft_dtype reduce_as = WEFT_F32;
static weft_float8_recipe float8 = WEFT_FLOAT8_NONE;
static weft_dtype of_weights = WEFT_F32, of_activations = WEFT_F32;
static bool exact = false;

static int32_t ac_mode = WEFT_AC_NONE;
static const char* const ac_modules[] = {"layers.*.mlp"};

static weft_transformer_options small(void) {
  weft_transformer_options o = WEFT_TRANSFORMER_OPTIONS_INIT;
  o.dim = TRAIN_DIM;
  o.layers = TRAIN_LAYERS;
  o.heads = TRAIN_HEADS;
  o.kv_heads = TRAIN_KV_HEADS;
  o.ffn_hidden = TRAIN_HIDDEN;
  o.vocab = TRAIN_VOCAB;
  o.max_seq = TRAIN_SEQUENCE;
  o.init_std = TRAIN_INIT_STD;
  o.seed = TRAIN_SEED;
  o.sequence_parallel = o.split_vocab = run.split;
  o.data_form = form;
  o.after_forward = after_forward;
  o.reduce = reduce_as;
  o.float8 = float8;
  o.weights = of_weights;
  o.activations = of_activations;
  o.ac_mode = ac_mode;
  o.ac_modules = ac_modules;
  o.ac_module_count = ac_mode == WEFT_AC_SELECTIVE;
  o.exact = exact;
  return o;
}

static parts make(rank_args* a, const weft_transformer_options* options) {
  const weft_mesh_axis axes[] = {{"dp", run.dp}, {"tp", run.tp}};
  weft_compute_options with = WEFT_COMPUTE_OPTIONS_INIT;
  parts p = {NULL, NULL, NULL, NULL, 0, TRAIN_ROWS / run.dp};
  int32_t at = 0;
  with.threads = 2;
  p.group = join(a, "world", 0);
  OK(weft_mesh_create(p.group, axes, 2, &p.mesh, &error));
  OK(weft_mesh_coordinate(p.mesh, "dp", &at, &error));
  p.first = at * p.rows;
  OK(weft_compute_create(a->context, &with, &p.compute, &error));
  OK(weft_transformer_create(p.mesh, p.compute, options, &p.model, &error));
  /* The model keeps what it needs. */
  weft_compute_destroy(p.compute);
  weft_mesh_destroy(p.mesh);
  weft_group_destroy(p.group);
  return p;
}

static weft_trainer* trainer_of(const parts* p) {
  weft_trainer_options options = WEFT_TRAINER_OPTIONS_INIT;
  weft_trainer* trainer = NULL;
  options.max_norm = TRAIN_MAX_NORM;
  OK(weft_trainer_create(p->model, &options, &trainer, &error));
  return trainer;
}

static double step(weft_trainer* trainer, const parts* p, int number) {
  int64_t tokens[TRAIN_ROWS * TRAIN_SEQUENCE], labels[TRAIN_ROWS * TRAIN_SEQUENCE];
  const weft_token_batch batch = {tokens, labels, p->rows, TRAIN_SEQUENCE, 0};
  weft_step_result result = WEFT_STEP_RESULT_INIT;
  train_batch(number, p->first, p->rows, tokens, labels);
  OK(weft_trainer_step(trainer, &batch, 1, TRAIN_RATE, &result, &error));
  CHECK(result.step == number && !result.skipped && result.grad_norm > 0);
  CHECK(result.tokens == TRAIN_ROWS * TRAIN_SEQUENCE - 6); /* those of all ranks that have a label */
  return result.loss;
}

/* ---- The same losses as from C++ ---- */

static void train(rank_args* a) {
  const weft_transformer_options options = small();
  const parts p = make(a, &options);
  weft_trainer* trainer = trainer_of(&p);
  int64_t steps = 0;
  weft_model_destroy(p.model); /* the trainer keeps it */
  for (int i = 0; i < TRAIN_STEPS; ++i) {
    const double loss = step(trainer, &p, i);
    if (a->rank == 0) run.losses[i] = loss;
  }
  OK(weft_trainer_steps(trainer, &steps, &error));
  CHECK(steps == TRAIN_STEPS);
  weft_trainer_destroy(trainer);
}

static void expect_losses_of_cpp(int dp, int tp) {
  double expected[TRAIN_STEPS];
  run.dp = dp;
  run.tp = tp;
  run_ranks(dp * tp, train);
  train_in_cpp(dp, tp, run.split, expected);
  CHECK(memcmp(run.losses, expected, sizeof(expected)) == 0);
  CHECK(run.losses[TRAIN_STEPS - 1] < run.losses[0]);
}

/* Activation checkpointing: the same losses, bit for bit. */
static void test_ac(void) {
  double none[TRAIN_STEPS];
  run.split = true;
  run.dp = 1;
  run.tp = 2;
  run_ranks(2, train);
  memcpy(none, run.losses, sizeof none);
  for (ac_mode = WEFT_AC_FULL; ac_mode <= WEFT_AC_SELECTIVE; ++ac_mode) {
    run_ranks(2, train);
    CHECK(memcmp(run.losses, none, sizeof none) == 0);
  }
  ac_mode = WEFT_AC_NONE;
  run.split = false;
}

/* Parameters divided over the data ranks: the same losses, up to rounding. */
static void test_divided_parameters(void) {
  double whole[TRAIN_STEPS];
  run.split = false;
  for (int tp = 1; tp <= 2; ++tp) {
    run.dp = 2;
    run.tp = tp;
    form = WEFT_DATA_DDP;
    run_ranks(2 * tp, train);
    memcpy(whole, run.losses, sizeof whole);
    form = WEFT_DATA_FSDP;
    run_ranks(2 * tp, train);
    for (int i = 0; i < TRAIN_STEPS; ++i) CHECK(fabs(run.losses[i] - whole[i]) <= 1e-5 * whole[i]);
    /* Blocks that are kept, or kept in part, compute the same. Gradients that are added up as bf16 are
     * nearly the same. */
    memcpy(whole, run.losses, sizeof whole);
    for (after_forward = WEFT_KEEP; after_forward <= 2; after_forward += 3) {
      run_ranks(2 * tp, train);
      CHECK(memcmp(run.losses, whole, sizeof whole) == 0);
    }
    after_forward = WEFT_RESHARD;
    reduce_as = WEFT_BF16;
    run_ranks(2 * tp, train);
    CHECK(memcmp(run.losses, whole, sizeof whole) != 0);
    for (int i = 0; i < TRAIN_STEPS; ++i) CHECK(fabs(run.losses[i] - whole[i]) <= 1e-2 * whole[i]);
    reduce_as = WEFT_F32;
    form = WEFT_DATA_DDP;
  }
}
/* q and o have sizes that are multiples of 16: nearly the losses of f32, by each recipe. */
static void test_float8(void) {
  double f32[TRAIN_STEPS];
  run.dp = run.tp = 2;
  run_ranks(4, train);
  memcpy(f32, run.losses, sizeof f32);
  for (float8 = WEFT_FLOAT8_TENSORWISE; float8 <= WEFT_FLOAT8_ROWWISE_GW_HP; ++float8) {
    run_ranks(4, train);
    CHECK(memcmp(run.losses, f32, sizeof f32) != 0);
    for (int i = 0; i < TRAIN_STEPS; ++i) CHECK(fabs(run.losses[i] - f32[i]) <= 5e-2 * f32[i]);
  }
  float8 = WEFT_FLOAT8_NONE;
}
/* Weights and activations in bf16: nearly the losses of f32. */
static void test_bf16(void) {
  double f32[TRAIN_STEPS], narrow[TRAIN_STEPS];
  run.dp = run.tp = 2;
  run_ranks(4, train);
  memcpy(f32, run.losses, sizeof f32);
  of_weights = WEFT_BF16;
  run_ranks(4, train);
  memcpy(narrow, run.losses, sizeof narrow);
  of_activations = WEFT_BF16;
  run_ranks(4, train);
  CHECK(memcmp(run.losses, narrow, sizeof narrow) != 0);
  for (int i = 0; i < TRAIN_STEPS; ++i) CHECK(fabs(run.losses[i] - f32[i]) <= 2e-2 * f32[i]);
  of_weights = of_activations = WEFT_F32;
}
/* On every mesh the same bits. */
static void test_exact(void) {
  double one[TRAIN_STEPS];
  exact = true;
  run.dp = run.tp = 1;
  run_ranks(1, train);
  memcpy(one, run.losses, sizeof one);
  run.dp = run.tp = 2;
  run_ranks(4, train);
  CHECK(memcmp(run.losses, one, sizeof one) == 0);
  exact = false;
  run_ranks(4, train);
  CHECK(memcmp(run.losses, one, sizeof one) != 0);
}
static void divided_refused(rank_args* a) {
  weft_transformer_options options = small();
  weft_group* group = join(a, "world", 0);
  const weft_mesh_axis axes[] = {{"dp", 1}, {"tp", 1}};
  weft_mesh* mesh = NULL;
  weft_compute* compute = NULL;
  weft_model* model = NULL;
  OK(weft_mesh_create(group, axes, 2, &mesh, &error));
  OK(weft_compute_create(a->context, NULL, &compute, &error));
  options.data_form = 2;
  CHECK_ERROR(
      weft_transformer_create(mesh, compute, &options, &model, &error), WEFT_BAD_ARGUMENT,
      "weft_transformer_create: options->data_form is 2; expected 0 (WEFT_DATA_DDP) or 1 (WEFT_DATA_FSDP)");
  options.data_form = WEFT_DATA_FSDP;
  options.float8 = 4;
  CHECK_ERROR(weft_transformer_create(mesh, compute, &options, &model, &error), WEFT_BAD_ARGUMENT,
              "weft_transformer_create: options->float8 is 4; expected 0 (WEFT_FLOAT8_NONE) to 3 "
              "(WEFT_FLOAT8_ROWWISE_GW_HP)");
  options.float8 = WEFT_FLOAT8_NONE;
  options.float8_whole_scales = true;
  CHECK_ERROR(
      weft_transformer_create(mesh, compute, &options, &model, &error), WEFT_BAD_ARGUMENT,
      "weft_transformer_create: options->float8_whole_scales is true; expected a recipe in options->float8");
  options.float8_whole_scales = false;
  options.exact = true;
  options.tied = !options.tied;
  CHECK_ERROR(weft_transformer_create(mesh, compute, &options, &model, &error), WEFT_BAD_ARGUMENT,
              "*exact: ");
  options.tied = !options.tied;
  options.exact = false;
  options.reduce = WEFT_F16;
  CHECK_ERROR(weft_transformer_create(mesh, compute, &options, &model, &error), WEFT_BAD_ARGUMENT,
              "* (WEFT_F32) or ");
  options.reduce = WEFT_F32;
  options.after_forward = 1;
  CHECK_ERROR(weft_transformer_create(mesh, compute, &options, &model, &error), WEFT_BAD_ARGUMENT,
              "*options->after_forward is 1; expected 0 (WEFT_RESHARD), -1 (WEFT_KEEP), or 2 or more");
  options.after_forward = 3;
  CHECK_ERROR(
      weft_transformer_create(mesh, compute, &options, &model, &error), WEFT_BAD_ARGUMENT,
      "*options.reshard_after_forward is 3; expected true, false, or a number that divides the 1 ranks");
  options.data_form = WEFT_DATA_DDP;
  CHECK_ERROR(weft_transformer_create(mesh, compute, &options, &model, &error), WEFT_BAD_ARGUMENT,
              "*options->after_forward is for WEFT_DATA_FSDP; data_form is WEFT_DATA_DDP");
  options.after_forward = WEFT_RESHARD;
  options.data_form = WEFT_DATA_FSDP;
  options.replicate_axis = "copies";
  CHECK_ERROR(weft_transformer_create(mesh, compute, &options, &model, &error), WEFT_BAD_ARGUMENT,
              "*no axis \"copies\" in dp=1 x tp=1");
  weft_compute_destroy(compute);
  weft_mesh_destroy(mesh);
  weft_group_destroy(group);
}
static void test_divided_refused(void) { run_ranks(1, divided_refused); }

/* ---- The scores of plain loops ---- */

/* A parameter of a model on one rank. */
static const float* whole(const weft_model* model, const char* format, int layer) {
  char name[100];
  int32_t index = -1;
  weft_parameter p = WEFT_PARAMETER_INIT;
  snprintf(name, sizeof(name), format, layer);
  OK(weft_model_find_parameter(model, name, &index, &error));
  CHECK(index >= 0);
  OK(weft_model_get_parameter(model, index, &p, &error));
  CHECK(strcmp(p.name, name) == 0 && p.trained && p.value.dtype == WEFT_F32);
  return p.value.data;
}

/* y = x w^T; x: (in), w: (out, in) */
static void times(const double* x, const float* w, double* y, int in, int out) {
  for (int o = 0; o < out; ++o) {
    y[o] = 0;
    for (int i = 0; i < in; ++i) y[o] += x[i] * (double)w[o * in + i];
  }
}
static void norm(const double* x, const float* w, double* y) {
  double squares = 0;
  for (int i = 0; i < TRAIN_DIM; ++i) squares += x[i] * x[i];
  for (int i = 0; i < TRAIN_DIM; ++i) y[i] = x[i] / sqrt(squares / TRAIN_DIM + 1e-5) * (double)w[i];
}
/* Turns the pairs (i, i + half) of each head by the position's angles. */
static void turn(double* x, int position) {
  enum { SIZE = TRAIN_DIM / TRAIN_HEADS, HALF = SIZE / 2 };
  for (int h = 0; h < TRAIN_HEADS; ++h)
    for (int i = 0; i < HALF; ++i) {
      const double angle = position * pow(10000, -2.0 * i / SIZE), low = x[h * SIZE + i],
                   high = x[h * SIZE + i + HALF];
      x[h * SIZE + i] = low * cos(angle) - high * sin(angle);
      x[h * SIZE + i + HALF] = high * cos(angle) + low * sin(angle);
    }
}

typedef double tokens_of_features[TRAIN_SEQUENCE][TRAIN_DIM];

static void attention(const weft_model* model, int layer, tokens_of_features x) {
  enum { SIZE = TRAIN_DIM / TRAIN_HEADS };
  tokens_of_features q, k, v;
  for (int t = 0; t < TRAIN_SEQUENCE; ++t) {
    double n[TRAIN_DIM];
    norm(x[t], whole(model, "layers.%d.attention_norm.weight", layer), n);
    times(n, whole(model, "layers.%d.attention.q_proj.weight", layer), q[t], TRAIN_DIM, TRAIN_DIM);
    times(n, whole(model, "layers.%d.attention.k_proj.weight", layer), k[t], TRAIN_DIM, TRAIN_DIM);
    times(n, whole(model, "layers.%d.attention.v_proj.weight", layer), v[t], TRAIN_DIM, TRAIN_DIM);
    turn(q[t], t);
    turn(k[t], t);
  }
  for (int t = 0; t < TRAIN_SEQUENCE; ++t) {
    double mixed[TRAIN_DIM] = {0}, out[TRAIN_DIM];
    for (int h = 0; h < TRAIN_HEADS; ++h) {
      double weights[TRAIN_SEQUENCE], sum = 0;
      for (int s = 0; s <= t; ++s) {
        double score = 0;
        for (int i = h * SIZE; i < (h + 1) * SIZE; ++i) score += q[t][i] * k[s][i];
        sum += weights[s] = exp(score / sqrt(SIZE));
      }
      for (int s = 0; s <= t; ++s)
        for (int i = h * SIZE; i < (h + 1) * SIZE; ++i) mixed[i] += weights[s] / sum * v[s][i];
    }
    times(mixed, whole(model, "layers.%d.attention.o_proj.weight", layer), out, TRAIN_DIM, TRAIN_DIM);
    for (int i = 0; i < TRAIN_DIM; ++i) x[t][i] += out[i];
  }
}
static void mlp(const weft_model* model, int layer, double x[TRAIN_DIM]) {
  double n[TRAIN_DIM], gate[TRAIN_HIDDEN], up[TRAIN_HIDDEN], out[TRAIN_DIM];
  norm(x, whole(model, "layers.%d.mlp_norm.weight", layer), n);
  times(n, whole(model, "layers.%d.mlp.gate_proj.weight", layer), gate, TRAIN_DIM, TRAIN_HIDDEN);
  times(n, whole(model, "layers.%d.mlp.up_proj.weight", layer), up, TRAIN_DIM, TRAIN_HIDDEN);
  for (int i = 0; i < TRAIN_HIDDEN; ++i) up[i] *= gate[i] / (1 + exp(-gate[i]));
  times(up, whole(model, "layers.%d.mlp.down_proj.weight", layer), out, TRAIN_HIDDEN, TRAIN_DIM);
  for (int i = 0; i < TRAIN_DIM; ++i) x[i] += out[i];
}

static void scores_of_loops(rank_args* a) {
  const weft_transformer_options options = small();
  const parts p = make(a, &options);
  int64_t tokens[TRAIN_ROWS * TRAIN_SEQUENCE], labels[TRAIN_ROWS * TRAIN_SEQUENCE];
  const weft_token_batch batch = {tokens, NULL, TRAIN_ROWS, TRAIN_SEQUENCE, 0};
  const weft_buffer scores = f32(run.whole, LENGTH(run.whole));
  const float* embedding = whole(p.model, "token_embedding.embedding.weight", 0);
  train_batch(0, 0, TRAIN_ROWS, tokens, labels);
  OK(weft_model_logits(p.model, &batch, &scores, &error));
  for (int r = 0; r < TRAIN_ROWS; ++r) {
    tokens_of_features x;
    for (int t = 0; t < TRAIN_SEQUENCE; ++t)
      for (int i = 0; i < TRAIN_DIM; ++i) x[t][i] = embedding[tokens[r * TRAIN_SEQUENCE + t] * TRAIN_DIM + i];
    for (int l = 0; l < TRAIN_LAYERS; ++l) {
      attention(p.model, l, x);
      for (int t = 0; t < TRAIN_SEQUENCE; ++t) mlp(p.model, l, x[t]);
    }
    for (int t = 0; t < TRAIN_SEQUENCE; ++t) {
      double n[TRAIN_DIM], expected[TRAIN_VOCAB];
      norm(x[t], whole(p.model, "norm.weight", 0), n);
      times(n, whole(p.model, "output_head.proj.weight", 0), expected, TRAIN_DIM, TRAIN_VOCAB);
      for (int v = 0; v < TRAIN_VOCAB; ++v) {
        const double got = run.whole[(r * TRAIN_SEQUENCE + t) * TRAIN_VOCAB + v];
        /* Scores are about 1; some twenty roundings of f32 in a row. */
        CHECK(fabs(got - expected[v]) <= 2e-6);
      }
    }
  }
  weft_model_destroy(p.model);
}

/* The logits on the ranks of a mesh are the same, except for the order of sums. */
static void scores_of_mesh(rank_args* a) {
  const weft_transformer_options options = small();
  const parts p = make(a, &options);
  int64_t tokens[TRAIN_ROWS * TRAIN_SEQUENCE], labels[TRAIN_ROWS * TRAIN_SEQUENCE];
  float scores[TRAIN_ROWS * TRAIN_SEQUENCE * TRAIN_VOCAB];
  const int64_t count = (int64_t)p.rows * TRAIN_SEQUENCE * TRAIN_VOCAB;
  const weft_token_batch batch = {tokens, NULL, p.rows, TRAIN_SEQUENCE, TRAIN_ROWS};
  const weft_buffer to = f32(scores, count);
  const float* expected = run.whole + p.first * TRAIN_SEQUENCE * TRAIN_VOCAB;
  train_batch(0, p.first, p.rows, tokens, labels);
  OK(weft_model_logits(p.model, &batch, &to, &error));
  for (int64_t i = 0; i < count; ++i) CHECK(fabsf(scores[i] - expected[i]) <= 2e-6f);
  weft_model_destroy(p.model);
}

static void vocabulary_is_split(rank_args* a) {
  const weft_transformer_options options = small();
  const parts p = make(a, &options);
  const char* const names[] = {"token_embedding.embedding.weight", "output_head.proj.weight"};
  for (int i = 0; i < 2; ++i) {
    weft_parameter d = WEFT_PARAMETER_INIT;
    int32_t index = -1;
    OK(weft_model_find_parameter(p.model, names[i], &index, &error));
    OK(weft_model_get_parameter(p.model, index, &d, &error));
    CHECK(d.extents[0] == TRAIN_VOCAB && d.local_extents[0] == TRAIN_VOCAB / run.tp);
  }
  weft_model_destroy(p.model);
}

/* ---- Parameters ---- */

static void parameters(rank_args* a) {
  const weft_transformer_options options = small();
  const parts p = make(a, &options);
  weft_parameter d = WEFT_PARAMETER_INIT;
  weft_layout* layout = NULL;
  int64_t extents[2] = {0, 0};
  int32_t count = 0, index = -1;
  float values[TRAIN_DIM * TRAIN_DIM], before[TRAIN_DIM * TRAIN_DIM];
  OK(weft_model_parameter_count(p.model, &count, &error));
  CHECK(count == 9 * TRAIN_LAYERS + 3);
  for (int32_t i = 0; i < count; ++i) { /* each has a name, by which it is found */
    OK(weft_model_get_parameter(p.model, i, &d, &error));
    OK(weft_model_find_parameter(p.model, d.name, &index, &error));
    CHECK(index == i);
  }
  OK(weft_model_find_parameter(p.model, "layers.7.norm", &index, &error));
  CHECK(index == -1);

  OK(weft_model_find_parameter(p.model, "layers.1.attention.q_proj.weight", &index, &error));
  OK(weft_model_get_parameter(p.model, index, &d, &error));
  CHECK(d.dim_count == 2 && d.extents[0] == TRAIN_DIM && d.extents[1] == TRAIN_DIM && d.extents[2] == 0);
  CHECK(d.local_extents[0] == TRAIN_DIM / run.tp && d.local_extents[1] == TRAIN_DIM);
  CHECK(d.value.count == TRAIN_DIM * TRAIN_DIM / run.tp && d.value.device == WEFT_CPU && d.trained);
  OK(weft_model_parameter_layout(p.model, index, &layout, &error));
  memcpy(before, d.value.data, sizeof(float) * (size_t)d.value.count);

  for (int64_t i = 0; i < d.value.count; ++i) values[i] = (float)i;
  const weft_buffer from = f32(values, d.value.count);
  OK(weft_model_set_parameter(p.model, index, &from, &error));
  CHECK(memcmp(d.value.data, values, sizeof(float) * (size_t)d.value.count) == 0);
  OK(weft_layout_local_extents(layout, a->rank, extents, 2, &error));
  CHECK(extents[0] == d.local_extents[0] && extents[1] == TRAIN_DIM);

  weft_model_destroy(p.model);
  weft_layout_destroy(layout); /* lives longer than its model */
}

/* ---- Options ---- */

static void more_options(rank_args* a) {
  weft_transformer_options options = small();
  const char* const frozen[] = {"layers.*.mlp", "norm"};
  weft_trainer_options with = WEFT_TRAINER_OPTIONS_INIT;
  weft_trainer* trainer = NULL;
  weft_parameter d = WEFT_PARAMETER_INIT;
  float before[TRAIN_HIDDEN * TRAIN_DIM];
  int32_t index = -1;
  options.weights = WEFT_BF16;
  options.tied = true;
  options.frozen = frozen;
  options.frozen_count = 2;
  parts p = make(a, &options);
  OK(weft_model_find_parameter(p.model, "output_head.proj.weight", &index, &error));
  CHECK(index == -1); /* it is the embedding's */
  OK(weft_model_find_parameter(p.model, "layers.0.mlp.up_proj.weight", &index, &error));
  OK(weft_model_get_parameter(p.model, index, &d, &error));
  CHECK(!d.trained);
  memcpy(before, d.value.data, sizeof(float) * (size_t)d.value.count);
  with.optimizer = WEFT_SGD;
  with.momentum = 0.9;
  with.weight_decay = 0;
  with.max_norm = 0;
  OK(weft_trainer_create(p.model, &with, &trainer, &error));

  /* Two micro-batches a step, and no result wanted. */
  int64_t tokens[2][2 * TRAIN_SEQUENCE], labels[2][2 * TRAIN_SEQUENCE];
  const weft_token_batch batches[] = {{tokens[0], labels[0], 1, TRAIN_SEQUENCE, 0},
                                      {tokens[1], labels[1], 1, TRAIN_SEQUENCE, 0}};
  weft_step_result first = WEFT_STEP_RESULT_INIT, last = WEFT_STEP_RESULT_INIT;
  for (int i = 0; i < 2; ++i) train_batch(0, p.first + i, 1, tokens[i], labels[i]);
  OK(weft_trainer_step(trainer, batches, 2, 0.1, &first, &error));
  OK(weft_trainer_step(trainer, batches, 2, 0.1, NULL, &error));
  OK(weft_trainer_step(trainer, batches, 2, 0.1, &last, &error));
  CHECK(last.loss < first.loss && last.step == 2);
  CHECK(memcmp(before, d.value.data, sizeof(float) * (size_t)d.value.count) == 0);
  weft_trainer_destroy(trainer);
  weft_model_destroy(p.model);
}

/* ---- Text ---- */

static void from_text(rank_args* a) {
  const char* const text =
      "steps = 100 # for weft train\n\n[model]\ndim = 16\nlayers = 2\nheads = 4\nkv_heads = 4\nffn_hidden = "
      "24\n"
      "vocab = 32\nmax_seq = 8\ninit_std = 0.1\n";
  const weft_transformer_options all = small();
  weft_transformer_options rest = WEFT_TRANSFORMER_OPTIONS_INIT;
  weft_model *model = NULL, *again = NULL, *none = NULL;
  weft_text *one = NULL, *two = NULL;
  weft_parameter x = WEFT_PARAMETER_INIT, y = WEFT_PARAMETER_INIT;
  const parts p = make(a, &all);
  const weft_mesh_axis axes[] = {{"dp", run.dp}, {"tp", run.tp}};
  weft_group* group = join(a, "again", 0);
  weft_mesh* mesh = NULL;
  weft_compute* compute = NULL;
  OK(weft_mesh_create(group, axes, 2, &mesh, &error));
  OK(weft_compute_create(a->context, NULL, &compute, &error));
  rest.seed = TRAIN_SEED;
  OK(weft_transformer_create_from_text(mesh, compute, text, &rest, &model, &error));
  OK(weft_model_text(p.model, &one, &error));
  OK(weft_model_text(model, &two, &error));
  CHECK(strcmp(weft_text_data(one), weft_text_data(two)) == 0);
  CHECK(strstr(weft_text_data(one), "\nffn_hidden = 24\n") != NULL);
  for (int32_t i = 0; i < 9 * TRAIN_LAYERS + 3; ++i) { /* of the same seed: the same values */
    OK(weft_model_get_parameter(p.model, i, &x, &error));
    OK(weft_model_get_parameter(model, i, &y, &error));
    CHECK(strcmp(x.name, y.name) == 0 && x.value.count == y.value.count);
    CHECK(memcmp(x.value.data, y.value.data, sizeof(float) * (size_t)x.value.count) == 0);
  }
  OK(weft_transformer_create_from_text(mesh, compute, weft_text_data(one), NULL, &again, &error));

#define FROM_TEXT(text) weft_transformer_create_from_text(mesh, compute, text, NULL, &none, &error)
#define WRONG_TEXT(text, words) CHECK_ERROR(FROM_TEXT(text), WEFT_BAD_ARGUMENT, words)
  WRONG_TEXT("", "text: has no table [model]");
  WRONG_TEXT("[model]\nhead = 4\n", "text:2: [model] has no \"head\"; is heads or head_size meant?");
  WRONG_TEXT("[model]\n\ndim = '4'\n", "text:3: dim is '4'; expected an integer");
  WRONG_TEXT("[model]\ndim = 0\n", "text:2: dim is 0; expected 1 or more");
  WRONG_TEXT("[model]\ndim = 30\nheads = 4\n", "text:2: transformer: dim 30 does not divide into heads 4");
  WRONG_TEXT("[model]\ndim = \n", "*text:2: not TOML: ");
  WRONG_TEXT(NULL, "weft_transformer_create_from_text: text is NULL");
  CHECK(none == NULL);
  weft_text_destroy(one);
  weft_text_destroy(two);
  weft_model_destroy(model);
  weft_model_destroy(again);
  weft_model_destroy(p.model);
  weft_compute_destroy(compute);
  weft_mesh_destroy(mesh);
  weft_group_destroy(group);
}

/* ---- Parameters as tensors of DLPack ---- */

static void of_dlpack(rank_args* a) {
  const weft_transformer_options options = small();
  const parts p = make(a, &options);
  weft_parameter d = WEFT_PARAMETER_INIT;
  int32_t index = -1;
  struct DLManagedTensor* plain = NULL;
  struct DLManagedTensorVersioned* versioned = NULL;
  float values[TRAIN_HIDDEN * TRAIN_DIM];
  OK(weft_model_find_parameter(p.model, "layers.1.mlp.up_proj.weight", &index, &error));
  OK(weft_model_get_parameter(p.model, index, &d, &error));
  OK(weft_model_parameter_dlpack(p.model, index, &plain, &error));
  OK(weft_model_parameter_dlpack_versioned(p.model, index, &versioned, &error));
  weft_dl_managed_tensor* const one = (weft_dl_managed_tensor*)(void*)plain;
  weft_dl_managed_tensor_versioned* const two = (weft_dl_managed_tensor_versioned*)(void*)versioned;
  CHECK(one->dl_tensor.data == d.value.data && two->dl_tensor.data == d.value.data); /* no copy */
  CHECK(one->dl_tensor.ndim == 2 && one->dl_tensor.shape[0] == TRAIN_HIDDEN / run.tp &&
        one->dl_tensor.shape[1] == TRAIN_DIM);
  CHECK(one->dl_tensor.strides[0] == TRAIN_DIM && one->dl_tensor.strides[1] == 1);
  CHECK(one->dl_tensor.dtype.code == WEFT_DL_FLOAT && one->dl_tensor.dtype.bits == 32);
  CHECK(two->version.major == 1 && two->flags == WEFT_DL_READ_ONLY);

  /* In by DLPack, and seen there at once. */
  int64_t shape[2] = {d.local_extents[0], d.local_extents[1]},
          turned[2] = {d.local_extents[1], d.local_extents[0]}, strides[2] = {1, d.local_extents[0]};
  weft_dl_tensor t = {values, {WEFT_DL_CPU, 0}, 2, {WEFT_DL_FLOAT, 32, 1}, shape, NULL, 0};
  for (int i = 0; i < TRAIN_HIDDEN * TRAIN_DIM; ++i) values[i] = (float)(i + a->rank);
  OK(weft_model_set_parameter_from_dltensor(p.model, index, &t, &error));
  CHECK(memcmp(one->dl_tensor.data, values, sizeof(float) * (size_t)d.value.count) == 0);
#define SET_DL(words, status) \
  CHECK_ERROR(weft_model_set_parameter_from_dltensor(p.model, index, &t, &error), status, words)
  char text[200];
  snprintf(text, sizeof text,
           "weft_model_set_parameter_from_dltensor: the tensor has shape (%d, %d); expected (%d, %d), what "
           "this rank "
           "holds of layers.1.mlp.up_proj.weight",
           (int)turned[0], (int)turned[1], (int)shape[0], (int)shape[1]);
  t.shape = turned;
  SET_DL(text, WEFT_BAD_ARGUMENT);
  t.shape = shape;
  t.strides = strides;
  SET_DL("*the tensor is strided", WEFT_LAYOUT);
  t.strides = NULL;
  t.dtype.bits = 64;
  SET_DL("weft_model_set_parameter_from_dltensor: tensor->dtype is f64; expected f32", WEFT_BAD_ARGUMENT);
  CHECK_ERROR(weft_model_set_parameter_from_dltensor(p.model, 99, &t, &error), WEFT_BAD_ARGUMENT,
              "weft_model_set_parameter_from_dltensor: index is 99; expected 0 to 20");
  CHECK_ERROR(weft_model_parameter_dlpack(p.model, -1, &plain, &error), WEFT_BAD_ARGUMENT,
              "weft_model_parameter_dlpack: index is -1; expected 0 to 20");

  /* The memory outlives the model's handle: it exists as long as one of the DLPack tensors. */
  weft_model_destroy(p.model);
  one->deleter(one);
  CHECK(memcmp(two->dl_tensor.data, values, sizeof(float) * (size_t)d.value.count) == 0);
  two->deleter(two);
}

/* ---- A step in two halves ---- */

static weft_status backward(weft_trainer* trainer, const parts* p, int number, weft_step_result* result,
                            weft_error* error) {
  int64_t tokens[TRAIN_ROWS * TRAIN_SEQUENCE], labels[TRAIN_ROWS * TRAIN_SEQUENCE];
  const weft_token_batch batch = {tokens, labels, p->rows, TRAIN_SEQUENCE, 0};
  train_batch(number, p->first, p->rows, tokens, labels);
  return weft_trainer_backward(trainer, &batch, 1, result, error);
}

/* The program clips with weft.h between the halves: the losses equal those of a run whose trainer clips. */
static void train_in_halves(rank_args* a) {
  enum { PARAMETERS = 9 * TRAIN_LAYERS + 3 };
  const weft_transformer_options options = small();
  const parts p = make(a, &options);
  weft_trainer_options with = WEFT_TRAINER_OPTIONS_INIT;
  weft_trainer* trainer = NULL;
  weft_tensor gradients[PARAMETERS];
  weft_step_result half = WEFT_STEP_RESULT_INIT, whole = WEFT_STEP_RESULT_INIT;
  weft_parameter d = WEFT_PARAMETER_INIT;
  int32_t count = 0;
  with.max_norm = 0;
  with.loss_scale = 1024; /* changes no bit */
  OK(weft_trainer_create(p.model, &with, &trainer, &error));
  for (int i = 0; i < TRAIN_STEPS; ++i) {
    double norm = 0;
    OK(backward(trainer, &p, i, &half, &error));
    CHECK(half.loss == run.losses[i] && half.step == i && half.tokens == TRAIN_ROWS * TRAIN_SEQUENCE - 6);
    OK(weft_trainer_gradients(trainer, NULL, 0, &count, &error));
    CHECK(count == PARAMETERS);
    OK(weft_trainer_gradients(trainer, gradients, PARAMETERS, &count, &error));
    for (int32_t k = 0; k < count; ++k) {
      OK(weft_model_get_parameter(p.model, k, &d, &error));
      CHECK(strcmp(gradients[k].name, d.name) == 0 && gradients[k].data.count == d.value.count);
    }
    OK(weft_clip_grad_norm(gradients, count, TRAIN_MAX_NORM, NULL, &norm, &error));
    OK(weft_trainer_update(trainer, TRAIN_RATE, &whole, &error));
    CHECK(whole.loss_scale == 1024);
    CHECK(whole.loss == half.loss && whole.step == i && whole.grad_norm <= TRAIN_MAX_NORM &&
          norm > whole.grad_norm);
  }
  CHECK_ERROR(weft_trainer_gradients(trainer, gradients, PARAMETERS, &count, &error), WEFT_BAD_ARGUMENT,
              "trainer: there are no gradients; expected backward() first");
  CHECK_ERROR(weft_trainer_update(trainer, TRAIN_RATE, NULL, &error), WEFT_BAD_ARGUMENT,
              "trainer: update() has no gradients; expected backward() first");
  OK(backward(trainer, &p, 0, NULL, &error));
  CHECK_ERROR(backward(trainer, &p, 0, NULL, &error), WEFT_BAD_ARGUMENT,
              "trainer: the gradients of a backward() are there; expected update() or discard() first");
  CHECK_ERROR(weft_trainer_gradients(trainer, gradients, 3, &count, &error), WEFT_BAD_ARGUMENT,
              "weft_trainer_gradients: room is 3; the list of gradients needs 21");
  OK(weft_trainer_discard(trainer, &error));
  OK(weft_trainer_discard(trainer, &error));
  int64_t steps = 0;
  OK(weft_trainer_steps(trainer, &steps, &error));
  CHECK(steps == TRAIN_STEPS);
  /* Rates that differ, and an invalid one. */
  OK(backward(trainer, &p, 0, NULL, &error));
  if (run.dp * run.tp > 1) {
    CHECK_ERROR(weft_trainer_update(trainer, a->rank == 0 ? 0.5 : 0.25, NULL, &error), WEFT_BAD_ARGUMENT,
                "*here, and 0.25 to 0.5 on the ranks of dp=");
  } else {
    CHECK_ERROR(weft_trainer_update(trainer, NAN, NULL, &error), WEFT_BAD_ARGUMENT,
                "trainer: the learning rate is nan; expected a finite number of 0 or more");
  }
  weft_trainer_destroy(trainer);
  weft_model_destroy(p.model);
}

/* Averages begin as the parameters, are exchanged with them and back, and are saved and loaded. A smoothed
 * loss is another one. */
static void averages(rank_args* a) {
  const weft_transformer_options options = small();
  const parts p = make(a, &options);
  weft_trainer_options with = WEFT_TRAINER_OPTIONS_INIT;
  weft_trainer* trainer = NULL;
  weft_step_result result = WEFT_STEP_RESULT_INIT;
  weft_parameter d = WEFT_PARAMETER_INIT;
  with.ema_decay = 0.5;
  with.label_smoothing = 0.25;
  OK(weft_trainer_create(p.model, &with, &trainer, &error));
  OK(weft_model_get_parameter(p.model, 0, &d, &error));
  const float* const x = d.value.data;
  const float first = x[0];
  OK(backward(trainer, &p, 0, NULL, &error));
  OK(weft_trainer_update(trainer, TRAIN_RATE, &result, &error));
  CHECK(fabs(result.loss - run.losses[0]) > 1e-6);
  const float second = x[0];
  CHECK(second != first);
  OK(weft_trainer_swap_averages(trainer, true, &error));
  CHECK(fabsf(x[0] - 0.5F * (first + second)) <= 1e-6F);
  CHECK_ERROR(weft_trainer_swap_averages(trainer, true, &error), WEFT_BAD_ARGUMENT, "*swap_in() ");
  CHECK_ERROR(backward(trainer, &p, 1, NULL, &error), WEFT_BAD_ARGUMENT,
              "trainer: the averages are in the place of the masters; swap_out() first");
  OK(weft_trainer_swap_averages(trainer, false, &error));
  CHECK(x[0] == second);
  weft_trainer_destroy(trainer);
  with.ema_decay = 1;
  CHECK_ERROR(weft_trainer_create(p.model, &with, &trainer, &error), WEFT_BAD_ARGUMENT,
              "ema: decay is 1; expected 0 or more, and less than 1");
  with.ema_decay = 0;
  with.ema_warm_up = true;
  CHECK_ERROR(weft_trainer_create(p.model, &with, &trainer, &error), WEFT_BAD_ARGUMENT,
              "weft_trainer_create: options->ema_warm_up is set; it needs an ema_decay");
  with.ema_warm_up = false;
  with.without_nesterov = true;
  CHECK_ERROR(weft_trainer_create(p.model, &with, &trainer, &error), WEFT_BAD_ARGUMENT,
              "weft_trainer_create: options->without_nesterov is set; it needs options->optimizer WEFT_MUON");
  with.without_nesterov = false;
  with.z_loss = -1;
  CHECK_ERROR(weft_trainer_create(p.model, &with, &trainer, &error), WEFT_BAD_ARGUMENT,
              "cross entropy: z_loss is -1; expected a finite number of 0 or more");
  with.z_loss = 0.01, with.label_smoothing = 0;
  OK(weft_trainer_create(p.model, &with, &trainer, &error));
  OK(backward(trainer, &p, 0, &result, &error));
  const double with_z = result.loss;
  OK(weft_trainer_discard(trainer, &error));
  weft_trainer_destroy(trainer);
  OK(weft_trainer_create(p.model, NULL, &trainer, &error));
  OK(backward(trainer, &p, 0, &result, &error));
  CHECK(with_z - result.loss > 0.01); /* (log of the entries)^2 is more than 1 */
  OK(weft_trainer_discard(trainer, &error));
  weft_trainer_destroy(trainer);
  with.z_loss = 0;
  with.freeze = "0:frozen:layer.0";
  CHECK_ERROR(weft_trainer_create(p.model, &with, &trainer, &error), WEFT_BAD_ARGUMENT,
              "freeze schedule: the pattern \"layer.0\" of step 0 matches no parameter");
  with.freeze = "0:frozen:*,1:trained:layers.0";
  OK(weft_trainer_create(p.model, &with, &trainer, &error));
  weft_trainer_destroy(trainer);
  with.freeze = "0:trained:*";
  OK(weft_trainer_create(p.model, &with, &trainer, &error));
  weft_trainer_destroy(trainer);
  with.freeze = NULL;
  with.label_smoothing = -1;
  CHECK_ERROR(weft_trainer_create(p.model, &with, &trainer, &error), WEFT_BAD_ARGUMENT,
              "cross entropy: label_smoothing is -1; expected 0 to 1");
  OK(weft_trainer_create(p.model, NULL, &trainer, &error));
  weft_trainer* second_trainer = NULL;
  CHECK_ERROR(weft_trainer_create(p.model, NULL, &second_trainer, &error), WEFT_BAD_ARGUMENT,
              "trainer: the model has a Trainer already; expected its end before another begins, or another "
              "model");
  CHECK_ERROR(weft_trainer_swap_averages(trainer, false, &error), WEFT_BAD_ARGUMENT,
              "weft_trainer_swap_averages: trainer has no averages; expected one made with an ema_decay");
  weft_trainer_destroy(trainer);
  weft_model_destroy(p.model);
}

/* The other optimizers, each with a group of rate 0. Schedule-free values are swapped in, and back to the
 * same bits; a step in between fails. */
static void other_optimizers(rank_args* a) {
  const char *still[] = {"token_embedding"}, *head[] = {"output_head"}, *none[] = {"tail"};
  weft_parameter_group group = {still, 1, 0.0, -1};
  for (weft_optimizer kind = WEFT_LION; kind <= WEFT_MUON; ++kind) {
    const weft_transformer_options options = small();
    const parts p = make(a, &options);
    weft_trainer* trainer = NULL;
    weft_trainer_options o = WEFT_TRAINER_OPTIONS_INIT;
    weft_parameter fixed = WEFT_PARAMETER_INIT, trained = WEFT_PARAMETER_INIT;
    o.optimizer = kind;
    o.momentum = 0.95;
    o.weight_decay = 0;
    o.groups = &group;
    o.group_count = 1;
    o.adamw_for = head;
    o.adamw_for_count = kind == WEFT_MUON ? 1 : 0;
    OK(weft_trainer_create(p.model, &o, &trainer, &error));
    OK(weft_model_get_parameter(p.model, 0, &fixed, &error));
    OK(weft_model_get_parameter(p.model, 2, &trained, &error));
    const float *const x = fixed.value.data, *const y = trained.value.data;
    const float first = x[0], before = y[0];
    for (int step = 0; step < 2; ++step) {
      OK(backward(trainer, &p, step, NULL, &error));
      OK(weft_trainer_update(trainer, TRAIN_RATE, NULL, &error));
    }
    const float after = y[0];
    CHECK(x[0] == first);
    CHECK(after != before);
    OK(weft_trainer_swap_evaluation(trainer, true, &error));
    CHECK((y[0] != after) == (kind == WEFT_SCHEDULE_FREE_ADAMW));
    CHECK_ERROR(backward(trainer, &p, 0, NULL, &error), WEFT_BAD_ARGUMENT,
                "trainer: the values for evaluation are in the place of the masters; swap_out() first");
    CHECK_ERROR(weft_trainer_swap_evaluation(trainer, true, &error), WEFT_BAD_ARGUMENT,
                "optimizer: swap_in() while the values for evaluation are swapped in; swap_out() first");
    OK(weft_trainer_swap_evaluation(trainer, false, &error));
    CHECK(y[0] == after);
    CHECK_ERROR(weft_trainer_swap_evaluation(trainer, false, &error), WEFT_BAD_ARGUMENT,
                "optimizer: swap_out() without swap_in()");
    weft_trainer_destroy(trainer);
    group.patterns = none;
    CHECK_ERROR(weft_trainer_create(p.model, &o, &trainer, &error), WEFT_BAD_ARGUMENT,
                "optimizer: a group has the pattern \"tail\", which matches no parameter");
    group.patterns = still;
    if (kind == WEFT_MUON) {
      o.iterations = 0;
      CHECK_ERROR(weft_trainer_create(p.model, &o, &trainer, &error), WEFT_BAD_ARGUMENT,
                  "optimizer: iterations is 0; expected 1 to 100");
    }
    weft_model_destroy(p.model);
  }
}

/* A wrong batch for logits on one tensor rank. Both ranks get an error at once, and not after their
 * deadline of a minute. */
static void logits_of_wrong_ranks(rank_args* a) {
  const weft_transformer_options options = small();
  const parts p = make(a, &options);
  static const char elsewhere[] =
      "compute_logits: another rank of tp=2 was given a batch that does not fit; its own error says why";
  int64_t tokens[TRAIN_SEQUENCE] = {0};
  float scores[TRAIN_SEQUENCE * TRAIN_VOCAB];
  const bool wrong = a->rank == 1;
  weft_token_batch batch = {tokens, NULL, 1, TRAIN_SEQUENCE, 0};
  weft_buffer to = f32(scores, wrong ? 7 : (int64_t)LENGTH(scores));
#define LOGITS_HERE(batch_given, to_given, words)                                           \
  CHECK_ERROR(weft_model_logits(p.model, batch_given, to_given, &error), WEFT_BAD_ARGUMENT, \
              wrong ? words : elsewhere)
  LOGITS_HERE(&batch, &to, "weft_model_logits: logits->count is 7; expected 256, of the scores (1, 8, 32)");
  to = f32(scores, LENGTH(scores));
  LOGITS_HERE(wrong ? NULL : &batch, &to, "weft_model_logits: batch is NULL");
  LOGITS_HERE(&batch, wrong ? NULL : &to, "weft_model_logits: logits is NULL");
  tokens[3] = wrong ? TRAIN_VOCAB : 0;
  LOGITS_HERE(&batch, &to, "compute_logits: tokens[3] is 32; expected 0 to 31");
  tokens[3] = wrong ? 1 : 0;
  CHECK_ERROR(
      weft_model_logits(p.model, &batch, &to, &error), WEFT_BAD_ARGUMENT,
      "compute_logits: the ranks of tp=2 were given different batches; expected the same, as they share "
      "the work on each");
  tokens[3] = 0;
  OK(weft_model_logits(p.model, &batch, &to, &error)); /* nothing is left behind */
  weft_model_destroy(p.model);
}

/* ---- New tokens ---- */

/* The most probable next token, again and again, by weft_model_logits. */
static void tokens_by_logits(weft_model* model, const int64_t* prompt, int length, int64_t* made, int count) {
  int64_t tokens[TRAIN_SEQUENCE] = {0};
  memcpy(tokens, prompt, (size_t)length * sizeof(int64_t));
  for (int n = length; n < length + count; ++n) {
    const weft_token_batch batch = {tokens, NULL, 1, n, 0};
    const weft_buffer to = f32(run.whole, (int64_t)n * TRAIN_VOCAB);
    const float* last = run.whole + (n - 1) * TRAIN_VOCAB;
    int best = 0;
    OK(weft_model_logits(model, &batch, &to, &error));
    for (int v = 1; v < TRAIN_VOCAB; ++v)
      if (last[v] > last[best]) best = v;
    tokens[n] = made[n - length] = best;
  }
}

static const int64_t first_prompt[] = {3, 1, 4}, second_prompt[] = {1};
static const weft_tokens both_prompts[] = {{first_prompt, 3}, {second_prompt, 1}};

static void generates(rank_args* a) {
  const weft_transformer_options options = small();
  const parts p = make(a, &options);
  weft_generate_options o = WEFT_GENERATE_OPTIONS_INIT;
  int64_t made[2][4], counts[2], expected[2][4];
  o.new_tokens = 4;
  o.temperature = 0;
  if (run.tp * run.dp == 1) {
    tokens_by_logits(p.model, first_prompt, 3, expected[0], 4);
    tokens_by_logits(p.model, second_prompt, 1, expected[1], 4);
    memcpy(run.expected_tokens, expected, sizeof(expected));
  }
  for (int no_cache = 0; no_cache < 2; ++no_cache) {
    o.no_cache = no_cache != 0;
    OK(weft_model_generate(p.model, both_prompts, 2, &o, made[0], counts, &error));
    CHECK(counts[0] == 4 && counts[1] == 4);
    CHECK(memcmp(made, run.expected_tokens, sizeof(made)) == 0);
  }
  /* a stop, and the end of the positions */
  const weft_tokens stop = {&run.expected_tokens[1], 1};
  o.stops = &stop;
  o.stop_count = 1;
  OK(weft_model_generate(p.model, both_prompts, 1, &o, made[0], counts, &error));
  CHECK(counts[0] == (run.expected_tokens[0] == run.expected_tokens[1] ? 1 : 2));
  int64_t many[100];
  o.stop_count = 0;
  o.new_tokens = 100;
  OK(weft_model_generate(p.model, both_prompts, 1, &o, many, counts, &error));
  CHECK(counts[0] == TRAIN_SEQUENCE - 3);
  weft_model_destroy(p.model);
}

static void generate_of_wrong_ranks(rank_args* a) {
  const weft_transformer_options options = small();
  const parts p = make(a, &options);
  static const char elsewhere[] =
      "generate: another rank was given prompts or options that do not fit; its own error says why";
  const bool wrong = a->rank == 1;
  int64_t made[2][4], counts[2];
  weft_generate_options o = WEFT_GENERATE_OPTIONS_INIT;
  weft_tokens bad = {NULL, 3};
  o.new_tokens = 4;
#define GENERATE_HERE(prompts, count, made_given, counts_given, words)                            \
  CHECK_ERROR(weft_model_generate(p.model, prompts, count, &o, made_given, counts_given, &error), \
              WEFT_BAD_ARGUMENT, wrong ? words : elsewhere)
  GENERATE_HERE(wrong ? NULL : both_prompts, 2, made[0], counts, "weft_model_generate: prompts is NULL");
  GENERATE_HERE(both_prompts, wrong ? -1 : 2, made[0], counts,
                "weft_model_generate: the number of prompts is -1; expected 0 or more");
  GENERATE_HERE(wrong ? &bad : both_prompts, 1, made[0], counts,
                "weft_model_generate: prompts[0] has 3 tokens, and is NULL; expected 0 or more, with memory");
  GENERATE_HERE(both_prompts, 2, wrong ? NULL : made[0], counts, "weft_model_generate: tokens is NULL");
  GENERATE_HERE(both_prompts, 2, made[0], wrong ? NULL : counts, "weft_model_generate: counts is NULL");
  int64_t usual[2][128];
  OK(weft_model_generate(p.model, both_prompts, 2, NULL, usual[0], counts,
                         &error)); /* nothing is left behind */
  weft_model_destroy(p.model);
}

/* ---- Checkpoints ---- */

static void save(rank_args* a) {
  const weft_transformer_options options = small();
  const parts p = make(a, &options);
  weft_trainer* trainer = trainer_of(&p);
  char folder[300];
  step(trainer, &p, 0);
  step(trainer, &p, 1);
  OK(weft_trainer_save(trainer, run.folder, &error));
  snprintf(folder, sizeof(folder), "%s/model", run.folder);
  OK(weft_model_save(p.model, folder, 7, &error));
  const double loss = step(trainer, &p, 2);
  if (a->rank == 0) run.losses[2] = loss;
  weft_trainer_destroy(trainer);
  weft_model_destroy(p.model);
}
static void load(rank_args* a) {
  const weft_transformer_options options = small();
  const parts p = make(a, &options);
  weft_trainer* trainer = trainer_of(&p);
  char folder[300];
  int64_t steps = 0;
  OK(weft_trainer_load(trainer, run.folder, &error));
  OK(weft_trainer_steps(trainer, &steps, &error));
  CHECK(steps == 2);
  CHECK(fabs(step(trainer, &p, 2) - run.losses[2]) <= 1e-5); /* another mesh: sums in another order */
  OK(weft_model_load(p.model, run.folder, &steps, &error));
  CHECK(steps == 2);
  snprintf(folder, sizeof(folder), "%s/model", run.folder);
  OK(weft_model_load(p.model, folder, &steps, &error));
  CHECK(steps == 7);
  OK(weft_model_load(p.model, folder, NULL, &error));
  CHECK_ERROR(weft_trainer_load(trainer, folder, &error), WEFT_BAD_ARGUMENT,
              "*does not fit the model; missing in the checkpoint (63): "
              "optimizer.step.token_embedding.embedding.weight "
              "i64 (1), ");
  CHECK_ERROR(weft_model_load(p.model, "/nowhere", NULL, &error), WEFT_BAD_ARGUMENT, "*/nowhere");
  weft_trainer_destroy(trainer);
  weft_model_destroy(p.model);
}

/* ---- A whole training ---- */

/* The data of a plan's functions: things that they know, and have seen. */
typedef struct {
  weft_trainer* trainer;
  const parts* p;
  const char* fails; /* the function that fails; NULL: none */
  char seen[200];
} training;

static weft_status see(training* t, const char* what, weft_error* e) {
  strncat(t->seen, what, sizeof(t->seen) - strlen(t->seen) - 1);
  if (t->fails == NULL || strcmp(t->fails, what) != 0) return WEFT_OK;
  snprintf(e->text, sizeof(e->text), "no such file");
  return WEFT_SYSTEM;
}
static weft_status take_step(void* data, int64_t number, weft_step_result* result, weft_error* e) {
  training* const t = data;
  const weft_status status = see(t, "s", e);
  if (status != WEFT_OK) return status;
  int64_t tokens[TRAIN_ROWS * TRAIN_SEQUENCE], labels[TRAIN_ROWS * TRAIN_SEQUENCE];
  const weft_token_batch batch = {tokens, labels, t->p->rows, TRAIN_SEQUENCE, 0};
  train_batch((int)number % TRAIN_STEPS, t->p->first, t->p->rows, tokens, labels);
  return weft_trainer_step(t->trainer, &batch, 1, TRAIN_RATE, result, e);
}
static weft_status evaluate(void* data, weft_evaluation* evaluation, weft_error* e) {
  training* const t = data;
  int64_t tokens[TRAIN_ROWS * TRAIN_SEQUENCE], labels[TRAIN_ROWS * TRAIN_SEQUENCE];
  const int64_t extents[2] = {t->p->rows, TRAIN_SEQUENCE}, count = extents[0] * extents[1];
  const weft_tensor input = {"tokens", {tokens, count, WEFT_I64, WEFT_CPU}, NULL, extents, 2},
                    target = {"labels", {labels, count, WEFT_I64, WEFT_CPU}, NULL, extents, 2};
  const weft_batch batch = {&input, 1, 1, &target, 0};
  train_batch(0, t->p->first, t->p->rows, tokens, labels);
  /* the first half of a step takes such a batch, too */
  weft_step_result half = WEFT_STEP_RESULT_INIT;
  OK(weft_trainer_backward_batches(t->trainer, &batch, 1, &half, &error));
  CHECK(half.loss > 0 && half.grad_norm == 0);
  OK(weft_trainer_discard(t->trainer, &error));
  return weft_trainer_evaluate(t->trainer, &batch, 1, evaluation, e);
}
static weft_status ask_to_stop(void* data, int32_t* reason, weft_error* e) {
  training* const t = data;
  if (t->fails != NULL && strcmp(t->fails, "stop") == 0) *reason = 15;
  return see(t, "", e);
}
static weft_status begun(void* data, weft_error* e) { return see(data, "b", e); }
static weft_status stepped(void* data, const weft_step_result* result, weft_error* e) {
  CHECK(result->loss > 0 && result->tokens > 0);
  return see(data, "+", e);
}
static weft_status evaluated(void* data, const weft_evaluation* evaluation, weft_error* e) {
  CHECK(evaluation->loss > 0 && evaluation->tokens > 0);
  return see(data, "e", e);
}
static weft_status saved(void* data, int64_t step, weft_error* e) {
  CHECK(step > 0);
  return see(data, "c", e);
}
static weft_status ended(void* data, const weft_training_end* end, weft_error* e) {
  CHECK(end->steps == 3 && end->evaluated);
  return see(data, ".", e);
}

static void whole_training(rank_args* a) {
  const weft_transformer_options options = small();
  const parts p = make(a, &options);
  training t = {trainer_of(&p), &p, NULL, ""};
  weft_training_plan plan = WEFT_TRAINING_PLAN_INIT;
  weft_training_end end = WEFT_TRAINING_END_INIT;
  plan.data = &t;
  plan.steps = 3;
  plan.step = take_step;
  plan.evaluate_every = 2;
  plan.evaluate = evaluate;
  plan.stop = ask_to_stop;
  plan.folder = run.folder;
  plan.save_every = 2;
  plan.on_begin = begun;
  plan.on_step = stepped;
  plan.on_evaluation = evaluated;
  plan.on_checkpoint = saved;
  plan.on_end = ended;
  OK(weft_trainer_train(t.trainer, &plan, &end, &error));
  CHECK(strcmp(t.seen, "bs+s+ecs+c.") == 0);
  CHECK(end.why == WEFT_ENDED_STEPS && end.steps == 3 && end.reason == 0 && end.evaluated);
  const double best = end.best_loss;
  CHECK(best > 0);

  /* A rank asks, and all stop. */
  plan.steps = 50, plan.on_end = NULL;
  t.fails = a->rank == 1 ? "stop" : NULL;
  OK(weft_trainer_train(t.trainer, &plan, &end, &error));
  CHECK(end.why == WEFT_ENDED_STOP && end.steps == 4 && end.reason == 15);

  /* A checkpoint holds the count of evaluations: with the loss of the best evaluation out of reach, one more
   * ends the training. */
  plan.stop = NULL, plan.evaluate_every = 1, plan.patience = 2, plan.least_gain = 1e9, plan.steps = 6;
  OK(weft_trainer_train(t.trainer, &plan, &end, &error));
  CHECK(end.why == WEFT_ENDED_STEPS && end.steps == 6);
  OK(weft_trainer_load(t.trainer, run.folder, &error));
  plan.steps = 50;
  OK(weft_trainer_train(t.trainer, &plan, &end, &error));
  CHECK(end.why == WEFT_ENDED_PATIENCE && end.steps == 7);
  CHECK(end.best_loss > 0);

  /* Functions that fail on one rank: their error here, a clear one on the other. */
  plan.patience = 0;
  t.fails = a->rank == 1 ? "+" : NULL;
  if (a->rank == 1)
    CHECK_ERROR(weft_trainer_train(t.trainer, &plan, &end, &error), WEFT_SYSTEM, "no such file");
  else
    CHECK_ERROR(weft_trainer_train(t.trainer, &plan, &end, &error), WEFT_BAD_ARGUMENT,
                "train: a hook failed on another rank; its own error says why");
  t.fails = a->rank == 1 ? "s" : NULL;
  if (a->rank == 1)
    CHECK_ERROR(weft_trainer_train(t.trainer, &plan, NULL, &error), WEFT_SYSTEM, "no such file");
  else
    CHECK_ERROR(weft_trainer_train(t.trainer, &plan, NULL, &error), WEFT_BAD_ARGUMENT,
                "trainer: another rank has given up; its own error says why");
  t.fails = NULL;

  /* Plans that cannot be followed. */
  plan.save_seconds = -1;
  CHECK_ERROR(weft_trainer_train(t.trainer, &plan, NULL, &error), WEFT_BAD_ARGUMENT,
              "train: checkpoints.every is -1; expected 0 or more");
  plan.save_seconds = 0;
  plan.step = NULL;
  CHECK_ERROR(weft_trainer_train(t.trainer, &plan, NULL, &error), WEFT_BAD_ARGUMENT,
              "train: step is empty; expected a function");
  end.struct_size = 3;
  CHECK_ERROR(weft_trainer_train(t.trainer, &plan, &end, &error), WEFT_BAD_ARGUMENT,
              "weft_trainer_train: end->struct_size is 3; expected 32: initialise it with "
              "WEFT_TRAINING_END_INIT");

  /* Another model begins with these parameters. */
  const char* const head[] = {"output_head"};
  const char* const nothing[] = {"tail"};
  int64_t from = 0;
  OK(weft_model_init_from(p.model, run.folder, head, 1, NULL, 0, &from, &error));
  CHECK(from == 7);
  CHECK_ERROR(weft_model_init_from(p.model, run.folder, nothing, 1, NULL, 0, NULL, &error), WEFT_BAD_ARGUMENT,
              "init_from: except: nothing in the model matches \"tail\"");
  weft_trainer_destroy(t.trainer);
  weft_model_destroy(p.model);
}
static void trainings(void) {
  char folder[] = "/tmp/weft-capi-training-XXXXXX", command[100];
  CHECK(mkdtemp(folder) != NULL);
  run.folder = folder;
  run.dp = 2;
  run.tp = 1;
  run_ranks(2, whole_training);
  snprintf(command, sizeof(command), "rm -r %s", folder);
  CHECK(system(command) == 0);
}

static void checkpoints(void) {
  char folder[] = "/tmp/weft-capi-train-XXXXXX", command[100];
  CHECK(mkdtemp(folder) != NULL);
  run.folder = folder;
  run.dp = 1;
  run.tp = 2;
  run_ranks(2, save);
  run_ranks(2, load);
  run.dp = 2;
  run.tp = 1;
  run_ranks(2, load);
  snprintf(command, sizeof(command), "rm -r %s", folder);
  CHECK(system(command) == 0);
}

/* ---- Errors ---- */

#define REFUSED(call, text) CHECK_ERROR(call, WEFT_BAD_ARGUMENT, text)

static void refuses_models(weft_mesh* mesh, weft_compute* compute) {
  weft_transformer_options o = small();
  weft_model* none = NULL;
  weft_mesh* part = NULL;
  const char* const axis = "tp";
  const char* const frozen[] = {"layers.9", NULL};
#define CREATE(mesh_given, options_given) \
  weft_transformer_create(mesh_given, compute, options_given, &none, &error)
  REFUSED(CREATE(NULL, &o), "weft_transformer_create: mesh is NULL");
  REFUSED(weft_transformer_create(mesh, NULL, &o, &none, &error), "weft_transformer_create: compute is NULL");
  REFUSED(weft_transformer_create(mesh, compute, &o, NULL, &error), "weft_transformer_create: model is NULL");
  OK(weft_mesh_along(mesh, &axis, 1, &part, &error));
  REFUSED(CREATE(part, &o),
          "weft_transformer_create: mesh is tp=2, a part of dp=1 x tp=2; expected a whole mesh");
  weft_mesh_destroy(part);
  o.struct_size = 8;
  REFUSED(CREATE(mesh, &o),
          "weft_transformer_create: options->struct_size is 8; expected 200: initialise it with "
          "WEFT_TRANSFORMER_OPTIONS_INIT");
  o = small();
  o.heads = 3;
  REFUSED(CREATE(mesh, &o), "transformer: dim 16 does not divide into heads 3");
  o = small();
  o.layers = 0;
  REFUSED(CREATE(mesh, &o), "transformer: layers is 0; expected at least 1");
  o = small();
  o.vocab = 31;
  REFUSED(CREATE(mesh, &o),
          "*\"output_head.proj\" has 31 output features; they do not divide into tp=2 (31 = 2 x 15 + 1)");
  o = small();
  o.weights = WEFT_F16;
  REFUSED(CREATE(mesh, &o),
          "weft_transformer_create: options->weights is 2; expected 1 (WEFT_F32) or 3 (WEFT_BF16)");
  o = small();
  o.data_axis = "pp";
  REFUSED(CREATE(mesh, &o), "mesh: no axis \"pp\" in dp=1 x tp=2");
  o.data_axis = "tp";
  REFUSED(CREATE(mesh, &o),
          "build_parallel_model: data_axis \"tp\" and tensor_axis \"tp\" share an axis of dp=1 x tp=2; "
          "expected two apart");
  o = small();
  o.frozen = frozen;
  o.frozen_count = 1;
  REFUSED(CREATE(mesh, &o), "build_parallel_model: frozen: nothing matches \"layers.9\"");
  o.frozen_count = 2;
  REFUSED(CREATE(mesh, &o), "weft_transformer_create: options->frozen[1] is NULL");
  o.frozen_count = -1;
  REFUSED(CREATE(mesh, &o), "weft_transformer_create: options->frozen_count is -1; expected 0 or more");
  o.frozen_count = 1;
  o.frozen = NULL;
  REFUSED(CREATE(mesh, &o), "weft_transformer_create: options->frozen is NULL");
  o = small();
  o.activations = WEFT_BF16;
  REFUSED(CREATE(mesh, &o),
          "build_parallel_model: options.activations is bf16 and options.dtype f32; expected bf16 of both");
  o.activations = WEFT_I8;
  REFUSED(CREATE(mesh, &o),
          "weft_transformer_create: options->activations is 4; expected 1 (WEFT_F32) or 3 (WEFT_BF16)");
  o = small();
  o.ac_mode = 3;
  REFUSED(CREATE(mesh, &o),
          "weft_transformer_create: options->ac_mode is 3; expected 0 (WEFT_AC_NONE), 1 (WEFT_AC_FULL) or 2 "
          "(WEFT_AC_SELECTIVE)");
  o.ac_mode = WEFT_AC_FULL;
  o.ac_every = -1;
  REFUSED(CREATE(mesh, &o), "apply_ac: every is -1; expected 1 or more");
  CHECK(none == NULL);
}

static void refuses_parameters(weft_model* model) {
  weft_parameter d = WEFT_PARAMETER_INIT;
  weft_layout* layout = NULL;
  float value[8] = {0};
  weft_buffer from = f32(value, 8);
  int32_t number = 0;
  REFUSED(weft_model_parameter_count(NULL, &number, &error), "weft_model_parameter_count: model is NULL");
  REFUSED(weft_model_parameter_count(model, NULL, &error), "weft_model_parameter_count: count is NULL");
  REFUSED(weft_model_get_parameter(NULL, 0, &d, &error), "weft_model_get_parameter: model is NULL");
  REFUSED(weft_model_get_parameter(model, 0, NULL, &error), "weft_model_get_parameter: parameter is NULL");
  REFUSED(weft_model_get_parameter(model, 21, &d, &error),
          "weft_model_get_parameter: index is 21; expected 0 to 20");
  REFUSED(weft_model_get_parameter(model, -1, &d, &error),
          "weft_model_get_parameter: index is -1; expected 0 to 20");
  d.struct_size = 0;
  REFUSED(weft_model_get_parameter(model, 0, &d, &error),
          "weft_model_get_parameter: parameter->struct_size is 0; expected 176: initialise it with "
          "WEFT_PARAMETER_INIT");
  REFUSED(weft_model_find_parameter(NULL, "norm.weight", &number, &error),
          "weft_model_find_parameter: model is NULL");
  REFUSED(weft_model_find_parameter(model, NULL, &number, &error), "weft_model_find_parameter: name is NULL");
  REFUSED(weft_model_find_parameter(model, "norm.weight", NULL, &error),
          "weft_model_find_parameter: index is NULL");
  REFUSED(weft_model_parameter_layout(NULL, 0, &layout, &error),
          "weft_model_parameter_layout: model is NULL");
  REFUSED(weft_model_parameter_layout(model, 0, NULL, &error), "weft_model_parameter_layout: layout is NULL");
  REFUSED(weft_model_parameter_layout(model, 99, &layout, &error),
          "weft_model_parameter_layout: index is 99; expected 0 to 20");
  OK(weft_model_find_parameter(model, "norm.weight", &number, &error));
#define SET(buffer) weft_model_set_parameter(model, number, buffer, &error)
  REFUSED(weft_model_set_parameter(NULL, number, &from, &error), "weft_model_set_parameter: model is NULL");
  REFUSED(weft_model_set_parameter(model, 99, &from, &error),
          "weft_model_set_parameter: index is 99; expected 0 to 20");
  REFUSED(SET(NULL), "weft_model_set_parameter: value is NULL");
  REFUSED(SET(&from), "weft_model_set_parameter: value->count is 8; expected 16, of norm.weight (16)");
  from.dtype = WEFT_F64;
  REFUSED(SET(&from), "weft_model_set_parameter: value->dtype is f64; expected f32");
  from = f32(NULL, 16);
  REFUSED(SET(&from), "weft_model_set_parameter: value->data is NULL; expected 16 elements");
  from.device = WEFT_CUDA(1);
  REFUSED(SET(&from),
          "weft_model_set_parameter: value->device is cuda:1; expected cpu, the device of the weft_compute");
}

static void refuses_logits(weft_model* model) {
  int64_t tokens[TRAIN_SEQUENCE] = {0};
  float scores[TRAIN_SEQUENCE * TRAIN_VOCAB];
  weft_token_batch batch = {tokens, NULL, 1, TRAIN_SEQUENCE, 0};
  weft_buffer to = f32(scores, 7);
#define LOGITS(batch_given, to_given) weft_model_logits(model, batch_given, to_given, &error)
  REFUSED(weft_model_logits(NULL, &batch, &to, &error), "weft_model_logits: model is NULL");
  REFUSED(LOGITS(NULL, &to), "weft_model_logits: batch is NULL");
  REFUSED(LOGITS(&batch, NULL), "weft_model_logits: logits is NULL");
  REFUSED(LOGITS(&batch, &to),
          "weft_model_logits: logits->count is 7; expected 256, of the scores (1, 8, 32)");
  to.count = LENGTH(scores);
  batch.global_rows = 3;
  REFUSED(LOGITS(&batch, &to),
          "compute_logits: rows is 1; expected 3, the part of rank 0 of 1 in global_rows 3");
  batch.global_rows = 0;
  tokens[3] = 32;
  REFUSED(LOGITS(&batch, &to), "compute_logits: tokens[3] is 32; expected 0 to 31");
  batch.tokens = NULL;
  REFUSED(LOGITS(&batch, &to), "compute_logits: tokens has no memory; expected 1 x 8");
  batch.sequence = 9;
  to.count = 9 * TRAIN_VOCAB;
  REFUSED(LOGITS(&batch, &to), "compute_logits: sequence is 9; expected 1 to 8 (max_seq)");
  batch.rows = -1;
  to.count = 0;
  REFUSED(LOGITS(&batch, &to), "compute_logits: rows is -1; expected 0 or more");
}

static void refuses_trainers(weft_model* model) {
  weft_trainer_options o = WEFT_TRAINER_OPTIONS_INIT;
  weft_trainer *none = NULL, *trainer = NULL;
  int64_t tokens[TRAIN_SEQUENCE] = {0}, labels[TRAIN_SEQUENCE] = {0}, steps = 0;
  weft_token_batch batch = {tokens, labels, 1, TRAIN_SEQUENCE, 0};
  weft_step_result result = WEFT_STEP_RESULT_INIT;
  double rate = 0;
#define TRAINER() weft_trainer_create(model, &o, &none, &error)
  REFUSED(weft_trainer_create(NULL, &o, &none, &error), "weft_trainer_create: model is NULL");
  REFUSED(weft_trainer_create(model, &o, NULL, &error), "weft_trainer_create: trainer is NULL");
  o.struct_size = 4;
  REFUSED(TRAINER(),
          "weft_trainer_create: options->struct_size is 4; expected 152: initialise it with "
          "WEFT_TRAINER_OPTIONS_INIT");
  o.struct_size = sizeof(o);
  o.optimizer = 5;
  REFUSED(TRAINER(),
          "weft_trainer_create: options->optimizer is 5; expected 0 (WEFT_ADAMW) to 4 (WEFT_MUON)");
  o.optimizer = WEFT_ADAMW;
  o.beta1 = 1;
  REFUSED(TRAINER(), "optimizer: beta1 is 1; expected 0 or more, and less than 1");
  o.beta1 = 0.9;
  o.eps = NAN;
  REFUSED(TRAINER(), "optimizer: eps is nan; expected a finite number that is above 0 in f32");
  o.eps = 1e-8;
  o.weight_decay = -1;
  REFUSED(TRAINER(), "optimizer: weight_decay is -1; expected 0 or more");
  o.optimizer = WEFT_SGD;
  REFUSED(TRAINER(), "optimizer: weight_decay is -1; expected 0 or more");
  o.momentum = -2;
  REFUSED(TRAINER(), "optimizer: momentum is -2; expected 0 or more");
  o.max_norm = -1;
  REFUSED(TRAINER(), "trainer: max_norm is -1; expected 0 (no clipping) or more");
  CHECK(none == NULL);

  OK(weft_trainer_create(model, NULL, &trainer, &error));
#define STEP(batches, count, rate) weft_trainer_step(trainer, batches, count, rate, &result, &error)
  REFUSED(weft_trainer_step(NULL, &batch, 1, 0.1, &result, &error), "weft_trainer_step: trainer is NULL");
  REFUSED(STEP(NULL, 1, 0.1), "weft_trainer_step: batches is NULL");
  REFUSED(STEP(&batch, -1, 0.1), "weft_trainer_step: batch_count is -1; expected 0 or more");
  REFUSED(STEP(NULL, 0, 0.1), "trainer: no batch is given; expected 1 or more");
  REFUSED(STEP(&batch, 1, INFINITY),
          "trainer: the learning rate is inf; expected a finite number of 0 or more");
  result.struct_size = 3;
  REFUSED(
      STEP(&batch, 1, 0.1),
      "weft_trainer_step: result->struct_size is 3; expected 48: initialise it with WEFT_STEP_RESULT_INIT");
  result.struct_size = sizeof(result);
  labels[0] = 77;
  REFUSED(STEP(&batch, 1, 0.1), "trainer: labels[0] is 77; expected 0 to 31, or -100");
  for (int i = 0; i < TRAIN_SEQUENCE; ++i) labels[i] = WEFT_IGNORED;
  REFUSED(STEP(&batch, 1, 0.1), "trainer: no label of the step counts (all are -100)");
  REFUSED(weft_trainer_steps(NULL, &steps, &error), "weft_trainer_steps: trainer is NULL");
  REFUSED(weft_trainer_steps(trainer, NULL, &error), "weft_trainer_steps: steps is NULL");
  REFUSED(weft_trainer_save(NULL, "x", &error), "weft_trainer_save: trainer is NULL");
  REFUSED(weft_trainer_save(trainer, NULL, &error), "weft_trainer_save: directory is NULL");
  REFUSED(weft_trainer_load(NULL, "x", &error), "weft_trainer_load: trainer is NULL");
  REFUSED(weft_trainer_load(trainer, NULL, &error), "weft_trainer_load: directory is NULL");
  REFUSED(weft_model_save(NULL, "x", 0, &error), "weft_model_save: model is NULL");
  REFUSED(weft_model_save(model, NULL, 0, &error), "weft_model_save: directory is NULL");
  REFUSED(weft_model_load(NULL, "x", NULL, &error), "weft_model_load: model is NULL");
  REFUSED(weft_model_load(model, NULL, NULL, &error), "weft_model_load: directory is NULL");
  weft_trainer_destroy(trainer);
  weft_trainer_destroy(NULL);

  OK(weft_cosine_rate(1e-3, 1e-4, 10, 100, 4, &rate, &error));
  CHECK(fabs(rate - 5e-4) < 1e-12);
  OK(weft_cosine_rate(1e-3, 1e-4, 10, 100, 1000, &rate, &error));
  CHECK(rate == 1e-4);
  REFUSED(weft_cosine_rate(1e-3, 0, 10, 100, 0, NULL, &error), "weft_cosine_rate: rate is NULL");
  REFUSED(weft_cosine_rate(1e-3, 0, 10, 100, -1, &rate, &error),
          "weft_cosine_rate: step is -1; expected 0 or more");
  REFUSED(weft_cosine_rate(1e-3, 0, 10, 10, 0, &rate, &error),
          "schedule: warmup 10 of total 10 steps; expected 0 <= warmup < total");
  REFUSED(weft_cosine_rate(1e-3, 1, 0, 10, 0, &rate, &error),
          "schedule: floor 1 and peak 0.001; expected 0 <= floor <= peak");

  weft_schedule s = WEFT_SCHEDULE_INIT;
  s.peak = 1, s.floor = 0.25, s.warmup = 4, s.total = 20;
  OK(weft_schedule_rate(&s, 12, &rate, &error));
  CHECK(fabs(rate - 0.625) < 1e-15);
  s.form = WEFT_SCHEDULE_LINEAR;
  OK(weft_schedule_rate(&s, 8, &rate, &error));
  CHECK(fabs(rate - 0.8125) < 1e-15);
  s.form = WEFT_SCHEDULE_REX;
  OK(weft_schedule_rate(&s, 12, &rate, &error));
  CHECK(fabs(rate - 0.75) < 1e-15); /* 0.25 + 0.75 (1/2) / (3/4) */
  s.form = WEFT_SCHEDULE_WSD, s.decay = 4, s.shape = WEFT_DECAY_ONE_MINUS_SQRT;
  OK(weft_schedule_rate(&s, 16, &rate, &error));
  CHECK(rate == 1);
  OK(weft_schedule_rate(&s, 17, &rate, &error));
  CHECK(fabs(rate - 0.625) < 1e-15);
  s.decay = 17;
  REFUSED(weft_schedule_rate(&s, 0, &rate, &error),
          "schedule: decay is 17; expected 1 to 16 (total 20 - warmup 4)");
  s.form = WEFT_SCHEDULE_CONSTANT, s.decay = 0, s.shape = WEFT_DECAY_LINEAR;
  OK(weft_schedule_rate(&s, 1000, &rate, &error));
  CHECK(rate == 1);
  s.form = WEFT_SCHEDULE_NONE, s.warmup = 0;
  OK(weft_schedule_rate(&s, 0, &rate, &error));
  CHECK(rate == 1);
  s.form = 6;
  REFUSED(weft_schedule_rate(&s, 0, &rate, &error),
          "weft_schedule_rate: schedule->form is 6; expected 0 to 5");
  s.form = WEFT_SCHEDULE_WSD, s.shape = -1;
  REFUSED(weft_schedule_rate(&s, 0, &rate, &error),
          "weft_schedule_rate: schedule->shape is -1; expected 0 to 2");
  s.shape = 0;
  REFUSED(weft_schedule_rate(&s, -1, NULL, &error), "weft_schedule_rate: rate is NULL");
  REFUSED(weft_schedule_rate(NULL, 0, &rate, &error), "weft_schedule_rate: schedule is NULL");
}

/* On a mesh of two ranks that this process alone plays: nothing is sent before the check. */
static void refuses(void) {
  const weft_mesh_axis two[] = {{"dp", 1}, {"tp", 2}}, one[] = {{"dp", 1}, {"tp", 1}};
  weft_context* context = NULL;
  weft_compute* compute = NULL;
  weft_mesh *mesh = NULL, *single = NULL;
  weft_model* model = NULL;
  const weft_transformer_options o = small();
  OK(weft_context_create(NULL, &context, &error));
  OK(weft_compute_create(context, NULL, &compute, &error));
  OK(weft_mesh_create_arithmetic(context, two, 2, 0, &mesh, &error));
  OK(weft_mesh_create_arithmetic(context, one, 2, 0, &single, &error));
  OK(weft_transformer_create(single, compute, &o, &model, &error));
  refuses_models(mesh, compute);
  refuses_parameters(model);
  refuses_logits(model);
  refuses_trainers(model);
  weft_mesh_destroy(mesh);
  weft_mesh_destroy(single);
  weft_compute_destroy(compute);
  weft_context_destroy(context);
  weft_model_destroy(model);
  weft_model_destroy(NULL);
}

/* A batch that is wrong on one rank is an error on both, and neither waits for the other. */
static void wrong_on_one_rank(rank_args* a) {
  const weft_transformer_options options = small();
  const parts p = make(a, &options);
  weft_trainer* trainer = trainer_of(&p);
  int64_t tokens[TRAIN_ROWS * TRAIN_SEQUENCE], labels[TRAIN_ROWS * TRAIN_SEQUENCE];
  const weft_token_batch batch = {tokens, labels, p.rows, TRAIN_SEQUENCE, 0};
  train_batch(0, p.first, p.rows, tokens, labels);
  if (a->rank == 1) tokens[1] = -5;
  REFUSED(weft_trainer_step(trainer, &batch, 1, TRAIN_RATE, NULL, &error),
          a->rank == 1 ? "trainer: tokens[1] is -5; expected 0 to 31"
                       : "trainer: another rank was given a batch that does not fit; its own error says why");
  step(trainer, &p, 0);
  weft_trainer_destroy(trainer);
  weft_model_destroy(p.model);
}

/* A model of a recipe as JSON trains with the bits of the model of options, and evaluates. */
static void from_json(rank_args* a) {
  const char* const recipe =
      "{\"transformer\": {\"dim\": 16, \"layers\": 2, \"heads\": 4, \"kv_heads\": 4, \"ffn_hidden\": 24, "
      "\"vocab\": 32, \"max_seq\": 8, \"init_std\": 0.1}}";
  const weft_transformer_options all = small();
  const parts p = make(a, &all);
  const weft_mesh_axis axes[] = {{"dp", run.dp}, {"tp", run.tp}};
  weft_group* group = join(a, "again", 0);
  weft_mesh* mesh = NULL;
  weft_compute* compute = NULL;
  weft_model *model = NULL, *none = NULL;
  weft_trainer *trainer = NULL, *no_trainer = NULL, *const expected = trainer_of(&p);
  char options[80], of_trainer[80];
  OK(weft_mesh_create(group, axes, 2, &mesh, &error));
  OK(weft_compute_create(a->context, NULL, &compute, &error));
  snprintf(options, sizeof options, "{\"seed\": %d, \"data\": \"fsdp\", \"ac\": \"full\"}", TRAIN_SEED);
  snprintf(of_trainer, sizeof of_trainer, "{\"optimizer\": {\"name\": \"adamw\"}, \"max_norm\": %.17g}",
           (double)TRAIN_MAX_NORM);
  OK(weft_model_create(mesh, compute, recipe, options, &model, &error));
  OK(weft_trainer_create_from_json(model, of_trainer, &trainer, &error));
  for (int i = 0; i < TRAIN_STEPS; ++i) {
    int64_t tokens[TRAIN_ROWS * TRAIN_SEQUENCE], labels[TRAIN_ROWS * TRAIN_SEQUENCE];
    const int64_t extents[] = {p.rows, TRAIN_SEQUENCE};
    const int64_t count = (int64_t)p.rows * TRAIN_SEQUENCE;
    const weft_tensor input = {"tokens", {tokens, count, WEFT_I64, WEFT_CPU}, NULL, extents, 2};
    const weft_tensor target = {"labels", {labels, count, WEFT_I64, WEFT_CPU}, NULL, extents, 2};
    const weft_batch batch = {&input, 1, 1, &target, 0};
    weft_step_result result = WEFT_STEP_RESULT_INIT;
    weft_evaluation evaluation = WEFT_EVALUATION_INIT;
    train_batch(i, p.first, p.rows, tokens, labels);
    OK(weft_trainer_evaluate(trainer, &batch, 1, &evaluation, &error));
    if (i == 0) { /* the outputs are the logits */
      float logits[TRAIN_ROWS * TRAIN_SEQUENCE * TRAIN_VOCAB];
      const weft_token_batch of_tokens = {tokens, labels, p.rows, TRAIN_SEQUENCE, 0};
      const weft_buffer to = {logits, count * TRAIN_VOCAB, WEFT_F32, WEFT_CPU};
      weft_tensor output = WEFT_TENSOR_INIT(NULL, to, NULL);
      int32_t outputs = 0;
      REFUSED(weft_model_get_output(model, 0, &output, &error),
              "weft_model_get_output: index is 0; there is no output: expected weft_model_forward first");
      OK(weft_model_forward(model, &batch, &outputs, &error));
      OK(weft_model_logits(model, &of_tokens, &to, &error));
      OK(weft_model_get_output(model, 0, &output, &error));
      CHECK(outputs == 1 && output.dim_count == 3 && output.extents[0] == p.rows);
      CHECK(output.extents[1] == TRAIN_SEQUENCE && output.extents[2] == TRAIN_VOCAB);
      CHECK(memcmp(output.data.data, logits, sizeof(float) * (size_t)to.count) == 0);
      REFUSED(weft_model_get_output(model, 1, &output, &error),
              "weft_model_get_output: index is 1; expected 0 to 0");
      if (run.dp * run.tp == 1) {
        const weft_batch empty = {NULL, 0, 0, NULL, 0};
        REFUSED(weft_model_forward(model, &empty, NULL, &error),
                "compute_outputs: inputs is empty; expected 1 tensor or more");
      }
    }
    if (i == 0) { /* documents are a second input; one for each row changes nothing */
      int64_t documents[TRAIN_ROWS * TRAIN_SEQUENCE] = {0};
      const weft_buffer of_documents = {documents, count, WEFT_I64, WEFT_CPU};
      const weft_tensor inputs[] = {input, {"documents", of_documents, NULL, extents, 2}};
      const weft_batch packed = {inputs, 2, 1, &target, 0};
      weft_evaluation of_packed = WEFT_EVALUATION_INIT;
      OK(weft_trainer_evaluate(trainer, &packed, 1, &of_packed, &error));
      CHECK(of_packed.loss == evaluation.loss);
      for (int64_t at = 0; at < count; ++at) documents[at] = at % TRAIN_SEQUENCE / 3;
      OK(weft_trainer_evaluate(trainer, &packed, 1, &of_packed, &error));
      CHECK(of_packed.loss != evaluation.loss && fabs(of_packed.loss - evaluation.loss) < 0.1);
    }
    OK(weft_trainer_step_batches(trainer, &batch, 1, TRAIN_RATE, &result, &error));
    CHECK(result.loss == step(expected, &p, i) && result.step == i);
    CHECK(fabs(evaluation.loss - result.loss) < 1e-6 && evaluation.tokens == result.tokens);
    CHECK(fabs(evaluation.perplexity - exp(evaluation.loss)) < 1e-6);
    if (i == 0 && run.dp * run.tp == 1) {
      const weft_batch empty = {NULL, 0, 0, NULL, 0}, missing = {NULL, 1, 0, NULL, 0};
      REFUSED(weft_trainer_step_batches(trainer, &empty, 1, TRAIN_RATE, NULL, &error),
              "trainer: inputs is empty; expected 1 tensor or more");
      REFUSED(weft_trainer_step_batches(trainer, &missing, 1, TRAIN_RATE, NULL, &error),
              "weft_trainer_step_batches: inputs is NULL");
    }
  }
  REFUSED(weft_model_create(mesh, compute, "{\"transformer\": {\"dims\": 16}}", NULL, &none, &error),
          "recipe: transformer has no \"dims\" (a transformer); is dim meant?");
  REFUSED(weft_model_create(mesh, compute, recipe, "{\"sed\": 1}", &none, &error),
          "options: it has no \"sed\" (build options); is seed meant?");
  REFUSED(weft_trainer_create_from_json(model, "{\"optimiser\": 1}", &no_trainer, &error),
          "options: it has no \"optimiser\" (options of a trainer); is optimizer meant?");
  CHECK(none == NULL && no_trainer == NULL);
  weft_trainer_destroy(expected);
  weft_trainer_destroy(trainer);
  weft_model_destroy(model);
  weft_model_destroy(p.model);
  /* of layers, without a vocabulary */
  OK(weft_model_create(mesh, compute, "{\"model\": {\"layer\": \"Linear\", \"in\": 2, \"out\": 3}}", NULL,
                       &model, &error));
  if (run.dp * run.tp == 1) {
    float logits[3];
    const weft_buffer to = {logits, 3, WEFT_F32, WEFT_CPU};
    const weft_token_batch tokens = {NULL, NULL, 0, 1, 0};
    weft_text* text = NULL;
    REFUSED(weft_model_logits(model, &tokens, &to, &error),
            "weft_model_logits: the model has no vocabulary; expected a model of tokens");
    REFUSED(weft_model_text(model, &text, &error), "transformer_of: the model is no Transformer");
    REFUSED(weft_trainer_create_from_json(model, NULL, &no_trainer, &error),
            "trainer: the model has no loss; expected a Recipe with one");
  }
  weft_model_destroy(model);
  weft_compute_destroy(compute);
  weft_mesh_destroy(mesh);
  weft_group_destroy(group);
}

/* A model with experts: the losses of C++, and the load of the experts. */
static double losses_with_experts[TRAIN_STEPS];
static void with_experts(rank_args* a) {
  const char* const recipe =
      "{\"moe\": {\"dim\": 16, \"layers\": 2, \"heads\": 4, \"kv_heads\": 4, \"ffn_hidden\": 24, \"vocab\": "
      "32, \"max_seq\": 8, \"init_std\": 0.1, \"experts\": 4, \"expert_hidden\": 12, \"router\": {\"bias\": "
      "\"selects\", \"aux_loss\": 0.05}}}";
  const weft_mesh_axis axes[] = {{"dp", run.dp}, {"ep", run.tp}, {"tp", 1}};
  const int ranks = run.dp * run.tp, rows = TRAIN_ROWS / ranks;
  weft_group* group = join(a, "world", 0);
  weft_mesh* mesh = NULL;
  weft_compute* compute = NULL;
  weft_model* model = NULL;
  weft_trainer* trainer = NULL;
  weft_text* text = NULL;
  weft_expert_balance balance = WEFT_EXPERT_BALANCE_INIT;
  int32_t layers = 0;
  char options[80], of_trainer[80];
  OK(weft_mesh_create(group, axes, 3, &mesh, &error));
  OK(weft_compute_create(a->context, NULL, &compute, &error));
  snprintf(options, sizeof options, "{\"expert_axis\": \"ep\", \"data\": \"fsdp\", \"seed\": %d}",
           TRAIN_SEED);
  snprintf(of_trainer, sizeof of_trainer, "{\"max_norm\": %.17g}", (double)TRAIN_MAX_NORM);
  OK(weft_model_create(mesh, compute, recipe, options, &model, &error));
  OK(weft_trainer_create_from_json(model, of_trainer, &trainer, &error));
  REFUSED(weft_model_get_expert_balance(model, 0, &balance, &error),
          "weft_model_get_expert_balance: index is 0; there is no report: expected weft_model_expert_balance "
          "first");
  REFUSED(weft_model_text(model, &text, &error),
          "weft_model_text: the model has mixtures of experts; expected a transformer without experts");
  for (int i = 0; i < TRAIN_STEPS; ++i) {
    int64_t tokens[TRAIN_ROWS * TRAIN_SEQUENCE], labels[TRAIN_ROWS * TRAIN_SEQUENCE];
    const weft_token_batch batch = {tokens, labels, rows, TRAIN_SEQUENCE, 0};
    weft_step_result result = WEFT_STEP_RESULT_INIT;
    train_batch(i, a->rank * rows, rows, tokens, labels);
    OK(weft_trainer_step(trainer, &batch, 1, TRAIN_RATE, &result, &error));
    CHECK(result.loss == losses_with_experts[i]);
  }
  OK(weft_model_expert_balance(model, &layers, &error));
  CHECK(layers == TRAIN_LAYERS);
  for (int32_t i = 0; i < layers; ++i) {
    int64_t assignments = 0;
    OK(weft_model_get_expert_balance(model, i, &balance, &error));
    CHECK(strcmp(balance.path, i == 0 ? "layers.0.mlp" : "layers.1.mlp") == 0);
    CHECK(balance.expert_count == TRAIN_EXPERTS && balance.dropped == 0);
    CHECK(balance.tokens == TRAIN_ROWS * TRAIN_SEQUENCE && balance.assignments == 2 * balance.tokens);
    for (int32_t e = 0; e < balance.expert_count; ++e) assignments += balance.counts[e];
    CHECK(assignments == balance.assignments && balance.aux_loss > 0.5 && balance.z_loss > 0);
  }
  REFUSED(weft_model_get_expert_balance(model, 2, &balance, &error),
          "weft_model_get_expert_balance: index is 2; expected 0 to 1");
  weft_trainer_destroy(trainer);
  weft_model_destroy(model);
  weft_compute_destroy(compute);
  weft_mesh_destroy(mesh);
  weft_group_destroy(group);
}

/* Two micro-batches of a model over the stages of a pipeline; stages below 1: without a pipeline. */
static int stages;
static double pipeline_losses[TRAIN_STEPS];
static void in_a_pipeline(rank_args* a) {
  const char* const recipe =
      "{\"transformer\": {\"dim\": 16, \"layers\": 2, \"heads\": 4, \"kv_heads\": 4, \"ffn_hidden\": 24, "
      "\"vocab\": 32, \"max_seq\": 8, \"init_std\": 0.1}}";
  const char* const layers =
      "{\"model\": {\"layer\": \"Sequential\", \"children\": [[\"a\", {\"layer\": \"Linear\", \"in\": 2, "
      "\"out\": "
      "3}], [\"b\", {\"layer\": \"Linear\", \"in\": 3, \"out\": 1}]]}, \"loss\": \"mean_squared_error\", "
      "\"pipeline\": [\"*\"], \"border\": [\"input.0\", 3]}";
  const char* const options = stages < 1 ? "{\"seed\": 5}"
                                         : "{\"seed\": 5, \"pipeline_axis\": \"pp\", \"pipeline\": "
                                           "\"zero-bubble\", \"stage_weights\": [1, 2, 2, 1, 1]}";
  const char* const of_layers = stages < 1 ? NULL : "{\"pipeline_axis\": \"pp\", \"pipeline\": \"gpipe\"}";
  const weft_mesh_axis axes[] = {{"pp", stages < 1 ? 1 : stages}, {"dp", 1}, {"tp", 1}};
  weft_group* group = join(a, "world", 0);
  weft_mesh* mesh = NULL;
  weft_compute* compute = NULL;
  weft_model* model = NULL;
  weft_trainer* trainer = NULL;
  OK(weft_mesh_create(group, axes, 3, &mesh, &error));
  OK(weft_compute_create(a->context, NULL, &compute, &error));
  OK(weft_model_create(mesh, compute, recipe, options, &model, &error));
  OK(weft_trainer_create_from_json(model, "{\"max_norm\": 0}", &trainer, &error));
  for (int i = 0; i < TRAIN_STEPS; ++i) {
    int64_t tokens[2][TRAIN_ROWS * TRAIN_SEQUENCE], labels[2][TRAIN_ROWS * TRAIN_SEQUENCE];
    weft_token_batch batches[2];
    weft_step_result result = WEFT_STEP_RESULT_INIT;
    for (int m = 0; m < 2; ++m) {
      const weft_token_batch batch = {tokens[m], labels[m], TRAIN_ROWS, TRAIN_SEQUENCE, 0};
      train_batch(2 * i + m, 0, TRAIN_ROWS, tokens[m], labels[m]);
      batches[m] = batch;
    }
    OK(weft_trainer_step(trainer, batches, 2, TRAIN_RATE, &result, &error));
    if (stages < 1) pipeline_losses[i] = result.loss;
    CHECK(result.loss == pipeline_losses[i]);
  }
  weft_trainer_destroy(trainer);
  weft_model_destroy(model);
  OK(weft_model_create(mesh, compute, layers, of_layers, &model, &error));
  OK(weft_trainer_create_from_json(model, "{\"max_norm\": 0}", &trainer, &error));
  {
    float x[] = {1, 2, 3, 4}, y[] = {1, -1};
    const int64_t of_x[] = {2, 2}, of_y[] = {2, 1};
    const weft_tensor input = {"x", {x, 4, WEFT_F32, WEFT_CPU}, NULL, of_x, 2};
    const weft_tensor target = {"y", {y, 2, WEFT_F32, WEFT_CPU}, NULL, of_y, 2};
    const weft_batch batch = {&input, 1, 1, &target, 0};
    static double loss;
    weft_step_result result = WEFT_STEP_RESULT_INIT;
    OK(weft_trainer_step_batches(trainer, &batch, 1, TRAIN_RATE, &result, &error));
    if (stages < 1) loss = result.loss;
    CHECK(result.loss == loss && loss > 0);
  }
  weft_trainer_destroy(trainer);
  weft_model_destroy(model);
  weft_compute_destroy(compute);
  weft_mesh_destroy(mesh);
  weft_group_destroy(group);
}

static void on_mesh(int dp, int tp, void (*body)(rank_args*)) {
  run.dp = dp;
  run.tp = tp;
  run_ranks(dp * tp, body);
}

int main(void) {
  expect_losses_of_cpp(1, 1);
  on_mesh(1, 1, train_in_halves); /* of the losses before it */
  on_mesh(1, 1, averages);
  on_mesh(1, 1, other_optimizers);
  expect_losses_of_cpp(2, 1);
  expect_losses_of_cpp(1, 2);
  on_mesh(1, 2, train_in_halves);
  on_mesh(1, 2, averages);
  expect_losses_of_cpp(2, 2);
  on_mesh(2, 2, train_in_halves);
  on_mesh(2, 2, averages);
  on_mesh(2, 2, other_optimizers);
  expect_losses_of_cpp(1, 4);
  on_mesh(1, 2, logits_of_wrong_ranks);
  on_mesh(1, 2, generate_of_wrong_ranks);
  on_mesh(1, 1, from_text);
  on_mesh(1, 2, from_text);
  on_mesh(1, 1, from_json);
  on_mesh(2, 2, from_json);
  train_experts_in_cpp(1, 1, losses_with_experts);
  on_mesh(1, 1, with_experts);
  train_experts_in_cpp(2, 2, losses_with_experts);
  on_mesh(2, 2, with_experts);
  run_ranks(1, in_a_pipeline);
  stages = 2;
  run_ranks(2, in_a_pipeline);
  on_mesh(1, 1, of_dlpack);
  on_mesh(1, 2, of_dlpack);
  on_mesh(1, 1, generates);
  on_mesh(1, 2, generates);
  on_mesh(2, 2, generates);
  on_mesh(1, 1, scores_of_loops);
  on_mesh(1, 2, scores_of_mesh);
  on_mesh(2, 2, scores_of_mesh);
  on_mesh(1, 4, scores_of_mesh);
  run.split = true;
  expect_losses_of_cpp(1, 2);
  expect_losses_of_cpp(2, 2);
  on_mesh(1, 2, scores_of_mesh);
  on_mesh(1, 4, scores_of_mesh);
  on_mesh(1, 4, vocabulary_is_split);
  run.split = false;
  on_mesh(1, 1, parameters);
  on_mesh(1, 2, parameters);
  on_mesh(2, 2, more_options);
  test_divided_parameters();
  test_float8();
  test_bf16();
  test_exact();
  test_divided_refused();
  test_ac();
  checkpoints();
  trainings();
  refuses();
  on_mesh(2, 1, wrong_on_one_rank);
  on_mesh(1, 2, wrong_on_one_rank);
  return 0;
}
