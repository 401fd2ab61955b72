#include "weft/base/tensor.hpp"

#include <fmt/format.h>

#include "weft/base/error.hpp"

namespace weft {
namespace {

// The size in bytes of a tensor of that shape; refuses negative extents and sizes beyond 2^63.
std::size_t checked_bytes(const Shape& shape, DType dtype) {
  if (static_cast<int>(dtype) >= kDTypeCount)
    throw Error(ErrorCode::bad_argument,
                fmt::format("tensor: dtype is {}; expected 0 ({}) to {} ({})", static_cast<int>(dtype),
                            name(DType{}), kDTypeCount - 1, name(static_cast<DType>(kDTypeCount - 1))));
  std::int64_t bytes = size_bytes(dtype);
  bool empty = false, overflow = false;
  for (int i = 0; i < shape.rank(); ++i) {
    if (shape[i] < 0)
      throw Error(ErrorCode::bad_argument,
                  fmt::format("tensor: dimension {} of shape {} is {}; expected 0 or more", i,
                              to_string(shape), shape[i]));
    empty |= shape[i] == 0;
    overflow |= __builtin_mul_overflow(bytes, shape[i], &bytes);
  }
  if (empty) return 0;
  if (overflow)
    throw Error(ErrorCode::bad_argument, fmt::format("tensor: shape {} of {} has more than 2^63 bytes",
                                                     to_string(shape), name(dtype)));
  return static_cast<std::size_t>(bytes);
}

}  // namespace

std::string elsewhere_text(const Tensor& t, Stream expected, std::string_view whose) {
  if (t.device() != expected.device)
    return fmt::format("{}, the device of {}", is_on(t.device(), expected.device), whose);
  return fmt::format("is ordered on another stream of {} than {}; to_device() orders it there",
                     to_string(expected.device), whose);
}

Tensor::Tensor(Context& context, Shape shape, DType dtype, Memory memory, Stream where)
    : storage_(Storage::allocate(context, memory, checked_bytes(shape, dtype), where)),
      shape_(shape),
      dtype_(dtype) {}

Tensor::Tensor(Storage storage, std::size_t offset_bytes, Shape shape, DType dtype)
    : storage_(std::move(storage)), offset_(offset_bytes), shape_(shape), dtype_(dtype) {
  const std::size_t needed = checked_bytes(shape, dtype);
  if (offset_bytes > storage_.bytes() || needed > storage_.bytes() - offset_bytes)
    throw Error(ErrorCode::bad_argument,
                fmt::format("tensor: shape {} of {} at byte {} needs {} bytes; the storage has {}",
                            to_string(shape), name(dtype), offset_bytes,
                            static_cast<unsigned __int128>(offset_bytes) + needed, storage_.bytes()));
  if (reinterpret_cast<std::uintptr_t>(data()) % static_cast<std::uintptr_t>(size_bytes(dtype)) != 0)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("tensor: byte {} of the storage is not aligned for {}; expected a multiple of {} bytes",
                    offset_bytes, name(dtype), size_bytes(dtype)));
}

Tensor Tensor::reshape(const Shape& shape) const {
  checked_bytes(shape, dtype_);
  if (shape.count() != count())
    throw Error(ErrorCode::bad_argument,
                fmt::format("reshape: {} has {} elements; expected {}, as {} has", to_string(shape),
                            shape.count(), count(), to_string(shape_)));
  Tensor t = *this;
  t.shape_ = shape;
  t.layout_ = nullptr;
  return t;
}

Tensor Tensor::slice_flat(std::int64_t offset, const Shape& shape) const {
  checked_bytes(shape, dtype_);
  if (offset < 0 || offset > count() || shape.count() > count() - offset)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format(
            "slice_flat: {} elements from {} on, shape {}; expected a range within the {} elements of {}",
            shape.count(), offset, to_string(shape), count(), to_string(shape_)));
  Tensor t = *this;
  t.offset_ += static_cast<std::size_t>(offset * size_bytes(dtype_));
  t.shape_ = shape;
  t.layout_ = nullptr;
  return t;
}

void Tensor::require(DType wanted) const {
  if (wanted != dtype_)
    throw Error(ErrorCode::bad_argument,
                fmt::format("tensor: read as {}; expected {}, its dtype", name(wanted), name(dtype_)));
  if (!storage_ && count() > 0)
    throw Error(ErrorCode::bad_argument,
                fmt::format("tensor: {} {} has no memory: it is empty or was moved from", name(dtype_),
                            to_string(shape_)));
}

void Tensor::throw_not_on_host() const {
  throw Error(ErrorCode::bad_argument,
              fmt::format("tensor: {} {} is on {}; the host reads cpu memory only: copy it first (to_host)",
                          name(dtype_), to_string(shape_), to_string(device())));
}

}  // namespace weft
