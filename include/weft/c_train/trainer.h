/* Training a model: the whole of a step, from tokens to new weights. */
#ifndef WEFT_C_TRAIN_TRAINER_H
#define WEFT_C_TRAIN_TRAINER_H

#include "weft/c_train/model.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The optimizer of a model with its state. For one thread at a time, the one that uses the model. Keeps the
 * model. */
typedef struct weft_trainer weft_trainer;

typedef int32_t weft_optimizer;
enum {
  WEFT_ADAMW = 0, /* I. Loshchilov, F. Hutter, "Decoupled Weight Decay Regularization", 2019 */
  WEFT_SGD = 1
};

typedef struct weft_trainer_options {
  uint32_t struct_size;
  weft_optimizer optimizer;
  double beta1, beta2, eps; /* WEFT_ADAMW */
  double weight_decay;      /* of parameters of two dimensions or more, except those of norms */
  double momentum;          /* WEFT_SGD */
  double max_norm;          /* gradients are clipped to this norm; 0: not at all */
  uint64_t seed;            /* of the random numbers in a pass; the same on all ranks */
  /* A step whose norm is not finite leaves the weights as they are, instead of an error. */
  bool skip_non_finite;
  /* Dynamic loss scaling, for layers that compute gradients in f16: the loss is multiplied by this at first,
   * and gradients are divided by it after their reduction. If they are not finite on one rank, all skip
   * the step and halve the scale; after 2000 steps in a row that were not skipped it doubles. 0: none.
   * weft_trainer_save saves the scale. */
  double loss_scale;
  /* 0 to 1: the part of each label's weight in the loss that goes to all entries alike. */
  double label_smoothing;
  /* Averages of the parameters over the steps, of this decay; 0: none. See weft_trainer_swap_averages. */
  double ema_decay;
  bool ema_warm_up; /* the decay grows to that: (1 + n) / (10 + n) in update n, where it is less */
} weft_trainer_options;
#define WEFT_TRAINER_OPTIONS_INIT \
  { sizeof(weft_trainer_options), WEFT_ADAMW, 0.9, 0.95, 1e-8, 0.1, 0, 1, 0, false, 0, 0, 0, false }

/* `options` may be NULL; the same on all ranks. No communication. A model has one trainer at a time that
 * takes steps. */
weft_status weft_trainer_create(weft_model* model, const weft_trainer_options* options,
                                weft_trainer** trainer, weft_error* error);
void weft_trainer_destroy(weft_trainer* trainer);

typedef struct weft_step_result {
  uint32_t struct_size;
  bool skipped;      /* see skip_non_finite, loss_scale */
  int64_t step;      /* its number, from 0 */
  int64_t tokens;    /* with a label, over all ranks */
  double loss;       /* the mean cross-entropy of these, in nats */
  double grad_norm;  /* before clipping */
  double loss_scale; /* of this step; 1: none */
} weft_step_result;
#define WEFT_STEP_RESULT_INIT \
  { sizeof(weft_step_result), false, 0, 0, 0, 0, 0 }

/* Forward, loss, backward, averaging over the data axis, sync over the tensor axis, clip, and one step of the
 * optimizer with learning rate `rate`. Several batches are micro-batches, as many on every rank: their
 * gradients add up to that of one batch of all their rows. `result` may be NULL. Collective over the mesh;
 * blocks until it is done. WEFT_BAD_ARGUMENT on all ranks, before any pass, where the batch of one does not
 * fit, or learning rates differ. (An argument that cannot be read at all, NULL or a result without its
 * initialiser, is an error of that rank alone; the others wait for it until their deadline.) After an error
 * gradients are forgotten; whether weights changed depends on when it came. */
weft_status weft_trainer_step(weft_trainer* trainer, const weft_token_batch* batches, int32_t batch_count,
                              double rate, weft_step_result* result, weft_error* error);

