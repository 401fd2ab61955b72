/* weft from C: contexts, groups of ranks, collectives, errors. C11; usable from C++ too. The same library,
 * the same calls and the same rules as weft/weft.hpp, which has more of them.
 *
 * Conventions
 * - Handles are opaque. They may be destroyed in any order: what a handle needs lives as long as the handle.
 *   Destroying NULL does nothing. A destroyed handle must not be used again.
 * - A function that can fail returns a weft_status, WEFT_OK if all went well. Outputs are written on success
 *   only. No function ends the program, and no C++ exception leaves one.
 * - The last argument, `error`, may be NULL. Where a call fails it receives the status, the text and what a
 *   program can act on; it belongs to the caller and is left alone on success. Errors are not kept anywhere
 *   else, so threads need not care about each other's.
 * - A NULL handle, or NULL where something is expected, is WEFT_BAD_ARGUMENT, and the text names it.
 * - Structs begin with `struct_size` and are made with their initialiser, so that a program compiled against
 *   an older or newer weft.h gets along with the library: what an older program does not have takes its
 *   default, and what the library does not know is WEFT_UNSUPPORTED unless it is zero.
 * - Times are int64_t nanoseconds; 0 is the default of the thing, negative is WEFT_BAD_ARGUMENT.
 * - Any function may be called from any thread. One Work or one error is for one thread at a time. The order
 *   of collectives on one group is the caller's to agree on.
 * - Do not cancel (pthread_cancel) or longjmp out of a thread that is inside weft.
 * - A child made by fork() may use no handle of its parent: its calls are WEFT_UNSUPPORTED.
 */
#ifndef WEFT_WEFT_H
#define WEFT_WEFT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define WEFT_VERSION "0.1.0"
/* The version of the library that is loaded, like WEFT_VERSION. Never NULL. */
const char* weft_version(void);

/* Errors ------------------------------------------------------------------------------------------------- */

typedef int32_t weft_status;
enum {
  WEFT_OK = 0,
  WEFT_BAD_ARGUMENT = 1, /* an argument of this call is wrong; nothing was sent */
  WEFT_LAYOUT = 2,       /* a tensor's layout does not fit the operation */
  WEFT_UNSUPPORTED = 3,  /* this backend or build cannot do it */
  WEFT_MISMATCH = 4,     /* ranks called different things */
  WEFT_TIMEOUT = 5,      /* the deadline passed; `ranks` had not arrived */
  WEFT_PEER_LOST = 6,    /* `ranks` died or left */
  WEFT_ABORTED = 7,      /* some rank called weft_group_abort */
  WEFT_SYSTEM = 8        /* the operating system refused, or memory ran out */
};
/* "ok", "bad_argument", ...; "?" for a number that is none. Never NULL. */
const char* weft_status_name(weft_status status);

/* The operation an error tells of. */
typedef int32_t weft_op;
enum {
  WEFT_OP_NONE = 0,
  WEFT_OP_ALL_REDUCE,
  WEFT_OP_REDUCE,
  WEFT_OP_BROADCAST,
  WEFT_OP_ALL_GATHER,
  WEFT_OP_ALL_GATHER_V,
  WEFT_OP_REDUCE_SCATTER,
  WEFT_OP_REDUCE_SCATTER_V,
  WEFT_OP_GATHER,
  WEFT_OP_SCATTER,
  WEFT_OP_ALL_TO_ALL,
  WEFT_OP_ALL_TO_ALL_V,
  WEFT_OP_BARRIER,
  WEFT_OP_SEND,
  WEFT_OP_RECV,
  WEFT_OP_SCAN,
  WEFT_OP_EXSCAN
};

#define WEFT_NO_CALL UINT64_MAX
#define WEFT_ERROR_RANKS 16
#define WEFT_ERROR_TEXT 1024

typedef struct weft_error {
  uint32_t struct_size;
  weft_status code;
  weft_op op;                      /* WEFT_OP_NONE: no operation's */
  int32_t rank_count;              /* how many ranks are to blame, even where `ranks` has no room for all */
  uint64_t call;                   /* the call's number in its group, or WEFT_NO_CALL */
  int32_t ranks[WEFT_ERROR_RANKS]; /* the ranks to blame: dead, absent, mismatching; unused ones are -1 */
  bool quiesced;                   /* false: weft_group_quiesce before the failed call's buffers are reused */
  char text[WEFT_ERROR_TEXT];      /* for people; ends in "..." where it had no room */
} weft_error;
#define WEFT_ERROR_INIT \
  { sizeof(weft_error), WEFT_OK, WEFT_OP_NONE, 0, WEFT_NO_CALL, {0}, true, "" }

