/* Groups of ranks: how they are made, their properties, and how they end. */
#ifndef WEFT_C_GROUP_H
#define WEFT_C_GROUP_H

#include "weft/c/buffer.h"
#include "weft/c/store.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A handle of one rank in a group of ranks. */
typedef struct weft_group weft_group;

/* The threads that make progress on calls. _CALLER: only a thread that waits, calls weft_work_done or
 * starts a call. _THREAD: also a helper thread of this rank, so that communication overlaps computation. */
typedef int32_t weft_progress;
enum { WEFT_PROGRESS_CALLER = 0, WEFT_PROGRESS_THREAD = 1 };

typedef struct weft_group_options {
  uint32_t struct_size;
  /* NULL means "auto": the backend that WEFT_BACKEND (weft run --backend) names. If it names none, "auto"
   * is shm if all ranks share this host, else the MPI whose mpirun started the program, else gloo. Other
   * values: "shm", "gloo", "mpi-openmpi", "mpi-mpich", "nccl" or another plug-in's name. */
  const char* backend;
  const char* name;    /* appears in errors; NULL: "world" */
  int64_t deadline_ns; /* the deadline of each call, and of the group's creation; 0: five minutes */
  weft_progress progress;
  /* The number of this rank within its process, if ranks are threads. -1: the default that each function
   * below states. */
  int32_t process_rank;
  /* WEFT_ORDER_CANONICAL: every reduction of the group and of its subgroups has the canonical order, also if
   * its weft_call_options say native. Then every transport gives the same bits, as exact mode needs. */
  weft_order order;
} weft_group_options;
#define WEFT_GROUP_OPTIONS_INIT \
  { sizeof(weft_group_options), NULL, NULL, 0, WEFT_PROGRESS_CALLER, -1, WEFT_ORDER_NATIVE }

/* The functions that make groups. Each of them blocks until all ranks have called it. After `deadline_ns` it
 * fails with WEFT_TIMEOUT. The text names the missing ranks. All ranks must give the same options, except for
 * process_rank. `options` may be NULL.
 *
 * Makes the group of all processes of a job. `weft run` and other launchers describe the members in the
 * environment. Without a launcher it is a group of one rank. process_rank -1 means 0: one rank per
 * process. */
weft_status weft_group_from_env(weft_context* context, const weft_group_options* options, weft_group** group,
                                weft_error* error);
/* Makes a group of `size` ranks, threads or processes, that find each other through `store`. The caller is
 * rank `rank`. process_rank -1 means `rank`, which is right if all ranks are threads of one process.
 * Processes with one rank each give 0. `store` may be NULL if size is 1. */
weft_status weft_group_create(weft_context* context, weft_store* store, int32_t rank, int32_t size,
                              const weft_group_options* options, weft_group** group, weft_error* error);
/* Makes a group like weft_group_create, but over TCP. Rank 0 serves a store at host:port, and the other
 * ranks connect to it. All ranks give the same `port`, 1 to 65535. If `host` is not a loopback address, a
 * secret is needed (see weft_store_server_options). NULL: no secret. The context of rank 0 keeps the
 * server until the last handle of the context is destroyed. process_rank -1 means 0. */
weft_status weft_group_create_tcp(weft_context* context, const char* host, int32_t port, const char* secret,
                                  int32_t rank, int32_t size, const weft_group_options* options,
                                  weft_group** group, weft_error* error);
/* Copies the `bytes` bytes at `data` of rank 0 to `data` of all other ranks. It may block. Returns 0, or
 * another value if it has failed. */
