/* Functions on gradients in the caller's memory. A reducer reduces them in buckets while later gradients are
 * still computed. Other functions average, synchronise, measure and clip gradients in place. This header also
 * has a sampler, which decides which samples each rank reads.
 *
 * A gradient is a weft_tensor of f64, f32, bf16 or f16 in the host's memory. If the ranks of an axis saw
 * different data, the gradient is WEFT_PARTIAL on that axis, with WEFT_SUM, or with WEFT_AVG if each rank has
 * the mean over its own data. After the reduction the gradient is WEFT_REPLICATE on that axis
 * (weft_layout_reduced).
 *
 * All ranks of the axes must call these functions in the same order, each from one thread, and give the
 * same gradients in the same order. Otherwise all ranks fail with WEFT_MISMATCH. The text names the first
 * gradient that differs. A mistake in the gradients of one rank alone is an error of the same code on all
 * ranks. If an argument cannot be read at all (NULL, a number that is no dtype), only that rank gets an
 * error. The other ranks wait until their deadline. Results have the same bits on all ranks. Functions use
 * the caller's memory only until they return, unless said otherwise. Lists may be NULL if count is 0. */
#ifndef WEFT_C_GRADIENTS_H
#define WEFT_C_GRADIENTS_H

#include "weft/c/layout.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Lists of gradients ---- */

/* The action of weft_reduce_gradients if replicas differ by more than rounding. */
typedef int32_t weft_on_drift;
enum { WEFT_DRIFT_ERROR = 0, WEFT_DRIFT_AVERAGE = 1 };
#define WEFT_EXACT (-1.0)

typedef struct weft_reduce_options {
  uint32_t struct_size;
  weft_on_drift on_drift;
  /* The largest difference of a replica from the average, relative to the largest element. 0 means the
   * default of the dtype: 1024 units in the last place for f64 and f32, 4 units for bf16 and f16.
   * WEFT_EXACT: replicas must be equal. */
  double tolerance;
  /* The subset of the call's axes whose ranks saw different data. The call fails with WEFT_LAYOUT if a
   * gradient is WEFT_REPLICATE on one of these axes. NULL: no axis. */
  const weft_mesh* data_axes;
} weft_reduce_options;
#define WEFT_REDUCE_OPTIONS_INIT \
  { sizeof(weft_reduce_options), WEFT_DRIFT_ERROR, 0, NULL }

/* Reduces gradients in place. On each of `axes` a gradient's placement decides what is done. WEFT_PARTIAL
 * is summed, or averaged. WEFT_SHARD does not change. WEFT_REPLICATE does not change if all replicas have
 * the same bits, and is averaged otherwise. Fails with WEFT_MISMATCH on all ranks, before any gradient
 * changes, if a replica differs by more. The text names the gradient, and `ranks` are numbered as in
 * `axes`. One pass reduces over all axes: an exchange that compares the lists, and one collective for each
 * reduction, dtype and set of axes. Blocks. `options` may be NULL, and must be the same on all ranks. */
weft_status weft_reduce_gradients(const weft_tensor* gradients, int32_t count, const weft_mesh* axes,
                                  const weft_reduce_options* options, weft_error* error);

/* Like weft_reduce_gradients, with all of `axes` as data axes. It is for gradients of ranks that saw
 * different data. Blocks. */
weft_status weft_average_gradients(const weft_tensor* gradients, int32_t count, const weft_mesh* axes,
                                   weft_error* error);

/* As in weft_reduce_options. */
typedef struct weft_sync_options {
  uint32_t struct_size;
  weft_on_drift on_drift;
  double tolerance;
} weft_sync_options;
#define WEFT_SYNC_OPTIONS_INIT \
  { sizeof(weft_sync_options), WEFT_DRIFT_ERROR, 0 }

/* Like weft_reduce_gradients, without data axes. It is for gradients of weights that every rank of `axes`
 * holds. Blocks. `options` may be NULL. */
weft_status weft_sync_replicated_gradients(const weft_tensor* gradients, int32_t count, const weft_mesh* axes,
                                           const weft_sync_options* options, weft_error* error);

/* Computes the p-norm of all gradients of all ranks, over any mixture of layouts. Each element counts
 * once. p is 1 or more, or infinity. Collective among all ranks of the gradients' meshes; blocks. Fails
 * with WEFT_LAYOUT if a gradient is still WEFT_PARTIAL. Gradients without a layout count on this rank. */
weft_status weft_grad_norm(const weft_tensor* gradients, int32_t count, double p, double* norm,
                           weft_error* error);

/* The action of weft_clip_grad_norm if the norm is not finite. WEFT_NON_FINITE_ERROR: it fails with
 * WEFT_BAD_ARGUMENT on every rank. The text names gradients and ranks. WEFT_NON_FINITE_SKIP: it does not
 * change the gradients. The caller, which gets *norm, must skip its step. */
