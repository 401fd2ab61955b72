/* DLPack: makes buffers of other frameworks' tensors without a copy, and makes DLPack tensors in shared
 * memory for other frameworks.
 *
 *   weft_buffer b;
 *   weft_buffer_from_dlpack_versioned(tensor, true, &b, &error);
 *   weft_all_reduce(group, &b, &b, NULL, NULL, &error);
 *
 * Neither weft nor this header needs dlpack.h. This header may be included before or after any version of
 * dlpack.h. Functions take the types of dlpack.h as they are, without a cast. Types that have a struct tag
 * in dlpack.h (DLManagedTensor, DLManagedTensorVersioned) are declared here by that tag. DLTensor has no
 * tag, so its function takes a const void*. For programs without dlpack.h this header has its structs
 * under the names weft_dl_...: cast pointers to them. */
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

/* Makes *buffer refer to the elements of a tensor, without a copy. The caller must keep the tensor alive
 * until the last call with the buffer is done. weft calls no deleter. Any thread may call it.
 *
 * The tensor must be row-major without gaps: its strides are NULL or equal to the row-major strides, except
 * in dimensions of one element. A strided tensor gives WEFT_LAYOUT, so make it contiguous first. A vector of
 * several lanes counts as that many elements. Host memory that a driver has pinned becomes WEFT_CPU. Managed
 * memory becomes memory of GPU `device_id`. To use it as memory of another device, set `device` of the
 * buffer.
 *
 * `tensor` points to a DLTensor. A DLTensor does not say whether it may be written. */
weft_status weft_buffer_from_dltensor(const void* tensor, weft_buffer* buffer, weft_error* error);
/* Like weft_buffer_from_dltensor, for the DLManagedTensor in a capsule named "dltensor". */
weft_status weft_buffer_from_dlpack(const struct DLManagedTensor* managed, weft_buffer* buffer,
                                    weft_error* error);
/* Like weft_buffer_from_dltensor, for the DLManagedTensorVersioned in a capsule named "dltensor_versioned",
 * which says whether it may be written. Fails with WEFT_BAD_ARGUMENT if the tensor is read-only and `writes`
 * is true, which says that a call will write it (as `out`). */
weft_status weft_buffer_from_dlpack_versioned(const struct DLManagedTensorVersioned* managed, bool writes,
                                              weft_buffer* buffer, weft_error* error);

/* Makes a row-major tensor in memory like that of weft_alloc, for a framework that adopts it. *managed
 * then belongs to that framework. Any thread may call the tensor's deleter, which frees the memory. Until
 * then the tensor keeps the parts of the context that it needs. No call that uses the tensor may be in
 * flight when the deleter is called. `shape` has `ndim` numbers, and may be NULL if `ndim` is 0. */
weft_status weft_alloc_dlpack(weft_context* context, weft_dtype dtype, const int64_t* shape, int32_t ndim,
                              struct DLManagedTensor** managed, weft_error* error);
weft_status weft_alloc_dlpack_versioned(weft_context* context, weft_dtype dtype, const int64_t* shape,
                                        int32_t ndim, struct DLManagedTensorVersioned** managed,
                                        weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_DLPACK_H */
