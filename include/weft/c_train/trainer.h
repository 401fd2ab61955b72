/* Training a model: complete steps, from tokens to new weights. */
#ifndef WEFT_C_TRAIN_TRAINER_H
#define WEFT_C_TRAIN_TRAINER_H

#include "weft/c_train/model.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The optimizer of a model with its state. Only the thread that uses the model may use it. It keeps the
 * model. */
typedef struct weft_trainer weft_trainer;

typedef int32_t weft_optimizer;
enum {
  WEFT_ADAMW = 0, /* I. Loshchilov, F. Hutter, "Decoupled Weight Decay Regularization", 2019 */
  WEFT_SGD = 1,
  WEFT_LION = 2, /* X. Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023; often beta2 0.99 */
  /* A. Defazio et al., "The Road Less Scheduled", 2024: AdamW without a schedule that must know the last
   * step. Use a constant rate after a warm-up, often beta2 0.999; see weft_trainer_swap_evaluation. */
  WEFT_SCHEDULE_FREE_ADAMW = 3,
  /* K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024, often momentum 0.95.
   * Parameters that are no matrices, and those of `adamw_for`, are trained by AdamW. */
  WEFT_MUON = 4
};

/* Parameters with a learning rate or a decay of their own. */
typedef struct weft_parameter_group {
  /* paths of parameters or modules; in a path, * stands for one step. If several groups match a parameter,
   * the last one counts. */
  const char* const* patterns;
  int32_t pattern_count;
  double rate;         /* a factor of the learning rate */
  double weight_decay; /* of all parameters of the group; below 0: as without a group */
} weft_parameter_group;

typedef struct weft_trainer_options {
  uint32_t struct_size;
  weft_optimizer optimizer;
  double beta1, beta2, eps; /* all but WEFT_SGD; WEFT_LION has no eps. In WEFT_MUON: of AdamW */
  double weight_decay;      /* for parameters of two dimensions or more, except those of norms */
  double momentum;          /* WEFT_SGD, WEFT_MUON */
  double max_norm;          /* gradients are clipped to this norm; 0: they are not clipped */
  uint64_t seed;            /* the seed of the random numbers in a pass; the same on all ranks */
  /* If the norm of a step is not finite, the step leaves the weights as they are, instead of failing. */
  bool skip_non_finite;
  /* Dynamic loss scaling, for layers that compute gradients in f16: this is the initial scale, by which the
   * loss is multiplied, and by which gradients are divided after their reduction. If gradients are not finite
   * on one rank, all ranks skip the step and halve the scale; after 2000 steps in a row that were not
   * skipped, the scale doubles. 0: no scaling. weft_trainer_save saves the scale. */
  double loss_scale;
  /* From 0 to 1: the part of each label's weight in the loss that is spread evenly over the vocabulary. */
  double label_smoothing;
  /* The decay of averages of the parameters over the steps; 0: no averages. See
   * weft_trainer_swap_averages. */
  double ema_decay;
  /* the decay grows to ema_decay: update n uses the smaller of ema_decay and (1 + n) / (10 + n) */
  bool ema_warm_up;
  /* WEFT_MUON: patterns as in weft_parameter_group; usually "token_embedding" and "output_head" */
  const char* const* adamw_for;
  const weft_parameter_group* groups;
  int32_t adamw_for_count, group_count;
  int32_t iterations; /* WEFT_MUON: Newton-Schulz iterations, 1 to 100 */
  /* WEFT_MUON: without the gradient of the step itself in the orthogonalised momentum */
  bool without_nesterov;
  /* WEFT_MUON: steps scaled by max(1, rows / columns)^0.5 as in the first paper, instead of 0.2 max(rows,
   * columns)^0.5, which makes them as large as AdamW's (J. Liu et al., "Muon is Scalable for LLM Training",
   * 2025) */
  bool original_scale;
  /* 0 or more: z_loss (log Z)^2 is added to the loss of each label, with Z the sum of e^logit over the
   * vocabulary; see weft_vocab_loss_options. */
  double z_loss;
  /* Which parameters are trained at which step: rules STEP:frozen:PATTERN or STEP:trained:PATTERN, separated
   * by commas ("0:frozen:layers.*,100:trained:layers.3"). The last rule that has begun and matches a
   * parameter counts; patterns are those of weft_parameter_group. A part that is trained for the first time
   * begins with the state of a new optimizer. weft_trainer_save stores the rules; weft_trainer_load refuses
   * a checkpoint with others. NULL: all is trained that the model trains. */
  const char* freeze;
} weft_trainer_options;
#define WEFT_TRAINER_OPTIONS_INIT                                                                         \
  {                                                                                                       \
    sizeof(weft_trainer_options), WEFT_ADAMW, 0.9, 0.95, 1e-8, 0.1, 0, 1, 0, false, 0, 0, 0, false, NULL, \
        NULL, 0, 0, 5, false, false, 0, NULL                                                              \
  }

