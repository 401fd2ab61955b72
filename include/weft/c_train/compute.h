/* The means by which one rank computes: a device, threads, scratch memory. */
#ifndef WEFT_C_TRAIN_COMPUTE_H
#define WEFT_C_TRAIN_COMPUTE_H

#include "weft/weft.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Any thread may use it, but only one at a time. A handle that was made with it keeps it alive. */
typedef struct weft_compute weft_compute;

typedef struct weft_compute_options {
  uint32_t struct_size;
  /* the number of computing threads, including the caller: 1 to 4096; results have the same bits with any
   * number */
  int32_t threads;
  weft_device device; /* the device whose memory it computes on */
} weft_compute_options;
#define WEFT_COMPUTE_OPTIONS_INIT \
  { sizeof(weft_compute_options), 1, WEFT_CPU }

/* `options` may be NULL: one thread, on the host. Does not block. */
weft_status weft_compute_create(weft_context* context, const weft_compute_options* options,
                                weft_compute** compute, weft_error* error);
void weft_compute_destroy(weft_compute* compute);
weft_status weft_compute_threads(const weft_compute* compute, int32_t* threads, weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_TRAIN_COMPUTE_H */
