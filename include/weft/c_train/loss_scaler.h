/* Dynamic loss scaling of a program's own gradients, and conversion of elements between dtypes: for programs
 * that compute in f16 or bf16 and keep masters in f32. (A weft_trainer scales by itself:
 * weft_trainer_options.loss_scale.) */
#ifndef WEFT_C_TRAIN_LOSS_SCALER_H
#define WEFT_C_TRAIN_LOSS_SCALER_H

#include "weft/c_train/compute.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Keeps gradients that are computed in f16 from vanishing, by the rule of P. Micikevicius et al., "Mixed
 * Precision Training", 2018, and of torch.amp.GradScaler: the program multiplies the loss by a scale, the
 * scaler divides the gradients by this scale after their reduction, and if gradients overflowed on any rank,
 * all ranks skip the step.
 *
 *   for each step:
 *     weft_loss_scaler_scale(scaler, &scale, &error);            backward of loss x scale; average the gradients
 *     weft_loss_scaler_unscale(scaler, gradients, n, mesh, NULL, &finite, &error);
 *     if (finite) weft_clip_grad_norm(...), a step of the optimizer
 *     weft_loss_scaler_update(scaler, &error);
 *
 * Each rank has its own scaler, which one thread at a time may use; it needs no context. */
typedef struct weft_loss_scaler weft_loss_scaler;

typedef struct weft_loss_scaler_options {
  uint32_t struct_size;
  double scale; /* the initial scale */
  /* The scale is multiplied by this factor, 1 or more, after `interval` steps in a row that were not skipped.
   * The scale never grows beyond the range of f32. */
  double growth;
  double backoff;   /* the scale's factor after a skipped step: more than 0, and less than 1 */
  int64_t interval; /* 1 or more */
  /* If gradients are not finite at this scale or a smaller one, weft_loss_scaler_update fails. */
  double least;
} weft_loss_scaler_options;
#define WEFT_LOSS_SCALER_OPTIONS_INIT \
  { sizeof(weft_loss_scaler_options), 65536, 2, 0.5, 2000, 1.0 / 16384 }

/* `options` may be NULL; all ranks must give the same. No communication. */
weft_status weft_loss_scaler_create(const weft_loss_scaler_options* options, weft_loss_scaler** scaler,
                                    weft_error* error);
void weft_loss_scaler_destroy(weft_loss_scaler* scaler);

/* Sets *scale to the factor by which the program must multiply the loss, or the gradient of the loss with
 * which it starts backward. */
weft_status weft_loss_scaler_scale(const weft_loss_scaler* scaler, double* scale, weft_error* error);

/* Sets *finite to whether every element of all gradients is finite on all ranks of `mesh`, which must contain
 * all ranks that step together; the result is the same on all of them. If *finite is true, the function
 * divides the gradients by the scale, in place; otherwise it leaves them as they are, and the program must
 * skip the step. This takes one small collective over `mesh`; blocks. Gradients are f64, f32 or bf16, as
 * weft/c/gradients.h says, and may differ from rank to rank; `gradients` may be NULL if `count` is 0.
 * `compute`: the weft_compute whose threads or device does the work; NULL: this thread does it, on the host.
 *
 * A program may unscale several lists (of two optimizers, for example) one by one before the update: each
 * result is for that list only, and the scale falls if any list was not finite. Unscale each list only once
 * before each update: a second call divides again.
 *
 * Fails with WEFT_MISMATCH on all ranks if scales differ: `loss_scaler: the scale is 65536 after 3 good steps
 * on dp rank 0, but 32768 after 0 on dp rank 1`. Fails with WEFT_BAD_ARGUMENT for gradients of f16, because
 * their small elements would vanish: convert them to f32 first (weft_convert). A mistake in the gradients of
 * one rank is an error of the same code on all ranks. */
weft_status weft_loss_scaler_unscale(weft_loss_scaler* scaler, const weft_tensor* gradients, int32_t count,
                                     const weft_mesh* mesh, weft_compute* compute, bool* finite,
                                     weft_error* error);
/* Adjusts the scale. Call it after each step, whether the step was taken or skipped. No communication. Fails
 * with WEFT_BAD_ARGUMENT if weft_loss_scaler_unscale was not called since the last update. Fails on all
 * ranks, and leaves the scale as it was, if gradients are not finite at options.least. */
weft_status weft_loss_scaler_update(weft_loss_scaler* scaler, weft_error* error);
/* Forgets the result of weft_loss_scaler_unscale; the scale stays. Call it in place of the update if the
 * program discards the gradients and computes them again. */
weft_status weft_loss_scaler_discard(weft_loss_scaler* scaler, weft_error* error);

/* Gives the state of the scaler as a text, for example for a weft_checkpoint_string. A resumed run that
 * restores this state continues as if it had not stopped. The caller destroys the text. */
weft_status weft_loss_scaler_state(const weft_loss_scaler* scaler, weft_text** text, weft_error* error);
/* Restores the state from a text of weft_loss_scaler_state, exactly. Fails with WEFT_BAD_ARGUMENT if `text`
 * is no such text, and then leaves the scaler unchanged. */
weft_status weft_loss_scaler_set_state(weft_loss_scaler* scaler, const char* text, weft_error* error);

/* out = in, each element rounded once to the dtype of `out`, to nearest even; values beyond its range become
 * infinite, and a NaN stays a NaN. Converts between any two of f64, f32, bf16 and f16 in host memory, and
 * between WEFT_F32 and WEFT_BF16 on a device. If both have one dtype, it copies. Both buffers have the same
 * number of elements, do not overlap, and are on the device of `compute`. The result has the same bits with
 * any number of threads. Blocks until it is done.
 *
 *   weft_convert(compute, &masters, &weights, &error);         f32 to bf16: what layers read
 *   weft_convert(compute, &half_gradient, &gradient, &error);  f16 to f32: exact */
weft_status weft_convert(weft_compute* compute, const weft_buffer* in, const weft_buffer* out,
                         weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_TRAIN_LOSS_SCALER_H */
