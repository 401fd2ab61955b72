/* Losses between elements and their targets, on the caller's memory. */
#ifndef WEFT_C_TRAIN_LOSS_H
#define WEFT_C_TRAIN_LOSS_H

#include "weft/c_train/compute.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct weft_element_loss_options {
  uint32_t struct_size;
  int64_t count; /* the number of elements of the whole batch, over all ranks; more than 0 */
  double scale;  /* the gradient of the loss: a factor for dy only */
} weft_element_loss_options;
#define WEFT_ELEMENT_LOSS_OPTIONS_INIT \
  { sizeof(weft_element_loss_options), 0, 1.0 }

/* y and target are WEFT_F32 or WEFT_BF16, with the same number of elements. They may be split over ranks in
 * any way: each rank passes the elements that it has. There is no communication: `loss` is this rank's part,
 * and the sum over the ranks is the total loss. dy: the gradient with regard to y; NULL if it is not wanted;
 * it may be y's memory if it has the same dtype.
 *
 * loss = the sum of (y - target)^2, divided by options->count. */
weft_status weft_mean_squared_error(weft_compute* compute, const weft_buffer* y, const weft_buffer* target,
                                    const weft_element_loss_options* options, const weft_buffer* dy,
                                    double* loss, weft_error* error);
/* loss = the sum of -target log p - (1 - target) log(1 - p), with p = 1 / (1 + e^-y), divided by
 * options->count: y are logits. A target that is not from 0 to 1 gives WEFT_BAD_ARGUMENT. */
weft_status weft_binary_cross_entropy(weft_compute* compute, const weft_buffer* y, const weft_buffer* target,
                                      const weft_element_loss_options* options, const weft_buffer* dy,
                                      double* loss, weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_TRAIN_LOSS_H */
