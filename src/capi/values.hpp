// Arguments of weft.h as C++ values. Each throws bad_argument naming `function` and the argument.
#pragma once

#include "capi/handles.hpp"
#include "weft/backends/call.hpp"
#include "weft/base/buffer.hpp"

namespace weft::capi {

/// `which` is the argument's name in texts; `of` stands between it and a field.
Buffer buffer_of(const char* function, const weft_buffer& buffer, const char* which, const char* of = ".");
inline Buffer buffer_of(const char* function, const weft_buffer* buffer, const char* which) {
  return buffer_of(function, given(function, buffer, which), which, "->");
}
/// Of an argument that counts only where `needed`: may be null elsewhere.
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

}  // namespace weft::capi
