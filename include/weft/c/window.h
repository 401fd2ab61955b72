/* Halos and windows: each rank gets the range of indices that it requests of a tensor that is cut over ranks,
 * whichever rank holds them, and beyond the ends the elements that an edge rule states.
 *
 * Plans are made once, without communication, and used as often as needed; each rank gives the same. A plan
 * keeps its layout and mesh, and is used by one thread at a time. Functions that move elements are collective
 * among the ranks of the axes that cut the dimensions named; these ranks begin exchanges in the same order,
 * and each exchange is a call of the group of these axes. The first start of a plan waits for that of the
 * other ranks: if they gave different things, all get WEFT_MISMATCH, whose text has what two of them gave.
 *
 * A plan may have several exchanges in flight. To begin one that writes what one of them still reads or
 * writes, or reads what one writes, is WEFT_BAD_ARGUMENT, whose text names the field. Texts of errors of
 * exchanges begin with "halo: " or "window: ". */
#ifndef WEFT_C_WINDOW_H
#define WEFT_C_WINDOW_H

#include "weft/c/layout.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The elements beyond an end of a dimension of n elements: x[-1] and x[n] are the first there. */
typedef int32_t weft_edge_kind;
enum {
  /* Nothing. Ghost cells stay as they are; a window that reaches there is WEFT_BAD_ARGUMENT. */
  WEFT_EDGE_NONE = 0,
  WEFT_EDGE_ZERO,      /* 0 */
  WEFT_EDGE_CONSTANT,  /* `value` */
  WEFT_EDGE_PERIODIC,  /* x[-1] = x[n-1], as often as needed */
  WEFT_EDGE_REFLECT,   /* x[-1] = x[1]; at most n-1 beyond the end */
  WEFT_EDGE_REPLICATE, /* x[-1] = x[0] */
  /* On a globe: x[-1, j] = x[0, j + half a turn], where dimension `longitude` is even; at most n beyond the
   * end. Scalars; a vector's components point the other way there, which is not changed. */
  WEFT_EDGE_POLE
};
typedef struct weft_edge {
  weft_edge_kind kind;
  int32_t longitude; /* of WEFT_EDGE_POLE; 0 otherwise */
  double value;      /* of WEFT_EDGE_CONSTANT; 0 otherwise */
} weft_edge;

/* Where a dimension is cut, in place of evenly: part p holds indices begins[p] to begins[p + 1] - 1. Parts
 * are numbered along the axes that shard the dimension, the outermost first. A part may be empty. */
typedef struct weft_cut {
  int32_t dim;
  int32_t part_count;
  const int64_t* begins; /* part_count + 1 numbers, from 0 to the extent of the dimension */
} weft_cut;

/* Ghost cells along one dimension: how many before and after a rank's part, and their values at the ends of
 * the whole. */
typedef struct weft_halo_dim {
  int32_t dim;
  int32_t reserved; /* 0 */
  int64_t before, after;
  weft_edge before_edge, after_edge;
} weft_halo_dim;

/* Ghost cells of arrays that hold this rank's part of a tensor and around it copies of the parts of others:
 * the exchange that fills them, corners too. */
typedef struct weft_halo weft_halo;

/* `cuts` may be NULL if cut_count is 0: then all is cut as `layout` says. WEFT_LAYOUT if that is
 * WEFT_PARTIAL. */
weft_status weft_halo_create(const weft_layout* layout, const weft_cut* cuts, int32_t cut_count,
                             const weft_halo_dim* dims, int32_t dim_count, weft_halo** halo,
                             weft_error* error);
void weft_halo_destroy(weft_halo* halo);
/* The extents of this rank's array: its part and the ghost cells. `room`: of `extents`, at least the
 * dimensions of the layout. */
weft_status weft_halo_extents(const weft_halo* halo, int64_t* extents, int32_t room, weft_error* error);
/* Where this rank's part lies in the array (inner), and in the whole (offsets), and its extents. `room`: of
 * each. */
weft_status weft_halo_part(const weft_halo* halo, int64_t* inner, int64_t* offsets, int64_t* extents,
                           int32_t room, weft_error* error);

/* An exchange in flight. For one thread at a time. */
typedef struct weft_exchange weft_exchange;

