/* The operations that ranks of a group perform together. */
#ifndef WEFT_C_COLLECTIVES_H
#define WEFT_C_COLLECTIVES_H

#include "weft/c/group.h"
#include "weft/c/work.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Each starts the call and returns, with its Work in *work; where `work` is NULL it waits until the call is
 * done. All ranks of the group call the same, in the same order; sends and receives are ordered per (source,
 * destination, tag) only. `options` may be NULL. Starting blocks only where 64 calls are in flight. Any
 * thread may call; the order of collectives is then the caller's to agree on.
 *
 * Buffers are the caller's, and must live, and not be touched, until the call is done. After a failure see
 * weft_group_quiesce. All buffers of a call are of one dtype, in memory that the backend moves.
 *
 * In place: all_reduce, scan, exscan, reduce, broadcast: `in` and `out` are the same memory. all_gather(_v)
 * and gather at the root: `in` is block `rank` of `out`. reduce_scatter(_v) and scatter at the root: `out` is
 * block `rank` of `in`. Any other overlap is WEFT_BAD_ARGUMENT.
 *
 * Operations that the transport lacks are composed from others, with the same results; an operation that
 * cannot be composed is WEFT_UNSUPPORTED. */

/* out[i] = the combination over ranks of in[i]. Counts are equal on all ranks. */
weft_status weft_all_reduce(weft_group* group, const weft_buffer* in, const weft_buffer* out,
                            const weft_call_options* options, weft_work** work, weft_error* error);
/* The same at rank `root` alone. Elsewhere `out` is ignored and may be NULL. */
weft_status weft_reduce(weft_group* group, const weft_buffer* in, const weft_buffer* out, int32_t root,
                        const weft_call_options* options, weft_work** work, weft_error* error);
/* out = in of rank `root`. Elsewhere `in` is ignored and may be NULL. */
weft_status weft_broadcast(weft_group* group, const weft_buffer* in, const weft_buffer* out, int32_t root,
                           const weft_call_options* options, weft_work** work, weft_error* error);
/* out = in of rank 0, in of rank 1, ...: size times as long. */
weft_status weft_all_gather(weft_group* group, const weft_buffer* in, const weft_buffer* out,
                            const weft_call_options* options, weft_work** work, weft_error* error);
/* Block r of out = in of rank r, which has out_blocks->counts[r] elements. All ranks give the same counts. */
weft_status weft_all_gather_v(weft_group* group, const weft_buffer* in, const weft_buffer* out,
                              const weft_blocks* out_blocks, const weft_call_options* options,
                              weft_work** work, weft_error* error);
/* out = block `rank` of the combination of all `in`, which is size times as long. */
weft_status weft_reduce_scatter(weft_group* group, const weft_buffer* in, const weft_buffer* out,
                                const weft_call_options* options, weft_work** work, weft_error* error);
/* The same with blocks of any size. All ranks give the same counts; offsets are their own. */
weft_status weft_reduce_scatter_v(weft_group* group, const weft_buffer* in, const weft_buffer* out,
                                  const weft_blocks* in_blocks, const weft_call_options* options,
                                  weft_work** work, weft_error* error);
/* At rank `root`: out = in of rank 0, in of rank 1, .... Elsewhere `out` is ignored and may be NULL. */
weft_status weft_gather(weft_group* group, const weft_buffer* in, const weft_buffer* out, int32_t root,
                        const weft_call_options* options, weft_work** work, weft_error* error);
/* out = block `rank` of in of rank `root`. Elsewhere `in` is ignored and may be NULL. */
weft_status weft_scatter(weft_group* group, const weft_buffer* in, const weft_buffer* out, int32_t root,
                         const weft_call_options* options, weft_work** work, weft_error* error);
/* Block r of out = block `rank` of in of rank r: `size` equal blocks each. Never in place. */
weft_status weft_all_to_all(weft_group* group, const weft_buffer* in, const weft_buffer* out,
                            const weft_call_options* options, weft_work** work, weft_error* error);
