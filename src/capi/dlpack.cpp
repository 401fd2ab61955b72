// DLPack in C: tensors as buffers, shared memory as a tensor. Any thread.
#include <fmt/ranges.h>

#include <array>
#include <cstddef>
#include <vector>

#include "capi/values.hpp"

using weft::ErrorCode;
using weft::Storage;
namespace capi = weft::capi;

namespace {

constexpr std::uint32_t kMajor = 1, kMinor = 1;  // of DLPack, as we write it
constexpr int kDimsMost = 64;

std::string shown(const std::int64_t* numbers, int count) {
  return fmt::format("({})", fmt::join(numbers, numbers + count, ", "));
}

struct KnownDType {
  int code, bits;
  weft_dtype dtype;
};
constexpr std::array<KnownDType, 17> kDTypes{{
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
}};
static_assert(kDTypes.size() == weft::kDTypeCount);

/// A tensor of another framework, read.
struct Reader {
  const char* function;
  const weft_dl_tensor& t;

  template <class... Args>
  [[noreturn]] void wrong(ErrorCode code, fmt::format_string<Args...> text, Args&&... args) const {
    capi::refuse(code, function, fmt::format(text, std::forward<Args>(args)...));
  }

  weft_dtype dtype() const {
    for (const KnownDType& known : kDTypes)
      if (known.code == t.dtype.code && known.bits == t.dtype.bits) return known.dtype;
    wrong(ErrorCode::unsupported,
          "the tensor's dtype has code {} and {} bits, which is no dtype of weft's (float, int, uint of 8 to "
          "64 bits, "
          "bfloat 16, complex 64 and 128, bool 8, float8 e4m3fn and e5m2)",
          t.dtype.code, t.dtype.bits);
  }

  weft_device device() const {
    switch (t.device.device_type) {
      case WEFT_DL_CPU:
      case WEFT_DL_CUDA_HOST: return WEFT_CPU;
      case WEFT_DL_CUDA:
      case WEFT_DL_CUDA_MANAGED:
        if (t.device.device_id < 0 || t.device.device_id >= INT16_MAX)
          wrong(ErrorCode::bad_argument, "the tensor's device_id is {}; expected 0 to {}", t.device.device_id,
                INT16_MAX - 1);
        return WEFT_CUDA(t.device.device_id);
      default: break;  // a number of DLPack's, whose list grows
    }
    wrong(ErrorCode::unsupported,
          "the tensor is on a device of type {}; expected 1 (CPU), 2 (CUDA), 3 (CUDA host) or 13 (CUDA "
          "managed)",
          t.device.device_type);
  }

  // The number of elements; the number of bytes fits 64 bits.
  std::int64_t count(weft_dtype of) const {
    if (t.ndim < 0 || t.ndim > kDimsMost)
      wrong(ErrorCode::bad_argument, "the tensor has ndim {}; expected 0 to {}", t.ndim, kDimsMost);
    if (t.ndim > 0 && t.shape == nullptr)
      wrong(ErrorCode::bad_argument, "the tensor's shape is NULL; expected {} numbers", t.ndim);
    if (t.dtype.lanes == 0)
      wrong(ErrorCode::bad_argument, "the tensor's dtype has 0 lanes; expected 1 or more");
    bool empty = false;
    for (int d = 0; d < t.ndim; ++d) {
      if (t.shape[d] < 0)
        wrong(ErrorCode::bad_argument, "the tensor's shape[{}] is {}; expected 0 or more", d, t.shape[d]);
      empty |= t.shape[d] == 0;
    }
    if (empty) return 0;
    std::int64_t n = t.dtype.lanes, bytes = 0;
    for (int d = 0; d < t.ndim; ++d)
      if (__builtin_mul_overflow(n, t.shape[d], &n)) n = INT64_MAX;
    if (__builtin_mul_overflow(n, weft_dtype_size(of), &bytes) || n == INT64_MAX)
      wrong(ErrorCode::bad_argument, "the tensor's bytes do not fit 64 bits: shape {}",
            shown(t.shape, t.ndim));
    return n;
  }