/* A step in two halves, so that a program sees, clips or replaces the gradients between them:
 *
 *   weft_trainer_backward(trainer, &batch, 1, &result, &error);
 *   weft_trainer_gradients(trainer, gradients, room, &count, &error);
 *   weft_clip_grad_norm(gradients, count, 1.0, NULL, &norm, &error);      (weft/c/gradients.h; or anything else)
 *   weft_trainer_update(trainer, rate, &result, &error);
 *
 * The first half: all of weft_trainer_step except clip and update. `result` gets step, tokens and loss.
 * Collective over the mesh; blocks. Errors are those of weft_trainer_step; WEFT_BAD_ARGUMENT also where the
 * gradients of a backward are still there. */
weft_status weft_trainer_backward(weft_trainer* trainer, const weft_token_batch* batches, int32_t batch_count,
                                  weft_step_result* result, weft_error* error);
/* Between the halves: the gradient of each parameter that is trained, in the order of the parameters, the
 * same on all ranks. The gradients are reduced: each is the gradient of the mean over all labels of the
 * step. *count gets their number; where `room` is 0, that alone, and `gradients` may be NULL. name: the
 * parameter's; data: f32, the trainer's memory, in which the program may write what weft_trainer_update then
 * uses: ranks that hold the same elements write the same; layout: the trainer's (weft_layout_destroy leaves
 * it alone); extents and dim_count are not set, as the layout has them. All are good until
 * weft_trainer_update, _discard, _load or _destroy. The list is what weft_grad_norm, weft_clip_grad_norm and
 * weft_check_replicas take (of a model in the host's memory). WEFT_BAD_ARGUMENT without a
 * weft_trainer_backward, and where `room` is too small. */
weft_status weft_trainer_gradients(weft_trainer* trainer, weft_tensor* gradients, int32_t room,
                                   int32_t* count, weft_error* error);
/* The second half: clips to max_norm, if that is not 0, and takes a step of the optimizer. `result`, which
 * may be NULL, is complete: grad_norm is that of the gradients as the program left them. Collective over the
 * mesh; blocks. WEFT_BAD_ARGUMENT without a weft_trainer_backward; on all ranks, where learning rates differ
 * or one is not a finite number of 0 or more. The gradients are forgotten, also after an error. */
weft_status weft_trainer_update(weft_trainer* trainer, double rate, weft_step_result* result,
                                weft_error* error);
/* In place of the second half: forgets the gradients, and no step was taken. Nothing if there are none. No
 * communication: all ranks do so, or none. */
weft_status weft_trainer_discard(weft_trainer* trainer, weft_error* error);
/* How many steps were taken. */
weft_status weft_trainer_steps(const weft_trainer* trainer, int64_t* steps, weft_error* error);

/* Exchanges the parameters and their averages where they lie: with `averages_in` the model computes with the
 * averages, and weft_model_get_parameter and weft_model_save give them; without it all is back, to the same
 * bits. Meanwhile a step, an update and weft_trainer_save are WEFT_BAD_ARGUMENT, the first two on all ranks.
 * WEFT_BAD_ARGUMENT if the trainer has none (ema_decay), and where it is so already. No communication: all
 * ranks do so, or none. */
weft_status weft_trainer_swap_averages(weft_trainer* trainer, bool averages_in, weft_error* error);

/* As weft_model_save and weft_model_load, with the state of the optimizer, averages, and the number of steps.
 * Collective over the mesh; blocks. A checkpoint of a model alone, or of another optimizer, is refused: the
 * error lists the missing tensors. */
weft_status weft_trainer_save(const weft_trainer* trainer, const char* directory, weft_error* error);
weft_status weft_trainer_load(weft_trainer* trainer, const char* directory, weft_error* error);

/* A learning rate that rises linearly to `peak` over the first `warmup` steps, then falls along half a cosine
 * to `floor` at step `total`, and stays there. Steps count from 0. Needs 0 <= warmup < total and 0 <= floor
 * <= peak. */
weft_status weft_cosine_rate(double peak, double floor, int64_t warmup, int64_t total, int64_t step,
                             double* rate, weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_TRAIN_TRAINER_H */
