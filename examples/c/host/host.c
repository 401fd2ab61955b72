/* A transport and an allocator that the host program provides, in C: four ranks, which are threads of one
 * process, connected by the queues of queues.h. All operations, and groups made from the group, use the
 * queues; weft's memory comes from the pool of pool.h.
 *
 *   ./host_in_c */
#include <stdio.h>

#include "pool.h"
#include "queues.h"

enum { RANKS = 4 };

/* The arguments of a rank, and its result. */
typedef struct host_rank {
  weft_context* context;
  weft_store* store; /* through which the ranks find each other */
  hub* wires;        /* what carries their bytes afterwards */
  int32_t rank;
  float sum, sum_of_half;
  int32_t left;
  weft_error error;
} host_rank;

static void* run(void* argument) {
  host_rank* r = argument;
  weft_error* error = &r->error;
  weft_group *group = NULL, *half = NULL;
  const weft_transport transport = queues(r->wires);
  const int32_t right = (r->rank + 1) % RANKS, left = (r->rank + RANKS - 1) % RANKS;

  r->sum = r->sum_of_half = (float)(r->rank + 1);
  const weft_buffer all = {&r->sum, 1, WEFT_F32, WEFT_CPU}, part = {&r->sum_of_half, 1, WEFT_F32, WEFT_CPU};
  const weft_buffer mine = {&r->rank, 1, WEFT_I32, WEFT_CPU}, theirs = {&r->left, 1, WEFT_I32, WEFT_CPU};
  if (weft_group_create_over(r->context, &transport, r->store, r->rank, RANKS, NULL, &group, error) ==
          WEFT_OK &&
      weft_all_reduce(group, &all, &all, NULL, NULL, error) == WEFT_OK &&
      weft_send_recv(group, &mine, right, &theirs, left, NULL, NULL, error) == WEFT_OK &&
      weft_group_split(group, r->rank / 2, r->rank, &half, error) == WEFT_OK) /* a channel of its own */
    weft_all_reduce(half, &part, &part, NULL, NULL, error);
  weft_group_destroy(half);
  weft_group_destroy(group);
  return NULL;
}

int main(void) {
  weft_error error = WEFT_ERROR_INIT;
  weft_context* context = NULL;
  weft_store* store = NULL;
  hub wires = {PTHREAD_MUTEX_INITIALIZER, NULL};
  pool memory = {PTHREAD_MUTEX_INITIALIZER, 1 << 20, 0, 0, 0, NULL}; /* weft may have 1 MiB at once */
  weft_context_options options = WEFT_CONTEXT_OPTIONS_INIT;
  host_rank ranks[RANKS];
  pthread_t threads[RANKS];
  int failures = 0;

  options.allocator = pool_allocator(&memory);
  if (weft_context_create(&options, &context, &error) != WEFT_OK ||
      weft_store_create_local(&store, &error) != WEFT_OK) {
    fprintf(stderr, "%s: %s\n", weft_status_name(error.code), error.text);
    return 1;
  }
  for (int32_t r = 0; r < RANKS; ++r) {
    ranks[r] = (host_rank){context, store, &wires, r, 0, 0, -1, WEFT_ERROR_INIT};
    if (pthread_create(&threads[r], NULL, run, &ranks[r]) != 0) abort();
  }
  for (int32_t r = 0; r < RANKS; ++r) {
    pthread_join(threads[r], NULL);
    const host_rank* got = &ranks[r];
    if (got->error.code != WEFT_OK) {
      fprintf(stderr, "rank %d: %s: %s\n", (int)r, weft_status_name(got->error.code), got->error.text);
      ++failures;
    } else if (got->sum != 10 || got->sum_of_half != (r < 2 ? 3 : 7) ||
               got->left != (r + RANKS - 1) % RANKS) {
      fprintf(stderr, "rank %d: wrong numbers: %g, %g, %d\n", (int)r, (double)got->sum,
              (double)got->sum_of_half, (int)got->left);
      ++failures;
    }
  }
  if (failures == 0) {
    printf("all_reduce over queues: %g on every rank\n", (double)ranks[0].sum);
    printf("send_recv in a ring: every rank has its left neighbour's number\n");
    printf("all_reduce in halves: %g and %g\n", (double)ranks[0].sum_of_half,
           (double)ranks[RANKS - 1].sum_of_half);
  }
  weft_store_destroy(store);
  weft_context_destroy(context);
  if (memory.requests == 0 || memory.in_use != 0) { /* now that the context is gone */
    fprintf(stderr, "%zu requests, %zu bytes that did not come back\n", memory.requests, memory.in_use);
    ++failures;
  } else if (failures == 0) {
    printf("local memory: from the host's pool, and all of it given back\n");
  }
  pool_end(&memory);
  return failures == 0 ? 0 : 1;
}