  void contiguous() const {
    if (t.strides == nullptr) return;
    std::int64_t expected = 1;
    for (int d = t.ndim - 1; d >= 0; --d) {
      if (t.shape[d] != 1 && t.strides[d] != expected)
        wrong(ErrorCode::layout, "the tensor is strided: shape {} has strides {}; make it contiguous first",
              shown(t.shape, t.ndim), shown(t.strides, t.ndim));
      expected *= t.shape[d];
    }
  }

  weft_buffer read() const {
    weft_buffer b{};
    b.dtype = dtype();
    b.device = device();
    b.count = count(b.dtype);
    if (b.count == 0) return b;
    contiguous();
    if (t.data == nullptr)
      wrong(ErrorCode::bad_argument, "the tensor's data is NULL; expected {} elements", b.count);
    const auto at = reinterpret_cast<std::uintptr_t>(t.data);
    if (t.byte_offset > UINTPTR_MAX - at)
      wrong(ErrorCode::bad_argument, "the tensor's byte_offset is {}, which is beyond all memory",
            t.byte_offset);
    b.data = static_cast<std::byte*>(t.data) + t.byte_offset;
    return b;
  }
};

/// A tensor that a framework adopts.
template <class Managed>
struct Owned {
  std::shared_ptr<const void> keeps;
  std::vector<std::int64_t> shape, strides;
  Managed managed{};

  static void destroy(Managed* self) noexcept {
    if (self != nullptr) delete static_cast<Owned*>(self->manager_ctx);
  }
};

weft_dl_device dl_device(weft_device device) {
  if (device == WEFT_CPU) return {WEFT_DL_CPU, 0};
  return {WEFT_DL_CUDA, device - WEFT_CUDA(0)};
}

/// Memory of weft_alloc_dlpack. Destroyed from below: the storage before its context.
struct Allocated {
  std::shared_ptr<capi::ContextState> context;
  Storage storage;
};

template <class Managed>
Managed* allocate(const char* function, weft_context* context, weft_dtype dtype, const std::int64_t* shape,
                  std::int32_t ndim) {
  weft_context& in = capi::given(function, context, "context");
  const auto wrong = [&](const std::string& text) { capi::refuse(ErrorCode::bad_argument, function, text); };
  const weft::DType of = capi::dtype_of(function, dtype, "dtype");
  if (ndim < 0 || ndim > kDimsMost) wrong(fmt::format("ndim is {}; expected 0 to {}", ndim, kDimsMost));
  if (ndim > 0) capi::given(function, shape, "shape");
  std::int64_t bytes = weft::size_bytes(of), count = 1;
  bool empty = false;
  for (int d = 0; d < ndim; ++d) {
    if (shape[d] < 0) wrong(fmt::format("shape[{}] is {}; expected 0 or more", d, shape[d]));
    empty |= shape[d] == 0;
  }
  for (int d = 0; d < ndim && !empty; ++d) {
    if (__builtin_mul_overflow(bytes, shape[d], &bytes))
      wrong(fmt::format("the bytes of shape {} do not fit 64 bits", shown(shape, ndim)));
    count *= shape[d];
  }
  const auto allocated = std::make_shared<Allocated>();
  if (!empty) {
    allocated->context = in.state;
    allocated->storage =
        Storage::allocate(in.state->context, weft::Memory::shared, static_cast<std::size_t>(bytes));
  }
  const weft_buffer data = {allocated->storage.data(), empty ? 0 : count, dtype, WEFT_CPU};
  return capi::hand_out<Managed>(allocated, data, {shape, static_cast<std::size_t>(ndim)});
}

}  // namespace

