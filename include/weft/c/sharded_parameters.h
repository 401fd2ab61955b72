/* Tensors of the caller of which each rank keeps a part. A rank holds the global tensor only while it
 * computes with it. This is the building block of fully sharded data parallelism.
 *
 * Each tensor is cut along its dimension 0 over all ranks of some axes, inside the cuts of other axes (tensor
 * parallelism). If the rows do not divide evenly, the first ranks hold one row more. With fewer rows than
 * ranks, the last ranks hold none. weft packs small tensors together, and sends large tensors directly from
 * source to destination. All memory is the caller's, on the host.
 *
 * All ranks of the axes must call these functions in the same order, each from one thread, with the same
 * lists. The first transfer compares the lists. If they differ, it fails with WEFT_MISMATCH on all ranks,
 * and the text names the first entry that differs. */
#ifndef WEFT_C_SHARDED_PARAMETERS_H
#define WEFT_C_SHARDED_PARAMETERS_H

#include "weft/c/layout.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A list of tensors. One thread at a time may use it. It keeps its meshes. */
typedef struct weft_sharded_parameters weft_sharded_parameters;

typedef struct weft_shard_entry {
  const char* name; /* in errors */
  const weft_layout*
      /* of the global tensor: WEFT_REPLICATE on the axes that cut it and on the axes that replicate it */
      layout;
  weft_dtype dtype; /* of the tensor's values */
} weft_shard_entry;

typedef struct weft_sharded_parameters_options {
  uint32_t struct_size;
  /* `reduce`: the dtype of gradients while ranks combine them; `gradient`: their dtype before and after. Each
   * is WEFT_F64, WEFT_F32, WEFT_BF16 or WEFT_F16. */
  weft_dtype reduce, gradient;
  /* A global tensor of at least so many bytes is sent alone. Smaller tensors are packed together. 0: 64
   * KiB. */
  int64_t alone_bytes;
  /* Axes whose ranks hold the same shards. Gradients are also summed over these axes. NULL: none. */
  const weft_mesh* replicate;
} weft_sharded_parameters_options;
#define WEFT_SHARDED_PARAMETERS_OPTIONS_INIT \
  { sizeof(weft_sharded_parameters_options), WEFT_F32, WEFT_F32, 0, NULL }

/* `axes`: the axes that cut the tensors. weft copies the names. `options` may be NULL. No communication.
 * Fails with WEFT_LAYOUT if an entry is not WEFT_REPLICATE on the axes, and with WEFT_BAD_ARGUMENT if an
 * entry has no dimensions. */
weft_status weft_sharded_parameters_create(const weft_mesh* axes, const weft_shard_entry* entries,
                                           int32_t count, const weft_sharded_parameters_options* options,
                                           weft_sharded_parameters** shards, weft_error* error);
/* Destroys the list. Transfers that were begun may still be finished. */
void weft_sharded_parameters_destroy(weft_sharded_parameters* shards);

/* The layout of tensor i after the cut. weft_layout_local_extents gives the extents of this rank's part.
 * Checkpoints, norms and redistribution accept this layout directly. */
weft_status weft_sharded_parameters_layout(const weft_sharded_parameters* shards, int32_t i,
                                           weft_layout** layout, weft_error* error);
/* The part of tensor i that `rank` of the axes keeps, as ranges of elements of the global tensor. Gives
 * range `index`. *range_count becomes the number of ranges: one, or one for each segment of dimension 0. A
 * range may be empty. `range_count` may be NULL. */
weft_status weft_sharded_parameters_range(const weft_sharded_parameters* shards, int32_t i, int32_t rank,
                                          int32_t index, int64_t* offset, int64_t* count,
                                          int32_t* range_count, weft_error* error);
/* The least number of bytes that this rank receives in one unshard, and sends in one reduce_scatter. */
weft_status weft_sharded_parameters_bytes(const weft_sharded_parameters* shards, int64_t* unshard_bytes,
                                          int64_t* reduce_bytes, weft_error* error);

/* Gathers all global tensors. parts[i] is the part of tensor i that this rank keeps, and wholes[i] becomes
 * global tensor i. `count`: the length of both lists, equal to the number of entries. If `transfer` is
 * NULL, the function blocks until `wholes` are written. Otherwise it begins *transfer, which
 * weft_transfer_finish ends. `parts` have been read when this function returns. The caller must keep
 * `wholes` alive until weft_transfer_finish returns. */
weft_status weft_sharded_parameters_unshard(weft_sharded_parameters* shards, const weft_buffer* parts,
                                            const weft_buffer* wholes, int32_t count,
                                            weft_transfer** transfer, weft_error* error);
/* The reverse of unshard: copies this rank's part out of each global tensor. No communication. */
weft_status weft_sharded_parameters_reshard(const weft_sharded_parameters* shards, const weft_buffer* wholes,
                                            const weft_buffer* parts, int32_t count, weft_error* error);
/* Combines the gradients of all ranks, WEFT_SUM or WEFT_AVG. gradients[i] is this rank's gradient of
 * global tensor i, and parts[i] becomes this rank's part of the combined gradient. Both have the dtype
 * options->gradient. Blocks, or gives a transfer, like weft_sharded_parameters_unshard. The gradients have
 * been read when this function returns. */
weft_status weft_sharded_parameters_reduce_scatter(weft_sharded_parameters* shards,
                                                   const weft_buffer* gradients, const weft_buffer* parts,
                                                   int32_t count, weft_reduce_op op, weft_transfer** transfer,
                                                   weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_SHARDED_PARAMETERS_H */
