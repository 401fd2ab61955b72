/* Embedding and cross-entropy with the vocabulary split over ranks, on the caller's memory (Shoeybi et al.,
 * Megatron-LM, arXiv:1909.08053, section 3). */
#ifndef WEFT_C_TRAIN_VOCAB_H
#define WEFT_C_TRAIN_VOCAB_H

#include "weft/c_train/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rules of all of these functions, in addition to those of weft/c_train/linear.h.
 *
 * The n ranks of `group` (NULL: one rank) hold a vocabulary of `vocab` entries in parts, in the order of the
 * ranks: the first vocab % n ranks hold one more than the rest; a part may be empty. `tokens` and `labels`
 * are WEFT_I64, the same on all ranks; every matrix of tokens has as many rows. Tensors that are looked up,
 * multiplied or written are WEFT_F32 or WEFT_BF16. A token or a label that the vocabulary does not have is
 * WEFT_BAD_ARGUMENT, before anything is sent, on all ranks, and the text has its position and its value.
 *
 * y = for each token its row of the whole table, on every rank: one all-reduce, and before it an all-gather
 * of 128 bytes, in which ranks compare their tokens as they do the labels of the loss below. Without `reduce`
 * y is this rank's contribution (zeros for tokens of other parts) and nothing is sent, for callers that
 * reduce-scatter it themselves. w: (part, dim); y: (tokens, dim). */
weft_status weft_vocab_embedding_forward(weft_compute* compute, weft_group* group, int64_t vocab,
                                         const weft_buffer* tokens, const weft_matrix* w,
                                         const weft_matrix* y, bool reduce, weft_error* error);
/* dw = the rows of dy, added up by the token that they are for; added to dw where `accumulate`. No
 * communication. dy: (tokens, dim), the same on all ranks; dw: as w. */
weft_status weft_vocab_embedding_backward(weft_compute* compute, weft_group* group, int64_t vocab,
                                          const weft_buffer* tokens, const weft_matrix* dy,
                                          const weft_matrix* dw, bool accumulate, weft_error* error);

typedef struct weft_vocab_loss_options {
  uint32_t struct_size;
  int64_t vocab; /* entries of the whole */
  int64_t valid; /* the number of labels that count, of the whole batch, on whatever ranks; more than 0 */
  double label_smoothing; /* 0 to 1: the part of each token's weight that goes to all entries alike */
  double scale;           /* of dlogits alone: the gradient of the loss */
} weft_vocab_loss_options;
#define WEFT_VOCAB_LOSS_OPTIONS_INIT \
  { sizeof(weft_vocab_loss_options), 0, 0, 0.0, 1.0 }

/* loss = the sum over tokens of -log softmax(logits)[label] (smoothed), divided by `valid`; the same on all
 * ranks. Labels of -100 (WEFT_IGNORED) do not count. dlogits: its gradient with regard to this rank's logits;
 * NULL: not wanted. Ranks send four f64 for each token by one all-gather, and never a logit; dlogits costs no
 * communication. Before it, in an all-gather of 128 bytes, they compare the options and, on the host, the
 * labels: WEFT_MISMATCH on all ranks where one gives others. Sizes, options and labels that are wrong on one
 * rank alone are an error of the same code on all ranks, with its text. logits: (tokens, part); dlogits: as
 * logits, may be the same memory where it has the same dtype. */
weft_status weft_vocab_cross_entropy(weft_compute* compute, weft_group* group, const weft_matrix* logits,
                                     const weft_buffer* labels, const weft_vocab_loss_options* options,
                                     const weft_matrix* dlogits, double* loss, weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_TRAIN_VOCAB_H */