typedef int32_t weft_non_finite;
enum { WEFT_NON_FINITE_ERROR = 0, WEFT_NON_FINITE_SKIP = 1 };

typedef struct weft_clip_options {
  uint32_t struct_size;
  weft_non_finite non_finite;
  double p; /* 0: 2 */
} weft_clip_options;
#define WEFT_CLIP_OPTIONS_INIT \
  { sizeof(weft_clip_options), WEFT_NON_FINITE_ERROR, 0 }

/* Scales all gradients by min(1, max_norm / (norm + 1e-6)). *norm (the pointer may be NULL) becomes the
 * norm before the scaling. All other rules are as in weft_grad_norm. `options` may be NULL. */
weft_status weft_clip_grad_norm(const weft_tensor* gradients, int32_t count, double max_norm,
                                const weft_clip_options* options, double* norm, weft_error* error);

/* ---- Buckets ---- */

/* A reducer reduces gradients in buckets while later gradients are still computed. Give the entries in the
 * order in which they become ready. This is mostly the reverse of forward.
 *
 *   for each step:  compute the gradients into slots, or into memory that was bound, calling weft_reducer_ready
 *                   weft_reducer_finish; the gradients are the reduced ones now
 *
 * A gradient may lie in its slot, which is a part of a bucket in shared memory. Then nothing is copied. Or it
 * lies in the caller's memory. Then a small gradient is copied into its slot and back, and a gradient that
 * fills a bucket alone is reduced in place.
 *
 * One thread per rank. Between weft_reducer_ready and the end of weft_reducer_finish, do not read or write
 * the gradient. Several reducers over the same axes are independent. All ranks must create and destroy
 * them, and call weft_reducer_finish, in the same order. In the first step all ranks must also call
 * weft_reducer_ready in the same order. */
typedef struct weft_reducer weft_reducer;

typedef struct weft_reducer_entry {
  const char* name; /* in errors */
  int64_t count;    /* elements on this rank */
  weft_dtype dtype;
  weft_reduce_op op; /* WEFT_SUM, or WEFT_AVG if each rank has the mean over its own data */
} weft_reducer_entry;

/* The treatment of a gradient for which weft_reducer_ready was not called. WEFT_UNUSED_ERROR:
 * weft_reducer_finish fails on all ranks. The text names the gradient. WEFT_UNUSED_ZEROS: this rank
 * contributes zeros. */
typedef int32_t weft_unused;
enum { WEFT_UNUSED_ERROR = 0, WEFT_UNUSED_ZEROS = 1 };

/* A bucket whose gradients are all ready. It is valid until the weft_reducer_finish of its step returns.
 * Its memory has the same address in every step. */
typedef struct weft_ready_bucket {
  weft_buffer data;       /* the bucket's gradients one after the other, with zeros between them */
  const int32_t* members; /* the bucket's gradients, as the reducer numbers them */
  int32_t member_count;
  int32_t number;    /* the bucket's number in the order in which buckets are sent, the same on all ranks */
  weft_reduce_op op; /* the reduction over the ranks: WEFT_SUM or WEFT_AVG */
} weft_ready_bucket;

/* A reduction of the program that replaces the all-reduce of each bucket. The reducer calls `begin` when
 * the bucket is ready, and `end` in weft_reducer_finish. `end` must leave the result in bucket->data. Both
 * functions communicate by any calls on a group of the program (weft_mesh_group of the same axes gives
 * one), and must not use the reducer. Both are called for every bucket in every step, in the same order on
 * all ranks. They are not called with one rank, or for an empty bucket. One of them may be NULL, but not
 * both. If one returns a status other than WEFT_OK, the call of the reducer fails on this rank with that
 * status and the error's text, and on the others with WEFT_ABORTED. Afterwards the reducer cannot be used. */
typedef struct weft_bucket_hook {
  const char*
      /* for error texts; ranks compare it, and must give the same name. NULL: no hook. weft copies the
       * name */
      name;
  weft_status (*begin)(void* data, const weft_ready_bucket* bucket, weft_error* error);
  weft_status (*end)(void* data, const weft_ready_bucket* bucket, weft_error* error);
  void* data;
} weft_bucket_hook;

/* WEFT_BUCKETS_BF16: buckets of f32 are rounded to bf16, reduced in bf16, and widened. Buckets of other
 * dtypes are reduced as they are. */
typedef int32_t weft_bucket_compression;
enum { WEFT_BUCKETS_AS_THEY_ARE = 0, WEFT_BUCKETS_BF16 = 1 };

typedef struct weft_reducer_options {
  uint32_t struct_size;
  weft_unused unused;
  int64_t bucket_bytes; /* a bucket is closed when it has this many bytes; 0: 4 MiB */
  weft_bucket_hook hook;
  weft_bucket_compression compression; /* used only without a hook */
} weft_reducer_options;
#define WEFT_REDUCER_OPTIONS_INIT \
  { sizeof(weft_reducer_options), WEFT_UNUSED_ERROR, 0, {NULL, NULL, NULL, NULL}, WEFT_BUCKETS_AS_THEY_ARE }

