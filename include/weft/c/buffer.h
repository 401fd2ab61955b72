/* The data of operations: buffers, the types of their elements, reductions, and devices of
 * memory. */
#ifndef WEFT_C_BUFFER_H
#define WEFT_C_BUFFER_H

#include "weft/c/error.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t weft_dtype;
enum {
  WEFT_F64 = 0,
  WEFT_F32,
  WEFT_F16,
  WEFT_BF16,
  WEFT_I8,
  WEFT_I16,
  WEFT_I32,
  WEFT_I64,
  WEFT_U8,
  WEFT_U16,
  WEFT_U32,
  WEFT_U64,
  WEFT_BOOL,
  WEFT_F8E4M3,
  WEFT_F8E5M2,
  WEFT_C64, /* two f32: real, imaginary */
  WEFT_C128
};

/* Bytes of one element. 0 for a number that is no dtype. */
int64_t weft_dtype_size(weft_dtype dtype);
/* "f64", "bf16", "bool", .... "?" for a number that is no dtype. Never NULL, and never freed. */
const char* weft_dtype_name(weft_dtype dtype);
/* The dtype of that name. */
weft_status weft_dtype_from_name(const char* name, weft_dtype* dtype, weft_error* error);

typedef int32_t weft_reduce_op;
enum {
  WEFT_SUM = 0,
  WEFT_AVG,
  WEFT_MIN,
  WEFT_MAX,
  WEFT_PROD,
  WEFT_PREMUL_SUM, /* each input times `scale`, then the sum */
  WEFT_BIT_AND,
  WEFT_BIT_OR,
  WEFT_BIT_XOR,
  WEFT_LOGICAL_AND,
  WEFT_LOGICAL_OR,
  WEFT_LOGICAL_XOR,
  WEFT_USER /* the function of `reduction` in weft_call_options */
};
/* "sum", "avg", ..., "user". "?" for a number that is no reduction. Never NULL, and never freed. */
const char* weft_reduce_op_name(weft_reduce_op op);

/* The order in which elements are combined: the backend's own order, or a tree over the ranks that is the
 * same on all backends.
 */
typedef int32_t weft_order;
enum { WEFT_ORDER_NATIVE = 0, WEFT_ORDER_CANONICAL = 1 };

typedef int32_t weft_device;
#define WEFT_CPU 0
#define WEFT_CUDA(index) (1 + (index))

/* `count` elements in a row. The memory is the caller's. The caller must keep it alive, and not touch it,
 * until the call's Work is done. A buffer called `in` is only read. The struct itself is copied. */
typedef struct weft_buffer {
  void* data; /* may be NULL if count is 0 */
  int64_t count;
  weft_dtype dtype;
  weft_device device;
} weft_buffer;

/* Sets *overlap to whether the two buffers have a byte in common. A buffer without elements overlaps no
 * other buffer. */
weft_status weft_buffer_overlap(const weft_buffer* a, const weft_buffer* b, bool* overlap, weft_error* error);

/* The division of a buffer among the ranks of a group: block r has counts[r] elements and begins at
 * element offsets[r]. If `offsets` is NULL, the blocks follow one another. Blocks that are written may not
 * overlap. Both arrays have `size` numbers, the group's size, and are copied when the call begins. */
typedef struct weft_blocks {
  const int64_t* counts;
  const int64_t* offsets; /* may be NULL */
  int64_t size;
} weft_blocks;

/* A queue of work on a device, in order. `handle` is the driver's handle of the stream (a cudaStream_t).
 * NULL means the default stream of `device`. A weft_stream that is all zeros means the default stream of
 * the group's device. */
typedef struct weft_stream {
  weft_device device;
  void* handle;
} weft_stream;

/* out[i] = left[i] combined with right[i], for each i < count, all of `dtype`. The function must be
 * associative, or the result depends on the number of ranks. It need not be commutative, since `left`
 * always comes from lower ranks. `out` may be `left`. Any thread may call the function. If threads are
 * ranks, several threads may call it at once. It must not call weft. */
typedef void (*weft_combine)(void* data, const void* left, const void* right, void* out, int64_t count,
                             weft_dtype dtype);

/* A reduction of the caller's own, for all dtypes except f8, on the host only. In a group of one rank weft
 * does not call it. */
typedef struct weft_reduction weft_reduction;

/* Ranks compare `name`. weft passes `data` to `combine`. If `release` is not NULL, weft calls it with `data`
 * when the reduction, and all weft_persistent and Works of calls with this reduction, are destroyed. Any
 * thread may call `release`.
 *
 * If `combine` throws (in C++), the call fails on this rank with WEFT_SYSTEM and the group is aborted.
 * Ranks that already have their result get the error in their next call. After such an exception the
 * reduction cannot be used any more. */
weft_status weft_reduction_create(const char* name, weft_combine combine, void* data,
                                  void (*release)(void* data), weft_reduction** reduction, weft_error* error);
/* Call it only when every function that got the reduction has returned. A call in flight keeps the parts of
 * the reduction that it needs. */
void weft_reduction_destroy(weft_reduction* reduction);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_BUFFER_H */