/* The same with blocks of any size: in_blocks->counts[r] here is out_blocks->counts[rank] on rank r. */
weft_status weft_all_to_all_v(weft_group* group, const weft_buffer* in, const weft_buffer* out,
                              const weft_blocks* in_blocks, const weft_blocks* out_blocks,
                              const weft_call_options* options, weft_work** work, weft_error* error);
/* out[i] = the combination over ranks 0 to `rank` of in[i], as an all_reduce among these ranks alone would
 * give it. */
weft_status weft_scan(weft_group* group, const weft_buffer* in, const weft_buffer* out,
                      const weft_call_options* options, weft_work** work, weft_error* error);
/* The same over ranks 0 to rank - 1. `out` of rank 0 becomes the identity of the reduction (0 of WEFT_SUM, 1
 * of WEFT_PROD, the largest value of WEFT_MIN, ...); WEFT_AVG and WEFT_USER have none: there it stays as it
 * is. */
weft_status weft_exscan(weft_group* group, const weft_buffer* in, const weft_buffer* out,
                        const weft_call_options* options, weft_work** work, weft_error* error);
/* Done when all ranks have called it. */
weft_status weft_barrier(weft_group* group, const weft_call_options* options, weft_work** work,
                         weft_error* error);

/* To rank `destination`, matched by its recv of the same tag (`tag` of the options). Done when `in` may be
 * reused, which above the eager limit (shm: 4 KiB) may be as late as the match. */
weft_status weft_send(weft_group* group, const weft_buffer* in, int32_t destination,
                      const weft_call_options* options, weft_work** work, weft_error* error);
/* As a source: any rank. No rank has this number, nor does arithmetic on ranks give it by mistake. */
#define WEFT_ANY_SOURCE INT32_MIN

/* From rank `source`. A message of another dtype or count is WEFT_MISMATCH.
 *
 * WEFT_ANY_SOURCE: the next message of this tag, whichever rank sent it; weft_work_source says which, so
 * `work` is NULL only if that does not matter. If a message fits several receives, the one that was begun
 * first takes it. If several messages fit a receive, it takes the one that arrived first. It fails when any
 * rank dies, and when all other ranks have left the group. Over nccl it is WEFT_UNSUPPORTED. */
weft_status weft_recv(weft_group* group, const weft_buffer* out, int32_t source,
                      const weft_call_options* options, weft_work** work, weft_error* error);
/* A send and a receive at once, with the same tag, so that rings cannot deadlock. `in` and `out` may not
 * overlap. */
weft_status weft_send_recv(weft_group* group, const weft_buffer* in, int32_t destination,
                           const weft_buffer* out, int32_t source, const weft_call_options* options,
                           weft_work** work, weft_error* error);

/* A message that has come and that no recv has taken yet. */
typedef struct weft_message {
  int32_t source, tag;
  int64_t count; /* elements */
  weft_dtype dtype;
} weft_message;

/* The message that a recv from `source` (or WEFT_ANY_SOURCE) with the tag of the options would take now:
 * *found is true and *message says whose it is and how long. If none has come *found is false and *message
 * stays as it is. The message stays: until another thread receives, a recv of its source and tag takes it. So
 * a program can allocate for messages whose size it does not know. Never waits, but takes the next steps of
 * all calls in flight, and fails once the group has failed. A rank that has left sends no more messages, so
 * none of it is ever found. Only `tag` of the options counts. */
weft_status weft_probe(weft_group* group, int32_t source, const weft_call_options* options, bool* found,
                       weft_message* message, weft_error* error);
/* The same, but waits until there is one. It is a call: after its deadline it gives WEFT_TIMEOUT; if no rank
 * is left that could send, it gives WEFT_PEER_LOST. Both fail the group. */
weft_status weft_wait_message(weft_group* group, int32_t source, const weft_call_options* options,
                              weft_message* message, weft_error* error);

