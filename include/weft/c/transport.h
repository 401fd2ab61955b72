/* A transport of the host's own: streams of bytes between ranks, over which weft does everything else. */
#ifndef WEFT_C_TRANSPORT_H
#define WEFT_C_TRANSPORT_H

#include "weft/c/group.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The facts about a group that a host gets when it opens a channel for it. Valid during the call alone. */
typedef struct weft_channel_init {
  uint32_t struct_size;
  int32_t rank, size; /* of this rank in the group */
  const char* group;  /* its name */
  const char* token;  /* the same on all ranks of the group, and different for each group of the job */
  /* For each rank of the group the rank that it gave to weft_group_create_over: the group may be a part of
   * that one, whose ranks have other numbers. */
  const int32_t* transport_ranks;
  int64_t limit_ns; /* how long opening may take */
} weft_channel_init;

/* The functions of a transport. A channel joins the ranks of one group: from each rank to each other one it
 * is a stream of bytes, which arrive in the order in which they were written, each once. Streams do not wait
 * for each other. weft keeps no pointer of a call in the transport, and the transport keeps none of weft's:
 * so nothing has to be cancelled.
 *
 * Each function returns WEFT_OK, or the status of the failure, with a text in error->text (which is not
 * NULL, and may be left alone): then the group fails, on all ranks, with that status and text, this rank's
 * name and that of the rank it was about. WEFT_PEER_LOST: that rank is lost. Functions of one channel are
 * called by one thread at a time, from any of the threads that use the group, weft's own among them; those of
 * several channels at once. They may not call weft on a group of this transport. A C++ exception that leaves
 * one counts as WEFT_SYSTEM. */
typedef struct weft_transport {
  uint32_t struct_size;
  bool detects_death; /* write and read give WEFT_PEER_LOST soon after the other rank has died */
  bool spin;          /* a read that finds nothing costs no system call: ranks that wait may spin */
  const char* name;   /* in errors and traces: 1 to 31 letters, digits, '-', '_' */
  void* transport_data;
  /* Opens this rank's end of a channel; all ranks of the group do. May wait for the others, at most
   * init->limit_ns. */
  weft_status (*open)(void* transport_data, const weft_channel_init* init, void** channel, weft_error* error);
  /* Takes the first bytes of `bytes` for rank `to`, as many as it can at once, up to `count`, and sets
   * *taken; 0: none now. Never waits. */
  weft_status (*write)(void* channel, int32_t to, const void* bytes, size_t count, size_t* taken,
                       weft_error* error);
  /* Writes the next bytes of rank `from` to `bytes`, as many as there are, up to `count`, and sets *got; 0:
   * none now. Never waits. */
  weft_status (*read)(void* channel, int32_t from, void* bytes, size_t count, size_t* got, weft_error* error);
  /* The group has ended: nothing is called on the channel afterwards. Bytes written before still arrive. May
   * be NULL. */
  void (*close)(void* channel);
} weft_transport;
#define WEFT_TRANSPORT_INIT \
  { sizeof(weft_transport), false, false, NULL, NULL, NULL, NULL, NULL, NULL }

/* A group over `transport`, which is copied; its transport_data must live until the last channel is closed.
 * The ranks meet in `store`, as in weft_group_create, and options->backend is NULL. Groups made from this one
 * have channels of their own. All operations run over it: weft matches messages, composes collectives from
 * them, and keeps deadlines; messages that nobody waits for yet are kept in memory. */
weft_status weft_group_create_over(weft_context* context, const weft_transport* transport, weft_store* store,
                                   int32_t rank, int32_t size, const weft_group_options* options,
                                   weft_group** group, weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_TRANSPORT_H */
