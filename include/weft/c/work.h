/* Calls in flight, and the options of any call. */
#ifndef WEFT_C_WORK_H
#define WEFT_C_WORK_H

#include "weft/c/buffer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct weft_call_options {
  uint32_t struct_size;
  weft_reduce_op reduce_op;
  weft_order order;
  double scale;        /* WEFT_PREMUL_SUM; 0 otherwise */
  int64_t deadline_ns; /* 0: the group's */
  int32_t tag;         /* send and recv: 0 or more */
  int32_t reserved;    /* 0 */
  /* groups of a device: the stream on which the call is ordered; {0}: the device's default stream. */
  weft_stream stream;
  const weft_reduction* reduction; /* WEFT_USER; NULL otherwise */
} weft_call_options;
#define WEFT_CALL_OPTIONS_INIT \
  { sizeof(weft_call_options), WEFT_SUM, WEFT_ORDER_NATIVE, 0, 0, 0, 0, {WEFT_CPU, NULL}, NULL }

/* A call in flight. Finished or not, it is destroyed with weft_work_destroy.
 *
 * A call makes progress while a thread of its rank is inside weft: one that waits, asks whether it is done or
 * begins another call takes the next steps of everything that its rank has in flight, in all its groups. So
 * waiting in different orders on different ranks cannot deadlock; but a rank that begins a call and then
 * computes past its deadline, without a call of these functions, fails its peers. Groups with a helper thread
 * make progress by themselves, and so do calls on a stream. */
typedef struct weft_work weft_work;

/* Blocks until the call is done, driving everything this rank has in flight. Fails with the call's error,
 * WEFT_TIMEOUT after its deadline; asked again it says the same. */
weft_status weft_work_wait(weft_work* work, weft_error* error);
/* Blocks at most `limit_ns`; *done is false if the call is still pending after that. */
weft_status weft_work_wait_for(weft_work* work, int64_t limit_ns, bool* done, weft_error* error);
/* Takes the next steps it can and never blocks. */
weft_status weft_work_done(weft_work* work, bool* done, weft_error* error);
/* Waits for all of them, of one group or of several, in any order. If some fail it gives the error of the
 * first in the list that did, after all have ended. */
weft_status weft_work_wait_all(weft_work* const* works, size_t count, weft_error* error);
/* The same for at most `limit_ns`: *done is false if some are pending then. An error is given when all
 * have ended or the time is over, even if some are pending. */
weft_status weft_work_wait_all_for(weft_work* const* works, size_t count, int64_t limit_ns, bool* done,
                                   weft_error* error);
/* Makes `stream` wait for the call; {0}: the default stream of the group's device. Transports of streams
 * (nccl) do not block this thread, and weft_work_wait or weft_work_done still report how the call ended.
 * With others it waits here.
 * */
weft_status weft_work_wait_on(weft_work* work, weft_stream stream, weft_error* error);

/* The rank that sent the message of a recv that is done. WEFT_BAD_ARGUMENT if it is not known: the call
 * is pending or has failed, or it is another call, or several. */
weft_status weft_work_source(weft_work* work, int32_t* source, weft_error* error);
/* The same for weft_coalesced and weft_send_recv, once done: one source for each recv from WEFT_ANY_SOURCE
 * among them, in the order of the calls: sources[0] to sources[*count - 1]. `room`: of `sources`, at least
 * that many; where it is less *count is set, and WEFT_BAD_ARGUMENT. `sources` may be NULL if `room` is
 * 0. */
weft_status weft_work_sources(weft_work* work, int32_t* sources, size_t room, size_t* count,
                              weft_error* error);

/* `error` is NULL if the call succeeded, otherwise the call's error; it is valid until the function
 * returns. */
typedef void (*weft_work_callback)(void* data, const weft_error* error);
/* `callback` is called exactly once, when the call has ended: that includes that the Work was destroyed
 * before. Several are called in the order in which they were given; where the call has ended already it is
 * called at once, here.
 *
 * It runs in the thread that takes the last step: one that waits or asks, for whatever call of this rank, or
 * the helper thread. No lock of weft's is held, so it may begin calls and ask weft_work_done. It should be
 * short, since that thread makes no progress meanwhile. It may not wait for a call of its own group
 * (WEFT_BAD_ARGUMENT), nor destroy the Work. A thread that waits for the call returns after the callback. An
 * exception of the callback, in C++, becomes the error of the Work. */
weft_status weft_work_then(weft_work* work, weft_work_callback callback, void* data, weft_error* error);

/* A Work that is not done yet: the group is aborted, for all ranks, and this waits up to 2 s until nobody can
 * touch the call's buffers. */
void weft_work_destroy(weft_work* work);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_WORK_H */
