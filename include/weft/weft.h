/* weft from C: contexts, groups of ranks, collectives, errors. C11; usable from C++ too. The same library,
 * the same calls and the same rules as weft/weft.hpp, which has more of them.
 *
 * Conventions
 * - Handles are opaque. They may be destroyed in any order: objects that a handle needs live as long as the
 *   handle. Destroying NULL does nothing. A handle that is destroyed, of another kind or of another libweft
 *   in the process is WEFT_BAD_ARGUMENT; a function that destroys leaves it alone and writes a line to
 *   stderr. That finds mistakes, but not all: memory of a destroyed handle may have become a new one of its
 *   kind, and then the old pointer is the new handle. A handle must not be destroyed while a call of another
 *   thread uses it.
 * - A function that can fail returns a weft_status, WEFT_OK if all went well. Outputs are written on success
 *   only. No function ends the program, and no C++ exception leaves one.
 * - The last argument, `error`, may be NULL. If a call fails it receives the status, the text and the facts
 *   that a program can act on; it belongs to the caller and is left alone on success. Errors are not kept
 *   anywhere else, so threads need not care about each other's. An error that was not made with
 *   WEFT_ERROR_INIT ({0}, for example) has no room that the library knows of: the call does nothing and
 *   returns WEFT_BAD_ARGUMENT, which is set as its code, too; the first such call of a process writes a line
 *   to stderr.
 * - A NULL handle, or NULL if something is expected, is WEFT_BAD_ARGUMENT, and the text names it.
 * - Structs begin with `struct_size` and are made with their initialiser, so that a program compiled against
 *   an older or newer weft.h works with the library: a field that an older program lacks takes its default,
 *   and a field that the library does not know is WEFT_UNSUPPORTED unless it is zero.
 * - Times are int64_t nanoseconds; 0 is the default of the thing, negative is WEFT_BAD_ARGUMENT.
 * - Any function may be called from any thread. One Work or one error is for one thread at a time. The order
 *   of collectives on one group is the caller's to agree on.
 * - Do not cancel (pthread_cancel) or longjmp out of a thread that is inside weft.
 * - A child made by fork() may use no handle of its parent: its calls are WEFT_UNSUPPORTED.
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