/* Context ------------------------------------------------------------------------------------------------ */

/* The one object per process; threads that are ranks of one job share one. */
typedef struct weft_context weft_context;

typedef int32_t weft_log_level;
enum { WEFT_LOG_ERROR = 0, WEFT_LOG_WARNING = 1, WEFT_LOG_INFO = 2, WEFT_LOG_DEBUG = 3 };

typedef struct weft_context_options {
  uint32_t struct_size;
  weft_log_level log_level; /* WEFT_LOG in the environment overrides it */
  /* Receives one line, without a line feed; NULL: stderr. Called from any thread, weft's own among them, one
   * call at a time, and with no lock of weft's held: it may wait for a lock of its own and call weft, but
   * must not destroy the context; and who does that must not hold a lock that it takes. */
  void (*log)(void* log_data, weft_log_level level, const char* line);
  void* log_data;
} weft_context_options;
#define WEFT_CONTEXT_OPTIONS_INIT \
  { sizeof(weft_context_options), WEFT_LOG_WARNING, NULL, NULL }

/* `options` may be NULL. */
weft_status weft_context_create(const weft_context_options* options, weft_context** context,
                                weft_error* error);
/* Memory of weft_alloc is freed with it, but for groups and Works that still live: then with the last of
 * them. */
void weft_context_destroy(weft_context* context);

/* Memory that ranks of this host may map, on which collectives copy nothing; at least `bytes`, whole pages.
 * Where shared memory cannot be had it is ordinary memory. */
weft_status weft_alloc(weft_context* context, size_t bytes, void** data, weft_error* error);
/* `data` is what weft_alloc of this context gave, or NULL. Not while a call that uses it is in flight. */
weft_status weft_free(weft_context* context, void* data, weft_error* error);

/* Groups ------------------------------------------------------------------------------------------------- */

/* Where threads of one process meet: made once, given to weft_group_create by each of them. May be destroyed
 * once they have their groups. Other processes meet through weft_group_from_env. */
typedef struct weft_store weft_store;
weft_status weft_store_create_local(weft_store** store, weft_error* error);
void weft_store_destroy(weft_store* store);

/* One rank's membership in a group of ranks. */
typedef struct weft_group weft_group;

typedef struct weft_group_options {
  uint32_t struct_size;
  const char* backend; /* NULL: "shm" */
  const char* name;    /* appears in errors; NULL: "world" */
  int64_t deadline_ns; /* of each call, and of the group's creation; 0: five minutes */
} weft_group_options;
#define WEFT_GROUP_OPTIONS_INIT \
  { sizeof(weft_group_options), NULL, NULL, 0 }

/* The group of all processes of a job: `weft run` and other launchers say in the environment who takes part;
 * without one it is a group of one. Blocks until all ranks have called it, at most `deadline_ns`. `options`
 * may be NULL. */
weft_status weft_group_from_env(weft_context* context, const weft_group_options* options, weft_group** group,
                                weft_error* error);
/* The group of `size` threads that meet in `store`; this one is rank `rank`, and the same in every group it
 * makes. Blocks until all have called it, at most `deadline_ns`. `store` may be NULL where size is 1;
 * `options` may be NULL. */
weft_status weft_group_create(weft_context* context, weft_store* store, int32_t rank, int32_t size,
                              const weft_group_options* options, weft_group** group, weft_error* error);
/* Leaves the group, once its last Work is destroyed too: peers that still wait for this rank get
 * WEFT_PEER_LOST. After a failure it may take up to 2 s, until nobody can touch the buffers of failed calls.
 */
void weft_group_destroy(weft_group* group);

weft_status weft_group_rank(const weft_group* group, int32_t* rank, weft_error* error);
weft_status weft_group_size(const weft_group* group, int32_t* size, weft_error* error);

/* Fails every pending and later call of every rank with WEFT_ABORTED and this text. Does not block. */
weft_status weft_group_abort(weft_group* group, const char* why, weft_error* error);
/* After a failure: waits at most `limit_ns` (0: one look) until nobody can touch the buffers of failed calls
 * any more, and says so in *quiet. */
weft_status weft_group_quiesce(weft_group* group, int64_t limit_ns, bool* quiet, weft_error* error);

/* After a failure: a group of the survivors, in *survivors, numbered in the order of their ranks in `group`.
 * All who live call it. Ranks known to be dead or gone are left out at once, others after `limit_ns` (0: the
 * group's deadline); who comes later gets WEFT_PEER_LOST with its own rank, and is in no group. Blocks that
 * long, again for each rank that is lost meanwhile. Both groups are destroyed as ever. WEFT_PEER_LOST, too,
 * where the store ended with the process that served it. */
