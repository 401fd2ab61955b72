/* Ends calls that wait for other ranks from outside: for Ctrl-C, for example. */
#ifndef WEFT_C_INTERRUPT_H
#define WEFT_C_INTERRUPT_H

#include "weft/c/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A switch that is set once, by weft_interrupt_raise. A thread that is attached to it is then interrupted:
 * its call that waits in a store, or for ranks to meet (stores, groups by every kind of rendezvous,
 * subgroups, meshes, shrink), ends within 20 ms with WEFT_ABORTED and the text
 * `weft_group_create: interrupted: ...`, and leaves nothing behind. Ranks that wait in the same group's
 * creation get WEFT_ABORTED, too, with this rank's number. Its wait for a call in flight (weft_work_wait, and
 * functions that wait themselves, as weft_min_loc) ends, too: then the group fails, on all ranks, with
 * WEFT_ABORTED and this rank's number. weft_work_wait_for and weft_work_wait_all_for end as by their limit,
 * and the calls stay in flight.
 *
 * Not ended: a function of the caller's (broadcast); the resolution of a host's name, and other waits inside
 * a transport's library (MPI_Init). weft_group_quiesce says that it is not quiet. */
typedef struct weft_interrupt weft_interrupt;

weft_status weft_interrupt_create(weft_interrupt** interrupt, weft_error* error);
/* Threads that are attached to it stay so, and it can no longer be raised. */
void weft_interrupt_destroy(weft_interrupt* interrupt);
/* From now on `interrupt` interrupts this thread, in place of the one before; NULL: none does. It is for the
 * first call that waits after the raise; to be interrupted a second time a thread attaches another one. */
weft_status weft_interrupt_attach(weft_interrupt* interrupt, weft_error* error);
/* Interrupts the threads that are attached, and those that will be. Any thread, and the handler of a signal
 * (with error NULL); never waits. */
weft_status weft_interrupt_raise(weft_interrupt* interrupt, weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_INTERRUPT_H */