/* Makes a reducer over all ranks of `axes`, a mesh of one or more axes. With one rank it moves no data.
 * All ranks must give the same entries and options. The first step compares them, and fails with
 * WEFT_MISMATCH if they differ. weft copies the names. `options` may be NULL. weft_reducer_create does not
 * block, with one exception: if an argument of this rank can be read but is wrong (a count below 0, for
 * example), it waits, at most the deadline, until the other ranks are in their first step. These ranks
 * then get an error of the same code that names this rank. */
weft_status weft_reducer_create(const weft_mesh* axes, const weft_reducer_entry* entries, int32_t count,
                                const weft_reducer_options* options, weft_reducer** reducer,
                                weft_error* error);
/* Destroys the reducer and its slots. If a reduction is still in flight, the group of the axes fails. */
void weft_reducer_destroy(weft_reducer* reducer);

/* Gives the memory of gradient i in its bucket, which holds zeros at first. It is valid as long as the
 * reducer, but not after weft_reducer_bind(i). */
weft_status weft_reducer_slot(const weft_reducer* reducer, int32_t i, weft_buffer* slot, weft_error* error);
/* From now on gradient i lies in the caller's memory `data`. The caller must keep the memory alive as long as
 * the reducer, or until the gradient is bound again. Call it in any step, before weft_reducer_ready. All
 * ranks must bind the same entries. If a buffer does not fit in the first step, the other ranks are notified
 * as by weft_reducer_create. If a buffer does not fit in a later step, call weft_reducer_finish, which fails
 * on all ranks because gradient i is not ready. */
weft_status weft_reducer_bind(weft_reducer* reducer, int32_t i, const weft_buffer* data, weft_error* error);
/* States that gradient i has its final value of this step. Sends the buckets that are ready. Blocks only in
 * the first step, to compare the entries. */
weft_status weft_reducer_ready(weft_reducer* reducer, int32_t i, weft_error* error);
weft_status weft_reducer_is_ready(const weft_reducer* reducer, int32_t i, bool* ready, weft_error* error);
/* Between weft_reducer_begin_no_sync and weft_reducer_end_no_sync, weft_reducer_ready may be called any
 * number of times. It only notes that a gradient has a value, and sends nothing. It is for micro-batches
 * before the last. The caller adds up their gradients. Pairs of the two functions may nest. Begin fails
 * with WEFT_BAD_ARGUMENT if a gradient is already ready in this step, and end fails if there was no begin. */
weft_status weft_reducer_begin_no_sync(weft_reducer* reducer, weft_error* error);
weft_status weft_reducer_end_no_sync(weft_reducer* reducer, weft_error* error);
/* Blocks until every gradient is reduced, on all ranks. After a failed reduction the reducer cannot be
 * used any more. Every later call returns the first failure. */
weft_status weft_reducer_finish(weft_reducer* reducer, weft_error* error);

/* The number of buckets, and the bytes of each bucket, in the order in which buckets are sent. */
weft_status weft_reducer_bucket_count(const weft_reducer* reducer, int32_t* count, weft_error* error);
weft_status weft_reducer_bucket_bytes(const weft_reducer* reducer, int32_t bucket, int64_t* bytes,
                                      weft_error* error);
/* The number of reductions that weft_reducer_ready, and not weft_reducer_finish, has sent so far: a measure
 * of overlap. */
weft_status weft_reducer_sent_early(const weft_reducer* reducer, int64_t* count, weft_error* error);

/* ---- Samples ---- */

/* A shuffled walk through a data set, without repeats within a round. It is a pure function of (seed,
 * step), so a program need save only the step. The global batch is the same for any number of data ranks,
 * and each data rank reads one contiguous part of it. Any threads may use a sampler at once. Its functions
 * neither block nor communicate. */
typedef struct weft_sampler weft_sampler;

/* `axis`: the data axis. Ranks with the same coordinate on it read the same samples. */
weft_status weft_sampler_create(const weft_mesh* axis, int64_t population, int64_t global_batch,
                                uint64_t seed, weft_sampler** sampler, weft_error* error);
void weft_sampler_destroy(weft_sampler* sampler);
/* The place of this rank's part in the global batch. */
weft_status weft_sampler_part(const weft_sampler* sampler, int64_t* offset, int64_t* count,
                              weft_error* error);
/* The numbers of the samples of a step that this rank reads. `room`: the size of `samples`, at least the
 * count of the part. */
weft_status weft_sampler_batch(const weft_sampler* sampler, int64_t step, int64_t* samples, int64_t room,
                               weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_GRADIENTS_H */
