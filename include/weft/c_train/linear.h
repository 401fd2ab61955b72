/* Column- and row-parallel linear layers on the caller's memory (Shoeybi et al., Megatron-LM,
 * arXiv:1909.08053): for programs that have layers of their own. */
#ifndef WEFT_C_TRAIN_LINEAR_H
#define WEFT_C_TRAIN_LINEAR_H

#include "weft/c_train/compute.h"

#ifdef __cplusplus
extern "C" {
#endif

/* rows x columns elements, row by row and without gaps. The memory is the caller's, as for a weft_buffer. */
typedef struct weft_matrix {
  void* data; /* may be NULL if there are no elements */
  int64_t rows, columns;
  weft_dtype dtype;
  weft_device device; /* the device of the weft_compute, whose memory the group moves */
} weft_matrix;

/* Make *matrix refer to the elements of a DLPack tensor, without a copy: the last dimension becomes the
 * columns, all others together the rows. For the rest they are like weft_buffer_from_dltensor,
 * weft_buffer_from_dlpack and weft_buffer_from_dlpack_versioned (weft/c/dlpack.h): weft calls no deleter, a
 * strided tensor gives WEFT_LAYOUT, and a read-only tensor is refused if `writes` is true. They fail with
 * WEFT_BAD_ARGUMENT if the tensor has no dimensions. Any thread may call them. For biases, which are vectors,
 * use weft_buffer_from_dltensor. */
weft_status weft_matrix_from_dltensor(const void* tensor, weft_matrix* matrix, weft_error* error);
weft_status weft_matrix_from_dlpack(const struct DLManagedTensor* managed, weft_matrix* matrix,
                                    weft_error* error);
weft_status weft_matrix_from_dlpack_versioned(const struct DLManagedTensorVersioned* managed, bool writes,
                                              weft_matrix* matrix, weft_error* error);

/* All ranks of the group must give the same options, in forward and in backward. */
typedef struct weft_linear_options {
  uint32_t struct_size;
  /* For the column layer only: on every rank, y, and dy in backward, have all features: (tokens, out). weft
   * gathers y; each rank uses only its own features of dy, so nothing is sent for dy. `out` need not be a
   * multiple of n: the first out % n ranks have one feature more. */
  bool gather_output;
  /* Sequence parallel (Korthikanti et al., arXiv:2205.05198): the activations outside a pair of a column
   * layer and a row layer are divided over the ranks along the sequence. x and dx of the column layer, and y
   * and dy of the row layer, have only this rank's part of the rows. The column layer all-gathers x, and the
   * row layer reduce-scatters y, instead of their all-reduces. The first `length % n` ranks have one position
   * more, and a rank may have none. */
  bool divide_sequence;
  /* If the sequence is divided: the number of sequences in the rows. The sequences follow one another,
   * (batch, sequence), and each is divided. 1: the rows are one sequence. 1 is also right for the order of
   * Megatron-LM, (sequence, batch), if the number of ranks divides the sequence. */
  int64_t batch;
} weft_linear_options;
#define WEFT_LINEAR_OPTIONS_INIT \
  { sizeof(weft_linear_options), false, false, 1 }

/* Rules for all functions below.
 *
 * A layer of `in` and `out` features is divided over the n ranks of `group` (NULL: one rank): the group of
 * the tensor axis of a mesh, or any other. Matrices are this rank's parts. Their rows are tokens, but the
 * rows of w are features. `options` may be NULL: then no output is gathered and no sequence is divided.
 *
 * x, w and dy have one dtype, WEFT_F32 or WEFT_BF16. Each of the other tensors is WEFT_F32 or of that dtype.
 * Each rank computes products and sums in f32, and rounds once when it writes a result. Across ranks, results
 * are summed in the dtype of the reduced tensor (y or dx); a bias is added to that sum.
 *
 * If a function communicates, all ranks of `group` must call it, with the same sizes and dtypes. A function
 * blocks until it is done, and then does not use the memory any more. It fails with WEFT_BAD_ARGUMENT, before
 * it writes or sends anything, if sizes do not fit; the text names the matrix. Only the rank with the wrong
 * sizes gets this error; the others wait for it until their deadline. Outputs must not overlap any other
 * argument. After any other error the contents of the outputs are undefined.
 *
 * The forward pass of a column layer: y = x w^T + b. Each rank computes its own features of y. Without
 * options there is no communication. x: (tokens, in), the same on all ranks; w: (out/n, in); b: out/n
 * elements, or NULL; y: (tokens, out/n). */
weft_status weft_column_linear_forward(weft_compute* compute, weft_group* group, const weft_matrix* x,
                                       const weft_matrix* w, const weft_buffer* b, const weft_matrix* y,
                                       const weft_linear_options* options, weft_error* error);
/* The backward pass of a column layer. dx = the sum over ranks of dy w; this takes one all-reduce, or a
 * reduce-scatter if the sequence is divided. dw = dy^T x and db = the sum of dy's rows are this rank's own,
 * and are computed during that communication. If the sequence is divided, x is gathered once more. Each of
 * dx, dw and db may be NULL if it is not wanted; `dx` must be NULL on all ranks or on none, and if the
 * sequence is divided, this also holds for `dw`. dx is overwritten. If `accumulate` is true, the results are
 * added to dw and db; otherwise dw and db are overwritten. dy: (tokens, out/n); x, w: as in forward; dx: like
 * x; dw: like w; db: out/n elements. */
weft_status weft_column_linear_backward(weft_compute* compute, weft_group* group, const weft_matrix* dy,
                                        const weft_matrix* x, const weft_matrix* w, const weft_matrix* dx,
                                        const weft_matrix* dw, const weft_buffer* db, bool accumulate,
                                        const weft_linear_options* options, weft_error* error);
/* The forward pass of a row layer: y = the sum over ranks of x w^T; b is added once, after the sum. This
 * takes one all-reduce, or a reduce-scatter if the sequence is divided. x: (tokens, in/n), this rank's
 * features; w: (out, in/n); b: out elements, the same on all ranks, or NULL; y: (tokens, out). */
weft_status weft_row_linear_forward(weft_compute* compute, weft_group* group, const weft_matrix* x,
                                    const weft_matrix* w, const weft_buffer* b, const weft_matrix* y,
                                    const weft_linear_options* options, weft_error* error);
/* The backward pass of a row layer: dx = dy w, dw = dy^T x, db = the sum of dy's rows; db is the same on all
 * ranks and is not scaled. No communication, except one all-gather of dy if the sequence is divided. The
 * rules of the column layer for NULL arguments and `accumulate` hold here, too. dy: (tokens, out), the same
 * on all ranks; dx: (tokens, in/n); dw: like w; db: out elements. */
weft_status weft_row_linear_backward(weft_compute* compute, weft_group* group, const weft_matrix* dy,
                                     const weft_matrix* x, const weft_matrix* w, const weft_matrix* dx,
                                     const weft_matrix* dw, const weft_buffer* db, bool accumulate,
                                     const weft_linear_options* options, weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_TRAIN_LINEAR_H */
