/* Column- and row-parallel 1x1 convolutions over maps on the caller's memory: the linear layers of
 * weft/c_train/linear.h with channels as features, and every pixel as a token. */
#ifndef WEFT_C_TRAIN_CONV_H
#define WEFT_C_TRAIN_CONV_H

#include "weft/c_train/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Four dimensions of elements, row-major and without gaps: maps (batch, channels, height, width), or the
 * weight of a convolution (out, in, 1, 1). The caller's, as a weft_buffer is. */
typedef struct weft_maps {
  void* data; /* may be NULL if there are no elements */
  int64_t shape[4];
  weft_dtype dtype;
  weft_device device; /* of the weft_compute, and of what the group moves */
} weft_maps;

/* A tensor of DLPack of four dimensions, in *maps. For the rest as weft_matrix_from_dltensor,
 * weft_matrix_from_dlpack and weft_matrix_from_dlpack_versioned; a tensor of another number of dimensions is
 * WEFT_BAD_ARGUMENT, and one with channels last is strided. */
weft_status weft_maps_from_dltensor(const void* tensor, weft_maps* maps, weft_error* error);
weft_status weft_maps_from_dlpack(const struct DLManagedTensor* managed, weft_maps* maps, weft_error* error);
weft_status weft_maps_from_dlpack_versioned(const struct DLManagedTensorVersioned* managed, bool writes,
                                            weft_maps* maps, weft_error* error);

/* The same on all ranks of the group, in forward and in backward. */
typedef struct weft_conv2d_options {
  uint32_t struct_size;
  /* Column alone: y, and dy in backward, have all channels on every rank, as for weft_linear_options. */
  bool gather_output;
  /* The dimension of maps that is divided over the ranks outside of a column and row pair: of the column x
   * and dx are this rank's part, of the row y and dy. 0: samples, 2: rows, 3: columns; -1: none. Cut and
   * communicated as the sequence of weft_linear_options. */
  int32_t sequence_dim;
} weft_conv2d_options;
#define WEFT_CONV2D_OPTIONS_INIT \
  { sizeof(weft_conv2d_options), false, -1 }

/* The rules of weft/c_train/linear.h hold for these functions, too: dtypes, what may be NULL, errors, who
 * calls them, and that outputs overlap nothing. `in` and `out` are channels of the whole layer, n is the
 * number of ranks of `group`. Only a plain convolution is split so (kernel 1x1, stride 1, no padding,
 * dilation 1, one group): a w of another kernel is WEFT_BAD_ARGUMENT. Pixels do not depend on each other, so
 * that a rank may hold any part of the maps; dw and db are sums over the samples and pixels that are given.
 *
 * Forward, column: y[:, o] = the sum of w[o, i] x[:, i] + b[o]. Each rank computes its own channels of y. No
 * communication without options. x: (batch, in, height, width), the same on all ranks; w: (out/n, in, 1, 1);
 * b: out/n elements, or NULL; y: (batch, out/n, height, width). */
weft_status weft_column_conv2d_forward(weft_compute* compute, weft_group* group, const weft_maps* x,
                                       const weft_maps* w, const weft_buffer* b, const weft_maps* y,
                                       const weft_conv2d_options* options, weft_error* error);
/* dx = the sum over ranks of w^T dy: one all-reduce, or a reduce-scatter where maps are divided; dw and db,
 * this rank's own, are computed while that is on its way. For `accumulate`, and for dx, dw and db that are
 * NULL, the rules of weft_column_linear_backward hold. dy: (batch, out/n, height, width); x, w: as in
 * forward; dx: as x; dw: as w; db: out/n elements. */
weft_status weft_column_conv2d_backward(weft_compute* compute, weft_group* group, const weft_maps* dy,
                                        const weft_maps* x, const weft_maps* w, const weft_maps* dx,
                                        const weft_maps* dw, const weft_buffer* db, bool accumulate,
                                        const weft_conv2d_options* options, weft_error* error);
/* y[:, o] = the sum over ranks of w[o, i] x[:, i], then + b[o], once: one all-reduce, or a reduce-scatter
 * where maps are divided. x: (batch, in/n, height, width), this rank's channels; w: (out, in/n, 1, 1); b: out
 * elements, the same on all ranks, or NULL; y: (batch, out, height, width). */
weft_status weft_row_conv2d_forward(weft_compute* compute, weft_group* group, const weft_maps* x,
                                    const weft_maps* w, const weft_buffer* b, const weft_maps* y,
                                    const weft_conv2d_options* options, weft_error* error);
/* dx = w^T dy, dw, and db, which is the same on all ranks and is not scaled. No communication; where maps are
 * divided, one all-gather of dy. dy: (batch, out, height, width), the same on all ranks; dx: (batch, in/n,
 * height, width); dw: as w; db: out elements. */
weft_status weft_row_conv2d_backward(weft_compute* compute, weft_group* group, const weft_maps* dy,
                                     const weft_maps* x, const weft_maps* w, const weft_maps* dx,
                                     const weft_maps* dw, const weft_buffer* db, bool accumulate,
                                     const weft_conv2d_options* options, weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_TRAIN_CONV_H */
