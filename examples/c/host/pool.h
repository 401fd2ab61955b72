/* An allocator with a budget. It keeps freed blocks for the next request of their size. An allocator for weft
 * needs only these two functions. */
#ifndef POOL_H
#define POOL_H

#include <pthread.h>
#include <stdlib.h>
#include <weft/weft.h>

/* A free block; its memory holds the link of the list of free blocks. */
typedef struct free_block {
  struct free_block* next;
  size_t bytes;
} free_block;

typedef struct pool {
  pthread_mutex_t mutex;
  size_t budget; /* bytes that may be in use at once */
  size_t in_use, requests, blocks;
  free_block* kept;
} pool;

static void* pool_allocate(void* data, size_t bytes, size_t alignment) {
  pool* p = data;
  void* memory = NULL;
  pthread_mutex_lock(&p->mutex);
  ++p->requests;
  if (bytes <= p->budget - p->in_use) {
    free_block** at = &p->kept;
    while (*at != NULL && (*at)->bytes != bytes) at = &(*at)->next;
    if (*at != NULL) {
      memory = *at;
      *at = (*at)->next;
    } else {
      memory = aligned_alloc(alignment, bytes);
      p->blocks += memory != NULL;
    }
    if (memory != NULL) p->in_use += bytes;
  }
  pthread_mutex_unlock(&p->mutex);
  return memory; /* NULL: weft's call fails, and says how many bytes it asked for */
}

static void pool_deallocate(void* data, void* memory, size_t bytes, size_t alignment) {
  pool* p = data;
  free_block* block = memory;
  (void)alignment; /* always the same */
  pthread_mutex_lock(&p->mutex);
  p->in_use -= bytes;
  block->bytes = bytes;
  block->next = p->kept;
  p->kept = block;
  pthread_mutex_unlock(&p->mutex);
}

static weft_allocator pool_allocator(pool* p) {
  const weft_allocator a = {pool_allocate, pool_deallocate, p};
  return a;
}

/* Frees the blocks that the pool keeps. */
static void pool_end(pool* p) {
  while (p->kept != NULL) {
    free_block* next = p->kept->next;
    free(p->kept);
    p->kept = next;
  }
}

#endif /* POOL_H */
