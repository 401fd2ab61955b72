/* Gradients of the caller's own: reduced in buckets while the rest of them is still computed, averaged,
 * synchronised, measured and clipped where they lie; and which samples each rank reads.
 *
 * A gradient is a weft_tensor of f64, f32, bf16 or f16 in the host's memory. Its layout says what the
 * elements are: a gradient of ranks that saw different data is WEFT_PARTIAL on their axis, with WEFT_SUM, or
 * WEFT_AVG where each rank has the mean over its own data; after the reduction it is WEFT_REPLICATE there
 * (weft_layout_reduced).
 *
 * All ranks of the axes call these functions in the same order, each from one thread, and give the same
 * gradients in the same order: else WEFT_MISMATCH on all of them, naming the first that differs. A mistake
 * in the gradients of one rank alone is an error of the same code on all ranks. An argument that cannot be
 * read at all (NULL, a number that is no dtype) is an error of that rank, and the others wait until their
 * deadline. Results are the same bits on all ranks. Memory is only used until the call is over, unless said
 * otherwise. Lists may be NULL if count is 0. */
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
  /* How far a replica may be from the average, relative to the largest element: 0 is the default of its dtype
   * (1024 units in the last place of f64 and f32, 4 of bf16 and f16). WEFT_EXACT: not at all. */
  double tolerance;
  /* The axes, among those given, whose ranks saw different data: WEFT_LAYOUT for a gradient that is
   * WEFT_REPLICATE there. NULL: none. */
  const weft_mesh* data_axes;
} weft_reduce_options;
#define WEFT_REDUCE_OPTIONS_INIT \
  { sizeof(weft_reduce_options), WEFT_DRIFT_ERROR, 0, NULL }

/* Reduces gradients, in place, as their layouts say on each of `axes`: WEFT_PARTIAL is summed, or averaged;
 * WEFT_SHARD stays; WEFT_REPLICATE stays as it is if all replicas have the same bits, and is averaged
 * otherwise. WEFT_MISMATCH on all ranks, before any gradient changes, where a replica has drifted: the text
 * names the gradient, and `ranks` are numbered as in `axes`. All axes in one pass: an exchange that compares
 * the lists, and one collective for each reduction, dtype and set of axes. Blocks. `options` may be NULL, and
 * are the same on all ranks. */
weft_status weft_reduce_gradients(const weft_tensor* gradients, int32_t count, const weft_mesh* axes,
                                  const weft_reduce_options* options, weft_error* error);

/* weft_reduce_gradients whose data axes are all of `axes`: for gradients of ranks that saw different data.
 * Blocks. */
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

/* weft_reduce_gradients without data axes: for gradients of weights that every rank of `axes` holds. Blocks.
 * `options` may be NULL. */
weft_status weft_sync_replicated_gradients(const weft_tensor* gradients, int32_t count, const weft_mesh* axes,
                                           const weft_sync_options* options, weft_error* error);

/* The p-norm of all gradients of all ranks, each element counted once, over any mixture of layouts; p is 1 or
 * more, or infinity. Collective among all ranks of the gradients' meshes; blocks. WEFT_LAYOUT if one is
 * still WEFT_PARTIAL. A gradient without a layout counts on this rank alone. */
weft_status weft_grad_norm(const weft_tensor* gradients, int32_t count, double p, double* norm,
                           weft_error* error);

/* The action of weft_clip_grad_norm if the norm is not finite: WEFT_BAD_ARGUMENT on every rank, naming
 * gradients and ranks; or nothing, so that the caller, who sees *norm, skips its step. */
typedef int32_t weft_non_finite;
enum { WEFT_NON_FINITE_ERROR = 0, WEFT_NON_FINITE_SKIP = 1 };

typedef struct weft_clip_options {
  uint32_t struct_size;
  weft_non_finite non_finite;
  double p; /* 0: 2 */
} weft_clip_options;
#define WEFT_CLIP_OPTIONS_INIT \
  { sizeof(weft_clip_options), WEFT_NON_FINITE_ERROR, 0 }

/* Scales all gradients by min(1, max_norm / (norm + 1e-6)); *norm is the norm before, and may be NULL.
 * Otherwise as weft_grad_norm. `options` may be NULL. */
