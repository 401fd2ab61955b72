/* Layers whose passes are functions of the program, as parts of a model of layers (weft_model_create). */
#ifndef WEFT_C_TRAIN_MODULE_H
#define WEFT_C_TRAIN_MODULE_H

#include "weft/c/layout.h"
#include "weft/c_train/model.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A parameter of such a layer. */
typedef struct weft_module_parameter {
  const char* name; /* without dots */
  int64_t extents[WEFT_MAX_DIMS];
  int32_t dim_count;
  /* The dimension that a tensor axis cuts if a plan splits the layer by columns; below 0: each rank has the
   * whole parameter. */
  int32_t split_dim;
  double mean, std; /* initial values, normally distributed; std 0: all are `mean` */
} weft_module_parameter;
#define WEFT_MODULE_PARAMETER_INIT \
  { NULL, {0}, 0, -1, 0, 0 }

/* A pass of the layer. weft fills it, and it is valid until the function returns, with all memory that it
 * points to: f32 on the host, row-major, `data`, `extents` and `dim_count` of each tensor set; inputs of the
 * model that are integers keep their dtype. Each rank has its part: its rows of the batch, and its part of
 * the features if a plan splits the layer. */
typedef struct weft_module_pass {
  uint32_t struct_size;
  bool training; /* dropout and statistics are for such passes */
  bool backward;
  int32_t input_count;
  const weft_tensor* inputs;     /* x, in both passes; only read them */
  const weft_tensor* parameters; /* as in weft_module.parameters; only read them */
  int32_t parameter_count;
  int32_t output_count;      /* 0 in forward */
  uint64_t seed;             /* of the pass, as the trainer's */
  int64_t step, micro_batch; /* step: -1 if nothing is trained */
  /* Backward only. */
  const weft_tensor* gradients; /* of the outputs: only read them */
  /* Gradients of the inputs: zeros, to which the function adds. `data` is NULL for an input of integers. */
  const weft_tensor* input_gradients;
  /* Gradients of the parameters, of this rank's rows: zeros, to which the function adds. `data` is NULL if
   * the parameter is not trained. weft sums them over ranks. */
  const weft_tensor* parameter_gradients;
  const weft_tensor* kept; /* what forward left by weft_module_keep, in that order */
  int32_t kept_count;
  void* state; /* weft's own */
} weft_module_pass;

/* A layer by its functions.
 *
 * Rules. Both functions are called in the thread that calls weft_trainer_step (or another function that runs
 * the model), one call at a time for each model. Two models in two threads may call them at the same time.
 * They must not call the trainer or the model. They may run again for the same batch (activation
 * checkpointing), and several times before the first backward (micro-batches): what backward needs belongs
 * into weft_module_keep, and not into `user`.
 *
 * If a function does not return WEFT_OK, the call fails with its status and the text that it wrote into
 * `error`. After each function the ranks exchange one number, so that the ranks of the mesh fail with it at
 * once: in a training pass all of them, in other passes those that share rows. All ranks must have the layer
 * at the same place. */
typedef struct weft_module {
  const char* name; /* the value of "layer" in the recipe; no name of a layer of the library */
  const weft_module_parameter* parameters;
  int32_t parameter_count;
  void* user; /* weft gives it to the functions */
  /* Calls weft_module_output once for each output, and writes all of its elements. */
  weft_status (*forward)(void* user, const weft_module_pass* pass, weft_error* error);
  weft_status (*backward)(void* user, const weft_module_pass* pass, weft_error* error);
  /* Called when nothing of the library uses the layer any more, in any thread; may be NULL. It is called once
   * for each weft_module of a weft_model_create_with_modules, also if that fails. */
  void (*release)(void* user);
} weft_module;
#define WEFT_MODULE_INIT \
  { NULL, NULL, 0, NULL, NULL, NULL, NULL }

/* Makes an output of forward with these extents, f32, and gives its memory in *output, which has the pass's
 * lifetime. On a mesh, a dimension that is cut keeps the extent that the first input has there: dimension 0
 * is this rank's rows. An output has features in its last dimension: if a plan splits the layer, this rank's.
 * Fails with WEFT_BAD_ARGUMENT outside of a forward pass. */
weft_status weft_module_output(const weft_module_pass* pass, int32_t dim_count, const int64_t* extents,
                               weft_tensor* output, weft_error* error);
/* Makes memory, f32, that backward gets in pass->kept. In a pass without backward it ends with the pass.
 * Fails with WEFT_BAD_ARGUMENT outside of a forward pass. */
weft_status weft_module_keep(const weft_module_pass* pass, int32_t dim_count, const int64_t* extents,
                             weft_tensor* kept, weft_error* error);

/* Like weft_model_create, with layers of the program: {"layer": NAME} in the recipe, without other keys, is
 * the one of these names in `modules`. A layer may stand in several places, with parameters of its own in
 * each. The structs are copied; functions and `user` must stay until `release`. Parameters are divided,
 * saved, averaged and trained like all others. A plan (docs/recipes.md, "plan") may split a layer by columns
 * if one of its parameters has a split_dim. On a device other than the host, the first pass fails with
 * WEFT_UNSUPPORTED. */
weft_status weft_model_create_with_modules(const weft_mesh* mesh, weft_compute* compute, const char* recipe,
                                           const char* options, const weft_module* modules,
                                           int32_t module_count, weft_model** model, weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_TRAIN_MODULE_H */
