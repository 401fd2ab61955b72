#include "difference.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace weft::tools {
namespace {

template <class T>
double number_at(const ConstTensorView& view, std::int64_t i) {
  T value;
  std::memcpy(&value, view.data + i * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
  return static_cast<double>(value);
}

// A type that converts to float alone.
template <class T>
double narrow_at(const ConstTensorView& view, std::int64_t i) {
  T value;
  std::memcpy(&value, view.data + i * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
  return static_cast<double>(static_cast<float>(value));
}

// Element i of a contiguous tensor. Integers beyond 2^53 lose their last bits; their bytes show whether they
// differ.
double element(const ConstTensorView& view, std::int64_t i) {
  switch (view.dtype) {
    case DType::f64: return number_at<double>(view, i);
    case DType::f32: return number_at<float>(view, i);
    case DType::f16: return narrow_at<f16>(view, i);
    case DType::bf16: return narrow_at<bf16>(view, i);
    case DType::f8e4m3: return narrow_at<f8e4m3>(view, i);
    case DType::f8e5m2: return narrow_at<f8e5m2>(view, i);
    case DType::i8: return number_at<std::int8_t>(view, i);
    case DType::i16: return number_at<std::int16_t>(view, i);
    case DType::i32: return number_at<std::int32_t>(view, i);
    case DType::i64: return number_at<std::int64_t>(view, i);
    case DType::u8:
    case DType::boolean: return number_at<std::uint8_t>(view, i);
    case DType::u16: return number_at<std::uint16_t>(view, i);
    case DType::u32: return number_at<std::uint32_t>(view, i);
    case DType::u64: return number_at<std::uint64_t>(view, i);
    case DType::c64:
    case DType::c128: break;  // seen as twice as many real numbers
  }
  return 0;
}

}  // namespace

ConstTensorView real_numbers(ConstTensorView view) {
  if (view.dtype != DType::c64 && view.dtype != DType::c128) return view;
  const std::int64_t count = 2 * view.count();
  return {view.data, view.dtype == DType::c64 ? DType::f32 : DType::f64, view.device, Dims::line(count),
          Dims::line(1)};
}

Difference difference(const ConstTensorView& a_in, const ConstTensorView& b_in, double tolerance) {
  Difference d;
  const bool same = a_in.dtype == b_in.dtype;
  if (same && std::memcmp(a_in.data, b_in.data, static_cast<std::size_t>(a_in.bytes())) == 0) return d;
  const ConstTensorView a = real_numbers(a_in), b = real_numbers(b_in);
  const int bytes = size_bytes(a.dtype);
  for (std::int64_t i = 0; i < a.count(); ++i) {
    if (same && std::memcmp(a.data + i * bytes, b.data + i * bytes, static_cast<std::size_t>(bytes)) == 0)
      continue;
    const double x = element(a, i), y = element(b, i);
    if (std::isnan(x) && std::isnan(y)) continue;
    const double apart = x == y ? 0 : std::isnan(x) || std::isnan(y) ? INFINITY : std::abs(x - y);
    if ((tolerance > 0 || !same) && apart <= tolerance) continue;
    ++d.numbers;
    d.largest = std::max(d.largest, apart);
  }
  return d;
}

}  // namespace weft::tools
