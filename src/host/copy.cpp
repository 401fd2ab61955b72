#include "weft/host/copy.hpp"

#include <fmt/format.h>

#include "host/strided/loops.hpp"
#include "weft/base/error.hpp"
#include "weft/host/device_runtime.hpp"

namespace weft {
namespace {

constexpr Device kHost{};

// Throws bad_argument if the view's extents are invalid, or if it has elements but no memory.
void check(const char* what, const ConstTensorView& v) {
  if (static_cast<int>(v.dtype) >= kDTypeCount)
    throw Error(ErrorCode::bad_argument, fmt::format("copy: {} has dtype {}; expected 0 to {}", what,
                                                     static_cast<int>(v.dtype), kDTypeCount - 1));
  std::int64_t bytes = size_bytes(v.dtype);
  bool empty = false, negative = false, beyond = false;
  for (const std::int64_t extent : v.shape) {
    negative |= extent < 0;
    empty |= extent == 0;
    if (extent != 0) beyond |= __builtin_mul_overflow(bytes, extent, &bytes);
  }
  if (negative || (beyond && !empty))
    throw Error(ErrorCode::bad_argument,
                fmt::format("copy: {} has shape {}; expected {}", what, to_string(v.shape),
                            negative ? "no negative extent" : "no more than 2^63 bytes"));
  if (v.strides.rank() != v.shape.rank())
    throw Error(ErrorCode::bad_argument, fmt::format("copy: {} has {} strides for {} dimensions", what,
                                                     v.strides.rank(), v.shape.rank()));
  if (!empty && reaches_too_far(v.shape, v.strides, v.dtype))
    throw Error(ErrorCode::bad_argument,
                fmt::format("copy: {} has strides {} of {}; expected elements within 2^63 bytes", what,
                            to_string(v.strides), to_string(v.shape)));
  if (!empty && v.data == nullptr)
    throw Error(ErrorCode::bad_argument, fmt::format("copy: {} {} has no memory", what, to_string(v.shape)));
}

void check(const ConstTensorView& from, const TensorView& to, Device device, Stream stream) {
  check("from", from);
  check("to", to);
  if (from.dtype != to.dtype || !(from.shape == to.shape))
    throw Error(ErrorCode::bad_argument,
                fmt::format("copy: from is {} {}, to is {} {}; expected the same", name(from.dtype),
                            to_string(from.shape), name(to.dtype), to_string(to.shape)));
  if (from.device != kHost && to.device != kHost && from.device != to.device)
    throw Error(ErrorCode::bad_argument,
                fmt::format("copy: from is on {}, to is on {}; expected one device, or the CPU on one side",
                            to_string(from.device), to_string(to.device)));
  if (stream.device != device)
    throw Error(ErrorCode::bad_argument,
                fmt::format("copy: stream is of {}; expected {}, where the tensors are",
                            to_string(stream.device), to_string(device)));
  for (int d = 0; d < to.shape.rank() && to.count() > 0; ++d)
    if (to.strides[d] == 0 && to.shape[d] > 1)
      throw Error(
          ErrorCode::bad_argument,
          fmt::format("copy: to has strides {} of {}: elements share memory; expected each in a place of "
                      "its own",
                      to_string(to.strides), to_string(to.shape)));
  const bool one_block = from.contiguous() && to.contiguous() && from.device == to.device && from.count() > 0;
  if (one_block && from.data < to.data + to.bytes() && to.data < from.data + from.bytes())
    throw Error(ErrorCode::bad_argument, "copy: from and to overlap; expected memory of their own");
}

}  // namespace

void copy(Context& context, const ConstTensorView& from, const TensorView& to, Stream stream) {
  const Device device = from.device == kHost ? to.device : from.device;
  if (stream == Stream{}) stream = device;
  check(from, to, device, stream);
  if (from.count() == 0) return;
  const std::int64_t element = size_bytes(from.dtype);
  Loops loops(static_cast<std::size_t>(element));
  for (int d = 0; d < from.shape.rank(); ++d)
    loops.add(from.shape[d], from.strides[d] * element, to.strides[d] * element);
  loops.copy(context.device(device), stream, from.data, from.device, to.data, to.device);
}

Tensor to_host(Context& context, const Tensor& t) {
  if (!t || t.device() == kHost) return t;
  const Tensor out = Tensor(context, t.shape(), t.dtype()).with_layout(t.layout());
  copy(context, t, out, t.stream());
  context.device(t.device()).wait(t.stream());
  return out;
}

Tensor to_device(Context& context, const Tensor& t, Stream where) {
  if (!t) return t;
  if (t.device() == where.device) return t.ordered_on(context, where);
  if (where.device == kHost) return to_host(context, t);
  const Tensor out =
      Tensor(context, t.shape(), t.dtype(), t.storage().memory(), where).with_layout(t.layout());
  copy(context, to_host(context, t), out, where);
  return out;
}

Tensor Tensor::zeros(Context& context, Shape shape, DType dtype, Memory memory, Stream where) {
  Tensor t(context, shape, dtype, memory, where);
  if (t.bytes() > 0)
    context.device(where.device).fill(t.data(), 0, {static_cast<std::size_t>(t.bytes())}, where);
  return t;
}

Tensor Tensor::clone(Context& context) const {
  if (!*this) return {};
  Tensor t(context, shape_, dtype_, storage_.memory(), stream());
  copy(context, *this, t, stream());
  t.layout_ = layout_;
  return t;
}

}  // namespace weft
