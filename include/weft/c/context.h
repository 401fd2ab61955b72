/* The context of a process: its log, and memory that ranks of one host share. */
#ifndef WEFT_C_CONTEXT_H
#define WEFT_C_CONTEXT_H

#include "weft/c/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A process makes one context. If its threads are ranks of one job, they share it. */
typedef struct weft_context weft_context;

typedef int32_t weft_log_level;
enum { WEFT_LOG_ERROR = 0, WEFT_LOG_WARNING = 1, WEFT_LOG_INFO = 2, WEFT_LOG_DEBUG = 3 };

/* An allocator of the program, from which weft takes local memory: two functions, and `data`, which weft
 * passes to both. Set both functions, or neither. Without them weft allocates memory itself. For each
 * block weft calls `allocate` once. It calls `deallocate` once, when the last owner of the block is
 * destroyed. weft keeps no free blocks. If the allocator keeps free blocks, weft need not touch new pages
 * again.
 *
 * weft takes the following memory from the allocator: weft's tensors that no other rank maps (weights,
 * optimizer states, activations that stay on their rank, results); staging buffers of operations that weft
 * composes over a transport, including transports of the program (weft_group_create_over); messages over such
 * a transport for which no receive waits yet; scratch memory of a weft_compute; and memory that replaces
 * shared memory if shared memory is not available.
 *
 * weft does not take the following memory from the allocator: memory that ranks of this host may map, which
 * lies in segments of shared memory (weft_alloc, the buckets of a weft_reducer, gradients and activations
 * that are communicated, copies that weft_redistribute makes); memory of devices; messages over weft's other
 * transports for which no receive waits yet, and buffers of plug-ins; memory of libraries that weft uses
 * (an MPI); tables of rotary positions; parts of files while a checkpoint is read or written;
 * handles, weft_text, and small objects behind them.
 *
 * Any thread may call both functions, including weft's own threads. Several threads may call them at once
 * and hold locks of weft. They must not call weft. The caller must keep the functions and `data` valid
 * until the context's handle is destroyed, and all objects that keep the context (groups, Works, models)
 * are destroyed, too. In a child made by fork() weft does not call them for the parent's memory. */
typedef struct weft_allocator {
  /* Returns `bytes` bytes at a multiple of `alignment`, which is 64. `bytes` is a multiple of `alignment`
   * and not 0, as aligned_alloc requires. The function may return NULL or a misaligned address (which weft
   * passes to `deallocate` at once), or throw a C++ exception. The weft function that needed the memory
   * then fails with WEFT_SYSTEM. The text gives bytes and alignment. */
  void* (*allocate)(void* data, size_t bytes, size_t alignment);
  /* Takes back a block that `allocate` returned, with the same `bytes` and `alignment`. weft logs a C++
   * exception as a warning and continues. */
  void (*deallocate)(void* data, void* memory, size_t bytes, size_t alignment);
  void* data;
} weft_allocator;

typedef struct weft_context_options {
  uint32_t struct_size;
  weft_log_level log_level; /* if WEFT_LOG in the environment is set, it is used instead */
  /* Receives one line, without a line feed. NULL: weft writes the line to stderr. Any thread may call the
   * function, including weft's own threads, but only one at a time, and with no lock of weft held. So the
   * function may wait for a lock of its own and may call weft. It must not destroy the context. The thread
   * that destroys the context must not hold a lock that this function takes. */
  void (*log)(void* log_data, weft_log_level level, const char* line);
  void* log_data;
  /* Levels of single layers, in the syntax of WEFT_LOG: "store=debug,dp=error". weft copies the string. NULL:
   * log_level for all layers. */
  const char* log_levels;
  /* the source of local memory; if both functions are NULL, weft uses its own allocator, which keeps free
   * blocks */
  weft_allocator allocator;
  /* Address space of each segment of shared memory, at most 2^62, rounded up to pages. If the system
   * refuses it, weft halves it. 0: 1 GiB. */
  size_t segment_bytes;
} weft_context_options;
#define WEFT_CONTEXT_OPTIONS_INIT \
  { sizeof(weft_context_options), WEFT_LOG_WARNING, NULL, NULL, NULL, {NULL, NULL, NULL}, 0 }

/* `options` may be NULL. Fails with WEFT_BAD_ARGUMENT if a field is wrong. The text names the field. */
weft_status weft_context_create(const weft_context_options* options, weft_context** context,
                                weft_error* error);
/* Destroys the context, and frees memory of weft_alloc. If groups and Works still exist, the memory is freed
 * when the last of them is destroyed. */
void weft_context_destroy(weft_context* context);

/* Allocates at least `bytes` bytes, in whole pages, of memory that ranks of this host may map, so that
 * collectives on it need no copies. If shared memory is not available, the result is local memory, from the
 * context's allocator if there is one. */
weft_status weft_alloc(weft_context* context, size_t bytes, void** data, weft_error* error);
/* Frees memory of weft_alloc. `data` must come from weft_alloc of this context, or be NULL. No call that uses
 * the memory may be in flight. */
weft_status weft_free(weft_context* context, void* data, weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_CONTEXT_H */