/* `options` may be NULL; all ranks must give the same. No communication. Only one trainer of a model at a
 * time may take steps. */
weft_status weft_trainer_create(weft_model* model, const weft_trainer_options* options,
                                weft_trainer** trainer, weft_error* error);
/* Like weft_trainer_create, with options as a JSON object, as Trainer::Options (weft/models/from_json.hpp
 * has the keys): {"optimizer": {"name": "adamw", "beta2": 0.99}, "max_norm": 1}. `options` may be NULL. Fails
 * with WEFT_BAD_ARGUMENT for an unknown key, with the nearest known one. */
weft_status weft_trainer_create_from_json(weft_model* model, const char* options, weft_trainer** trainer,
                                          weft_error* error);
void weft_trainer_destroy(weft_trainer* trainer);

typedef struct weft_step_result {
  uint32_t struct_size;
  bool skipped;      /* see skip_non_finite, loss_scale */
  int64_t step;      /* the number of the step, from 0 */
  int64_t tokens;    /* the number of tokens with a label, over all ranks */
  double loss;       /* the mean cross-entropy of these tokens, in nats */
  double grad_norm;  /* before clipping */
  double loss_scale; /* the scale of this step; 1: no scaling */
} weft_step_result;
#define WEFT_STEP_RESULT_INIT \
  { sizeof(weft_step_result), false, 0, 0, 0, 0, 0 }

/* Performs a whole training step: forward, loss, backward, average over the data axis, sync over the tensor
 * axis, clip, and a step of the optimizer with learning rate `rate`. Several batches are micro-batches, the
 * same number on every rank: their gradients add up to the gradient of one batch with all their rows.
 * `result` may be NULL. Collective over the mesh; blocks until it is done. Fails with WEFT_BAD_ARGUMENT on
 * all ranks, before any pass, if the batch of a rank does not fit, or if learning rates differ. (An argument
 * that cannot be read at all, NULL or a result without its initialiser, is an error of that rank only; the
 * others wait for it until their deadline.) After an error the trainer drops the gradients; the weights may
 * or may not have changed. */
weft_status weft_trainer_step(weft_trainer* trainer, const weft_token_batch* batches, int32_t batch_count,
                              double rate, weft_step_result* result, weft_error* error);

/* Like weft_trainer_step, for a model of any recipe. `result->tokens` is the number of elements over which
 * the loss is a mean. */
weft_status weft_trainer_step_batches(weft_trainer* trainer, const weft_batch* batches, int32_t batch_count,
                                      double rate, weft_step_result* result, weft_error* error);

typedef struct weft_evaluation {
  uint32_t struct_size;
  int64_t tokens;    /* the number of elements over which the loss is a mean, over all ranks */
  double loss;       /* the mean of the model's loss over these elements */
  double perplexity; /* e^loss */
} weft_evaluation;
#define WEFT_EVALUATION_INIT \
  { sizeof(weft_evaluation), 0, 0, 0 }

/* The loss of held-out batches: forward passes that keep nothing and draw no random numbers. Nothing of the
 * training changes. Collective over the mesh; blocks. Fails like weft_trainer_step_batches. */
weft_status weft_trainer_evaluate(weft_trainer* trainer, const weft_batch* batches, int32_t batch_count,
                                  weft_evaluation* evaluation, weft_error* error);