/* Any of the calls above, as a value; not weft_probe and weft_wait_message. */
typedef struct weft_call {
  uint32_t struct_size;
  weft_op op;
  weft_buffer in, out;    /* one that the operation lacks, or ignores on this rank, stays as initialised */
  int32_t root;           /* reduce, broadcast, gather, scatter */
  int32_t peer;           /* send: the destination; recv: the source, or WEFT_ANY_SOURCE */
  weft_blocks in_blocks;  /* reduce_scatter_v, all_to_all_v */
  weft_blocks out_blocks; /* all_gather_v, all_to_all_v */
  const weft_call_options* options; /* may be NULL */
} weft_call;
#define WEFT_CALL_INIT                                                                                     \
  {                                                                                                        \
    sizeof(weft_call), WEFT_OP_NONE, {NULL, 0, WEFT_F32, WEFT_CPU}, {NULL, 0, WEFT_F32, WEFT_CPU}, -1, -1, \
        {NULL, NULL, 0}, {NULL, NULL, 0}, NULL                                                             \
  }

/* One call. The struct and everything that it points to, except the buffers' memory, may be freed once this
 * has returned. */
weft_status weft_submit(weft_group* group, const weft_call* call, weft_work** work, weft_error* error);

/* A call that is checked and described once and started often: a persistent operation of MPI. It is destroyed
 * with weft_persistent_destroy, before its group or after it; it does not keep the group. */
typedef struct weft_persistent weft_persistent;

/* Checks the call, as weft_submit does, and sends nothing: local. The struct and everything that it points
 * to may be freed once this has returned, but the buffers' memory stays the same, and lives until the handle
 * is destroyed and its last Work is done. */
weft_status weft_persistent_create(weft_group* group, const weft_call* call, weft_persistent** persistent,
                                   weft_error* error);
/* Begins the call with the present contents of its buffers, in place of weft_submit and in less time,
 * because nothing is checked again. For the other ranks, which may start theirs or call the plain function,
 * it is the same. WEFT_BAD_ARGUMENT, and nothing is sent, where the Work of the last start is not done yet,
 * or the group was left or destroyed. One thread at a time. */
weft_status weft_persistent_start(weft_persistent* persistent, weft_work** work, weft_error* error);
/* Starts all of them as one, as weft_coalesced begins a list of calls: begun together, done when all of them
 * are. So a send and a receive that neighbours start are no deadlock on any transport. All are of one group.
 * The order of the collectives among them must be the same on all ranks. At most 64 are in flight at once;
 * the rest begin as earlier ones end. WEFT_BAD_ARGUMENT, and nothing is sent, if weft_persistent_start of one
 * of them would give it, if one is there twice, or of another group. If one cannot be sent after others were
 * sent, the group fails. */
weft_status weft_persistent_start_all(weft_persistent* const* calls, size_t count, weft_work** work,
                                      weft_error* error);
/* May be called while a call that it has started is in flight, which goes on. NULL: nothing. */
void weft_persistent_destroy(weft_persistent* persistent);

/* Several calls as one: begun together, done when all of them are. The order of the collectives among them
 * must be the same on all ranks. A wrong argument in any of them is an error before the first is sent, and so
 * is memory that one of them writes and another one writes or reads (of calls with blocks, the blocks count).
 * At most 64 are in flight at once; the rest begin as earlier ones end. If one cannot be sent after others
 * were sent, the group fails. `calls` are all made with one WEFT_CALL_INIT. */
weft_status weft_coalesced(weft_group* group, const weft_call* calls, size_t count, weft_work** work,
                           weft_error* error);

/* For each i: least[i] becomes the least of values[i] of all ranks, and where[i] the index that came with it:
 * MPI's MINLOC. All ranks get the same. `values` and `least` are of one dtype, f64, f32, i64 or i32;
 * `indices` and `where` are i64, any numbers. All four have the same count. `least` may be `values`, and
 * `where` `indices`. If values are equal, the lowest index wins; a NaN comes before all others.
 *
 * Waits until it is done. On the host only. Only the deadline of `options` is used; `options` may be
 * NULL. */
weft_status weft_min_loc(weft_group* group, const weft_buffer* values, const weft_buffer* indices,
                         const weft_buffer* least, const weft_buffer* where, const weft_call_options* options,
                         weft_error* error);
/* The same of the largest values. A NaN is above all others. */
weft_status weft_max_loc(weft_group* group, const weft_buffer* values, const weft_buffer* indices,
                         const weft_buffer* largest, const weft_buffer* where,
                         const weft_call_options* options, weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_COLLECTIVES_H */
