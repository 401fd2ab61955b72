/* weft from C: contexts, groups of ranks, collectives, errors. C11; usable from C++ too. The C API belongs to
 * the same library and has the same rules as the C++ API (weft/weft.hpp), which has more functions.
 *
 * Conventions
 * - Handles are opaque. They may be destroyed in any order: a handle keeps the objects that it needs.
 *   Destroying NULL does nothing. A function fails with WEFT_BAD_ARGUMENT if it gets a handle that was
 *   destroyed, is of another kind, or belongs to another libweft in the process; a function that destroys
 *   leaves such a handle alone and writes a line to stderr. This check does not find all mistakes: the memory
 *   of a destroyed handle may hold a new handle of its kind, and then the old pointer is the new handle. A
 *   handle must not be destroyed while a call of another thread uses it.
 * - A function that can fail returns a weft_status, WEFT_OK if all went well. A function writes its outputs
 *   only if it succeeds. No function ends the program, and no C++ exception leaves one.
 * - The last argument, `error`, may be NULL. If a call fails, weft writes the status, the text and the facts
 *   that a program can act on into `error`; it belongs to the caller, and weft leaves it alone on success.
 *   weft keeps errors nowhere else, so threads do not see each other's errors. An error that was not made
 *   with WEFT_ERROR_INIT ({0}, for example) does not state its size: the call does nothing and returns
 *   WEFT_BAD_ARGUMENT, which it also sets as the error's code; the first such call of a process writes a line
 *   to stderr.
 * - A function fails with WEFT_BAD_ARGUMENT if a handle or a required pointer is NULL; the text names the
 *   argument.
 * - Structs begin with `struct_size` and are made with their initialiser, so that a program compiled against
 *   an older or newer weft.h works with the library: a field that an older program lacks has its default, and
 *   a field that the library does not know gives WEFT_UNSUPPORTED unless it is zero.
 * - Times are int64_t nanoseconds; 0 means the default, and a negative time gives WEFT_BAD_ARGUMENT.
 * - Any function may be called from any thread. Only one thread at a time may use a Work or an error. The
 *   caller must ensure that all ranks call the collectives of a group in the same order.
 * - Do not cancel (pthread_cancel) or longjmp out of a thread that is inside weft.
 * - A child made by fork() must not use a handle of its parent: calls with such a handle give
 *   WEFT_UNSUPPORTED.
 * */
#ifndef WEFT_WEFT_H
#define WEFT_WEFT_H

#include "weft/c/buffer.h"
#include "weft/c/callbacks.h"
#include "weft/c/checkpoint.h"
#include "weft/c/collectives.h"
#include "weft/c/context.h"
#include "weft/c/dlpack.h"
#include "weft/c/error.h"
#include "weft/c/exchange.h"
#include "weft/c/gradients.h"
#include "weft/c/group.h"
#include "weft/c/interrupt.h"
#include "weft/c/layout.h"
#include "weft/c/mesh.h"
#include "weft/c/sharded_parameters.h"
#include "weft/c/store.h"
#include "weft/c/trace.h"
#include "weft/c/transport.h"
#include "weft/c/window.h"
#include "weft/c/work.h"

#endif /* WEFT_WEFT_H */
