/* The operations that ranks of a group perform together. */
#ifndef WEFT_C_COLLECTIVES_H
#define WEFT_C_COLLECTIVES_H

#include "weft/c/group.h"
#include "weft/c/work.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Each function starts a call and returns, with the call's Work in *work. If `work` is NULL, the function
 * waits until the call is done. All ranks of the group must call the same collectives in the same order.
 * Sends and receives are ordered only per (source, destination, tag). `options` may be NULL. A start blocks
 * only if 64 calls are in flight. Any thread may call these functions. If several threads do, the program
 * must ensure that all ranks call collectives in the same order.
 *
 * The caller must keep the buffers alive, and must not touch them, until the call is done. After a failure
 * see weft_group_quiesce. All buffers of a call must have one dtype, and lie in memory that the backend
 * moves.
 *
 * Calls in place: for all_reduce, scan, exscan, reduce and broadcast, `in` and `out` may be the same memory.
 * For all_gather(_v), and gather at the root, `in` may be block `rank` of `out`. For reduce_scatter(_v), and
 * scatter at the root, `out` may be block `rank` of `in`. Any other overlap gives WEFT_BAD_ARGUMENT.
 *
 * weft composes an operation that the transport lacks from other operations, with the same results. An
 * operation that cannot be composed gives WEFT_UNSUPPORTED. */

/* out[i] = the combination over ranks of in[i]. Counts are equal on all ranks. */
weft_status weft_all_reduce(weft_group* group, const weft_buffer* in, const weft_buffer* out,
                            const weft_call_options* options, weft_work** work, weft_error* error);
/* Like weft_all_reduce, but only rank `root` gets the result. On other ranks `out` is ignored and may be
 * NULL. */
weft_status weft_reduce(weft_group* group, const weft_buffer* in, const weft_buffer* out, int32_t root,
                        const weft_call_options* options, weft_work** work, weft_error* error);
/* out = in of rank `root`. On other ranks `in` is ignored and may be NULL. */
weft_status weft_broadcast(weft_group* group, const weft_buffer* in, const weft_buffer* out, int32_t root,
                           const weft_call_options* options, weft_work** work, weft_error* error);
/* out = in of rank 0, in of rank 1, ...: `out` is `size` times as long as `in`. */
weft_status weft_all_gather(weft_group* group, const weft_buffer* in, const weft_buffer* out,
                            const weft_call_options* options, weft_work** work, weft_error* error);
/* Block r of out = in of rank r, which has out_blocks->counts[r] elements. All ranks must give the same
 * counts. */
weft_status weft_all_gather_v(weft_group* group, const weft_buffer* in, const weft_buffer* out,
                              const weft_blocks* out_blocks, const weft_call_options* options,
                              weft_work** work, weft_error* error);
/* out = block `rank` of the combination of `in` over all ranks. `in` is `size` times as long as `out`. */
weft_status weft_reduce_scatter(weft_group* group, const weft_buffer* in, const weft_buffer* out,
                                const weft_call_options* options, weft_work** work, weft_error* error);
/* Like weft_reduce_scatter, but with blocks of any size. All ranks must give the same counts. Offsets may
 * differ. */
weft_status weft_reduce_scatter_v(weft_group* group, const weft_buffer* in, const weft_buffer* out,
                                  const weft_blocks* in_blocks, const weft_call_options* options,
                                  weft_work** work, weft_error* error);
/* At rank `root`: out = in of rank 0, in of rank 1, .... On other ranks `out` is ignored and may be NULL. */
weft_status weft_gather(weft_group* group, const weft_buffer* in, const weft_buffer* out, int32_t root,
                        const weft_call_options* options, weft_work** work, weft_error* error);
/* out = block `rank` of in of rank `root`. On other ranks `in` is ignored and may be NULL. */
weft_status weft_scatter(weft_group* group, const weft_buffer* in, const weft_buffer* out, int32_t root,
                         const weft_call_options* options, weft_work** work, weft_error* error);
/* Block r of out = block `rank` of in of rank r. Each has `size` equal blocks. Never in place. */
weft_status weft_all_to_all(weft_group* group, const weft_buffer* in, const weft_buffer* out,
                            const weft_call_options* options, weft_work** work, weft_error* error);
/* Like weft_all_to_all, but with blocks of any size. in_blocks->counts[r] on this rank must equal
 * out_blocks->counts[rank] on rank r. */
