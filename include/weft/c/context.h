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

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_CONTEXT_H */
