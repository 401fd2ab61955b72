/* The process: its log, and memory that ranks of one host share. */
#ifndef WEFT_C_CONTEXT_H
#define WEFT_C_CONTEXT_H

#include "weft/c/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The one object per process; threads that are ranks of one job share one. */
typedef struct weft_context weft_context;

typedef int32_t weft_log_level;
enum { WEFT_LOG_ERROR = 0, WEFT_LOG_WARNING = 1, WEFT_LOG_INFO = 2, WEFT_LOG_DEBUG = 3 };

/* An allocator of the host's, from which weft takes local memory: two functions, and `data`, which is handed
 * to both. Both are set, or neither: then weft has memory of its own. Each block is one call of `allocate`,
 * and one of `deallocate` when its last owner goes; weft keeps no free block for later, so an allocator that
 * does spares it the first touch of pages.
 *
 * From it come: tensors of weft's that no other rank maps (weights, optimizer states, activations that stay
 * on their rank, results), the staging buffers of operations that are composed over a transport, among them
 * each of the host's own (weft_group_create_over), messages that no receive waits for yet over one of these,
 * scratch memory of a weft_compute, and what is given in place of shared memory if that cannot be had.
 *
 * Not from it come: memory that ranks of this host may map, which lies in segments of shared memory
 * (weft_alloc, the buckets of a weft_reducer, gradients and activations that are communicated, copies that
 * weft_redistribute makes); memory of devices; messages that no receive waits for yet over weft's other
 * transports, and buffers of plug-ins; what libraries under weft allocate (oneDNN, an MPI); tables of rotary
 * positions; parts of files while a checkpoint is read or written; handles, weft_text, and small objects
 * behind them.
 *
 * Both are called from any thread, weft's own among them, also by several at once, perhaps with locks of
 * weft's held: they must not call weft. They and `data` live until the context is gone: its handle is
 * destroyed, and so is all that keeps it (groups, Works, models). In a child made by fork() they are not
 * called for memory of the parent. */
typedef struct weft_allocator {
  /* `bytes` bytes at a multiple of `alignment`, which is 64; `bytes` is a multiple of it and not 0, as
   * aligned_alloc wants it. NULL, an address that is not aligned so, which is given back at once, and a C++
   * exception: the function that needed the memory fails with WEFT_SYSTEM, naming bytes and alignment. */
  void* (*allocate)(void* data, size_t bytes, size_t alignment);
  /* Takes back what `allocate` gave, with the same sizes. A C++ exception is logged as a warning and goes no
   * further. */
  void (*deallocate)(void* data, void* memory, size_t bytes, size_t alignment);
  void* data;
} weft_allocator;

typedef struct weft_context_options {
  uint32_t struct_size;
  weft_log_level log_level; /* WEFT_LOG in the environment overrides it */
  /* Receives one line, without a line feed; NULL: stderr. Called from any thread, weft's own among them, one
   * call at a time, and with no lock of weft's held: it may wait for a lock of its own and call weft, but
   * must not destroy the context; and the thread that destroys the context must not hold a lock that this
   * function takes. */
  void (*log)(void* log_data, weft_log_level level, const char* line);
  void* log_data;
  /* Levels of single layers, in the words of WEFT_LOG: "store=debug,dp=error". Copied. NULL: log_level for
   * all. */
  const char* log_levels;
  weft_allocator allocator; /* where local memory comes from; of NULLs: weft's own, which keeps free blocks */
  /* Address space of each segment of shared memory, rounded up to pages: up to 2^62; halved where the system
   * refuses. 0: 1 GiB. */
  size_t segment_bytes;
} weft_context_options;
#define WEFT_CONTEXT_OPTIONS_INIT \
  { sizeof(weft_context_options), WEFT_LOG_WARNING, NULL, NULL, NULL, {NULL, NULL, NULL}, 0 }

/* `options` may be NULL. WEFT_BAD_ARGUMENT, naming the field, where one is wrong. */
weft_status weft_context_create(const weft_context_options* options, weft_context** context,
                                weft_error* error);
/* Memory of weft_alloc is freed with it; if groups and Works still live, with the last of them. */
void weft_context_destroy(weft_context* context);

/* Memory that ranks of this host may map, on which collectives copy nothing; at least `bytes`, whole pages.
 * If shared memory cannot be had it is local memory, of the context's allocator where it has one. */
weft_status weft_alloc(weft_context* context, size_t bytes, void** data, weft_error* error);
/* `data` is what weft_alloc of this context gave, or NULL. Not while a call that uses it is in flight. */
weft_status weft_free(weft_context* context, void* data, weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_CONTEXT_H */
