/* When the library may call functions of the program's. */
#ifndef WEFT_C_CALLBACKS_H
#define WEFT_C_CALLBACKS_H

#include "weft/c/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* For a language's runtime that ends before its process, and for a plug-in that is unloaded: threads of
 * weft's (those of groups with progress WEFT_PROGRESS_THREAD, of savers, of store servers) may call functions
 * that the program has given: callbacks of works, log functions, reductions, transports, hooks, functions of
 * checkpoints.
 *
 * From now on no such function is called, in the whole process. Returns when none is running; a callback that
 * calls this is not waited for. WEFT_TIMEOUT after limit_ns: some are still running; none is begun any more.
 * 0: no wait. Later callbacks of works, log functions and stages of a save are left out; a call that needs
 * an answer of a function (a reduction, a transport, ...) fails with WEFT_SYSTEM. Functions of weft_allocator
 * are not concerned. */
weft_status weft_callbacks_end(int64_t limit_ns, weft_error* error);
/* Functions are called again; so it is at first. */
weft_status weft_callbacks_begin(weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_CALLBACKS_H */