weft_status weft_group_shrink(weft_group* group, int64_t limit_ns, weft_group** survivors, weft_error* error);
/* The rank that `rank` has in the group that this one was shrunk from; -1: it was not. */
weft_status weft_group_parent_rank(const weft_group* group, int32_t rank, int32_t* parent_rank,
                                   weft_error* error);

/* Collectives -------------------------------------------------------------------------------------------- */

typedef int32_t weft_dtype;
enum {
  WEFT_F64 = 0,
  WEFT_F32,
  WEFT_F16,
  WEFT_BF16,
  WEFT_I8,
  WEFT_I16,
  WEFT_I32,
  WEFT_I64,
  WEFT_U8,
  WEFT_U16,
  WEFT_U32,
  WEFT_U64,
  WEFT_BOOL,
  WEFT_F8E4M3,
  WEFT_F8E5M2,
  WEFT_C64, /* two f32: real, imaginary */
  WEFT_C128
};

typedef int32_t weft_reduce_op;
enum {
  WEFT_SUM = 0,
  WEFT_AVG,
  WEFT_MIN,
  WEFT_MAX,
  WEFT_PROD,
  WEFT_PREMUL_SUM, /* each input times `scale`, then the sum */
  WEFT_BIT_AND,
  WEFT_BIT_OR,
  WEFT_BIT_XOR,
  WEFT_LOGICAL_AND,
  WEFT_LOGICAL_OR,
  WEFT_LOGICAL_XOR
};

/* In which order elements are combined: the backend's own, or one tree over the ranks, the same everywhere.
 */
typedef int32_t weft_order;
enum { WEFT_ORDER_NATIVE = 0, WEFT_ORDER_CANONICAL = 1 };

typedef int32_t weft_device;
#define WEFT_CPU 0
#define WEFT_CUDA(index) (1 + (index))

/* `count` elements in a row. The caller's: it must live, and not be touched, until the call's Work is done.
 * What is called `in` is only read. The struct itself is copied. */
typedef struct weft_buffer {
  void* data; /* may be NULL where count is 0 */
  int64_t count;
  weft_dtype dtype;
  weft_device device;
} weft_buffer;

typedef struct weft_call_options {
  uint32_t struct_size;
  weft_reduce_op reduce_op;
  weft_order order;
  double scale;        /* WEFT_PREMUL_SUM; 0 otherwise */
  int64_t deadline_ns; /* 0: the group's */
} weft_call_options;
#define WEFT_CALL_OPTIONS_INIT \
  { sizeof(weft_call_options), WEFT_SUM, WEFT_ORDER_NATIVE, 0, 0 }

/* A call in flight. Finished or not, it is destroyed with weft_work_destroy. */
typedef struct weft_work weft_work;

/* Each starts the call and returns, with its Work in *work; where `work` is NULL it waits until the call is
 * done. All ranks of the group call the same, in the same order. `options` may be NULL. Starting blocks only
 * where 64 calls are in flight.
 *
 * out[i] = the combination over ranks of in[i]. `in` and `out` may be the same memory. */
weft_status weft_all_reduce(weft_group* group, const weft_buffer* in, const weft_buffer* out,
                            const weft_call_options* options, weft_work** work, weft_error* error);
/* out = in of rank 0, in of rank 1, ...: size times as long. `in` may be block `rank` of `out`. */
weft_status weft_all_gather(weft_group* group, const weft_buffer* in, const weft_buffer* out,
                            const weft_call_options* options, weft_work** work, weft_error* error);
/* Done when all ranks have called it. */
weft_status weft_barrier(weft_group* group, const weft_call_options* options, weft_work** work,
                         weft_error* error);

/* Blocks until the call is done, driving everything this rank has in flight. Fails with the call's error,
 * WEFT_TIMEOUT after its deadline; asked again it says the same. */
weft_status weft_work_wait(weft_work* work, weft_error* error);
/* Blocks at most `limit_ns`; *done is false where the call is still pending after that. */
weft_status weft_work_wait_for(weft_work* work, int64_t limit_ns, bool* done, weft_error* error);
/* Takes the next steps it can and never blocks. */
weft_status weft_work_done(weft_work* work, bool* done, weft_error* error);
/* A Work that is not done yet: the group is aborted, for all ranks, and this waits up to 2 s until nobody can
 * touch the call's buffers. */
void weft_work_destroy(weft_work* work);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_WEFT_H */