namespace weft::capi {

const weft_dl_tensor& dl_tensor_of(const char* function, const void* tensor, const char* which) {
  return given(function, static_cast<const weft_dl_tensor*>(tensor), which);
}
const weft_dl_tensor& dl_tensor_of(const char* function, const DLManagedTensor* managed, const char* which) {
  return given(function, reinterpret_cast<const weft_dl_managed_tensor*>(managed), which).dl_tensor;
}
const weft_dl_tensor& dl_tensor_of(const char* function, const DLManagedTensorVersioned* managed, bool writes,
                                   const char* which) {
  const auto* pointer = reinterpret_cast<const weft_dl_managed_tensor_versioned*>(managed);
  const weft_dl_managed_tensor_versioned& m = given(function, pointer, which);
  // Beyond `version`, `manager_ctx` and `deleter` another major version may be laid out differently.
  if (m.version.major != kMajor)
    refuse(ErrorCode::unsupported, function,
           fmt::format("the tensor is of DLPack {}.{}; expected {}.x", m.version.major, m.version.minor,
                       kMajor));
  if (writes && (m.flags & WEFT_DL_READ_ONLY) != 0)
    refuse(ErrorCode::bad_argument, function, "the tensor is read-only, but the call writes it; pass a copy");
  return m.dl_tensor;
}

weft_buffer dl_buffer_of(const char* function, const weft_dl_tensor& tensor) {
  return Reader{function, tensor}.read();
}

template <class Managed>
Managed* hand_out(std::shared_ptr<const void> keeps, const weft_buffer& data,
                  std::span<const std::int64_t> shape) {
  auto owned = std::make_unique<Owned<Managed>>();
  owned->keeps = std::move(keeps);
  owned->shape.assign(shape.begin(), shape.end());
  owned->strides.resize(shape.size());
  std::int64_t step = 1;
  for (std::size_t d = shape.size(); d-- > 0;) {
    owned->strides[d] = step;
    if (data.count != 0) step *= shape[d];  // without elements the product need not fit
  }
  weft_dl_tensor& t = owned->managed.dl_tensor;
  t.data = data.data;
  t.device = dl_device(data.device);
  t.ndim = static_cast<std::int32_t>(shape.size());
  for (const KnownDType& known : kDTypes)
    if (known.dtype == data.dtype)
      t.dtype = {static_cast<std::uint8_t>(known.code), static_cast<std::uint8_t>(known.bits), 1};
  t.shape = owned->shape.data();
  t.strides = owned->strides.data();
  if constexpr (requires { owned->managed.version; }) owned->managed.version = {kMajor, kMinor};
  owned->managed.manager_ctx = owned.get();
  owned->managed.deleter = Owned<Managed>::destroy;
  return &owned.release()->managed;
}
template weft_dl_managed_tensor* hand_out(std::shared_ptr<const void>, const weft_buffer&,
                                          std::span<const std::int64_t>);
template weft_dl_managed_tensor_versioned* hand_out(std::shared_ptr<const void>, const weft_buffer&,
                                                    std::span<const std::int64_t>);

}  // namespace weft::capi

weft_status weft_buffer_from_dltensor(const void* tensor, weft_buffer* buffer, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_dl_tensor& t = capi::dl_tensor_of(function, tensor, "tensor");
    capi::given(function, buffer, "buffer") = capi::dl_buffer_of(function, t);
  });
}

weft_status weft_buffer_from_dlpack(const DLManagedTensor* managed, weft_buffer* buffer, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_dl_tensor& t = capi::dl_tensor_of(function, managed, "managed");
    capi::given(function, buffer, "buffer") = capi::dl_buffer_of(function, t);
  });
}

weft_status weft_buffer_from_dlpack_versioned(const DLManagedTensorVersioned* managed, bool writes,
                                              weft_buffer* buffer, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_dl_tensor& t = capi::dl_tensor_of(function, managed, writes, "managed");
    capi::given(function, buffer, "buffer") = capi::dl_buffer_of(function, t);
  });
}

weft_status weft_alloc_dlpack(weft_context* context, weft_dtype dtype, const int64_t* shape, int32_t ndim,
                              DLManagedTensor** managed, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    DLManagedTensor*& to = capi::given(function, managed, "managed");
    to = reinterpret_cast<DLManagedTensor*>(
        allocate<weft_dl_managed_tensor>(function, context, dtype, shape, ndim));
  });
}

weft_status weft_alloc_dlpack_versioned(weft_context* context, weft_dtype dtype, const int64_t* shape,
                                        int32_t ndim, DLManagedTensorVersioned** managed, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    DLManagedTensorVersioned*& to = capi::given(function, managed, "managed");
    to = reinterpret_cast<DLManagedTensorVersioned*>(
        allocate<weft_dl_managed_tensor_versioned>(function, context, dtype, shape, ndim));
  });
}
