/* Tensors of DLPack as buffers, and shared memory as such a tensor. If dlpack.h is installed (Debian:
 * libdlpack-dev) its structs are compared with ours, and handed in without a cast. */
#include "support.h"

#include <pthread.h>

#if defined(__has_include)
#if __has_include(<dlpack/dlpack.h>)
#include <dlpack/dlpack.h>
#define HAVE_DLPACK 1
#endif
#endif

#ifdef HAVE_DLPACK
#define SAME(ours, theirs, field)                                                       \
  _Static_assert(offsetof(ours, field) == offsetof(theirs, field), #theirs "." #field); \
  _Static_assert(sizeof(((ours*)0)->field) == sizeof(((theirs*)0)->field), #theirs "." #field)
SAME(weft_dl_device, DLDevice, device_type);
SAME(weft_dl_device, DLDevice, device_id);
SAME(weft_dl_data_type, DLDataType, code);
SAME(weft_dl_data_type, DLDataType, bits);
SAME(weft_dl_data_type, DLDataType, lanes);
SAME(weft_dl_tensor, DLTensor, data);
SAME(weft_dl_tensor, DLTensor, device);
SAME(weft_dl_tensor, DLTensor, ndim);
SAME(weft_dl_tensor, DLTensor, dtype);
SAME(weft_dl_tensor, DLTensor, shape);
SAME(weft_dl_tensor, DLTensor, strides);
SAME(weft_dl_tensor, DLTensor, byte_offset);
SAME(weft_dl_managed_tensor, DLManagedTensor, dl_tensor);
SAME(weft_dl_managed_tensor, DLManagedTensor, manager_ctx);
SAME(weft_dl_managed_tensor, DLManagedTensor, deleter);
_Static_assert(sizeof(weft_dl_tensor) == sizeof(DLTensor), "DLTensor");
_Static_assert(sizeof(weft_dl_managed_tensor) == sizeof(DLManagedTensor), "DLManagedTensor");
_Static_assert((int)WEFT_DL_CPU == (int)kDLCPU && (int)WEFT_DL_CUDA == (int)kDLCUDA, "devices");
_Static_assert((int)WEFT_DL_CUDA_HOST == (int)kDLCUDAHost, "devices");
_Static_assert((int)WEFT_DL_INT == (int)kDLInt && (int)WEFT_DL_UINT == (int)kDLUInt, "codes");
_Static_assert((int)WEFT_DL_FLOAT == (int)kDLFloat && (int)WEFT_DL_BFLOAT == (int)kDLBfloat, "codes");
#ifdef DLPACK_MAJOR_VERSION /* 1.0 and later */
SAME(weft_dl_managed_tensor_versioned, struct DLManagedTensorVersioned, version);
SAME(weft_dl_managed_tensor_versioned, struct DLManagedTensorVersioned, manager_ctx);
SAME(weft_dl_managed_tensor_versioned, struct DLManagedTensorVersioned, deleter);
SAME(weft_dl_managed_tensor_versioned, struct DLManagedTensorVersioned, flags);
SAME(weft_dl_managed_tensor_versioned, struct DLManagedTensorVersioned, dl_tensor);
_Static_assert((int)WEFT_DL_COMPLEX == (int)kDLComplex && (int)WEFT_DL_BOOL == (int)kDLBool, "codes");
_Static_assert((int)WEFT_DL_READ_ONLY == (int)DLPACK_FLAG_BITMASK_READ_ONLY, "flags");
#endif

static void test_their_types(void) {
  double x[6] = {1, 2, 3, 4, 5, 6};
  int64_t shape[2] = {2, 3};
  DLManagedTensor managed;
  memset(&managed, 0, sizeof managed);
  managed.dl_tensor.data = x;
  managed.dl_tensor.device.device_type = kDLCPU;
  managed.dl_tensor.ndim = 2;
  managed.dl_tensor.dtype.code = kDLFloat;
  managed.dl_tensor.dtype.bits = 64;
  managed.dl_tensor.dtype.lanes = 1;
  managed.dl_tensor.shape = shape;
  weft_buffer b;
  OK(weft_buffer_from_dltensor(&managed.dl_tensor, &b, &error));
  CHECK(b.data == x && b.count == 6 && b.dtype == WEFT_F64 && b.device == WEFT_CPU);
  OK(weft_buffer_from_dlpack(&managed, &b, &error));
  CHECK(b.data == x && b.count == 6);

  weft_context* c = NULL;
  DLManagedTensor* adopted = NULL;
  OK(weft_context_create(NULL, &c, &error));
  OK(weft_alloc_dlpack(c, WEFT_F64, shape, 2, &adopted, &error));
  CHECK(adopted->dl_tensor.dtype.code == kDLFloat && adopted->dl_tensor.shape[1] == 3);
  adopted->deleter(adopted);
  weft_context_destroy(c);
}
#else
static void test_their_types(void) { printf("skipped: dlpack.h is not installed\n"); }
#endif

static float memory[64];
static int64_t shape_of[4], strides_of[4];

/* A tensor of f32 in `memory`. */
static weft_dl_tensor tensor(int32_t ndim, int64_t a, int64_t b) {
  weft_dl_tensor t = {memory, {WEFT_DL_CPU, 0}, ndim, {WEFT_DL_FLOAT, 32, 1}, shape_of, NULL, 0};
  shape_of[0] = a;
  shape_of[1] = b;
  return t;
}

static void test_dtypes(void) {
  static const struct {
    int code, bits;
    weft_dtype dtype;
  } all[] = {
      {WEFT_DL_FLOAT, 64, WEFT_F64},
      {WEFT_DL_FLOAT, 32, WEFT_F32},
      {WEFT_DL_FLOAT, 16, WEFT_F16},
      {WEFT_DL_BFLOAT, 16, WEFT_BF16},
      {WEFT_DL_INT, 8, WEFT_I8},
      {WEFT_DL_INT, 16, WEFT_I16},
      {WEFT_DL_INT, 32, WEFT_I32},
      {WEFT_DL_INT, 64, WEFT_I64},
      {WEFT_DL_UINT, 8, WEFT_U8},
      {WEFT_DL_UINT, 16, WEFT_U16},
      {WEFT_DL_UINT, 32, WEFT_U32},
      {WEFT_DL_UINT, 64, WEFT_U64},
      {WEFT_DL_BOOL, 8, WEFT_BOOL},
      {WEFT_DL_FLOAT8_E4M3FN, 8, WEFT_F8E4M3},
      {WEFT_DL_FLOAT8_E5M2, 8, WEFT_F8E5M2},
      {WEFT_DL_COMPLEX, 64, WEFT_C64},
      {WEFT_DL_COMPLEX, 128, WEFT_C128},
  };
  weft_context* c = NULL;
  OK(weft_context_create(NULL, &c, &error));
  for (size_t k = 0; k < LENGTH(all); ++k) {
    weft_dl_tensor t = tensor(1, 2, 0);
    weft_buffer b = {NULL, 0, -1, -1};
    t.dtype.code = (uint8_t)all[k].code;
    t.dtype.bits = (uint8_t)all[k].bits;
    OK(weft_buffer_from_dltensor(&t, &b, &error));
    CHECK(b.dtype == all[k].dtype && b.count == 2 && b.data == memory);

    /* And back. */
    struct DLManagedTensorVersioned* opaque = NULL;
    OK(weft_alloc_dlpack_versioned(c, all[k].dtype, t.shape, 1, &opaque, &error));
    weft_dl_managed_tensor_versioned* m = (weft_dl_managed_tensor_versioned*)opaque;
    CHECK(m->version.major == 1 && m->flags == 0);
    CHECK(m->dl_tensor.dtype.code == all[k].code && m->dl_tensor.dtype.bits == all[k].bits &&
          m->dl_tensor.dtype.lanes == 1);
    m->deleter(m);
  }
  weft_context_destroy(c);

  weft_buffer b;
  weft_dl_tensor t = tensor(1, 2, 0);
  t.dtype.code = 17;
  t.dtype.bits = 4;
  CHECK_ERROR(
      weft_buffer_from_dltensor(&t, &b, &error), WEFT_UNSUPPORTED,
      "*weft_buffer_from_dltensor: the tensor's dtype has code 17 and 4 bits, which is no dtype of weft's");
  t.dtype.code = WEFT_DL_FLOAT;
  t.dtype.bits = 128;
  CHECK_ERROR(weft_buffer_from_dltensor(&t, &b, &error), WEFT_UNSUPPORTED, "*code 2 and 128 bits");
  t.dtype.bits = 32;
  t.dtype.lanes = 4; /* vectors */
  OK(weft_buffer_from_dltensor(&t, &b, &error));
  CHECK(b.count == 8 && b.dtype == WEFT_F32);
  t.dtype.lanes = 0;
  CHECK_ERROR(weft_buffer_from_dltensor(&t, &b, &error), WEFT_BAD_ARGUMENT,
              "weft_buffer_from_dltensor: the tensor's dtype has 0 lanes; expected 1 or more");
}

static void test_devices(void) {
  static const struct {
    int32_t type, id;
    weft_device device;
  } all[] = {{WEFT_DL_CPU, 0, WEFT_CPU},       {WEFT_DL_CPU, 3, WEFT_CPU},
             {WEFT_DL_CUDA_HOST, 0, WEFT_CPU}, {WEFT_DL_CUDA, 0, WEFT_CUDA(0)},
             {WEFT_DL_CUDA, 5, WEFT_CUDA(5)},  {WEFT_DL_CUDA_MANAGED, 0, WEFT_CUDA(0)}};
  weft_buffer b;
  weft_dl_tensor t = tensor(1, 2, 0);
  for (size_t k = 0; k < LENGTH(all); ++k) {
    t.device.device_type = all[k].type;
    t.device.device_id = all[k].id;
    OK(weft_buffer_from_dltensor(&t, &b, &error));
    CHECK(b.device == all[k].device);
  }
  t.device.device_type = 10;
  CHECK_ERROR(
      weft_buffer_from_dltensor(&t, &b, &error), WEFT_UNSUPPORTED,
      "weft_buffer_from_dltensor: the tensor is on a device of type 10; expected 1 (CPU), 2 (CUDA), 3 (CUDA "
      "host) or 13 (CUDA managed)");
  t.device.device_type = WEFT_DL_CUDA;
  t.device.device_id = -1;
  CHECK_ERROR(weft_buffer_from_dltensor(&t, &b, &error), WEFT_BAD_ARGUMENT,
              "weft_buffer_from_dltensor: the tensor's device_id is -1; expected 0 to 32766");
}

static void test_shapes(void) {
  weft_buffer b;
  weft_dl_tensor t = tensor(2, 3, 4);
  OK(weft_buffer_from_dltensor(&t, &b, &error)); /* without strides */
  CHECK(b.count == 12 && b.data == memory);
  t.strides = strides_of;
  strides_of[0] = 4;
  strides_of[1] = 1;
  t.byte_offset = 8;
  OK(weft_buffer_from_dltensor(&t, &b, &error));
  CHECK(b.count == 12 && b.data == memory + 2);
  t.byte_offset = 0;
  strides_of[0] = 1;
  strides_of[1] = 3;
  CHECK_ERROR(weft_buffer_from_dltensor(&t, &b, &error), WEFT_LAYOUT,
              "weft_buffer_from_dltensor: the tensor is strided: shape (3, 4) has strides (1, 3); make it "
              "contiguous first");
  shape_of[0] = 1; /* strides of dimensions of one element do not count */
  strides_of[0] = -7;
  strides_of[1] = 1;
  OK(weft_buffer_from_dltensor(&t, &b, &error));
  CHECK(b.count == 4);
  shape_of[0] = 0; /* nor do any, if there are no elements */
  strides_of[1] = 9;
  t.data = NULL;
  OK(weft_buffer_from_dltensor(&t, &b, &error));
  CHECK(b.count == 0 && b.dtype == WEFT_F32);
  t = tensor(0, 0, 0);
  t.shape = NULL;
  OK(weft_buffer_from_dltensor(&t, &b, &error)); /* one number */
  CHECK(b.count == 1 && b.data == memory);

  const weft_status bad = WEFT_BAD_ARGUMENT;
  t.ndim = -1;
  CHECK_ERROR(weft_buffer_from_dltensor(&t, &b, &error), bad,
              "weft_buffer_from_dltensor: the tensor has ndim -1; expected 0 to 64");
  t.ndim = 65;
  CHECK_ERROR(weft_buffer_from_dltensor(&t, &b, &error), bad, "*ndim 65; expected 0 to 64");
  t.ndim = 1;
  CHECK_ERROR(weft_buffer_from_dltensor(&t, &b, &error), bad,
              "weft_buffer_from_dltensor: the tensor's shape is NULL; expected 1 numbers");
  t = tensor(2, 3, -4);
  CHECK_ERROR(weft_buffer_from_dltensor(&t, &b, &error), bad,
              "weft_buffer_from_dltensor: the tensor's shape[1] is -4; expected 0 or more");
  t = tensor(2, INT64_MAX, 2);
  CHECK_ERROR(
      weft_buffer_from_dltensor(&t, &b, &error), bad,
      "weft_buffer_from_dltensor: the tensor's bytes do not fit 64 bits: shape (9223372036854775807, 2)");
  t = tensor(1, 2, 0);
  t.data = NULL;
  CHECK_ERROR(weft_buffer_from_dltensor(&t, &b, &error), bad,
              "weft_buffer_from_dltensor: the tensor's data is NULL; expected 2 elements");
  t.data = memory;
  t.byte_offset = UINT64_MAX;
  CHECK_ERROR(weft_buffer_from_dltensor(&t, &b, &error), bad, "*byte_offset is 18446744073709551615");
  CHECK_ERROR(weft_buffer_from_dltensor(NULL, &b, &error), bad, "weft_buffer_from_dltensor: tensor is NULL");
  t.byte_offset = 0;
  CHECK_ERROR(weft_buffer_from_dltensor(&t, NULL, &error), bad, "weft_buffer_from_dltensor: buffer is NULL");
}

static void test_capsules(void) {
  weft_buffer b = {NULL, -1, -1, -1};
  const weft_status bad = WEFT_BAD_ARGUMENT;
  weft_dl_managed_tensor old = {tensor(1, 5, 0), NULL, NULL};
  OK(weft_buffer_from_dlpack((const struct DLManagedTensor*)&old, &b, &error));
  CHECK(b.count == 5);
  CHECK_ERROR(weft_buffer_from_dlpack(NULL, &b, &error), bad, "weft_buffer_from_dlpack: managed is NULL");

  weft_dl_managed_tensor_versioned m = {{1, 9}, NULL, NULL, WEFT_DL_IS_COPIED, tensor(1, 6, 0)};
  const struct DLManagedTensorVersioned* opaque = (const struct DLManagedTensorVersioned*)&m;
  OK(weft_buffer_from_dlpack_versioned(opaque, true, &b, &error));
  CHECK(b.count == 6);
  m.flags = WEFT_DL_READ_ONLY;
  OK(weft_buffer_from_dlpack_versioned(opaque, false, &b, &error));
  CHECK_ERROR(
      weft_buffer_from_dlpack_versioned(opaque, true, &b, &error), bad,
      "weft_buffer_from_dlpack_versioned: the tensor is read-only, but the call writes it; pass a copy");
  m.version.major = 2;
  CHECK_ERROR(weft_buffer_from_dlpack_versioned(opaque, false, &b, &error), WEFT_UNSUPPORTED,
              "weft_buffer_from_dlpack_versioned: the tensor is of DLPack 2.9; expected 1.x");
  CHECK_ERROR(weft_buffer_from_dlpack_versioned(NULL, false, &b, &error), bad,
              "weft_buffer_from_dlpack_versioned: managed is NULL");
}

static void* delete_tensor(void* managed) {
  weft_dl_managed_tensor* m = managed;
  m->deleter(m);
  return NULL;
}

/* Memory that outlives its context, in a collective, freed by another thread. */
static void allocated(rank_args* a) {
  weft_group* group = join(a, "world", 20000 * MS);
  const int64_t shape[3] = {2, 3, 5};
  struct DLManagedTensor* opaque = NULL;
  OK(weft_alloc_dlpack(a->context, WEFT_F32, shape, 3, &opaque, &error));
  weft_dl_managed_tensor* m = (weft_dl_managed_tensor*)opaque;
  CHECK(m->dl_tensor.ndim == 3 && memcmp(m->dl_tensor.shape, shape, sizeof shape) == 0);
  CHECK(m->dl_tensor.strides[0] == 15 && m->dl_tensor.strides[1] == 5 && m->dl_tensor.strides[2] == 1);
  CHECK(m->dl_tensor.device.device_type == WEFT_DL_CPU && m->dl_tensor.byte_offset == 0);
  CHECK((uintptr_t)m->dl_tensor.data % 256 == 0);
  weft_buffer b;
  OK(weft_buffer_from_dlpack(opaque, &b, &error));
  for (int i = 0; i < 30; ++i) ((float*)b.data)[i] = (float)(i + a->rank);
  OK(weft_all_reduce(group, &b, &b, NULL, NULL, &error));
  for (int i = 0; i < 30; ++i) CHECK(((float*)b.data)[i] == (float)(2 * i + 1));
  weft_group_destroy(group);
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, delete_tensor, m) == 0);
  CHECK(pthread_join(thread, NULL) == 0);
}
static void test_allocated(void) {
  run_ranks(2, allocated);

  weft_context* c = NULL;
  struct DLManagedTensor *one = NULL, *none = NULL, *failed_one = NULL;
  const int64_t empty[2] = {0, 4}, negative[1] = {-1}, huge[2] = {INT64_MAX, 8};
  OK(weft_context_create(NULL, &c, &error));
  OK(weft_alloc_dlpack(c, WEFT_C128, NULL, 0, &one, &error));
  OK(weft_alloc_dlpack(c, WEFT_I8, empty, 2, &none, &error));
  const weft_status bad = WEFT_BAD_ARGUMENT;
  CHECK_ERROR(weft_alloc_dlpack(NULL, WEFT_I8, empty, 2, &failed_one, &error), bad,
              "weft_alloc_dlpack: context is NULL");
  CHECK_ERROR(weft_alloc_dlpack(c, 17, empty, 2, &failed_one, &error), bad,
              "weft_alloc_dlpack: dtype is 17; expected 0 (WEFT_F64) to 16 (WEFT_C128)");
  CHECK_ERROR(weft_alloc_dlpack(c, WEFT_I8, NULL, 2, &failed_one, &error), bad,
              "weft_alloc_dlpack: shape is NULL");
  CHECK_ERROR(weft_alloc_dlpack(c, WEFT_I8, empty, -1, &failed_one, &error), bad,
              "weft_alloc_dlpack: ndim is -1; expected 0 to 64");
  CHECK_ERROR(weft_alloc_dlpack(c, WEFT_I8, negative, 1, &failed_one, &error), bad,
              "weft_alloc_dlpack: shape[0] is -1; expected 0 or more");
  CHECK_ERROR(weft_alloc_dlpack(c, WEFT_I8, huge, 2, &failed_one, &error), bad,
              "weft_alloc_dlpack: the bytes of shape (9223372036854775807, 8) do not fit 64 bits");
  CHECK_ERROR(weft_alloc_dlpack(c, WEFT_I8, empty, 2, NULL, &error), bad,
              "weft_alloc_dlpack: managed is NULL");
  CHECK_ERROR(weft_alloc_dlpack_versioned(c, WEFT_I8, empty, 2, NULL, &error), bad,
              "weft_alloc_dlpack_versioned: managed is NULL");
  CHECK(failed_one == NULL);
  weft_context_destroy(c);
  weft_dl_managed_tensor *m = (weft_dl_managed_tensor*)one, *n = (weft_dl_managed_tensor*)none;
  CHECK(m->dl_tensor.ndim == 0 && m->dl_tensor.data != NULL);
  memset(m->dl_tensor.data, 1, 16); /* the context is gone, the memory is not */
  CHECK(n->dl_tensor.data == NULL && n->dl_tensor.shape[1] == 4);
  m->deleter(m);
  n->deleter(n);
}

int main(int argc, char** argv) {
  static const named_test tests[] = {
      {"their_types", test_their_types}, {"dtypes", test_dtypes},     {"devices", test_devices},
      {"shapes", test_shapes},           {"capsules", test_capsules}, {"allocated", test_allocated},
  };
  return run_tests(tests, LENGTH(tests), argc, argv);
}