/* A step in two halves, so that a program sees, clips or replaces the gradients between them:
 *
 *   weft_trainer_backward(trainer, &batch, 1, &result, &error);
 *   weft_trainer_gradients(trainer, gradients, room, &count, &error);
 *   weft_clip_grad_norm(gradients, count, 1.0, NULL, &norm, &error);      (weft/c/gradients.h; or anything else)
 *   weft_trainer_update(trainer, rate, &result, &error);
 *
 * weft_trainer_backward is the first half: all of weft_trainer_step except clip and update. `result` gets
 * step, tokens and loss. Collective over the mesh; blocks. Fails like weft_trainer_step, and with
 * WEFT_BAD_ARGUMENT if the trainer still has the gradients of an earlier weft_trainer_backward. */
weft_status weft_trainer_backward(weft_trainer* trainer, const weft_token_batch* batches, int32_t batch_count,
                                  weft_step_result* result, weft_error* error);
/* Like weft_trainer_backward, for a model of any recipe. */
weft_status weft_trainer_backward_batches(weft_trainer* trainer, const weft_batch* batches,
                                          int32_t batch_count, weft_step_result* result, weft_error* error);
/* Between the two halves, weft_trainer_gradients gives the gradient of each trained parameter, in the order
 * of the parameters, which is the same on all ranks. The gradients are reduced: each is the gradient of the
 * mean over all labels of the step. **count gets the number of gradients; if `room` is 0, the function gives
 * only *count, and `gradients` may be NULL. In each entry, `name` is the parameter's name. `data` is f32, in
 * the trainer's memory: the program may write new values into it, which weft_trainer_update then uses; ranks
 * that hold the same elements must write the same values. `layout` belongs to the trainer
 * (weft_layout_destroy leaves it alone). `extents` and `dim_count` are not set, because the layout has them.
 * The entries are valid until weft_trainer_update, _discard, _load or _destroy. For a model in host memory,
 * weft_grad_norm, weft_clip_grad_norm and weft_check_replicas accept this list. Fails with WEFT_BAD_ARGUMENT
 * if weft_trainer_backward was not called before, or if `room` is too small. */
weft_status weft_trainer_gradients(weft_trainer* trainer, weft_tensor* gradients, int32_t room,
                                   int32_t* count, weft_error* error);
/* The second half of a step: clips to max_norm, if that is not 0, and takes a step of the optimizer. All
 * fields of `result`, which may be NULL, are set: grad_norm is the norm of the gradients as the program left
 * them. Collective over the mesh; blocks. Fails with WEFT_BAD_ARGUMENT if weft_trainer_backward was not
 * called before, and on all ranks if learning rates differ, or one is negative or not finite. The trainer
 * drops the gradients, even after an error. */
weft_status weft_trainer_update(weft_trainer* trainer, double rate, weft_step_result* result,
                                weft_error* error);
/* Replaces the second half of a step: drops the gradients without a step. Does nothing if there are none. No
 * communication, but either all ranks must call it or none. */
weft_status weft_trainer_discard(weft_trainer* trainer, weft_error* error);
/* The number of steps taken. */
weft_status weft_trainer_steps(const weft_trainer* trainer, int64_t* steps, weft_error* error);

/* Exchanges the parameters and their averages in place: with `averages_in` true the model computes with the
 * averages, and weft_model_get_parameter and weft_model_save give the averages. A call with `averages_in`
 * false restores everything, to the same bits. Between the two calls a step, an update and weft_trainer_save
 * fail with WEFT_BAD_ARGUMENT, the first two on all ranks. The function fails with WEFT_BAD_ARGUMENT if the
 * trainer has no averages (ema_decay), or if the model already computes with what `averages_in` requests. No
 * communication, but either all ranks must call it or none. */
weft_status weft_trainer_swap_averages(weft_trainer* trainer, bool averages_in, weft_error* error);

/* For WEFT_SCHEDULE_FREE_ADAMW, which trains other values than those to evaluate and to export: with
 * `evaluation_in` true the parameters become the values to evaluate; a call with false restores the trained
 * values, to the same bits. For other optimizers the parameters stay as they are. Between the two calls a
 * step, an update and weft_trainer_save fail with WEFT_BAD_ARGUMENT, the first two on all ranks;
 * weft_model_save saves the values to evaluate. Fails with WEFT_BAD_ARGUMENT if the parameters already are
 * what `evaluation_in` requests. No communication, but either all ranks must call it or none. */
