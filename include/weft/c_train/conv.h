/* Column- and row-parallel 1x1 convolutions over maps on the caller's memory: the linear layers of
 * weft/c_train/linear.h with channels as features, and every pixel as a token. */
#ifndef WEFT_C_TRAIN_CONV_H
#define WEFT_C_TRAIN_CONV_H

#include "weft/c_train/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A tensor of four dimensions, row-major and without gaps: maps (batch, channels, height, width), or the
 * weight of a convolution (out, in, 1, 1). The memory is the caller's, as for a weft_buffer. */
typedef struct weft_maps {
  void* data; /* may be NULL if there are no elements */
  int64_t shape[4];
  weft_dtype dtype;
  weft_device device; /* the device of the weft_compute, whose memory the group moves */
} weft_maps;

/* Make *maps from a DLPack tensor of four dimensions, like weft_matrix_from_dltensor, weft_matrix_from_dlpack
 * and weft_matrix_from_dlpack_versioned. They fail with WEFT_BAD_ARGUMENT if the tensor has another number of
 * dimensions; they refuse a tensor with channels last, because it is strided. */
weft_status weft_maps_from_dltensor(const void* tensor, weft_maps* maps, weft_error* error);
weft_status weft_maps_from_dlpack(const struct DLManagedTensor* managed, weft_maps* maps, weft_error* error);
weft_status weft_maps_from_dlpack_versioned(const struct DLManagedTensorVersioned* managed, bool writes,
                                            weft_maps* maps, weft_error* error);

/* All ranks of the group must give the same options, in forward and in backward. */
typedef struct weft_conv2d_options {
  uint32_t struct_size;
  /* For the column layer only: on every rank, y, and dy in backward, have all channels, as with
   * weft_linear_options. */
  bool gather_output;
  /* Outside a pair of a column layer and a row layer, maps may be divided over the ranks along this
   * dimension. x and dx of the column layer, and y and dy of the row layer, are then this rank's part. 0:
   * samples, 2: rows, 3: columns; -1: none. The dimension is cut and communicated like the sequence of
   * weft_linear_options. */
  int32_t sequence_dim;
} weft_conv2d_options;
#define WEFT_CONV2D_OPTIONS_INIT \
  { sizeof(weft_conv2d_options), false, -1 }

/* The rules of weft/c_train/linear.h also hold for these functions: for dtypes, NULL arguments, errors, the
 * ranks that call them, and outputs that must overlap nothing. `in` and `out` are channels of the whole
 * layer, n is the number of ranks of `group`. Only a plain convolution can be split in this way (kernel 1x1,
 * stride 1, no padding, dilation 1, one group): a `w` with another kernel gives WEFT_BAD_ARGUMENT. Pixels do
 * not depend on each other, so a rank may hold any part of the maps; dw and db are sums over the samples and
 * pixels that this rank passes.
 *
 * The forward pass of a column layer: y[:, o] = the sum over i of w[o, i] x[:, i], plus b[o]. Each rank
 * computes its own channels of y. Without options there is no communication. x: (batch, in, height, width),
 * the same on all ranks; w: (out/n, in, 1, 1); b: out/n elements, or NULL; y: (batch, out/n, height,
 * width). */
weft_status weft_column_conv2d_forward(weft_compute* compute, weft_group* group, const weft_maps* x,
                                       const weft_maps* w, const weft_buffer* b, const weft_maps* y,
                                       const weft_conv2d_options* options, weft_error* error);
/* The backward pass of a column layer. dx = the sum over ranks of w^T dy; this takes one all-reduce, or a
 * reduce-scatter if maps are divided. dw and db are this rank's own, and are computed during that
 * communication. The rules of weft_column_linear_backward for `accumulate`, and for NULL as dx, dw or db,
 * hold here, too. dy: (batch, out/n, height, width); x, w: as in forward; dx: as x; dw: as w; db: out/n
 * elements. */
weft_status weft_column_conv2d_backward(weft_compute* compute, weft_group* group, const weft_maps* dy,
                                        const weft_maps* x, const weft_maps* w, const weft_maps* dx,
                                        const weft_maps* dw, const weft_buffer* db, bool accumulate,
                                        const weft_conv2d_options* options, weft_error* error);
/* The forward pass of a row layer: y[:, o] = the sum over ranks of w[o, i] x[:, i]; b[o] is added once, after
 * the sum. This takes one all-reduce, or a reduce-scatter if maps are divided. x: (batch, in/n, height,
 * width), this rank's channels; w: (out, in/n, 1, 1); b: out elements, the same on all ranks, or NULL; y:
 * (batch, out, height, width). */
weft_status weft_row_conv2d_forward(weft_compute* compute, weft_group* group, const weft_maps* x,
                                    const weft_maps* w, const weft_buffer* b, const weft_maps* y,
                                    const weft_conv2d_options* options, weft_error* error);
/* The backward pass of a row layer: computes dx = w^T dy, dw and db; db is the same on all ranks and is not
 * scaled. No communication, except one all-gather of dy if maps are divided. dy: (batch, out, height, width),
 * the same on all ranks; dx: (batch, in/n, height, width); dw: as w; db: out elements. */
weft_status weft_row_conv2d_backward(weft_compute* compute, weft_group* group, const weft_maps* dy,
                                     const weft_maps* x, const weft_maps* w, const weft_maps* dx,
                                     const weft_maps* dw, const weft_buffer* db, bool accumulate,
                                     const weft_conv2d_options* options, weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_TRAIN_CONV_H */