weft_status weft_clip_grad_norm(const weft_tensor* gradients, int32_t count, double max_norm,
                                const weft_clip_options* options, double* norm, weft_error* error);

/* ---- Buckets ---- */

/* Reduces gradients in buckets while the rest of them is still computed. Give the entries in the order in
 * which they become ready: mostly the reverse of forward.
 *
 *   for each step:  compute the gradients into slots, or into memory that was bound, calling weft_reducer_ready
 *                   weft_reducer_finish; the gradients are the reduced ones now
 *
 * A gradient may lie in its slot, a part of a bucket in shared memory: then nothing is copied. Or it lies in
 * memory of the caller's: a small one is copied into its slot and back, one that fills a bucket alone is
 * reduced where it lies.
 *
 * One thread per rank. Between weft_reducer_ready and the end of weft_reducer_finish a gradient belongs to
 * the reduction: neither read nor write it. Several reducers over the same axes are independent; all ranks
 * create and destroy them, and call weft_reducer_finish, in the same order, and in the first step also
 * weft_reducer_ready. */
typedef struct weft_reducer weft_reducer;

typedef struct weft_reducer_entry {
  const char* name; /* in errors */
  int64_t count;    /* elements on this rank */
  weft_dtype dtype;
  weft_reduce_op op; /* WEFT_SUM, or WEFT_AVG where each rank has the mean over its own data */
} weft_reducer_entry;

/* The treatment of a gradient that nobody made ready: weft_reducer_finish fails on all ranks, naming it; or
 * it counts as zeros of this rank. */
typedef int32_t weft_unused;
enum { WEFT_UNUSED_ERROR = 0, WEFT_UNUSED_ZEROS = 1 };

/* A bucket all of whose gradients are there. Good until the weft_reducer_finish of its step is over; its
 * memory lies in the same place in every step. */
typedef struct weft_ready_bucket {
  weft_buffer data;       /* its gradients one after the other, zeros between them */
  const int32_t* members; /* its gradients, as the reducer numbers them */
  int32_t member_count;
  int32_t number;    /* in the order in which buckets are sent: the same on all ranks */
  weft_reduce_op op; /* its reduction over the ranks: WEFT_SUM or WEFT_AVG */
} weft_ready_bucket;

/* A reduction of the program's own in the place of each bucket's all-reduce: `begin`, when the bucket is
 * ready, then `end` in weft_reducer_finish, which leaves the result in bucket->data. They communicate over a
 * group of the program's own (weft_mesh_group of the same axes gives one), by any calls on it, and do not use
 * the reducer. Both are called for every bucket in every step, in the same order on all ranks; with one rank,
 * and for an empty bucket, not at all. Either may be NULL, but not both. A status other than WEFT_OK fails
 * the call of the reducer on this rank, with that status and the error's text, and with WEFT_ABORTED on the
 * others; the reducer cannot be used any more. */
typedef struct weft_bucket_hook {
  const char*
      name; /* for error texts; the same on all ranks, which compare it. NULL: there is no hook. Copied */
  weft_status (*begin)(void* data, const weft_ready_bucket* bucket, weft_error* error);
  weft_status (*end)(void* data, const weft_ready_bucket* bucket, weft_error* error);
  void* data;
} weft_bucket_hook;

/* WEFT_BUCKETS_BF16: buckets of f32 are rounded to bf16, reduced as such, and widened; others are reduced as
 * they are. */
typedef int32_t weft_bucket_compression;
enum { WEFT_BUCKETS_AS_THEY_ARE = 0, WEFT_BUCKETS_BF16 = 1 };

typedef struct weft_reducer_options {
  uint32_t struct_size;
  weft_unused unused;
  int64_t bucket_bytes; /* a bucket is closed when it has this many; 0: 4 MiB */
  weft_bucket_hook hook;
  weft_bucket_compression compression; /* without a hook */
} weft_reducer_options;
#define WEFT_REDUCER_OPTIONS_INIT \
  { sizeof(weft_reducer_options), WEFT_UNUSED_ERROR, 0, {NULL, NULL, NULL, NULL}, WEFT_BUCKETS_AS_THEY_ARE }

