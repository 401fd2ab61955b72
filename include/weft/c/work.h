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
  int64_t deadline_ns; /* 0: the group's deadline */
  int32_t tag;         /* send and recv: 0 or more */
  int32_t reserved;    /* 0 */
  /* for groups on a device: the stream on which the call is ordered; {0} means the default stream of the
   * group's device */
  weft_stream stream;
  const weft_reduction* reduction; /* WEFT_USER; NULL otherwise */
} weft_call_options;
#define WEFT_CALL_OPTIONS_INIT \
  { sizeof(weft_call_options), WEFT_SUM, WEFT_ORDER_NATIVE, 0, 0, 0, 0, {WEFT_CPU, NULL}, NULL }

/* A call in flight. Destroy it with weft_work_destroy, whether the call has finished or not.
 *
 * A call makes progress while a thread of its rank is inside weft: a thread that waits, polls a Work or
 * begins another call takes the next steps of everything that its rank has in flight, in all its groups. So
 * ranks may wait in different orders without deadlock. But if a rank begins a call and then computes until
 * after the call's deadline, without calling these functions, the call fails on its peers. Groups with a
 * helper thread make progress by themselves, and so do calls on a stream. */
typedef struct weft_work weft_work;

/* Blocks until the call is done, and meanwhile makes progress on everything that this rank has in flight.
 * Fails with the call's error; with WEFT_TIMEOUT after its deadline. A later call for the same Work returns
 * the same result. */
weft_status weft_work_wait(weft_work* work, weft_error* error);
/* Blocks at most `limit_ns`; *done is false if the call is still pending after that. */
weft_status weft_work_wait_for(weft_work* work, int64_t limit_ns, bool* done, weft_error* error);
/* Takes the next steps it can and never blocks. */
weft_status weft_work_done(weft_work* work, bool* done, weft_error* error);
/* Waits for all of the Works, which may be of several groups and in any order. If some of them fail, it
 * returns the error of the first failed Work in the list, after all Works have ended. */
weft_status weft_work_wait_all(weft_work* const* works, size_t count, weft_error* error);
/* Like weft_work_wait_all, but waits at most `limit_ns`: *done becomes false if calls are still pending. If a
 * Work has failed, it returns the error when all have ended or the time is over, even if some are pending. */
weft_status weft_work_wait_all_for(weft_work* const* works, size_t count, int64_t limit_ns, bool* done,
                                   weft_error* error);
/* Makes `stream` wait for the call; {0} means the default stream of the group's device. With a stream
 * transport (nccl) this thread does not block, and weft_work_wait or weft_work_done still report how the call
 * ended. With other transports this thread waits. */
weft_status weft_work_wait_on(weft_work* work, weft_stream stream, weft_error* error);

/* The rank that sent the message of a recv that is done. Fails with WEFT_BAD_ARGUMENT if the source is not
 * known: the call is pending or has failed, or the Work is that of another operation, or of several calls. */
weft_status weft_work_source(weft_work* work, int32_t* source, weft_error* error);
/* Like weft_work_source, for a Work of weft_coalesced or weft_send_recv that is done: gives the sources of
 * the calls that are recvs from WEFT_ANY_SOURCE, in the order of the calls, as sources[0] to sources[*count -
 * 1]. `room`: the size of `sources`. If it is too small, *count becomes the number of sources, and the
 * function fails with WEFT_BAD_ARGUMENT. `sources` may be NULL if `room` is 0. */
weft_status weft_work_sources(weft_work* work, int32_t* sources, size_t room, size_t* count,
                              weft_error* error);

/* `error` is NULL if the call succeeded, otherwise the call's error; it is valid until the function
 * returns. */
typedef void (*weft_work_callback)(void* data, const weft_error* error);
/* weft calls `callback` exactly once, when the call has ended, or when the Work is destroyed before that.
 * Several callbacks are called in the order in which they were given. If the call has ended already, weft
 * calls `callback` at once, in this function.
 *
 * The callback runs in the thread that takes the last step of the call: a thread that waits for or polls any
 * call of this rank, or the helper thread. That thread holds no lock of weft, so the callback may begin calls
 * and call weft_work_done. It should be short, because the thread makes no progress meanwhile. It must not
 * wait for a call of its own group (WEFT_BAD_ARGUMENT), nor destroy the Work. A thread that waits for the
 * call returns after the callback has returned. An exception of the callback, in C++, becomes the error of
 * the Work. */
weft_status weft_work_then(weft_work* work, weft_work_callback callback, void* data, weft_error* error);

/* Destroys the Work. If its call is not done yet, the group is aborted on all ranks, and this function waits
 * up to 2 s until no rank can access the call's buffers. */
void weft_work_destroy(weft_work* work);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_WORK_H */
