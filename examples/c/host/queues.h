/* A transport for threads of one process: a ring of bytes from each rank to each other rank, and one set of
 * rings for each channel. A transport needs only these four functions, which could also use sockets or a
 * network library. */
#ifndef QUEUES_H
#define QUEUES_H

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <weft/weft.h>

enum { QUEUE_BYTES = 4096 };

typedef struct queue {
  unsigned char bytes[QUEUE_BYTES];
  size_t begin, used;
} queue;

/* The rings of one channel. Its ranks find it by the token; the last rank that closes it frees it. */
typedef struct rings {
  struct rings* next;
  char* token;
  int32_t size, closed;
  queue* from_to; /* [from * size + to] */
} rings;

/* The state that all channels share: the transport_data. */
typedef struct hub {
  pthread_mutex_t mutex;
  rings* first;
} hub;

typedef struct channel {
  hub* owner;
  rings* all;
  int32_t rank;
} channel;

static weft_status queues_open(void* transport_data, const weft_channel_init* init, void** opened,
                               weft_error* error) {
  hub* h = transport_data;
  channel* c = malloc(sizeof *c);
  rings* r = NULL;
  (void)error; /* the status says it all */
  if (c == NULL) return WEFT_SYSTEM;
  pthread_mutex_lock(&h->mutex);
  for (r = h->first; r != NULL && strcmp(r->token, init->token) != 0;) r = r->next;
  if (r == NULL && (r = calloc(1, sizeof *r)) != NULL) {
    r->size = init->size;
    r->token = malloc(strlen(init->token) + 1);
    r->from_to = calloc((size_t)init->size * (size_t)init->size, sizeof *r->from_to);
    if (r->token == NULL || r->from_to == NULL) {
      free(r->token);
      free(r->from_to);
      free(r);
      r = NULL;
    } else {
      strcpy(r->token, init->token);
      r->next = h->first;
      h->first = r;
    }
  }
  pthread_mutex_unlock(&h->mutex);
  if (r == NULL) {
    free(c);
    return WEFT_SYSTEM;
  }
  *c = (channel){h, r, init->rank};
  *opened = c;
  return WEFT_OK;
}

static weft_status queues_write(void* opened, int32_t to, const void* bytes, size_t count, size_t* taken,
                                weft_error* error) {
  channel* c = opened;
  queue* q = &c->all->from_to[c->rank * c->all->size + to];
  const unsigned char* from = bytes;
  (void)error;
  pthread_mutex_lock(&c->owner->mutex);
  for (*taken = 0; *taken < count && q->used < QUEUE_BYTES; ++*taken)
    q->bytes[(q->begin + q->used++) % QUEUE_BYTES] = from[*taken];
  pthread_mutex_unlock(&c->owner->mutex);
  return WEFT_OK;
}

static weft_status queues_read(void* opened, int32_t from, void* bytes, size_t count, size_t* got,
                               weft_error* error) {
  channel* c = opened;
  queue* q = &c->all->from_to[from * c->all->size + c->rank];
  unsigned char* to = bytes;
  (void)error;
  pthread_mutex_lock(&c->owner->mutex);
  for (*got = 0; *got < count && q->used > 0; ++*got, --q->used) {
    to[*got] = q->bytes[q->begin];
    q->begin = (q->begin + 1) % QUEUE_BYTES;
  }
  pthread_mutex_unlock(&c->owner->mutex);
  return WEFT_OK;
}

static void queues_close(void* opened) {
  channel* c = opened;
  hub* h = c->owner;
  pthread_mutex_lock(&h->mutex);
  if (++c->all->closed == c->all->size) {
    rings** at = &h->first;
    while (*at != c->all) at = &(*at)->next;
    *at = c->all->next;
    free(c->all->token);
    free(c->all->from_to);
    free(c->all);
  }
  pthread_mutex_unlock(&h->mutex);
  free(c);
}

static weft_transport queues(hub* h) {
  weft_transport t = WEFT_TRANSPORT_INIT;
  t.name = "queues";
  t.transport_data = h;
  t.open = queues_open;
  t.write = queues_write;
  t.read = queues_read;
  t.close = queues_close;
  return t;
}

#endif /* QUEUES_H */