weft_status weft_all_to_all_v(weft_group* group, const weft_buffer* in, const weft_buffer* out,
                              const weft_blocks* in_blocks, const weft_blocks* out_blocks,
                              const weft_call_options* options, weft_work** work, weft_error* error);
/* out[i] = the combination over ranks 0 to `rank` of in[i], as an all_reduce among these ranks alone would
 * give it. */
weft_status weft_scan(weft_group* group, const weft_buffer* in, const weft_buffer* out,
                      const weft_call_options* options, weft_work** work, weft_error* error);
/* Like weft_scan, but over ranks 0 to rank - 1. `out` of rank 0 becomes the identity of the reduction (0
 * for WEFT_SUM, 1 for WEFT_PROD, the largest value for WEFT_MIN, ...). WEFT_AVG and WEFT_USER have no
 * identity, so they do not change `out` of rank 0. */
weft_status weft_exscan(weft_group* group, const weft_buffer* in, const weft_buffer* out,
                        const weft_call_options* options, weft_work** work, weft_error* error);
/* The call is done when all ranks have called weft_barrier. */
weft_status weft_barrier(weft_group* group, const weft_call_options* options, weft_work** work,
                         weft_error* error);

/* Sends to rank `destination`, whose recv must have the same tag (`tag` of the options). The call is done
 * when `in` may be reused. For a message above the eager limit (shm: 4 KiB) this may be only when the
 * receiver has the matching recv. */
weft_status weft_send(weft_group* group, const weft_buffer* in, int32_t destination,
                      const weft_call_options* options, weft_work** work, weft_error* error);
/* The source of a recv that means any rank. No rank has this number, and arithmetic on ranks does not give
 * it by mistake. */
#define WEFT_ANY_SOURCE INT32_MIN

/* Receives from rank `source`. A message of another dtype or count gives WEFT_MISMATCH.
 *
 * With WEFT_ANY_SOURCE it receives the next message of this tag, from any rank. weft_work_source gives
 * that rank, so pass a `work` if the program needs to know it. If a message matches several receives, the
 * receive that was begun first takes it. If several messages match a receive, it takes the message that
 * arrived first. A receive from any source fails when any rank dies, and when all other ranks have left
 * the group. Over nccl it gives WEFT_UNSUPPORTED. */
weft_status weft_recv(weft_group* group, const weft_buffer* out, int32_t source,
                      const weft_call_options* options, weft_work** work, weft_error* error);
/* Performs a send and a receive at the same time, with the same tag, so that rings cannot deadlock. `in` and
 * `out` may not overlap. */
weft_status weft_send_recv(weft_group* group, const weft_buffer* in, int32_t destination,
                           const weft_buffer* out, int32_t source, const weft_call_options* options,
                           weft_work** work, weft_error* error);

/* A message that has arrived and for which there was no recv yet. */
typedef struct weft_message {
  int32_t source, tag;
  int64_t count; /* elements */
  weft_dtype dtype;
} weft_message;

/* Finds the message that a recv from `source` (or WEFT_ANY_SOURCE) with the tag of the options would take
 * now. If there is one, *found becomes true, and *message gives its sender and size. Otherwise *found
 * becomes false, and *message does not change. The message is not received. A later recv of its source and
 * tag takes it, unless another thread receives it first. So a program can allocate memory for messages
 * whose size it does not know. Never waits, but takes the next steps of all calls in flight, and fails if
 * the group has failed. It finds no further messages of a rank that has left. It uses only `tag` of the
 * options. */
weft_status weft_probe(weft_group* group, int32_t source, const weft_call_options* options, bool* found,
                       weft_message* message, weft_error* error);
/* Like weft_probe, but waits until there is a message. It is a call of the group. It fails with
 * WEFT_TIMEOUT after its deadline, and with WEFT_PEER_LOST if no rank is left that could send. Both errors
 * fail the group. */
weft_status weft_wait_message(weft_group* group, int32_t source, const weft_call_options* options,
                              weft_message* message, weft_error* error);

