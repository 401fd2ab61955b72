/* Column- and row-parallel linear layers on the caller's memory (Shoeybi et al., Megatron-LM,
 * arXiv:1909.08053): for programs that have layers of their own. */
#ifndef WEFT_C_TRAIN_LINEAR_H
#define WEFT_C_TRAIN_LINEAR_H

#include "weft/c_train/compute.h"

#ifdef __cplusplus
extern "C" {
#endif

/* rows x columns elements, row by row and without gaps. The caller's, as a weft_buffer is. */
typedef struct weft_matrix {
  void* data; /* may be NULL if there are no elements */
  int64_t rows, columns;
  weft_dtype dtype;
  weft_device device; /* of the weft_compute, and of what the group moves */
} weft_matrix;

/* The elements of a tensor of DLPack as they lie, in *matrix: the last dimension as columns, all others
 * together as rows. For the rest as weft_buffer_from_dltensor, weft_buffer_from_dlpack and
 * weft_buffer_from_dlpack_versioned (weft/c/dlpack.h): no copy, no deleter is called, a strided tensor is
 * WEFT_LAYOUT, and a read-only one is refused if `writes`. WEFT_BAD_ARGUMENT for a tensor without dimensions.
 * Any thread. Biases are vectors: weft_buffer_from_dltensor. */
weft_status weft_matrix_from_dltensor(const void* tensor, weft_matrix* matrix, weft_error* error);
weft_status weft_matrix_from_dlpack(const struct DLManagedTensor* managed, weft_matrix* matrix,
                                    weft_error* error);
weft_status weft_matrix_from_dlpack_versioned(const struct DLManagedTensorVersioned* managed, bool writes,
                                              weft_matrix* matrix, weft_error* error);

/* The same on all ranks of the group, in forward and in backward. */
typedef struct weft_linear_options {
  uint32_t struct_size;
  /* Column alone: y, and dy in backward, have all features on every rank: (tokens, out). y is gathered; of dy
   * each rank takes its own features, for which nothing is sent. `out` need not divide: the first out % n
   * ranks have one feature more. */
  bool gather_output;
  /* Sequence parallel (Korthikanti et al., arXiv:2205.05198): the activations outside of a column and row
   * pair are divided over the ranks along the sequence. Column layers split x and dx, row layers y and dy:
   * their rows are this rank's part of the rows that the other side has as a whole. The column all-gathers x,
   * the row reduce-scatters y, in place of their all-reduces. The first `length % n` ranks have one position
   * more, and a rank may have none. */
  bool divide_sequence;
  /* If the sequence is divided: rows are so many sequences, one after the other, each of which is divided
   * (batch, sequence). 1: the rows are one sequence; also (sequence, batch), as Megatron-LM has it, where the
   * ranks divide the sequence. */
  int64_t batch;
} weft_linear_options;
#define WEFT_LINEAR_OPTIONS_INIT \
  { sizeof(weft_linear_options), false, false, 1 }

/* Rules of all of these functions.
 *
 * A layer of `in` and `out` features is divided over the n ranks of `group` (NULL: one rank): the group of
 * the tensor axis of a mesh, or any other. Matrices are this rank's parts; their rows are tokens, the rows
 * of w are features. `options` may be NULL: the behaviour described below without them.
 *
 * x, w and dy have one dtype, WEFT_F32 or WEFT_BF16. The others are WEFT_F32 or of that dtype, each as the
 * caller likes. Products and sums are f32's on each rank, rounded once where they are written; across ranks
 * they are summed in the dtype of the reduced tensor (y or dx), and a bias is added to that sum.
 *
 * If a function communicates, all ranks of `group` call it, with the same sizes and dtypes. It blocks until
 * it is done, and then the memory is the caller's again. WEFT_BAD_ARGUMENT, before anything is written or
 * sent, names the matrix whose sizes do not fit, on the rank where they do not; the others wait for it until
 * their deadline. Outputs overlap nothing else. After another error the contents of the outputs are
 * undefined.
 *
 * Forward, column: y = x w^T + b. Each rank computes its own features of y. No communication without options.
 * x: (tokens, in), the same on all ranks; w: (out/n, in); b: out/n elements, or NULL; y: (tokens, out/n). */
weft_status weft_column_linear_forward(weft_compute* compute, weft_group* group, const weft_matrix* x,
                                       const weft_matrix* w, const weft_buffer* b, const weft_matrix* y,
                                       const weft_linear_options* options, weft_error* error);
/* dx = the sum over ranks of dy w: one all-reduce, or a reduce-scatter where the sequence is divided. dw =
 * dy^T x and db = the sum of dy's rows are this rank's own, and are computed while that is on its way. If the
 * sequence is divided x is gathered once more. dx, dw and db may each be NULL: not wanted; `dx` is NULL on
 * all ranks or on none, and so is `dw` where the sequence is divided. dx is overwritten; dw and db are added
 * to if `accumulate` is true, else overwritten. dy: (tokens, out/n); x, w: as in forward; dx: as x; dw: as w;
 * db: out/n elements. */
weft_status weft_column_linear_backward(weft_compute* compute, weft_group* group, const weft_matrix* dy,
                                        const weft_matrix* x, const weft_matrix* w, const weft_matrix* dx,
                                        const weft_matrix* dw, const weft_buffer* db, bool accumulate,
                                        const weft_linear_options* options, weft_error* error);
/* y = the sum over ranks of x w^T, then + b, once: one all-reduce, or a reduce-scatter where the sequence is
 * divided. x: (tokens, in/n), this rank's features; w: (out, in/n); b: out elements, the same on all ranks,
 * or NULL; y: (tokens, out). */
weft_status weft_row_linear_forward(weft_compute* compute, weft_group* group, const weft_matrix* x,
                                    const weft_matrix* w, const weft_buffer* b, const weft_matrix* y,
                                    const weft_linear_options* options, weft_error* error);
/* dx = dy w, dw = dy^T x, db = the sum of dy's rows, which is the same on all ranks and is not scaled. No
 * communication; where the sequence is divided, one all-gather of dy. For NULL arguments and `accumulate`
 * the rules of the column hold. dy: (tokens, out), the same on all ranks; dx: (tokens, in/n); dw: as w; db:
 * out elements. */
weft_status weft_row_linear_backward(weft_compute* compute, weft_group* group, const weft_matrix* dy,
                                     const weft_matrix* x, const weft_matrix* w, const weft_matrix* dx,
                                     const weft_matrix* dw, const weft_buffer* db, bool accumulate,
                                     const weft_linear_options* options, weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_TRAIN_LINEAR_H */
