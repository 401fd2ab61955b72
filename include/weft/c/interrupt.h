/* Interrupts calls that wait for other ranks, for example after Ctrl-C. */
#ifndef WEFT_C_INTERRUPT_H
#define WEFT_C_INTERRUPT_H

#include "weft/c/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A switch that weft_interrupt_raise sets once. It interrupts the threads that are attached to it. If such a
 * thread waits in a store or for other ranks (stores, groups made in any way, subgroups, meshes, shrink), its
 * call ends within 20 ms with WEFT_ABORTED and the text `weft_group_create: interrupted: ...`, and leaves
 * nothing behind. Ranks that wait for the creation of the same group also get WEFT_ABORTED, with this rank's
 * number. If the thread waits for a call in flight (weft_work_wait, and functions that wait themselves, such
 * as weft_min_loc), the wait also ends. The group then fails on all ranks, with WEFT_ABORTED and this rank's
 * number. weft_work_wait_for and weft_work_wait_all_for return as at their limit, and the calls stay in
 * flight.
 *
 * An interrupt does not end a function of the program (such as `broadcast`), the resolution of a host's name,
 * or a wait inside a transport's library (MPI_Init). An interrupted weft_group_quiesce returns with *quiet
 * false. */
typedef struct weft_interrupt weft_interrupt;

weft_status weft_interrupt_create(weft_interrupt** interrupt, weft_error* error);
/* Attached threads stay attached, and the interrupt can no longer be raised. */
void weft_interrupt_destroy(weft_interrupt* interrupt);
/* From now on `interrupt` interrupts this thread, and replaces the interrupt that was attached before.
 * NULL: no interrupt is attached. It ends only the first waiting call after the raise. To be interrupted a
 * second time, the thread must attach another interrupt. */
weft_status weft_interrupt_attach(weft_interrupt* interrupt, weft_error* error);
/* Interrupts the threads that are attached now, and those that attach later. It may be called from any
 * thread, and in a signal handler (with error NULL). Never waits. */
weft_status weft_interrupt_raise(weft_interrupt* interrupt, weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_INTERRUPT_H */