weft_status weft_trainer_swap_evaluation(weft_trainer* trainer, bool evaluation_in, weft_error* error);

/* Like weft_model_save and weft_model_load, but including the state of the optimizer, the averages, the
 * number of steps. Collective over the mesh; blocks. Checkpoints of weft_trainer_train also hold the count
 * for its early end, which weft_trainer_load keeps for the next weft_trainer_train. weft_trainer_load reads
 * the newest whole checkpoint: if a newer one is broken, rank 0 logs a warning. It refuses a checkpoint of a
 * model only, or of another optimizer: the error lists the missing tensors. */
weft_status weft_trainer_save(const weft_trainer* trainer, const char* directory, weft_error* error);
weft_status weft_trainer_load(weft_trainer* trainer, const char* directory, weft_error* error);

/* Why a training has ended. */
typedef int32_t weft_training_ended;
enum {
  WEFT_ENDED_STEPS = 0,   /* the last step was taken */
  WEFT_ENDED_STOP = 1,    /* weft_training_plan.stop asked for it */
  WEFT_ENDED_PATIENCE = 2 /* the loss of evaluations did not fall any more */
};

typedef struct weft_training_end {
  uint32_t struct_size;
  weft_training_ended why;
  int64_t steps;    /* of the trainer */
  int32_t reason;   /* the largest number that `stop` gave on any rank; 0: none */
  bool evaluated;   /* whether there was an evaluation */
  double best_loss; /* the lowest of all evaluations, if there was one */
} weft_training_end;
#define WEFT_TRAINING_END_INIT \
  { sizeof(weft_training_end), WEFT_ENDED_STEPS, 0, 0, false, 0 }

/* The work of weft_trainer_train. The numbers and `folder` must be the same on all ranks. Each function is
 * called on every rank, with `data`; those that are NULL, except `step`, are not called. A function that
 * returns another status than WEFT_OK ends the training on all ranks: weft_trainer_train fails on this rank
 * with that status and the error's text, and on the others with WEFT_BAD_ARGUMENT. */
typedef struct weft_training_plan {
  uint32_t struct_size;
  int32_t keep; /* the newest so many checkpoints are kept; 0: all */
  void* data;
  int64_t steps; /* ends when the trainer has taken so many steps */
  /* Takes the step with this number: calls weft_trainer_step or weft_trainer_step_batches, or a backward and
   * weft_trainer_update. `result` has its initialiser, for that call. */
  weft_status (*step)(void* data, int64_t step, weft_step_result* result, weft_error* error);
  int64_t evaluate_every; /* evaluates after each step whose number is a multiple; 0: never */
  /* Calls weft_trainer_evaluate once. `evaluation` has its initialiser. */
  weft_status (*evaluate)(void* data, weft_evaluation* evaluation, weft_error* error);
  /* Ends after so many evaluations in a row whose loss was not at least `least_gain` below the lowest before;
   * 0: never. Checkpoints hold the count. */
  int64_t patience;
  double least_gain;
  /* Asked after each step: a number above 0 in *reason, which is 0 before, on any rank ends the training on
   * all ranks after this step. */
  weft_status (*stop)(void* data, int32_t* reason, weft_error* error);
  const char* folder;    /* of checkpoints; NULL: none */
  int64_t save_every;    /* saves after each step whose number is a multiple; 0: not by steps */
  double save_seconds;   /* saves if so many seconds have passed since the last checkpoint; 0: not by time */
  bool not_at_end;       /* does not save after the last step */
  bool wait_for_saves;   /* writes checkpoints at once, and not in the background */
  bool no_replica_check; /* does not compare the replicas of all parameters before each checkpoint */
  weft_status (*on_begin)(void* data, weft_error* error);
  weft_status (*on_step)(void* data, const weft_step_result* result, weft_error* error);
  weft_status (*on_evaluation)(void* data, const weft_evaluation* evaluation, weft_error* error);
  /* when the checkpoint of this step is written; in the background: when its writing has begun */
  weft_status (*on_checkpoint)(void* data, int64_t step, weft_error* error);
  /* when all checkpoints are written */
  weft_status (*on_end)(void* data, const weft_training_end* end, weft_error* error);
} weft_training_plan;
#define WEFT_TRAINING_PLAN_INIT                                                                         \
  {                                                                                                     \
    sizeof(weft_training_plan), 0, NULL, 0, NULL, 0, NULL, 0, 0, NULL, NULL, 0, 0, false, false, false, \
        NULL, NULL, NULL, NULL, NULL                                                                    \
  }

