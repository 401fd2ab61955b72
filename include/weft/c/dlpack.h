/* Tensors of other frameworks as DLPack describes them: made into buffers without a copy, and shared memory
 * handed out as such a tensor.
 *
 *   weft_buffer b;
 *   weft_buffer_from_dlpack_versioned(tensor, true, &b, &error);
 *   weft_all_reduce(group, &b, &b, NULL, NULL, &error);
 *
 * Neither weft nor this header needs dlpack.h, and it may be included before or after it, of any version:
 * functions take the types of dlpack.h as they are, without a cast. Those that have a tag there
 * (DLManagedTensor, DLManagedTensorVersioned) are declared here by it. DLTensor has none, so its function
 * takes a const void*. The structs weft_dl_... are those of dlpack.h under names of weft's own, for programs
 * without it: cast their pointers.
 * */
#ifndef WEFT_C_DLPACK_H
#define WEFT_C_DLPACK_H

#include "weft/c/buffer.h"
#include "weft/c/context.h"

#ifdef __cplusplus
extern "C" {
#endif

struct DLManagedTensor;
struct DLManagedTensorVersioned;

typedef struct weft_dl_device {
  int32_t device_type; /* WEFT_DL_CPU, ... */
  int32_t device_id;
} weft_dl_device;

typedef struct weft_dl_data_type {
  uint8_t code; /* WEFT_DL_INT, ... */
  uint8_t bits;
  uint16_t lanes;
} weft_dl_data_type;

typedef struct weft_dl_tensor {
  void* data;
  weft_dl_device device;
  int32_t ndim;
  weft_dl_data_type dtype;
  int64_t* shape;
  int64_t* strides; /* elements; NULL: row-major */
  uint64_t byte_offset;
} weft_dl_tensor;

typedef struct weft_dl_managed_tensor {
  weft_dl_tensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(struct weft_dl_managed_tensor* self);
} weft_dl_managed_tensor;

typedef struct weft_dl_version {
  uint32_t major;
  uint32_t minor;
} weft_dl_version;

typedef struct weft_dl_managed_tensor_versioned {
  weft_dl_version version;
  void* manager_ctx;
  void (*deleter)(struct weft_dl_managed_tensor_versioned* self);
  uint64_t flags; /* WEFT_DL_READ_ONLY, ... */
  weft_dl_tensor dl_tensor;
} weft_dl_managed_tensor_versioned;

/* Devices whose memory weft moves. */
enum { WEFT_DL_CPU = 1, WEFT_DL_CUDA = 2, WEFT_DL_CUDA_HOST = 3, WEFT_DL_CUDA_MANAGED = 13 };
/* Kinds of elements that weft knows. */
enum {
  WEFT_DL_INT = 0,
  WEFT_DL_UINT = 1,
  WEFT_DL_FLOAT = 2,
  WEFT_DL_BFLOAT = 4,
  WEFT_DL_COMPLEX = 5,
  WEFT_DL_BOOL = 6,
  WEFT_DL_FLOAT8_E4M3FN = 10,
  WEFT_DL_FLOAT8_E5M2 = 12
};
/* Bits of `flags`. */
enum { WEFT_DL_READ_ONLY = 1, WEFT_DL_IS_COPIED = 2 };

/* The elements of a tensor, as they lie, in *buffer. The tensor stays the caller's, and must live until the
 * last call with the buffer is done; no deleter is called. Any thread.
 *
 * It must be row-major without gaps (strides NULL, or what they would be; those of dimensions of one element
 * do not count); a strided tensor is WEFT_LAYOUT: make it contiguous first. Vectors of several lanes are so
 * many elements. Host memory that a driver has pinned is WEFT_CPU. Managed memory is taken for that of GPU
 * `device_id`; set `device` of the buffer where it is to be used as another's.
 *
 * `tensor` points to a DLTensor. It does not say whether it may be written. */
weft_status weft_buffer_from_dltensor(const void* tensor, weft_buffer* buffer, weft_error* error);
/* The same of the struct that an unversioned capsule ("dltensor") holds. */
weft_status weft_buffer_from_dlpack(const struct DLManagedTensor* managed, weft_buffer* buffer,
                                    weft_error* error);
/* The same of a versioned capsule ("dltensor_versioned"), which knows whether it may be written: where it may
 * not, and `writes` says that it will be (as `out` of a call), it is WEFT_BAD_ARGUMENT. */
weft_status weft_buffer_from_dlpack_versioned(const struct DLManagedTensorVersioned* managed, bool writes,
                                              weft_buffer* buffer, weft_error* error);

/* A row-major tensor in memory as that of weft_alloc, for a framework that adopts it: *managed is its own
 * from then on. Its deleter, which any thread may call, frees it, and keeps what it needs of the context
 * until then: not while a call that uses it is in flight. `shape` has `ndim` numbers, and may be NULL if
 * that is 0. */
weft_status weft_alloc_dlpack(weft_context* context, weft_dtype dtype, const int64_t* shape, int32_t ndim,
                              struct DLManagedTensor** managed, weft_error* error);
weft_status weft_alloc_dlpack_versioned(weft_context* context, weft_dtype dtype, const int64_t* shape,
                                        int32_t ndim, struct DLManagedTensorVersioned** managed,
                                        weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_DLPACK_H */
