/* Halos and windows of a tensor that is cut over ranks. Each rank gets the elements of the range of indices
 * that it requests, whichever ranks hold them. Beyond the ends of the tensor an edge rule gives the elements.
 *
 * A program makes a plan (weft_halo, weft_window) once, without communication, and uses it as often as
 * needed. All ranks must give the same arguments. A plan keeps its layout and mesh. One thread at a time may
 * use it. Functions that move elements are collective among the ranks of the axes that cut the named
 * dimensions. These ranks must begin exchanges in the same order. Each exchange is a call of the group of
 * these axes. The first start of a plan waits for the first start on the other ranks, and compares the
 * arguments. If they differ, all ranks get WEFT_MISMATCH. The text shows the arguments of two ranks.
 *
 * A plan may have several exchanges in flight. A new exchange fails with WEFT_BAD_ARGUMENT, naming the field,
 * if it writes memory that an exchange in flight still reads or writes, or if it reads memory that an
 * exchange in flight still writes. Texts of errors of exchanges begin with "halo: " or "window: ". */
#ifndef WEFT_C_WINDOW_H
#define WEFT_C_WINDOW_H

#include "weft/c/layout.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The elements beyond an end of a dimension of n elements. x[-1] and x[n] are the first of them. */
typedef int32_t weft_edge_kind;
enum {
  /* There are no elements. Ghost cells do not change, and a window that reaches there fails with
   * WEFT_BAD_ARGUMENT. */
  WEFT_EDGE_NONE = 0,
  WEFT_EDGE_ZERO,      /* 0 */
  WEFT_EDGE_CONSTANT,  /* `value` */
  WEFT_EDGE_PERIODIC,  /* x[-1] = x[n-1], as often as needed */
  WEFT_EDGE_REFLECT,   /* x[-1] = x[1]; at most n-1 beyond the end */
  WEFT_EDGE_REPLICATE, /* x[-1] = x[0] */
  /* On a globe: x[-1, j] = x[0, j + half a turn]. The size of dimension `longitude` must be even. At most
   * n beyond the end. The rule is for scalars. The components of a vector point in the opposite direction
   * beyond a pole, and weft does not change their signs. */
  WEFT_EDGE_POLE
};
typedef struct weft_edge {
  weft_edge_kind kind;
  int32_t longitude; /* the dimension of longitude for WEFT_EDGE_POLE; 0 otherwise */
  double value;      /* the value for WEFT_EDGE_CONSTANT; 0 otherwise */
} weft_edge;

/* The cuts of a dimension that is not cut evenly: part p holds indices begins[p] to begins[p + 1] - 1.
 * Parts are numbered along the axes that shard the dimension, the outermost first. A part may be
 * empty. */
typedef struct weft_cut {
  int32_t dim;
  int32_t part_count;
  const int64_t* begins; /* part_count + 1 numbers, from 0 to the extent of the dimension */
} weft_cut;

/* Ghost cells along one dimension: the numbers of cells before and after a rank's part, and the rules for
 * their values at the ends of the global tensor. */
typedef struct weft_halo_dim {
  int32_t dim;
  int32_t reserved; /* 0 */
  int64_t before, after;
  weft_edge before_edge, after_edge;
} weft_halo_dim;

/* The plan of an exchange that fills ghost cells, including corners, of arrays that hold this rank's part of
 * a tensor and, around it, copies of elements of other ranks. */
typedef struct weft_halo weft_halo;

/* `cuts` may be NULL if cut_count is 0. Then `layout` decides where all dimensions are cut. Fails with
 * WEFT_LAYOUT if the layout is WEFT_PARTIAL. */
weft_status weft_halo_create(const weft_layout* layout, const weft_cut* cuts, int32_t cut_count,
                             const weft_halo_dim* dims, int32_t dim_count, weft_halo** halo,
                             weft_error* error);
void weft_halo_destroy(weft_halo* halo);
/* The extents of this rank's array: its part and the ghost cells. `room`: the size of `extents`, at least the
 * number of dimensions. */
weft_status weft_halo_extents(const weft_halo* halo, int64_t* extents, int32_t room, weft_error* error);
/* The place of this rank's part in the array (inner) and in the global tensor (offsets), and its extents.
 * `room`: the size of each array. */
weft_status weft_halo_part(const weft_halo* halo, int64_t* inner, int64_t* offsets, int64_t* extents,
                           int32_t room, weft_error* error);

/* An exchange in flight. One thread at a time may use it. */
typedef struct weft_exchange weft_exchange;

/* Fills the ghost cells of `field_count` row-major arrays of weft_halo_extents, of any dtypes, with one
 * message for each neighbour and dtype. If `exchange` is NULL, it blocks until the ghost cells are filled.
 * Otherwise it sends the messages, and weft_exchange_finish fills the ghost cells. Until then the program
 * may read inner cells but not write them, and may neither read nor write ghost cells. */