/* The description of any of the calls above, except weft_probe and weft_wait_message. */
typedef struct weft_call {
  uint32_t struct_size;
  weft_op op;
  /* a buffer that the operation lacks, or ignores on this rank, must stay as initialised */
  weft_buffer in, out;
  int32_t root;                     /* reduce, broadcast, gather, scatter */
  int32_t peer;                     /* send: the destination; recv: the source, or WEFT_ANY_SOURCE */
  weft_blocks in_blocks;            /* reduce_scatter_v, all_to_all_v */
  weft_blocks out_blocks;           /* all_gather_v, all_to_all_v */
  const weft_call_options* options; /* may be NULL */
} weft_call;
#define WEFT_CALL_INIT                                                                                     \
  {                                                                                                        \
    sizeof(weft_call), WEFT_OP_NONE, {NULL, 0, WEFT_F32, WEFT_CPU}, {NULL, 0, WEFT_F32, WEFT_CPU}, -1, -1, \
        {NULL, NULL, 0}, {NULL, NULL, 0}, NULL                                                             \
  }

/* Begins the described call. When weft_submit has returned, the program may free the struct and everything
 * that it points to, except the buffers' memory. */
weft_status weft_submit(weft_group* group, const weft_call* call, weft_work** work, weft_error* error);

/* A call that is checked and described once and started often. MPI calls this a persistent operation.
 * Destroy it with weft_persistent_destroy, before or after its group. It does not keep the group alive. */
typedef struct weft_persistent weft_persistent;

/* Checks the call, as weft_submit does, but does not communicate. When it has returned, the program may
 * free the struct and everything that it points to, except the buffers' memory. The caller must keep that
 * memory alive, at the same addresses, until the handle is destroyed and its last Work is done. */
weft_status weft_persistent_create(weft_group* group, const weft_call* call, weft_persistent** persistent,
                                   weft_error* error);
/* Begins the call with the present contents of its buffers. It takes less time than weft_submit, because it
 * does not check the call again. The other ranks may start a persistent call, or call the plain function.
 * Fails with WEFT_BAD_ARGUMENT, and sends nothing, if the Work of the last start is not done yet, or if the
 * group was left or destroyed. One thread at a time may start a persistent call. */
weft_status weft_persistent_start(weft_persistent* persistent, weft_work** work, weft_error* error);
/* Starts several persistent calls as one, as weft_coalesced begins a list of calls. They begin together,
 * and their common Work is done when all of them are done. So neighbours that start a send and a receive
 * do not deadlock, on any transport. All calls must be of one group. The order of the collectives among
 * them must be the same on all ranks. At most 64 calls are in flight at once. The others begin when
 * earlier ones end. Fails with WEFT_BAD_ARGUMENT, and sends nothing, if weft_persistent_start of one call
 * would fail so, if a call is in the list twice, or if one is of another group. If a call cannot be sent
 * after others were sent, the group fails. */
weft_status weft_persistent_start_all(weft_persistent* const* calls, size_t count, weft_work** work,
                                      weft_error* error);
/* Destroys the handle. A call that it has started continues. NULL: no effect. */
void weft_persistent_destroy(weft_persistent* persistent);

/* Begins several calls as one. They begin together, and their common Work is done when all of them are
 * done. The order of the collectives among them must be the same on all ranks. The function fails before
 * it sends anything if an argument of any call is wrong, or if one call writes memory that another call
 * writes or reads. For a call with blocks, only the blocks count. At most 64 calls are in flight at once.
 * The others begin when earlier ones end. If a call cannot be sent after others were sent, the group
 * fails. All elements of `calls` must be made with the same WEFT_CALL_INIT. */
weft_status weft_coalesced(weft_group* group, const weft_call* calls, size_t count, weft_work** work,
                           weft_error* error);

/* For each i: least[i] becomes the least values[i] of all ranks, and where[i] becomes the indices[i] of the
 * rank with that value, as with MPI's MINLOC. All ranks get the same results. `values` and `least` have one
 * dtype: f64, f32, i64 or i32. `indices` and `where` are i64. Indices may be any numbers. All four buffers
 * have the same count. `least` may be the same memory as `values`, and `where` the same as `indices`. If
 * values are equal, the result has the lowest index. A NaN counts as less than all numbers.
 *
 * Waits until the call is done. On the host only. Only the deadline of `options` is used; `options` may be
 * NULL. */
weft_status weft_min_loc(weft_group* group, const weft_buffer* values, const weft_buffer* indices,
                         const weft_buffer* least, const weft_buffer* where, const weft_call_options* options,
                         weft_error* error);
/* Like weft_min_loc, for the largest values. A NaN counts as larger than all numbers. */
weft_status weft_max_loc(weft_group* group, const weft_buffer* values, const weft_buffer* indices,
                         const weft_buffer* largest, const weft_buffer* where,
                         const weft_call_options* options, weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_COLLECTIVES_H */
