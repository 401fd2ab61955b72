/* Layouts: how a tensor lies over a mesh; tensors of the caller's brought from one layout to another.
 *
 * A layout is a value behind a handle, and keeps its mesh; functions do not change it, they make another
 * one. All functions on layouts may be called from any thread, also on one layout at once, and neither
 * communicate nor block. Functions that move tensors say so. */
#ifndef WEFT_C_LAYOUT_H
#define WEFT_C_LAYOUT_H

#include "weft/c/buffer.h"
#include "weft/c/mesh.h"

#ifdef __cplusplus
extern "C" {
#endif

#define WEFT_MAX_DIMS 8

/* The parts of a tensor that the ranks of one mesh axis hold. */
typedef int32_t weft_placement_kind;
enum {
  WEFT_REPLICATE = 0, /* each rank has the same */
  WEFT_SHARD = 1,  /* dimension `dim` is cut among them; the first ranks hold one more where it is uneven */
  WEFT_PARTIAL = 2 /* each has a contribution of full size; the value is their combination by `op` */
};
typedef struct weft_placement {
  weft_placement_kind kind;
  int32_t dim;       /* of WEFT_SHARD; 0 otherwise */
  weft_reduce_op op; /* of WEFT_PARTIAL, any but WEFT_PREMUL_SUM; 0 otherwise */
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

/* A placement for each axis of a mesh, the order in which axes nest, and the shape of the whole tensor. */
typedef struct weft_layout weft_layout;

/* The layout of a tensor with these extents over the whole mesh that `mesh` is, or is a part of; axes that
 * are not named are WEFT_REPLICATE. Several axes that shard one dimension nest in the order of the mesh: the
 * first cuts the whole, each later one the part that is left. Names and extents are copied. No
 * communication; all ranks must state the same. */
weft_status weft_layout_create(const weft_mesh* mesh, const weft_axis_placement* placements,
                               int32_t placement_count, const int64_t* extents, int32_t dim_count,
                               weft_layout** layout, weft_error* error);
void weft_layout_destroy(weft_layout* layout);

/* The same with another placement on `axes`, a sub-mesh of its mesh; several axes nest in their order. */
weft_status weft_layout_with(const weft_layout* layout, const weft_mesh* axes,
                             const weft_placement* placement, weft_layout** changed, weft_error* error);
/* The same of a whole with other extents. */
weft_status weft_layout_with_extents(const weft_layout* layout, const int64_t* extents, int32_t dim_count,
                                     weft_layout** changed, weft_error* error);
/* `axes` shard dimension `dim` inside all other axes that do: a weight that is cut for tensor parallelism
 * first and then into data shards. */
weft_status weft_layout_shard_inside(const weft_layout* layout, const weft_mesh* axes, int32_t dim,
                                     weft_layout** changed, weft_error* error);
/* The axes named nest in this order, outermost first; the others stay where they are. */
weft_status weft_layout_nested(const weft_layout* layout, const char* const* axes, int32_t axis_count,
                               weft_layout** changed, weft_error* error);
/* Dimension `dim` consists of segments of these lengths, such as the rows of a fused [q|k|v] weight; each is
 * cut on its own. */
weft_status weft_layout_segmented(const weft_layout* layout, int32_t dim, const int64_t* lengths,
                                  int32_t segment_count, weft_layout** changed, weft_error* error);
/* The layout of the same elements with other extents, of as many elements, where each rank keeps its
 * elements, in place: (b, s, h * d) cut in its dimension 2 and (b, s, h, d) cut in its dimension 2 are each
 * other's, if cuts are at the borders of heads. WEFT_LAYOUT if a rank's part would not be a part of such a
 * tensor. */
weft_status weft_layout_reshape(const weft_layout* layout, const int64_t* extents, int32_t dim_count,
                                weft_layout** changed, weft_error* error);
/* The layout of the tensor whose dimension i is dimension order[i] of this one; `order` has each dimension
 * once. */
weft_status weft_layout_transpose(const weft_layout* layout, const int32_t* order, int32_t dim_count,
                                  weft_layout** changed, weft_error* error);
/* The layout that weft_reduce_gradients gives a gradient: WEFT_PARTIAL on any of `axes` becomes
 * WEFT_REPLICATE. */
weft_status weft_layout_reduced(const weft_layout* layout, const weft_mesh* axes, weft_layout** reduced,
                                weft_error* error);

/* The whole mesh that it is over. */
weft_status weft_layout_mesh(const weft_layout* layout, weft_mesh** mesh, weft_error* error);
/* Its placement on `axes`, a sub-mesh of its mesh. WEFT_LAYOUT if these have several. */
weft_status weft_layout_on(const weft_layout* layout, const weft_mesh* axes, weft_placement* placement,
                           weft_error* error);
weft_status weft_layout_dim_count(const weft_layout* layout, int32_t* dim_count, weft_error* error);
/* The extents of the whole; `room`: of `extents`, at least its number of dimensions. */
weft_status weft_layout_extents(const weft_layout* layout, int64_t* extents, int32_t room, weft_error* error);
/* The extents of the part that `rank` of the whole mesh holds; -1: this rank. All its parts, joined. */
weft_status weft_layout_local_extents(const weft_layout* layout, int32_t rank, int64_t* extents, int32_t room,
                                      weft_error* error);
/* How many parts each rank holds: 1, or one for each segment. */
weft_status weft_layout_part_count(const weft_layout* layout, int32_t* count, weft_error* error);
/* Where part `index` of `rank` (-1: this rank) lies in the whole: offsets[d] and extents[d] for each
 * dimension. An extent may be 0. `room`: of both arrays. */
weft_status weft_layout_part(const weft_layout* layout, int32_t rank, int32_t index, int64_t* offsets,
                             int64_t* extents, int32_t room, weft_error* error);
/* Whether both say the same of one mesh. */
weft_status weft_layout_equal(const weft_layout* a, const weft_layout* b, bool* equal, weft_error* error);
/* "(7, 4) as [dp: Shard(0), tp: Replicate]" into `text`, which has `room` bytes, as much as fits, ended by a
 * zero; *bytes is what all of it needs. `text` may be NULL if room is 0. */
weft_status weft_layout_text(const weft_layout* layout, char* text, size_t room, size_t* bytes,
                             weft_error* error);

/* A tensor of the caller's, for functions that work on a list of them. The struct and all that it points to
 * are only used until the call is over. */
typedef struct weft_tensor {
  const char* name;          /* in errors, and in checkpoints */
  weft_buffer data;          /* this rank's part, row-major without gaps */
  const weft_layout* layout; /* the layout of the elements over the mesh; NULL: this rank's alone */
  /* The extents of `data`, with as many elements; NULL: those of the layout on this rank, or without a layout
   * one dimension. */
  const int64_t* extents;
  int32_t dim_count; /* 0 if extents is NULL */
} weft_tensor;

/* A redistribution in flight. For one thread at a time. */
typedef struct weft_transfer weft_transfer;

/* Gives a tensor another layout of the same mesh, extents and segments: `in` is this rank's part as `from`,
 * `out` becomes its part as `to`. Any pair of placements: all-gather, reduce-scatter, all-to-all, all-reduce,
 * or nothing at all, as is needed; contributions combine in the same order on all ranks. WEFT_REPLICATE to
 * WEFT_PARTIAL gives the value to one rank of the axis and zeros to the others for a sum; for avg, min and
 * max to all.
 *
 * Collective among the ranks of the axes whose placement changes; all call it in the same order. With
 * `transfer` NULL it blocks until `out` is written. Otherwise it begins the first step of the communication,
 * and the end of *transfer does the rest: all ranks begin and finish transfers in the same order. `in` and
 * `out` are the caller's, live until then, and overlap only if both begin at the same address; `in` is not
 * written, unless `out` is the same memory. Both are on one device, ordered on `stream` there; NULL: its
 * default one.
 *
 * WEFT_BAD_ARGUMENT or WEFT_LAYOUT if buffers do not fit their layouts: this is found on each rank alone, and
 * the others wait for it until their deadline. */
weft_status weft_redistribute(const weft_buffer* in, const weft_layout* from, const weft_buffer* out,
                              const weft_layout* to, const weft_stream* stream, weft_transfer** transfer,
                              weft_error* error);
/* Whether weft_transfer_finish has only later steps to wait for. Takes the next steps it can; never
 * blocks. */
weft_status weft_transfer_done(weft_transfer* transfer, bool* done, weft_error* error);
/* Blocks until `out` is written. Once; a second time is WEFT_BAD_ARGUMENT. */
weft_status weft_transfer_finish(weft_transfer* transfer, weft_error* error);
/* One that is not finished: its group is aborted, for all ranks. */
void weft_transfer_destroy(weft_transfer* transfer);

/* Compares the tensors along those of `axes` on which they are WEFT_REPLICATE: the same bits on all ranks
 * that hold a replica. Collective among the ranks of `axes`, which give the same tensors in the same order;
 * blocks. Two small all-gathers at most, for any number of tensors. WEFT_MISMATCH on all ranks where one has
 * drifted: the text names it, and `ranks` are those that differ, as `axes` numbers them. A wrong tensor on
 * one rank alone is an error of all ranks. `tensors` may be NULL if count is 0. */
weft_status weft_check_replicas(const weft_tensor* tensors, int32_t count, const weft_mesh* axes,
                                weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_LAYOUT_H */
