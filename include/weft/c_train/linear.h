/* Column- and row-parallel linear layers on the caller's memory (Shoeybi et al., Megatron-LM, arXiv:1909.08053): for
 * programs that have layers of their own. */
#ifndef WEFT_C_TRAIN_LINEAR_H
#define WEFT_C_TRAIN_LINEAR_H

#include "weft/c_train/compute.h"

#ifdef __cplusplus
extern "C" {
#endif

/* rows x columns elements, row by row and without gaps. The caller's, as a weft_buffer is. */
typedef struct weft_matrix {
  void* data; /* may be NULL where there are no elements */
  int64_t rows, columns;
  weft_dtype dtype;
  weft_device device; /* of the weft_compute, and of what the group moves */
} weft_matrix;

/* What holds for all of these functions.
 *
 * A layer of `in` and `out` features is divided over the n ranks of `group` (NULL: one rank): the group of the tensor
 * axis of a mesh, or any other. Matrices are what this rank holds; their rows are tokens, those of w are features.
 *
 * x, w and dy have one dtype, WEFT_F32 or WEFT_BF16. The others are WEFT_F32 or of that dtype, each as the caller
 * likes. Products and sums are f32's on each rank, rounded once where they are written; across ranks they are
 * summed in the dtype of what is reduced (y or dx), and a bias is added to that sum.
 *
 * Where a function communicates, all ranks of `group` call it, with the same sizes and dtypes. It blocks until it is
 * done, and then the memory is the caller's again. WEFT_BAD_ARGUMENT, before anything is written or sent, names the
 * matrix whose sizes do not fit; what is written overlaps nothing else. After another error the contents of what
 * is written are undefined.
 *
 * Forward, column: y = x w^T + b. Each rank computes its own features of y. No communication.
 * x: (tokens, in), the same on all ranks; w: (out/n, in); b: out/n elements, or NULL; y: (tokens, out/n). */
weft_status weft_column_linear_forward(weft_compute* compute, const weft_matrix* x, const weft_matrix* w,
                                       const weft_buffer* b, const weft_matrix* y, weft_error* error);
/* dx = the sum over ranks of dy w: one all-reduce. dw = dy^T x and db = the sum of dy's rows are this rank's own, and
 * are computed while the all-reduce is on its way. dx, dw and db may each be NULL: not wanted; `dx` is NULL on all
 * ranks or on none. dx is overwritten; dw and db are added to where `accumulate`.
 * dy: (tokens, out/n); x, w: as in forward; dx: as x; dw: as w; db: out/n elements. */
weft_status weft_column_linear_backward(weft_compute* compute, weft_group* group, const weft_matrix* dy,
                                        const weft_matrix* x, const weft_matrix* w, const weft_matrix* dx,
                                        const weft_matrix* dw, const weft_buffer* db, bool accumulate,
                                        weft_error* error);
/* y = the sum over ranks of x w^T, then + b, once: one all-reduce.
 * x: (tokens, in/n), this rank's features; w: (out, in/n); b: out elements, the same on all ranks, or NULL;
 * y: (tokens, out). */
weft_status weft_row_linear_forward(weft_compute* compute, weft_group* group, const weft_matrix* x,
                                    const weft_matrix* w, const weft_buffer* b, const weft_matrix* y,
                                    weft_error* error);
/* dx = dy w, dw = dy^T x, db = the sum of dy's rows, which is the same on all ranks and is not scaled. No
 * communication. What may be NULL, and `accumulate`: as for the column.
 * dy: (tokens, out), the same on all ranks; dx: (tokens, in/n); dw: as w; db: out elements. */
weft_status weft_row_linear_backward(weft_compute* compute, const weft_matrix* dy, const weft_matrix* x,
                                     const weft_matrix* w, const weft_matrix* dx, const weft_matrix* dw,
                                     const weft_buffer* db, bool accumulate, weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_TRAIN_LINEAR_H */
