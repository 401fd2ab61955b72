/* Models over a mesh: a transformer by its configuration, its parameters, its outputs for tokens. */
#ifndef WEFT_C_TRAIN_MODEL_H
#define WEFT_C_TRAIN_MODEL_H

#include "weft/c_train/compute.h"

#ifdef __cplusplus
extern "C" {
#endif

/* This rank's part of a model. For one thread at a time. Keeps its mesh and its weft_compute. */
typedef struct weft_model weft_model;

/* The use that data-parallel ranks make of the parameters: each rank has all, and gradients are averaged; or
 * the parameters are divided over the data axis, and each rank has all of one block at a time. If parameters
 * are divided, masters, gradients and optimizer states take that much less memory on each rank; results are
 * the same. */
typedef int32_t weft_data_form;
enum { WEFT_DATA_DDP = 0, WEFT_DATA_FSDP = 1 };

/* A decoder: pre-norm blocks of grouped-query attention with rotary positions and SwiGLU. */
typedef struct weft_transformer_options {
  uint32_t struct_size;
  weft_dtype weights; /* the dtype that layers read: WEFT_F32, or WEFT_BF16 with masters in f32 */
  int64_t dim, layers, heads, kv_heads, ffn_hidden, vocab, max_seq;
  int64_t head_size; /* features of a head; 0: dim / heads */
  double rope_theta, norm_eps;
  double init_std;         /* of the first values, which depend on `seed` and not on the mesh */
  uint64_t seed;           /* the same on all ranks */
  const char* data_axis;   /* the axis that divides batches; NULL: "dp" */
  const char* tensor_axis; /* the axis that divides layers; NULL: "tp" */
  /* parameters that are not trained: paths of parameters or modules, in which * is one step. */
  const char* const* frozen;
  int32_t frozen_count;
  bool tied; /* the head uses the embedding's weight */
  /* The activations between the layers that are split over the tensor axis (norms, residual sums) are
   * divided along the sequence. */
  bool sequence_parallel;
  /* Embedding and head are split over the vocabulary, and no rank has all scores of a training step. */
  bool split_vocab;
  weft_data_form data_form;
  /* A second data axis, over which divided parameters are replicated (HSDP); NULL: none. */
  const char* replicate_axis;
  /* WEFT_DATA_FSDP alone: the dtype of gradients while data ranks add them up, WEFT_F32 or WEFT_BF16; and
   * the treatment of a block's weights between its forward and its backward: WEFT_RESHARD dropped, and
   * gathered again; WEFT_KEEP kept; a number n of 2 or more: each rank keeps 1/n, and backward gathers among
   * n neighbouring ranks of the data axis, which n divides. */
  weft_dtype reduce;
  int32_t after_forward;
} weft_transformer_options;
enum { WEFT_RESHARD = 0, WEFT_KEEP = -1 };
#define WEFT_TRANSFORMER_OPTIONS_INIT                                                                   \
  {                                                                                                     \
    sizeof(weft_transformer_options), WEFT_F32, 256, 4, 8, 4, 768, 256, 512, 0, 10000.0, 1e-5, 0.02, 0, \
        NULL, NULL, NULL, 0, false, false, false, WEFT_DATA_DDP, NULL, WEFT_F32, 0                      \
  }

/* `mesh`: a whole mesh that has both axes, of size 1 where not wanted; `options` may be NULL. All ranks give
 * the same options. No communication; no rank ever holds more than its part. WEFT_BAD_ARGUMENT with the
 * arithmetic where the model does not fit the mesh. */
weft_status weft_transformer_create(const weft_mesh* mesh, weft_compute* compute,
                                    const weft_transformer_options* options, weft_model** model,
                                    weft_error* error);
/* The same with the sizes from `text` instead of those of `options`: the table [model] of a TOML text, whose
 * keys are the options' names (dim, layers, heads, kv_heads, ffn_hidden, vocab, max_seq, head_size,
 * rope_theta, norm_eps, tied, init_std). Members that it does not name are as in `options`. The rest of the
 * text is ignored, so it may be the file that `weft train --config` reads. WEFT_BAD_ARGUMENT with the line
 * of the fault: "text:3: [model] has no "head"; is heads meant?". */
weft_status weft_transformer_create_from_text(const weft_mesh* mesh, weft_compute* compute, const char* text,
                                              const weft_transformer_options* options, weft_model** model,
                                              weft_error* error);
/* Such a text of a model's own sizes, with every key. Destroyed with weft_text_destroy. */
weft_status weft_model_text(const weft_model* model, weft_text** text, weft_error* error);
void weft_model_destroy(weft_model* model);

typedef struct weft_parameter {
  uint32_t struct_size;
  int32_t dim_count;
  const char* name;               /* its path, "layers.0.mlp.up_proj.weight"; lives as long as the model */
  int64_t extents[WEFT_MAX_DIMS]; /* of the whole */
  int64_t local_extents[WEFT_MAX_DIMS]; /* of this rank's part */
  /* f32, this rank's part; lives as long as the model. To be read: weft_model_set_parameter writes. */
  weft_buffer value;
  bool trained;
} weft_parameter;
#define WEFT_PARAMETER_INIT \
  { sizeof(weft_parameter), 0, NULL, {0}, {0}, {NULL, 0, WEFT_F32, WEFT_CPU}, false }

/* Parameters are numbered from 0, in the same order on all ranks. */
weft_status weft_model_parameter_count(const weft_model* model, int32_t* count, weft_error* error);
weft_status weft_model_get_parameter(const weft_model* model, int32_t index, weft_parameter* parameter,
                                     weft_error* error);
/* The number of the parameter of this name; -1: there is none. */
weft_status weft_model_find_parameter(const weft_model* model, const char* name, int32_t* index,
                                      weft_error* error);
/* The layout of the parameter over the mesh: a handle to be destroyed as any other. */
weft_status weft_model_parameter_layout(const weft_model* model, int32_t index, weft_layout** layout,
                                        weft_error* error);
/* Copies what this rank holds of it from `value`: f32, as many elements as local_extents say, on the device
 * of the weft_compute. */
weft_status weft_model_set_parameter(weft_model* model, int32_t index, const weft_buffer* value,
                                     weft_error* error);

/* The same of a tensor of DLPack, which must have the parameter's local extents, row-major; `tensor` points
 * to a DLTensor, as in weft/c/dlpack.h. It is only read. */
weft_status weft_model_set_parameter_from_dltensor(weft_model* model, int32_t index, const void* tensor,
                                                   weft_error* error);
/* This rank's part of it as a tensor of DLPack, without a copy: its memory is the model's. *managed belongs
 * to the code that adopts it; it keeps the model, with all of its memory, as a handle does, also after
 * weft_model_destroy; its deleter, which any thread may call, releases it. Values are those of the moment at
 * which they are read: steps and weft_model_set_parameter change them, in the thread that makes them. To be
 * read: the versioned one says so by WEFT_DL_READ_ONLY, the other one cannot. */
weft_status weft_model_parameter_dlpack(const weft_model* model, int32_t index,
                                        struct DLManagedTensor** managed, weft_error* error);
weft_status weft_model_parameter_dlpack_versioned(const weft_model* model, int32_t index,
                                                  struct DLManagedTensorVersioned** managed,
                                                  weft_error* error);

/* This rank's rows of a batch, on the host. Ranks that differ in their tensor axis alone give the same
 * rows. */
typedef struct weft_token_batch {
  const int64_t* tokens; /* rows x sequence, each from 0 to vocab - 1 */
  /* Rows x sequence: for each token what follows it, or WEFT_IGNORED; not read if nothing is trained. */
  const int64_t* labels;
  int64_t rows, sequence;
  /* The rows of all ranks of the data axis, of which the first have one more where it is uneven; 0: as many
   * as here on each. */
  int64_t global_rows;
} weft_token_batch;
#define WEFT_IGNORED (-100) /* a label that does not count */

/* The model's scores for each token: `logits`, f32, rows x sequence x vocab elements. Collective over the
 * tensor axis; blocks until it is done. A wrong batch or wrong memory on one rank is WEFT_BAD_ARGUMENT on
 * all ranks of its tensor axis, at once and before any pass, and so are different tokens on these ranks. */
weft_status weft_model_logits(weft_model* model, const weft_token_batch* batch, const weft_buffer* logits,
                              weft_error* error);

/* Writes the folder directory/step-N, and names it in directory/latest when it is whole; a kill at any moment
 * leaves the one before. Collective over the mesh; blocks. */
weft_status weft_model_save(const weft_model* model, const char* directory, int64_t step, weft_error* error);
/* Reads the parameters from directory's latest checkpoint, or from `directory` itself where that is one; also
 * from one of a trainer, or of another mesh. `step`, which may be NULL, gets its step. Collective; blocks. */
weft_status weft_model_load(weft_model* model, const char* directory, int64_t* step, weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_TRAIN_MODEL_H */