weft_status weft_halo_start(const weft_halo* halo, const weft_buffer* fields, int32_t field_count,
                            weft_exchange** exchange, weft_error* error);
/* The adjoint of weft_halo_start, in place: each ghost cell is added to the inner cell that
 * weft_halo_start copies into it. Each inner cell gets the contributions of rank 0 first, then those of
 * rank 1, and so on. Ghost cells do not change. For integers, f64, f32, bf16 and f16 (added in f32 and
 * rounded once), in host memory. Until the exchange is done the program may read ghost cells, and may
 * neither read nor write inner cells near the border. */
weft_status weft_halo_start_add(const weft_halo* halo, const weft_buffer* fields, int32_t field_count,
                                weft_exchange** exchange, weft_error* error);
/* A halo, and arrays for it. */
typedef struct weft_halo_fields {
  const weft_halo* halo;
  const weft_buffer* fields;
  int32_t field_count;
  int32_t reserved; /* 0 */
} weft_halo_fields;
/* Like weft_halo_start, for several halos in one exchange. Each rank sends one message to each neighbour.
 * The halos must be different plans, cut over the same axes of one mesh. All ranks must give the halos in
 * the same order. No array may be given twice. */
weft_status weft_halo_start_together(const weft_halo_fields* halos, int32_t halo_count,
                                     weft_exchange** exchange, weft_error* error);

/* Indices lo to hi - 1 of the global tensor. */
typedef struct weft_range {
  int64_t lo, hi;
} weft_range;
/* The requests of the ranks for one dimension: the ranks that hold part p request the range wanted[p]. */
typedef struct weft_window_dim {
  int32_t dim;
  int32_t part_count;
  const weft_range* wanted;
  weft_edge before_edge, after_edge;
} weft_window_dim;

/* The plan of an exchange that copies the window of each rank into a separate array. */
typedef struct weft_window weft_window;

/* In dimensions that are not named, the window is the rank's part. weft copies the arrays. */
weft_status weft_window_create(const weft_layout* layout, const weft_cut* cuts, int32_t cut_count,
                               const weft_window_dim* dims, int32_t dim_count, weft_window** window,
                               weft_error* error);
void weft_window_destroy(weft_window* window);
/* The extents of this rank's part and of its window. `room`: the size of each array. */
weft_status weft_window_extents(const weft_window* window, int64_t* part, int64_t* extents, int32_t room,
                                weft_error* error);
/* The indices of the window, in a named dimension, whose elements this rank holds itself. These elements are
 * filled when weft_window_start returns. */
weft_status weft_window_own(const weft_window* window, int32_t dim, weft_range* own, weft_error* error);
/* Fills out[i] with the window on in[i], for each of `field_count` arrays. `exchange` is as in
 * weft_halo_start. The caller must keep `in` and `out` alive until the exchange is finished; they must not
 * overlap. `stream`: the stream of the arrays' device on which the exchange is ordered; NULL means the
 * device's default stream. */
weft_status weft_window_start(const weft_window* window, const weft_buffer* in, const weft_buffer* out,
                              int32_t field_count, const weft_stream* stream, weft_exchange** exchange,
                              weft_error* error);
/* A window, and arrays for it. */
typedef struct weft_window_fields {
  const weft_window* window;
  const weft_buffer* in;
  const weft_buffer* out;
  int32_t field_count;
  int32_t reserved; /* 0 */
} weft_window_fields;
/* Like weft_window_start, for several windows in one exchange; compare weft_halo_start_together. */
weft_status weft_window_start_together(const weft_window_fields* windows, int32_t window_count,
                                       const weft_stream* stream, weft_exchange** exchange,
                                       weft_error* error);
/* The adjoint of weft_window_start: in[i] is a gradient of this rank's window. out[i] has the extents of this
 * rank's part; each of its elements becomes the sum of the gradients of that element in all windows, in the
 * order of ranks. For integers, f64, f32, bf16 and f16, in host memory. */
weft_status weft_window_start_adjoint(const weft_window* window, const weft_buffer* in,
                                      const weft_buffer* out, int32_t field_count, weft_exchange** exchange,
                                      weft_error* error);

/* Sets *done to whether weft_exchange_finish would return without waiting. Makes progress; never blocks. */
weft_status weft_exchange_done(weft_exchange* exchange, bool* done, weft_error* error);
/* Blocks until all elements are written. A second call for the same exchange fails with WEFT_BAD_ARGUMENT. */
weft_status weft_exchange_finish(weft_exchange* exchange, weft_error* error);
/* Destroys the exchange. If it is not finished, its group is aborted on all ranks. */
void weft_exchange_destroy(weft_exchange* exchange);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_WINDOW_H */