typedef int32_t (*weft_broadcast_fn)(void* broadcast_data, void* data, size_t bytes);
/* Makes a group of ranks that another library already connects; all of them call it. Rank 0 serves a store
 * on a free port, and sends the address and a random secret to the others by `broadcast`. weft calls
 * `broadcast` once on each rank (never if size is 1), with the same number of bytes. `host`, given on rank
 * 0: an address of rank 0's host that the others can use. NULL: all ranks are on one host. The secret is
 * as safe as `broadcast` is. The context of rank 0 keeps the server until the last handle of the context
 * is destroyed. process_rank -1 means 0. For MPI there is weft_group_from_mpi (weft/weft_mpi.h). Fails
 * with WEFT_SYSTEM if `broadcast` does not return 0, and with rank 0's error if rank 0 cannot serve. */
weft_status weft_group_create_by_broadcast(weft_context* context, const char* host, int32_t rank,
                                           int32_t size, weft_broadcast_fn broadcast, void* broadcast_data,
                                           const weft_group_options* options, weft_group** group,
                                           weft_error* error);
/* Leaves the group together with the other ranks. All ranks must call it as their last call of the group, and
 * then call weft_group_destroy. It waits for all ranks, at most `deadline_ns` (0: the group's deadline), and
 * compares the calls of all ranks, including broadcasts and scatters, whose roots wait for nobody. Fails with
 * WEFT_MISMATCH on every rank if calls differ or a rank has left out a call. Over nccl, and if the comparison
 * is switched off, it only waits. Afterwards every other function refuses the group (WEFT_BAD_ARGUMENT). If
 * weft_group_leave fails, the rank has not left the group. */
weft_status weft_group_leave(weft_group* group, int64_t deadline_ns, weft_error* error);
/* Destroys the handle. The rank leaves the group when its last Work is destroyed, too. Peers that still
 * wait for this rank get WEFT_PEER_LOST. weft_group_destroy compares the last calls without waiting.
 * weft_group_leave waits. After a failure it may take up to 2 s, until no rank can access the buffers of
 * failed calls. */
void weft_group_destroy(weft_group* group);

/* The functions that make groups of a group's ranks. The new group is independent, so `group` may be
 * destroyed first. It has the backend, deadline and progress of `group`. If `group` fails while the new group
 * is made, or a member has left `group`, these functions fail with the first cause of `group`.
 *
 * Makes a group of `ranks` (ranks of `group`, in the order of their new ranks), which must contain this
 * rank. Only these ranks call it. It blocks until all of them have called it. `name` appears in errors. */
weft_status weft_group_subgroup(weft_group* group, const char* name, const int32_t* ranks, size_t rank_count,
                                weft_group** subgroup, weft_error* error);
/* Makes one group for each color (0 or more). Its members are the ranks that give this color, ordered by
 * (key, rank). All ranks of `group` must call it. It blocks until all have called it. A rank that gives
 * color -1 is in no group, and its *part becomes NULL. */
weft_status weft_group_split(weft_group* group, int32_t color, int32_t key, weft_group** part,
                             weft_error* error);
/* Makes a group of the ranks of `group` that are on this rank's host, in the same order. All these ranks must
 * call it. */
weft_status weft_group_split_by_host(weft_group* group, weft_group** part, weft_error* error);
/* Makes a group of the same ranks, whose calls are independent of those of `group`. All ranks must call
 * it. */
weft_status weft_group_duplicate(weft_group* group, weft_group** duplicate, weft_error* error);
/* The rank that `rank` has in the parent group, from which this group was made by subgroup, split,
 * duplicate or shrink. -1 if there is no parent group. */
weft_status weft_group_parent_rank(const weft_group* group, int32_t rank, int32_t* parent_rank,
                                   weft_error* error);

/* Properties of a group. These functions do not block, except for weft_group_local_rank and
 * weft_group_local_size. */
weft_status weft_group_rank(const weft_group* group, int32_t* rank, weft_error* error);
weft_status weft_group_size(const weft_group* group, int32_t* size, weft_error* error);
/* The number of this rank among the group's ranks on its host, and the number of these ranks. The first call
 * reads the store, and may wait for ranks that have not published their host yet. */