/* Over all ranks of `axes`, a mesh of one or more axes; with one rank nothing moves. The same entries and
 * options on all ranks: the first step compares them, and is WEFT_MISMATCH if they differ. Names are copied.
 * `options` may be NULL. Blocks only if something other than a misuse of C is wrong on this rank (a count
 * below 0, for example): until the others are in their first step, at most the deadline. They get an error of
 * the same code that names this rank. */
weft_status weft_reducer_create(const weft_mesh* axes, const weft_reducer_entry* entries, int32_t count,
                                const weft_reducer_options* options, weft_reducer** reducer,
                                weft_error* error);
/* Slots are gone with it. A reduction still in flight is given up, and with it the group of the axes. */
void weft_reducer_destroy(weft_reducer* reducer);

/* Gradient i's place in its bucket: zeros at first. It lives as long as the reducer, but not after
 * weft_reducer_bind(i). */
weft_status weft_reducer_slot(const weft_reducer* reducer, int32_t i, weft_buffer* slot, weft_error* error);
/* Gradient i is in the caller's memory from now on, which lives as long as the reducer, or until it is bound
 * again: in any step, before weft_reducer_ready. The same entries are bound on all ranks. In the first step a
 * buffer that does not fit is reported to the others as by weft_reducer_create; later call
 * weft_reducer_finish, which fails on all ranks, as nobody made i ready. */
weft_status weft_reducer_bind(weft_reducer* reducer, int32_t i, const weft_buffer* data, weft_error* error);
/* Gradient i has its final value of this step. Sends what can be sent, and blocks in the first step alone, to
 * compare the entries. */
weft_status weft_reducer_ready(weft_reducer* reducer, int32_t i, weft_error* error);
weft_status weft_reducer_is_ready(const weft_reducer* reducer, int32_t i, bool* ready, weft_error* error);
/* Between the two, weft_reducer_ready only notes that a gradient has a value, any number of times, and sends
 * nothing: for micro-batches before the last, whose gradients the caller adds up. They nest.
 * WEFT_BAD_ARGUMENT for a begin after a gradient became ready in this step, and for an end without a
 * begin. */
weft_status weft_reducer_begin_no_sync(weft_reducer* reducer, weft_error* error);
weft_status weft_reducer_end_no_sync(weft_reducer* reducer, weft_error* error);
/* Blocks until every gradient is reduced, on all ranks. After a failed reduction the reducer cannot be used
 * any more: every later call returns the first failure. */
weft_status weft_reducer_finish(weft_reducer* reducer, weft_error* error);

/* How many buckets there are, and the bytes of each in the order they are sent. */
weft_status weft_reducer_bucket_count(const weft_reducer* reducer, int32_t* count, weft_error* error);
weft_status weft_reducer_bucket_bytes(const weft_reducer* reducer, int32_t bucket, int64_t* bytes,
                                      weft_error* error);
/* Reductions sent by weft_reducer_ready rather than by weft_reducer_finish so far: a measure of overlap. */
weft_status weft_reducer_sent_early(const weft_reducer* reducer, int64_t* count, weft_error* error);

/* ---- Samples ---- */

/* A shuffled walk through a data set, without repeats within a round, as a pure function of (seed, step):
 * the step is the only state to save. The global batch is the same for any number of data ranks, and each
 * reads a part of it that lies in one piece. Any thread, several at once; nothing blocks or communicates. */
typedef struct weft_sampler weft_sampler;

/* `axis`: the data axis; ranks that differ on other axes alone read the same samples. */
weft_status weft_sampler_create(const weft_mesh* axis, int64_t population, int64_t global_batch,
                                uint64_t seed, weft_sampler** sampler, weft_error* error);
void weft_sampler_destroy(weft_sampler* sampler);
/* Where this rank's part lies in the global batch. */
weft_status weft_sampler_part(const weft_sampler* sampler, int64_t* offset, int64_t* count,
                              weft_error* error);
/* The numbers of the samples of a step that this rank reads. `room`: of `samples`, at least the part's
 * count. */
weft_status weft_sampler_batch(const weft_sampler* sampler, int64_t step, int64_t* samples, int64_t room,
                               weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_GRADIENTS_H */