/* A whole training: steps until the plan ends them, with evaluations, checkpoints and hooks. After each step
 * the ranks exchange a few numbers, so that they end, and save, after the same step. A training that goes on
 * after weft_trainer_load counts evaluations on from there. `end` may be NULL. Collective over the mesh;
 * blocks. Fails with WEFT_BAD_ARGUMENT on all ranks if the plan differs between ranks or cannot be followed,
 * with the errors of the plan's functions, of weft_check_replicas and of weft_trainer_save. */
weft_status weft_trainer_train(weft_trainer* trainer, const weft_training_plan* plan, weft_training_end* end,
                               weft_error* error);

/* Gives a learning rate that rises linearly to `peak` over the first `warmup` steps, then falls along half a
 * cosine to `floor` at step `total`, and stays there. Steps count from 0. Needs 0 <= warmup < total and 0 <=
 * floor <= peak. */
weft_status weft_cosine_rate(double peak, double floor, int64_t warmup, int64_t total, int64_t step,
                             double* rate, weft_error* error);

/* How a learning rate moves after its warm-up. NONE: the peak at every step, without a warm-up. CONSTANT:
 * stays at the peak. LINEAR, COSINE: falls along a straight line or half a cosine. WSD, warm-up, stable,
 * decay: stays at the peak and falls in the last `decay` steps (arXiv:2404.06395, section 4). REX: falls
 * slowly at first (arXiv:2107.04197). weft/nn/schedule.hpp has the formulas. */
typedef int32_t weft_schedule_form;
enum {
  WEFT_SCHEDULE_NONE = 0,
  WEFT_SCHEDULE_CONSTANT = 1,
  WEFT_SCHEDULE_LINEAR = 2,
  WEFT_SCHEDULE_COSINE = 3,
  WEFT_SCHEDULE_WSD = 4,
  WEFT_SCHEDULE_REX = 5
};
/* The curve of the decay of WEFT_SCHEDULE_WSD. */
typedef int32_t weft_decay_shape;
enum {
  WEFT_DECAY_LINEAR = 0,
  WEFT_DECAY_COSINE = 1,
  WEFT_DECAY_ONE_MINUS_SQRT = 2 /* 1 - sqrt(d), arXiv:2405.18392 */
};

typedef struct weft_schedule {
  uint32_t struct_size;
  weft_schedule_form form;
  double peak, floor;     /* NONE and CONSTANT do not use `floor` */
  int64_t warmup;         /* steps in which the rate rises linearly to `peak`; NONE: 0 */
  int64_t total;          /* the step from which the rate is `floor`; NONE and CONSTANT do not use it */
  int64_t decay;          /* WSD: the steps of the decay, which end at `total`; others: 0 */
  weft_decay_shape shape; /* WSD; others: WEFT_DECAY_LINEAR */
} weft_schedule;
#define WEFT_SCHEDULE_INIT \
  { sizeof(weft_schedule), WEFT_SCHEDULE_COSINE, 1e-3, 0, 0, 1, 0, WEFT_DECAY_LINEAR }

/* Gives the learning rate of a step; steps count from 0. Fails with WEFT_BAD_ARGUMENT, which names the field,
 * unless 0 <= floor <= peak, 0 <= warmup < total (NONE: warmup = 0; CONSTANT: 0 <= warmup), and for WSD 1 <=
 * decay <= total - warmup. */
weft_status weft_schedule_rate(const weft_schedule* schedule, int64_t step, double* rate, weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_TRAIN_TRAINER_H */
