/* Tensors of the caller's of which each rank keeps a part, and has the whole for as long as it computes with
 * it: the building block of fully sharded data parallelism.
 *
 * Each tensor is cut along its dimension 0 over all ranks of some axes, inside the cuts of other axes (tensor
 * parallelism); the first ranks hold one row more where it is uneven, and with fewer rows than ranks the last
 * ones hold none. Small tensors travel together, large ones from where they lie to where they belong. Memory
 * is the caller's, in the host's memory.
 *
 * All ranks of the axes call these functions in the same order, each from one thread, with the same lists:
 * the first transfer compares them, and is WEFT_MISMATCH on all ranks if they differ, naming the first entry
 * that does. */
#ifndef WEFT_C_SHARDED_PARAMETERS_H
#define WEFT_C_SHARDED_PARAMETERS_H

#include "weft/c/layout.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A list of tensors. For one thread at a time. Keeps its meshes. */
typedef struct weft_sharded_parameters weft_sharded_parameters;

typedef struct weft_shard_entry {
  const char* name; /* in errors */
  const weft_layout*
      layout;       /* of the whole: WEFT_REPLICATE on the axes that cut it and on those that replicate it */
  weft_dtype dtype; /* of its values */
} weft_shard_entry;

typedef struct weft_sharded_parameters_options {
  uint32_t struct_size;
  /* The dtype of gradients while ranks combine them, and before and after: WEFT_F64, WEFT_F32, WEFT_BF16 or
   * WEFT_F16. */
  weft_dtype reduce, gradient;
  /* A tensor whose whole has as many bytes travels alone; smaller ones are packed. 0: 64 KiB. */
  int64_t alone_bytes;
  /* Axes whose ranks hold the same shards, and over which gradients are summed, too; NULL: none. */
  const weft_mesh* replicate;
} weft_sharded_parameters_options;
#define WEFT_SHARDED_PARAMETERS_OPTIONS_INIT \
  { sizeof(weft_sharded_parameters_options), WEFT_F32, WEFT_F32, 0, NULL }

/* `axes`: those that cut the tensors. Names are copied. `options` may be NULL. No communication. WEFT_LAYOUT
 * if an entry is not WEFT_REPLICATE on the axes; WEFT_BAD_ARGUMENT for one without dimensions. */
weft_status weft_sharded_parameters_create(const weft_mesh* axes, const weft_shard_entry* entries,
                                           int32_t count, const weft_sharded_parameters_options* options,
                                           weft_sharded_parameters** shards, weft_error* error);
/* Transfers that were begun may still be finished. */
void weft_sharded_parameters_destroy(weft_sharded_parameters* shards);

/* The layout of this rank's part of tensor i: weft_layout_local_extents gives its extents. Checkpoints,
 * norms and redistribution take it as it is. */
weft_status weft_sharded_parameters_layout(const weft_sharded_parameters* shards, int32_t i,
                                           weft_layout** layout, weft_error* error);
/* The part of tensor i that `rank` of the axes keeps, as a range of the elements of the whole: range `index`
 * of as many as *range_count says, which is one, or one for each segment of dimension 0. A range may be
 * empty. range_count may be NULL. */
weft_status weft_sharded_parameters_range(const weft_sharded_parameters* shards, int32_t i, int32_t rank,
                                          int32_t index, int64_t* offset, int64_t* count,
                                          int32_t* range_count, weft_error* error);
/* The bytes that this rank receives in one unshard, and sends in one reduce_scatter, at least. */
weft_status weft_sharded_parameters_bytes(const weft_sharded_parameters* shards, int64_t* unshard_bytes,
                                          int64_t* reduce_bytes, weft_error* error);

/* Gathers all wholes: parts[i] is what this rank keeps of tensor i, wholes[i] becomes all of it. `count`: of
 * both lists, as many as entries. With `transfer` NULL it blocks until the wholes are written. Otherwise
 * *transfer is on its way, and weft_transfer_finish ends it: the parts were read already, the wholes live
 * until then. */
weft_status weft_sharded_parameters_unshard(weft_sharded_parameters* shards, const weft_buffer* parts,
                                            const weft_buffer* wholes, int32_t count,
                                            weft_transfer** transfer, weft_error* error);
/* The reverse: copies this rank's part of each whole. No communication. */
weft_status weft_sharded_parameters_reshard(const weft_sharded_parameters* shards, const weft_buffer* wholes,
                                            const weft_buffer* parts, int32_t count, weft_error* error);
/* Combines the gradients of all ranks, WEFT_SUM or WEFT_AVG: gradients[i] is this rank's gradient of whole i,
 * parts[i] becomes its part of the combined one. Both are of options->gradient. Blocks, or gives a transfer,
 * as weft_sharded_parameters_unshard does; the gradients were read already. */
weft_status weft_sharded_parameters_reduce_scatter(weft_sharded_parameters* shards,
                                                   const weft_buffer* gradients, const weft_buffer* parts,
                                                   int32_t count, weft_reduce_op op, weft_transfer** transfer,
                                                   weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_SHARDED_PARAMETERS_H */