/* Fills the ghost cells of `field_count` arrays, row-major, of weft_halo_extents and any dtypes; in one
 * message for each neighbour and dtype. With `exchange` NULL it blocks until that is done. Else messages are
 * sent, and *exchange ends it: until then inner cells may be read, not written, and ghost cells neither. */
weft_status weft_halo_start(const weft_halo* halo, const weft_buffer* fields, int32_t field_count,
                            weft_exchange** exchange, weft_error* error);
/* The adjoint, in place: each ghost cell is added to the inner cell of which weft_halo_start makes it a copy;
 * to an inner cell first what rank 0 sends, then what rank 1 sends, and so on. Ghost cells stay as they are.
 * Integers, f64, f32, bf16 and f16 (added in f32 and rounded once), in the memory of the host. Until it is
 * done ghost cells may be read, and inner cells near the border neither read nor written. */
weft_status weft_halo_start_add(const weft_halo* halo, const weft_buffer* fields, int32_t field_count,
                                weft_exchange** exchange, weft_error* error);
/* A halo, and arrays for it. */
typedef struct weft_halo_fields {
  const weft_halo* halo;
  const weft_buffer* fields;
  int32_t field_count;
  int32_t reserved; /* 0 */
} weft_halo_fields;
/* weft_halo_start of several halos as one exchange: each rank sends one message to each neighbour. The halos
 * are different ones, cut over the same axes of one mesh; all ranks give them in the same order; no array is
 * given twice. */
weft_status weft_halo_start_together(const weft_halo_fields* halos, int32_t halo_count,
                                     weft_exchange** exchange, weft_error* error);

/* Indices lo to hi - 1 of the whole. */
typedef struct weft_range {
  int64_t lo, hi;
} weft_range;
/* The ranges of one dimension that the ranks want: those that hold part p want wanted[p]. */
typedef struct weft_window_dim {
  int32_t dim;
  int32_t part_count;
  const weft_range* wanted;
  weft_edge before_edge, after_edge;
} weft_window_dim;

/* A window: an array of its own. */
typedef struct weft_window weft_window;

/* In dimensions that are not named each rank has its part as it is. Arrays are copied. */
weft_status weft_window_create(const weft_layout* layout, const weft_cut* cuts, int32_t cut_count,
                               const weft_window_dim* dims, int32_t dim_count, weft_window** window,
                               weft_error* error);
void weft_window_destroy(weft_window* window);
/* The extents of this rank's part and of its window. `room`: of each. */
weft_status weft_window_extents(const weft_window* window, int64_t* part, int64_t* extents, int32_t room,
                                weft_error* error);
/* The indices of the window, in a dimension that was named, which this rank holds itself: they are there once
 * weft_window_start has returned. */
weft_status weft_window_own(const weft_window* window, int32_t dim, weft_range* own, weft_error* error);
/* out[i] becomes the window on in[i], for each of `field_count` arrays. `exchange` as in weft_halo_start;
 * `in` and `out` live until it is finished and do not overlap. `stream`: the stream on which it is ordered,
 * on the device of the arrays; NULL: the device's default one. */
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
/* weft_window_start of several windows as one exchange, as weft_halo_start_together does. */
weft_status weft_window_start_together(const weft_window_fields* windows, int32_t window_count,
                                       const weft_stream* stream, weft_exchange** exchange,
                                       weft_error* error);
/* The adjoint: in[i] is a gradient of a window, out[i], of the extents of a part, becomes the sum of the
 * gradients of its elements over all windows, in the order of ranks. Integers, f64, f32, bf16 and f16, in the
 * memory of the host. */
weft_status weft_window_start_adjoint(const weft_window* window, const weft_buffer* in,
                                      const weft_buffer* out, int32_t field_count, weft_exchange** exchange,
                                      weft_error* error);

/* Whether weft_exchange_finish would not wait. Takes the next steps it can; never blocks. */
weft_status weft_exchange_done(weft_exchange* exchange, bool* done, weft_error* error);
/* Blocks until all is written. Once; a second time is WEFT_BAD_ARGUMENT. */
weft_status weft_exchange_finish(weft_exchange* exchange, weft_error* error);
/* One that is not finished: its group is aborted, for all ranks. */
void weft_exchange_destroy(weft_exchange* exchange);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_WINDOW_H */
