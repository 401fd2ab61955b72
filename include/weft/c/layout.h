/* Layouts describe the distribution of a tensor over a mesh. This header also has functions that move the
 * caller's tensors from one layout to another.
 *
 * A layout is a value behind a handle, and keeps its mesh. Functions do not change it, but make another
 * one. Any thread may call the functions on layouts, and several threads may use one layout at once. These
 * functions neither communicate nor block. Functions that move tensors may do both. */
#ifndef WEFT_C_LAYOUT_H
#define WEFT_C_LAYOUT_H

#include "weft/c/buffer.h"
#include "weft/c/mesh.h"

#ifdef __cplusplus
extern "C" {
#endif

#define WEFT_MAX_DIMS 8

/* How a tensor is distributed over the ranks of one mesh axis. */
typedef int32_t weft_placement_kind;
enum {
  WEFT_REPLICATE = 0, /* each rank has all elements */
  WEFT_SHARD = 1,  /* dimension `dim` is cut over the ranks; if it is uneven, the first ranks hold one more */
  WEFT_PARTIAL = 2 /* each rank has a contribution of full size; the value is their combination by `op` */
};
typedef struct weft_placement {
  weft_placement_kind kind;
  int32_t dim;       /* the dimension for WEFT_SHARD; 0 otherwise */
  weft_reduce_op op; /* the reduction for WEFT_PARTIAL, any but WEFT_PREMUL_SUM; 0 otherwise */
} weft_placement;

static inline weft_placement weft_replicate(void) {
  const weft_placement placement = {WEFT_REPLICATE, 0, WEFT_SUM};
  return placement;
}
static inline weft_placement weft_shard(int32_t dim) {
  const weft_placement placement = {WEFT_SHARD, dim, WEFT_SUM};
  return placement;
}
static inline weft_placement weft_partial(weft_reduce_op op) {
  const weft_placement placement = {WEFT_PARTIAL, 0, op};
  return placement;
}

typedef struct weft_axis_placement {
  const char* axis;
  weft_placement placement;
} weft_axis_placement;

/* A layout: a placement for each axis of a mesh, the order in which axes nest, and the shape of the global
 * tensor. */
typedef struct weft_layout weft_layout;

/* Makes the layout of a tensor with these extents over the root mesh of `mesh` (weft_mesh_root). Axes that
 * are not named are WEFT_REPLICATE. If several axes shard one dimension, they nest in the order of the
 * mesh. The first axis cuts the dimension, and each later axis cuts the parts of the axis before it. weft
 * copies names and extents. No communication. All ranks must give the same arguments. */
weft_status weft_layout_create(const weft_mesh* mesh, const weft_axis_placement* placements,
                               int32_t placement_count, const int64_t* extents, int32_t dim_count,
                               weft_layout** layout, weft_error* error);
void weft_layout_destroy(weft_layout* layout);

/* Makes a layout like `layout`, with another placement on `axes`, a sub-mesh of its mesh. Several axes
 * nest in their order. */
weft_status weft_layout_with(const weft_layout* layout, const weft_mesh* axes,
                             const weft_placement* placement, weft_layout** changed, weft_error* error);
/* Makes a layout like `layout`, for a tensor with other global extents. */
weft_status weft_layout_with_extents(const weft_layout* layout, const int64_t* extents, int32_t dim_count,
                                     weft_layout** changed, weft_error* error);
/* Makes a layout like `layout`, but `axes` shard dimension `dim` inside all other axes that shard it. This is
 * for a weight that is first cut for tensor parallelism and then into data shards. */
weft_status weft_layout_shard_inside(const weft_layout* layout, const weft_mesh* axes, int32_t dim,
                                     weft_layout** changed, weft_error* error);
/* Makes a layout like `layout`, but the named axes nest in this order, outermost first. The other axes do
 * not move. */
weft_status weft_layout_nested(const weft_layout* layout, const char* const* axes, int32_t axis_count,
                               weft_layout** changed, weft_error* error);
/* Makes a layout like `layout`, but dimension `dim` consists of segments of these lengths, such as the
 * rows of a fused [q|k|v] weight. Each segment is cut separately. */
weft_status weft_layout_segmented(const weft_layout* layout, int32_t dim, const int64_t* lengths,
                                  int32_t segment_count, weft_layout** changed, weft_error* error);
/* Makes a layout of the same elements with other extents, whose product is the same. Each rank keeps its
 * elements in place. For example, (b, s, h * d) cut in dimension 2 becomes (b, s, h, d) cut in dimension
 * 2, and back, if the cuts are at the borders of heads. Fails with WEFT_LAYOUT if a rank's part would not
 * be a part of such a tensor. */
weft_status weft_layout_reshape(const weft_layout* layout, const int64_t* extents, int32_t dim_count,
                                weft_layout** changed, weft_error* error);
/* Makes the layout of the tensor whose dimension i is dimension order[i] of this layout's tensor. `order`
 * must have each dimension once. */
weft_status weft_layout_transpose(const weft_layout* layout, const int32_t* order, int32_t dim_count,
                                  weft_layout** changed, weft_error* error);
/* The layout that weft_reduce_gradients gives a gradient: WEFT_PARTIAL on any of `axes` becomes
 * WEFT_REPLICATE. */
weft_status weft_layout_reduced(const weft_layout* layout, const weft_mesh* axes, weft_layout** reduced,
                                weft_error* error);

/* The root mesh of the layout. */
weft_status weft_layout_mesh(const weft_layout* layout, weft_mesh** mesh, weft_error* error);
/* The placement of the layout on `axes`, a sub-mesh of its mesh. Fails with WEFT_LAYOUT if the axes have
 * different placements. */
weft_status weft_layout_on(const weft_layout* layout, const weft_mesh* axes, weft_placement* placement,
                           weft_error* error);
weft_status weft_layout_dim_count(const weft_layout* layout, int32_t* dim_count, weft_error* error);
/* The global extents. `room`: the size of `extents`, at least the number of dimensions. */
weft_status weft_layout_extents(const weft_layout* layout, int64_t* extents, int32_t room, weft_error* error);
/* The extents of the tensor that `rank` of the root mesh holds (-1: this rank), all its parts joined. */
weft_status weft_layout_local_extents(const weft_layout* layout, int32_t rank, int64_t* extents, int32_t room,
                                      weft_error* error);
/* The number of parts that each rank holds: 1, or one for each segment. */
weft_status weft_layout_part_count(const weft_layout* layout, int32_t* count, weft_error* error);
/* The place of part `index` of `rank` (-1: this rank) in the global tensor: offsets[d] and extents[d] for
 * each dimension. An extent may be 0. `room`: the size of each array. */
weft_status weft_layout_part(const weft_layout* layout, int32_t rank, int32_t index, int64_t* offsets,
                             int64_t* extents, int32_t room, weft_error* error);
/* Whether both layouts have the same mesh and are equal. */
weft_status weft_layout_equal(const weft_layout* a, const weft_layout* b, bool* equal, weft_error* error);
/* Writes the layout as text, "(7, 4) as [dp: Shard(0), tp: Replicate]", into `text`, which has `room`
 * bytes. It writes as much as fits, with a zero at the end. *bytes becomes the number of bytes for all of
 * it. `text` may be NULL if room is 0. */
weft_status weft_layout_text(const weft_layout* layout, char* text, size_t room, size_t* bytes,
                             weft_error* error);

/* A tensor of the caller, for functions that work on a list of tensors. weft uses the struct, and all that it
 * points to, only until the call returns. */
typedef struct weft_tensor {
  const char* name;          /* in errors, and in checkpoints */
  weft_buffer data;          /* this rank's part, row-major without gaps */
  const weft_layout* layout; /* the layout of the elements over the mesh; NULL: only this rank has them */
  /* The extents of `data`. Their product is its count. NULL: the local extents of the layout, or one
   * dimension if there is no layout. */
  const int64_t* extents;
  int32_t dim_count; /* 0 if extents is NULL */
} weft_tensor;
/* Initialises a weft_tensor with the extents of its layout, or with one dimension if it has no layout:
 * weft_tensor g = WEFT_TENSOR_INIT("weight", buffer, layout). `data` is a weft_buffer. */
#define WEFT_TENSOR_INIT(name, data, layout) \
  { (name), (data), (layout), NULL, 0 }

/* A redistribution in flight. One thread at a time may use it. */
typedef struct weft_transfer weft_transfer;

/* Gives a tensor another layout with the same mesh, extents and segments. `in` is this rank's part in layout
 * `from`, and `out` becomes its part in layout `to`. Any pair of placements is possible: weft uses an
 * all-gather, a reduce-scatter, an all-to-all, an all-reduce or no communication, as needed. Contributions
 * combine in the same order on all ranks. From WEFT_REPLICATE to WEFT_PARTIAL: for a sum, one rank of the
 * axis keeps the value and the others get zeros; for avg, min and max, all ranks keep the value.
 *
 * Collective among the ranks of the axes whose placement changes. All of them must call it in the same order.
 * If `transfer` is NULL, it blocks until `out` is written. Otherwise it begins the first step of the
 * communication, and weft_transfer_finish does the other steps. All ranks must begin and finish transfers in
 * the same order. The caller must keep `in` and `out` alive until then. They may overlap only if both begin
 * at the same address. weft does not write `in`, unless `out` is the same memory. Both must be on one device,
 * and are ordered on `stream` of that device. NULL means its default stream.
 *
 * Fails with WEFT_BAD_ARGUMENT or WEFT_LAYOUT if buffers do not fit their layouts. Only the rank itself
 * detects such a fault. The others wait for it until their deadline. */
weft_status weft_redistribute(const weft_buffer* in, const weft_layout* from, const weft_buffer* out,
                              const weft_layout* to, const weft_stream* stream, weft_transfer** transfer,
                              weft_error* error);
/* Sets *done to whether the first step is done. If it is, weft_transfer_finish waits only for later steps.
 * Makes progress; never blocks. */
weft_status weft_transfer_done(weft_transfer* transfer, bool* done, weft_error* error);
/* Blocks until `out` is written. A second call for the same transfer fails with WEFT_BAD_ARGUMENT. */
weft_status weft_transfer_finish(weft_transfer* transfer, weft_error* error);
/* Destroys the transfer. If it is not finished, its group is aborted on all ranks. */
void weft_transfer_destroy(weft_transfer* transfer);

/* Checks that all replicas of each tensor have the same bits, along the axes of `axes` on which the tensor is
 * WEFT_REPLICATE. Collective among the ranks of `axes`, which must give the same tensors in the same order.
 * Blocks. Costs at most two small all-gathers, for any number of tensors. Fails with WEFT_MISMATCH on all
 * ranks if a replica differs. The text names the tensor, and `ranks` are the ranks that differ, as `axes`
 * numbers them. A wrong tensor on one rank alone is an error on all ranks. `tensors` may be NULL if count is
 * 0. */
weft_status weft_check_replicas(const weft_tensor* tensors, int32_t count, const weft_mesh* axes,
                                weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_LAYOUT_H */
