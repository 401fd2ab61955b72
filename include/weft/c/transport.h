/* A transport of the program's own: streams of bytes between ranks. weft implements all operations over
 * these streams. */
#ifndef WEFT_C_TRANSPORT_H
#define WEFT_C_TRANSPORT_H

#include "weft/c/group.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The facts about a group that `open` gets when it opens a channel for the group. Valid only during the
 * call. */
typedef struct weft_channel_init {
  uint32_t struct_size;
  int32_t rank, size; /* this rank's number in the group, and the group's size */
  const char* group;  /* its name */
  const char* token;  /* the same on all ranks of the group, and different for each group of the job */
  /* transport_ranks[r] is the number that rank r of this group gave to weft_group_create_over. It differs
   * from r if this group is a part of the group that was made there. */
  const int32_t* transport_ranks;
  int64_t limit_ns; /* how long `open` may take */
} weft_channel_init;

/* The functions of a transport. A channel joins the ranks of one group. It has a stream of bytes from each
 * rank to each other rank. Bytes arrive in the order in which they were written, each once. Streams do not
 * wait for each other. After a call neither weft nor the transport keeps a pointer of the other, so nothing
 * has to be cancelled.
 *
 * Each function returns WEFT_OK, or the status of the failure, with a text in error->text (which is not
 * NULL; a text is optional). After a failure the group fails on all ranks, with that status and text, and
 * with the numbers of this rank and of the rank for which the function was called. WEFT_PEER_LOST means
 * that the rank for which the function was called is lost. One thread at a time calls functions of one
 * channel. It may be any thread that uses the group, including weft's own threads. Functions of different
 * channels may run at once. The functions may not call weft on a group of this transport. A C++ exception
 * that leaves a function counts as WEFT_SYSTEM. */
typedef struct weft_transport {
  uint32_t struct_size;
  bool detects_death; /* write and read give WEFT_PEER_LOST soon after the other rank has died */
  bool spin;          /* a read that finds nothing costs no system call, so waiting ranks may spin */
  const char* name;   /* in errors and traces: 1 to 31 letters, digits, '-', '_' */
  void* transport_data;
  /* Opens this rank's end of a channel. It is called on all ranks of the group. It may wait for the other
   * ranks, at most init->limit_ns. */
  weft_status (*open)(void* transport_data, const weft_channel_init* init, void** channel, weft_error* error);
  /* Takes the first bytes of `bytes` for rank `to`, as many as it can at once, up to `count`, and sets
   * *taken. 0 if it can take none now. Never waits. */
  weft_status (*write)(void* channel, int32_t to, const void* bytes, size_t count, size_t* taken,
                       weft_error* error);
  /* Writes the next bytes of rank `from` to `bytes`, as many as there are, up to `count`, and sets *got. 0
   * if there are none now. Never waits. */
  weft_status (*read)(void* channel, int32_t from, void* bytes, size_t count, size_t* got, weft_error* error);
  /* Called when the group has ended, as the last function on the channel. Bytes that were written before must
   * still arrive. May be NULL. */
  void (*close)(void* channel);
} weft_transport;
#define WEFT_TRANSPORT_INIT \
  { sizeof(weft_transport), false, false, NULL, NULL, NULL, NULL, NULL, NULL }

/* Makes a group over `transport`. weft copies the struct. The caller must keep transport_data valid until
 * the last channel is closed. The ranks find each other through `store`, as in weft_group_create.
 * options->backend must be NULL. Groups made from this group have channels of their own. All operations
 * run over the transport: weft matches messages, composes collectives from messages, and keeps deadlines.
 * weft keeps messages in memory until a receive waits for them. */
weft_status weft_group_create_over(weft_context* context, const weft_transport* transport, weft_store* store,
                                   int32_t rank, int32_t size, const weft_group_options* options,
                                   weft_group** group, weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_TRANSPORT_H */
