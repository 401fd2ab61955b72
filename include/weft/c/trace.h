/* The flight recorder: the last calls of a group. */
#ifndef WEFT_C_TRACE_H
#define WEFT_C_TRACE_H

#include "weft/c/group.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Gives the last 1024 calls of this rank, as JSON: operation, dtype, count, call, posted and finished in
 * ns, state, and the failure, if any (docs/traces.md). Any thread may call it at any time, even after a
 * failure. It does not wait for other ranks. Destroy the text with weft_text_destroy. If WEFT_TRACE names
 * a folder, weft writes the trace there when the group fails, and at every SIGUSR2. */
weft_status weft_group_trace_json(const weft_group* group, weft_text** json, weft_error* error);
/* Gives these calls in the format of chrome://tracing and Perfetto. */
weft_status weft_group_trace_chrome(const weft_group* group, weft_text** json, weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_TRACE_H */
