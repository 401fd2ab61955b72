/* Stops and allows calls of the program's functions by the library. */
#ifndef WEFT_C_CALLBACKS_H
#define WEFT_C_CALLBACKS_H

#include "weft/c/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* For the runtime of a language that ends before its process, and for a plug-in that is unloaded. Threads of
 * weft (those of groups with progress WEFT_PROGRESS_THREAD, of savers, of store servers) may call functions
 * that the program has given to weft: callbacks of Works, log functions, reductions, transports, hooks,
 * functions of checkpoints.
 *
 * After weft_callbacks_end, weft calls no such function in the whole process. It returns when none of
 * these functions is running, except for a callback that called it. Fails with WEFT_TIMEOUT if some
 * functions still run after limit_ns (0: no wait). Even then it begins no further one. weft skips
 * callbacks of Works, log functions and stages of a save. A call that needs a function's result (a
 * reduction, a transport, ...) fails with WEFT_SYSTEM. weft still calls the functions of a weft_allocator. */
weft_status weft_callbacks_end(int64_t limit_ns, weft_error* error);
/* From now on weft calls functions of the program again, as it does when the process begins. */
weft_status weft_callbacks_begin(weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_CALLBACKS_H */
