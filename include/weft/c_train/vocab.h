/* Embedding and cross-entropy with the vocabulary split over ranks, on the caller's memory (Shoeybi et al.,
 * Megatron-LM, arXiv:1909.08053, section 3). */
#ifndef WEFT_C_TRAIN_VOCAB_H
#define WEFT_C_TRAIN_VOCAB_H

#include "weft/c_train/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rules for all functions of this header, in addition to those of weft/c_train/linear.h.
 *
 * The n ranks of `group` (NULL: one rank) hold a vocabulary of `vocab` entries in parts, in the order of the
 * ranks: the first vocab % n ranks hold one entry more than the others; a part may be empty. `tokens` and
 * `labels` are WEFT_I64, the same on all ranks. A matrix of tokens has one row for each token. Tensors that
 * are looked up, multiplied or written are WEFT_F32 or WEFT_BF16. If the vocabulary does not have a token or
 * a label, the function fails with WEFT_BAD_ARGUMENT on all ranks, before anything is sent; the text has the
 * position and the value.
 *
 * y = for each token its row of the whole table, on every rank. First the ranks compare their tokens in an
 * all-gather of 128 bytes, as weft_vocab_cross_entropy compares labels; then they make one all-reduce. If
 * `reduce` is false, y is this rank's contribution (zeros for tokens of other parts) and nothing is sent, for
 * callers that reduce-scatter y themselves. w: (part, dim); y: (tokens, dim). */
weft_status weft_vocab_embedding_forward(weft_compute* compute, weft_group* group, int64_t vocab,
                                         const weft_buffer* tokens, const weft_matrix* w,
                                         const weft_matrix* y, bool reduce, weft_error* error);
/* For each token of this rank's part, dw = the sum of the rows of dy with that token. The sums are added to
 * dw if `accumulate` is true. No communication. dy: (tokens, dim), the same on all ranks; dw: like w. */
weft_status weft_vocab_embedding_backward(weft_compute* compute, weft_group* group, int64_t vocab,
                                          const weft_buffer* tokens, const weft_matrix* dy,
                                          const weft_matrix* dw, bool accumulate, weft_error* error);

typedef struct weft_vocab_loss_options {
  uint32_t struct_size;
  int64_t vocab; /* entries of the whole vocabulary */
  /* the number of labels that count in the whole batch, over all ranks; more than 0 */
  int64_t valid;
  /* from 0 to 1: the part of each token's weight that is spread evenly over all entries */
  double label_smoothing;
  double scale; /* the gradient of the loss: a factor for dlogits only */
  /* 0 or more: z_loss (log Z)^2 is added to each token's term, with Z the sum of e^logit over the whole
   * vocabulary (PaLM, arXiv:2204.02311, section 5) */
  double z_loss;
} weft_vocab_loss_options;
#define WEFT_VOCAB_LOSS_OPTIONS_INIT \
  { sizeof(weft_vocab_loss_options), 0, 0, 0.0, 1.0, 0.0 }

/* loss = the sum over tokens of -log softmax(logits)[label] (smoothed), divided by `valid`; the same on all
 * ranks. Labels of -100 (WEFT_IGNORED) do not count. dlogits: the gradient of the loss with regard to this
 * rank's logits; NULL if it is not wanted. Ranks send four f64 for each token in one all-gather, and never
 * send a logit; dlogits costs no communication. Before that, ranks compare the options and, on the host, the
 * labels in an all-gather of 128 bytes: if these differ, all ranks fail with WEFT_MISMATCH. If sizes, options
 * or labels are wrong on one rank only, all ranks fail with the same code and the text of that rank. logits:
 * (tokens, part); dlogits: like logits; it may be the same memory if it has the same dtype. */
weft_status weft_vocab_cross_entropy(weft_compute* compute, weft_group* group, const weft_matrix* logits,
                                     const weft_buffer* labels, const weft_vocab_loss_options* options,
                                     const weft_matrix* dlogits, double* loss, weft_error* error);

/* The loss of weft_vocab_cross_entropy for logits = x w^T, computed for `chunk` tokens at a time (1 or more):
 * the logits of a chunk become their own gradient, then a part of dx and of dw, and are dropped. So a rank
 * never has more than `chunk` rows of logits. dx has the same bits as with all logits at once; the loss and
 * dw are sums over the chunks. dx and dw may be NULL: not wanted; all ranks must want the same. If
 * `accumulate` is true, the result is added to dw. Each chunk costs one all-gather of four f64 for each
 * token; dx costs one all-reduce at the end. Fails like weft_vocab_cross_entropy; ranks compare `chunk`, too.
 * x: (tokens, dim), the same on all ranks; w: (part, dim), with the dtype of x; dx and dw: like x and w, f32
 * or the dtype of x. */
weft_status weft_vocab_linear_cross_entropy(weft_compute* compute, weft_group* group, const weft_matrix* x,
                                            const weft_matrix* w, const weft_buffer* labels,
                                            const weft_vocab_loss_options* options, int64_t chunk,
                                            const weft_matrix* dx, const weft_matrix* dw, bool accumulate,
                                            double* loss, weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_TRAIN_VOCAB_H */