weft_status weft_group_local_rank(const weft_group* group, int32_t* local_rank, weft_error* error);
weft_status weft_group_local_size(const weft_group* group, int32_t* local_size, weft_error* error);
/* It is valid as long as the handle. */
weft_status weft_group_name(const weft_group* group, const char** name, weft_error* error);
weft_status weft_group_backend(const weft_group* group, const char** backend, weft_error* error);

/* The thread or stream that makes progress on calls: weft's own polling, a thread of the transport, a
 * device's stream. */
typedef int32_t weft_progress_style;
enum { WEFT_PROGRESS_POLLED = 0, WEFT_PROGRESS_THREADED = 1, WEFT_PROGRESS_STREAM = 2 };
#define WEFT_OP_BIT(op) (UINT64_C(1) << (op))
#define WEFT_DTYPE_BIT(dtype) (UINT64_C(1) << (dtype))
#define WEFT_TRAITS_REDUCE_OPS 32

/* The operations that a transport performs itself (weft composes others), and its guarantees. */
typedef struct weft_traits {
  uint32_t struct_size;
  weft_progress_style progress_style;
  uint64_t ops;    /* WEFT_OP_BIT of each operation */
  uint64_t dtypes; /* WEFT_DTYPE_BIT of each type that the transport moves */
  /* For each weft_reduce_op: WEFT_DTYPE_BIT of each type that the transport combines itself. */
  uint64_t reduces[WEFT_TRAITS_REDUCE_OPS];
  weft_device device; /* the device whose memory the transport moves */
  bool native_is_canonical;
  bool spin;           /* a waiting rank may spin: there are no more ranks here than usable cores */
  bool rings;          /* the transport wakes a sleeping rank */
  bool deadline;       /* a call that has not ended by its deadline fails with WEFT_TIMEOUT */
  bool names_absent;   /* ... which names the ranks that had not arrived */
  bool detects_death;  /* if a rank dies, every survivor gets WEFT_PEER_LOST, before the deadline */
  bool survives_death; /* survivors may continue, in other groups */
  bool checks_calls;   /* ranks that call different things get WEFT_MISMATCH */
  bool revocable;      /* after a failure the transport does not touch the callers' memory again */
  bool quiesces;       /* weft_group_quiesce succeeds at some time, even if a peer is stopped */
} weft_traits;
#define WEFT_TRAITS_INIT \
  { sizeof(weft_traits), 0, 0, 0, {0}, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

weft_status weft_group_traits(const weft_group* group, weft_traits* traits, weft_error* error);
/* The traits of the backend named `backend`, before a group exists. Loads the plug-in if needed. */
weft_status weft_backend_traits(weft_context* context, const char* backend, weft_traits* traits,
                                weft_error* error);

/* Fails every pending and later call of every rank with WEFT_ABORTED and this text. A call whose peers
 * have already done their part may still succeed. The next call fails. Does not block. */
weft_status weft_group_abort(weft_group* group, const char* why, weft_error* error);
/* After a failure: waits until no rank can access the buffers of failed calls any more, at most `limit_ns`
 * (0: one poll). Sets *quiet to true if this is so, and to false if ranks can still access them. */
weft_status weft_group_quiesce(weft_group* group, int64_t limit_ns, bool* quiet, weft_error* error);

/* After a failure: makes a group of the survivors, in *survivors, numbered in the order of their ranks in
 * `group`. All surviving ranks must call it. It leaves out ranks that are known to be dead or gone. It
 * waits for the others at most `limit_ns` (0: the group's deadline), and then leaves out the missing
 * ranks, too. A rank that calls it later gets WEFT_PEER_LOST with its own number, and is in no group. It
 * may block for `limit_ns`, and again for each rank that is lost meanwhile. Destroy both groups. It also
 * fails with WEFT_PEER_LOST if the store has ended with the process that served it. */
weft_status weft_group_shrink(weft_group* group, int64_t limit_ns, weft_group** survivors, weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_GROUP_H */
