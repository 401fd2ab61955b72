/* Models over a mesh: a transformer by its configuration, a model of any layers by its recipe, parameters,
 * outputs for tokens. */
#ifndef WEFT_C_TRAIN_MODEL_H
#define WEFT_C_TRAIN_MODEL_H

#include "weft/c_train/compute.h"

#ifdef __cplusplus
extern "C" {
#endif

/* This rank's part of a model. One thread at a time may use it. It keeps its mesh and its weft_compute. */
typedef struct weft_model weft_model;

/* How data-parallel ranks hold the parameters. WEFT_DATA_DDP: each rank has all parameters, and gradients are
 * averaged. WEFT_DATA_FSDP: the parameters are divided over the data axis, and each rank has one whole block
 * at a time; so masters, gradients and optimizer states are divided by the number of data ranks. The results
 * are the same. */
typedef int32_t weft_data_form;
enum { WEFT_DATA_DDP = 0, WEFT_DATA_FSDP = 1 };

/* Linear layers whose products take operands of eight bits (docs/float8.md). TENSORWISE: one scale for a
 * tensor; activations and weights e4m3, gradients e5m2. ROWWISE: one scale for each row or column of an
 * operand, e4m3. ROWWISE_GW_HP: as ROWWISE, with the gradients of weights in bf16. */
typedef int32_t weft_float8_recipe;
enum {
  WEFT_FLOAT8_NONE = 0,
  WEFT_FLOAT8_TENSORWISE = 1,
  WEFT_FLOAT8_ROWWISE = 2,
  WEFT_FLOAT8_ROWWISE_GW_HP = 3
};

/* A decoder: pre-norm blocks of grouped-query attention with rotary positions and SwiGLU. */
typedef struct weft_transformer_options {
  uint32_t struct_size;
  weft_dtype weights; /* the dtype that layers read: WEFT_F32, or WEFT_BF16 with masters in f32 */
  int64_t dim, layers, heads, kv_heads, ffn_hidden, vocab, max_seq;
  int64_t head_size; /* features of a head; 0: dim / heads */
  double rope_theta, norm_eps;
  /* the standard deviation of the initial values; these depend on `seed`, and not on the mesh */
  double init_std;
  uint64_t seed;           /* the same on all ranks */
  const char* data_axis;   /* the axis that divides batches; NULL: "dp" */
  const char* tensor_axis; /* the axis that divides layers; NULL: "tp" */
  /* parameters that are not trained: paths of parameters or modules; in a path, * stands for one step */
  const char* const* frozen;
  int32_t frozen_count;
  bool tied; /* the head uses the embedding's weight */
  /* Activations between layers that are split over the tensor axis (in norms and residual sums) are divided
   * along the sequence. */
  bool sequence_parallel;
  /* Embedding and head are split over the vocabulary, so no rank has all logits of a training step. */
  bool split_vocab;
  weft_data_form data_form;
  /* A second data axis, over which divided parameters are replicated (HSDP); NULL: none. */
  const char* replicate_axis;
  /* For WEFT_DATA_FSDP only. `reduce`: the dtype of gradients while data ranks add them up, WEFT_F32 or
   * WEFT_BF16. `after_forward`: the treatment of a block's weights between its forward and its backward.
   * WEFT_RESHARD drops them and gathers them again; WEFT_KEEP keeps them; with a number n of 2 or more each
   * rank keeps 1/n of the weights, and backward gathers them from n neighbouring ranks of the data axis; n
   * must divide the size of that axis. */
  weft_dtype reduce;
  int32_t after_forward;
  /* All linear layers except the head, whose sizes are multiples of 16. With float8_whole_scales the scale of
   * an activation or a gradient is that of the whole tensor over all ranks, otherwise that of the rank's
   * part. */
  weft_float8_recipe float8;
  bool float8_whole_scales;
  /* Activation checkpointing: which modules keep only their inputs in a forward pass, and run again in
   * backward; results have the same bits. WEFT_AC_FULL: each block, or the first of every `ac_every` blocks
   * (0 means 1). WEFT_AC_SELECTIVE: only the attentions, or the modules that `ac_modules` names: paths, in
   * which * stands for one step. */
  int32_t ac_mode;
  int32_t ac_every;
  const char* const* ac_modules;
  int32_t ac_module_count;
  /* The same bits of losses, gradients and parameters on 1, 2, 4 and 8 ranks (docs/exact.md). If something
   * has no rule for that, creation or a step fails with WEFT_BAD_ARGUMENT, whose text says what. */
  bool exact;
  /* The dtype of activations and their gradients, between layers and over the tensor axis: WEFT_F32, or
   * WEFT_BF16 if `weights` is WEFT_BF16. Logits are f32. */
  weft_dtype activations;
} weft_transformer_options;
enum { WEFT_AC_NONE = 0, WEFT_AC_FULL = 1, WEFT_AC_SELECTIVE = 2 };
enum { WEFT_RESHARD = 0, WEFT_KEEP = -1 };
#define WEFT_TRANSFORMER_OPTIONS_INIT                                                                        \
  {                                                                                                          \
    sizeof(weft_transformer_options), WEFT_F32, 256, 4, 8, 4, 768, 256, 512, 0, 10000.0, 1e-5, 0.02, 0,      \
        NULL, NULL, NULL, 0, false, false, false, WEFT_DATA_DDP, NULL, WEFT_F32, 0, WEFT_FLOAT8_NONE, false, \
        WEFT_AC_NONE, 0, NULL, 0, false, WEFT_F32                                                            \
  }

/* `mesh`: a root mesh that has both axes; an axis that is not wanted has size 1. `options` may be NULL; all
 * ranks must give the same options. No communication; no rank ever holds more than its part. Fails with
 * WEFT_BAD_ARGUMENT if the model does not fit the mesh; the error text shows the sizes that do not divide. */
weft_status weft_transformer_create(const weft_mesh* mesh, weft_compute* compute,
                                    const weft_transformer_options* options, weft_model** model,
                                    weft_error* error);
/* Like weft_transformer_create, but takes the sizes from `text` instead of `options`: from the table [model]
 * of a TOML text, whose keys are the options' names (dim, layers, heads, kv_heads, ffn_hidden, vocab,
 * max_seq, head_size, rope_theta, norm_eps, tied, init_std). A size that the table does not name is as in
 * `options`. The rest of the text is ignored, so it may be the file that `weft train --config` reads. Fails
 * with WEFT_BAD_ARGUMENT; the text names the line of the mistake: "text:3: [model] has no "head"; is heads
 * meant?". */
weft_status weft_transformer_create_from_text(const weft_mesh* mesh, weft_compute* compute, const char* text,
                                              const weft_transformer_options* options, weft_model** model,
                                              weft_error* error);
/* Builds the model of a recipe that the program describes: `recipe` is a JSON object with a name, a model as
 * a tree of layers, a loss and blocks, or with the sizes of a transformer or of a mixture of experts;
 * docs/recipes.md has its keys and the layers. `options`, a JSON object or NULL, says how the mesh shares the
 * model, as BuildOptions (weft/models/from_json.hpp). All ranks must give the same texts. No communication;
 * no rank ever holds more than its part. Fails with WEFT_BAD_ARGUMENT for an unknown key, with the nearest
 * known one: "recipe: model.embed has no "kernal" (Conv2d); is kernel meant?". */
weft_status weft_model_create(const weft_mesh* mesh, weft_compute* compute, const char* recipe,
                              const char* options, weft_model** model, weft_error* error);
/* Gives the sizes of a model as a text for weft_transformer_create_from_text, with every key. Destroy it with
 * weft_text_destroy. Fails with WEFT_BAD_ARGUMENT for a model with experts, which that text cannot
 * describe. */
weft_status weft_model_text(const weft_model* model, weft_text** text, weft_error* error);
void weft_model_destroy(weft_model* model);

typedef struct weft_parameter {
  uint32_t struct_size;
  int32_t dim_count;
  const char* name;               /* its path, "layers.0.mlp.up_proj.weight"; valid as long as the model */
  int64_t extents[WEFT_MAX_DIMS]; /* of the global tensor */
  int64_t local_extents[WEFT_MAX_DIMS]; /* of this rank's part */
  /* f32, this rank's part; valid as long as the model. Only read it; to write, call
   * weft_model_set_parameter. */
  weft_buffer value;
  bool trained;
} weft_parameter;
#define WEFT_PARAMETER_INIT \
  { sizeof(weft_parameter), 0, NULL, {0}, {0}, {NULL, 0, WEFT_F32, WEFT_CPU}, false }

/* Parameters are numbered from 0, in the same order on all ranks. In a pipeline they are those of this rank's
 * stages. */
weft_status weft_model_parameter_count(const weft_model* model, int32_t* count, weft_error* error);
weft_status weft_model_get_parameter(const weft_model* model, int32_t index, weft_parameter* parameter,
                                     weft_error* error);
/* The number of the parameter called `name`; -1 if there is none. */
weft_status weft_model_find_parameter(const weft_model* model, const char* name, int32_t* index,
                                      weft_error* error);
/* Gives the layout of the parameter over the mesh. Destroy the handle like any other. */
weft_status weft_model_parameter_layout(const weft_model* model, int32_t index, weft_layout** layout,
                                        weft_error* error);
/* Copies this rank's part of the parameter from `value`: f32, with the number of elements that local_extents
 * give, on the device of the weft_compute. */
weft_status weft_model_set_parameter(weft_model* model, int32_t index, const weft_buffer* value,
                                     weft_error* error);

/* Like weft_model_set_parameter, for a DLPack tensor, which must have the parameter's local extents,
 * row-major. `tensor` points to a DLTensor, as in weft/c/dlpack.h; weft only reads it. */
weft_status weft_model_set_parameter_from_dltensor(weft_model* model, int32_t index, const void* tensor,
                                                   weft_error* error);
/* Gives this rank's part of the parameter as a DLPack tensor in the memory of the model, without a copy.
 * *managed belongs to the code that adopts it. Like a handle, the DLPack tensor keeps the model and all of
 * its memory alive, even after weft_model_destroy. The tensor's deleter, which any thread may call, releases
 * the model. The values change with the model: steps and weft_model_set_parameter write them in the thread
 * that calls them. The program must only read the tensor: the versioned tensor has the flag
 * WEFT_DL_READ_ONLY, the other form has no such flag. */
weft_status weft_model_parameter_dlpack(const weft_model* model, int32_t index,
                                        struct DLManagedTensor** managed, weft_error* error);
weft_status weft_model_parameter_dlpack_versioned(const weft_model* model, int32_t index,
                                                  struct DLManagedTensorVersioned** managed,
                                                  weft_error* error);

/* This rank's rows of a batch, on the host. Ranks that differ only in their coordinate on the tensor axis
 * must give the same rows. */
typedef struct weft_token_batch {
  const int64_t* tokens; /* rows x sequence, each from 0 to vocab - 1 */
  /* Rows x sequence: for each token the next token, or WEFT_IGNORED; not read if nothing is trained. */
  const int64_t* labels;
  int64_t rows, sequence;
  /* The number of rows on all ranks of the data axis together; if they do not divide evenly, the first ranks
   * have one row more. 0: every rank has as many rows as this one. */
  int64_t global_rows;
} weft_token_batch;
#define WEFT_IGNORED (-100) /* a label that does not count */

/* Writes the model's scores for each token into `logits`: f32, rows x sequence x vocab elements. Collective
 * over the tensor axis; blocks until it is done. Fails with WEFT_BAD_ARGUMENT on all ranks of the tensor
 * axis, before any pass, if one of these ranks gives a wrong batch or wrong memory, or if their tokens
 * differ. */
weft_status weft_model_logits(weft_model* model, const weft_token_batch* batch, const weft_buffer* logits,
                              weft_error* error);

/* This rank's rows of a batch for a model of any recipe, row-major, on the host. Ranks that differ only in
 * their coordinate on the tensor axis must give the same rows. Layouts of the tensors are not read; names are
 * for errors. */
typedef struct weft_batch {
  /* The inputs of the model, in its order: (rows, ...) each. A transformer takes tokens, i64 (rows,
   * sequence), and, if given, the number of each token's document in the same form: successive tokens of a
   * row with one number are a document, and attention stays inside of it. */
  const weft_tensor* inputs;
  int32_t input_count;
  int32_t target_count;
  const weft_tensor* targets; /* of the loss; may be NULL if target_count is 0 */
  int64_t global_rows;        /* as in weft_token_batch */
} weft_batch;

/* Computes the outputs of the model for this rank's rows of a batch, whose targets are not read: passes that
 * keep nothing. *count, which may be NULL, becomes the number of outputs, which weft_model_get_output gives
 * until the next weft_model_forward. Collective over the tensor axis and the axes that cut maps; blocks.
 * Fails with WEFT_BAD_ARGUMENT on all ranks of these axes, before any pass, if one of them gives a wrong
 * batch, or if their inputs differ; and for a pipeline. */
weft_status weft_model_forward(weft_model* model, const weft_batch* batch, int32_t* count, weft_error* error);
/* Gives an output: this rank's rows, with all features, on the host. `data` and `extents` are valid until the
 * next weft_model_forward, or until the model ends. */
weft_status weft_model_get_output(const weft_model* model, int32_t index, weft_tensor* output,
                                  weft_error* error);

/* The choices of the router of one mixture of experts in its last forward pass, over all data ranks. Losses
 * are without their factors (docs/expert_parallel.md). */
typedef struct weft_expert_balance {
  uint32_t struct_size;
  int32_t expert_count;
  const char* path;      /* of the layer, "layers.0.mlp" */
  const int64_t* counts; /* assignments of each expert, before capacity */
  int64_t tokens, assignments, dropped;
  double aux_loss, z_loss;
} weft_expert_balance;
#define WEFT_EXPERT_BALANCE_INIT \
  { sizeof(weft_expert_balance), 0, NULL, NULL, 0, 0, 0, 0, 0 }

/* Takes the reports of all routers of the model. *count becomes their number, 0 for a model without experts;
 * weft_model_get_expert_balance gives them until the next call. In a pipeline collective over the stages,
 * and every rank has the reports of all stages; otherwise no communication. */
weft_status weft_model_expert_balance(weft_model* model, int32_t* count, weft_error* error);
/* Gives a report. `path` and `counts` are valid until the next weft_model_expert_balance, or until the model
 * ends. */
weft_status weft_model_get_expert_balance(const weft_model* model, int32_t index,
                                          weft_expert_balance* balance, weft_error* error);

/* Tokens that the program owns. */
typedef struct weft_tokens {
  const int64_t* tokens;
  int64_t count;
} weft_tokens;

/* How new tokens are drawn (docs/sample.md). temperature 0: always the most probable token. top_k 0 and top_p
 * 1: from all tokens. A sample ends behind the first of the `stops` that it has made. no_cache: each token is
 * a pass over the whole sample; slower, the same tokens. */
typedef struct weft_generate_options {
  uint32_t struct_size;
  bool no_cache;
  int64_t new_tokens, top_k;
  double temperature, top_p;
  uint64_t seed;
  const weft_tokens* stops;
  int32_t stop_count;
} weft_generate_options;
#define WEFT_GENERATE_OPTIONS_INIT \
  { sizeof(weft_generate_options), false, 128, 0, 1, 1, 0, NULL, 0 }

/* Continues each prompt. Row i of `tokens` (prompt_count x new_tokens) gets the tokens behind prompt i, and
 * counts[i] their number, which is smaller than new_tokens if a stop ended the sample or max_seq was reached;
 * the rest of the row is not written. `options` may be NULL. All ranks give the same prompts and options, and
 * all get all tokens: the ranks of the data axis share the prompts, those of the tensor axis each pass.
 * Collective over the mesh; blocks. Fails on all ranks, before any pass, if one of them gives wrong
 * arguments, or if their arguments differ. */
weft_status weft_model_generate(weft_model* model, const weft_tokens* prompts, int32_t prompt_count,
                                const weft_generate_options* options, int64_t* tokens, int64_t* counts,
                                weft_error* error);

/* Writes the folder directory/step-N, and names it in directory/latest when it is complete. If the process is
 * killed at any moment, the previous checkpoint stays. Collective over the mesh; blocks. */
weft_status weft_model_save(const weft_model* model, const char* directory, int64_t step, weft_error* error);
/* Reads the parameters from the latest checkpoint in `directory`, or from `directory` itself if it is a
 * checkpoint. The checkpoint may also be one of a trainer, or of another mesh. `step`, which may be NULL,
 * becomes the checkpoint's step. Collective; blocks. */
weft_status weft_model_load(weft_model* model, const char* directory, int64_t* step, weft_error* error);
/* Begins a fine-tuning: reads the parameters and buffers of another run's checkpoint, and neither an
 * optimizer nor averages. Call it before the trainer is made. `except`: patterns of paths (of parameters, or
 * of modules) that keep their values, for a new head; `left_out`: the same for what only the checkpoint has.
 * Both may be NULL with a count of 0. Tensors under older names (docs/checkpoints.md) are read. `step`, which
 * may be NULL, becomes the checkpoint's step. Collective; blocks. Fails with WEFT_BAD_ARGUMENT on all ranks
 * if an entry of `except` matches nothing in the model, or if the checkpoint does not fit. */
weft_status weft_model_init_from(weft_model* model, const char* directory, const char* const* except,
                                 int32_t except_count, const char* const* left_out, int32_t left_out_count,
                                 int64_t* step, weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_TRAIN_MODEL_H */
