// Arguments of weft.h as C++ values. Each throws bad_argument naming `function` and the argument.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "capi/handles.hpp"
#include "weft/backends/call.hpp"
#include "weft/base/buffer.hpp"

namespace weft::capi {

/// `which` is the argument's name in texts. `of` is between it and a field.
Buffer buffer_of(const char* function, const weft_buffer& buffer, const char* which, const char* of = ".");
inline Buffer buffer_of(const char* function, const weft_buffer* buffer, const char* which) {
  return buffer_of(function, given(function, buffer, which), which, "->");
}
/// An argument that is used only if `needed`, and may be null otherwise.
inline Buffer buffer_where(bool needed, const char* function, const weft_buffer* buffer, const char* which) {
  return needed || buffer != nullptr ? buffer_of(function, buffer, which) : Buffer{};
}
Blocks blocks_of(const char* function, const weft_blocks& blocks, const char* which);
inline Blocks blocks_of(const char* function, const weft_blocks* blocks, const char* which) {
  return blocks_of(function, given(function, blocks, which), which);
}
DType dtype_of(const char* function, weft_dtype dtype, const char* which);
Device device_of(const char* function, weft_device device, const char* which);
Stream stream_of(const char* function, const weft_stream& stream, const char* which);

CallOptions read_call_options(const char* function, const weft_call_options& options);
/// Null: the defaults.
inline CallOptions call_options(const char* function, const weft_call_options* options) {
  if (options == nullptr) return {};
  return read_call_options(function, *options);
}

// Tensors of DLPack (dlpack.cpp) ----

/// The tensor of a pointer that weft/c/dlpack.h takes. Throws bad_argument if it is NULL, where it is of
/// another major version of DLPack (unsupported), and where it is read-only and `writes`. `which`: the
/// argument's name in texts.
const weft_dl_tensor& dl_tensor_of(const char* function, const void* tensor, const char* which);
const weft_dl_tensor& dl_tensor_of(const char* function, const DLManagedTensor* managed, const char* which);
const weft_dl_tensor& dl_tensor_of(const char* function, const DLManagedTensorVersioned* managed, bool writes,
                                   const char* which);

/// Its elements, in the order in which they are stored. Throws the errors of weft_buffer_from_dltensor. A
/// tensor that passes has `ndim` extents that are not negative, and whose product fits 64 bits.
weft_buffer dl_buffer_of(const char* function, const weft_dl_tensor& tensor);

/// A row-major tensor for the receiver to adopt. Its deleter, which any thread may call, releases `keeps`,
/// which keeps the memory alive.
template <class Managed>
Managed* hand_out(std::shared_ptr<const void> keeps, const weft_buffer& data,
                  std::span<const std::int64_t> shape);
extern template weft_dl_managed_tensor* hand_out(std::shared_ptr<const void>, const weft_buffer&,
                                                 std::span<const std::int64_t>);
extern template weft_dl_managed_tensor_versioned* hand_out(std::shared_ptr<const void>, const weft_buffer&,
                                                           std::span<const std::int64_t>);

}  // namespace weft::capi
