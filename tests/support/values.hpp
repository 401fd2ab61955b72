// Values for tests of collectives: small integers that depend on rank and index, exact in every dtype, so
// that a misplaced block cannot pass and no tolerance is needed.
#pragma once

#include <cmath>
#include <complex>
#include <cstdint>
#include <cstdlib>

#include "weft/base/tensor.hpp"

namespace weft::test {

/// 0 … 6: a sum over 7 ranks stays below 128, exact in i8 and bf16.
inline int value(int rank, std::int64_t index) {
  return static_cast<int>((rank * 5 + index * 3 + index / 7) % 7);
}

inline void store(const TensorView& v, std::int64_t i, double x) {
  std::byte* const at = v.data + i * size_bytes(v.dtype);
  const auto put = [&](auto y) { *reinterpret_cast<decltype(y)*>(at) = y; };
  switch (v.dtype) {
    case DType::f64: return put(x);
    case DType::f32: return put(static_cast<float>(x));
    case DType::f16: return put(f16(static_cast<float>(x)));
    case DType::bf16: return put(bf16(static_cast<float>(x)));
    case DType::i8: return put(static_cast<std::int8_t>(x));
    case DType::i16: return put(static_cast<std::int16_t>(x));
    case DType::i32: return put(static_cast<std::int32_t>(x));
    case DType::i64: return put(static_cast<std::int64_t>(x));
    case DType::u8: return put(static_cast<std::uint8_t>(x));
    case DType::u16: return put(static_cast<std::uint16_t>(x));
    case DType::u32: return put(static_cast<std::uint32_t>(x));
    case DType::u64: return put(static_cast<std::uint64_t>(x));
    case DType::boolean: return put(x != 0);
    case DType::c64: return put(std::complex<float>(static_cast<float>(x)));
    case DType::c128: return put(std::complex<double>(x));
    case DType::f8e4m3:
    case DType::f8e5m2: break;
  }
  std::abort();
}

inline double load(const ConstTensorView& v, std::int64_t i) {
  const std::byte* const at = v.data + i * size_bytes(v.dtype);
  const auto get = [&]<class T>(T) { return *reinterpret_cast<const T*>(at); };
  switch (v.dtype) {
    case DType::f64: return get(double{});
    case DType::f32: return get(float{});
    case DType::f16: return static_cast<float>(get(f16{}));
    case DType::bf16: return static_cast<float>(get(bf16{}));
    case DType::i8: return get(std::int8_t{});
    case DType::i16: return get(std::int16_t{});
    case DType::i32: return get(std::int32_t{});
    case DType::i64: return static_cast<double>(get(std::int64_t{}));
    case DType::u8: return get(std::uint8_t{});
    case DType::u16: return get(std::uint16_t{});
    case DType::u32: return get(std::uint32_t{});
    case DType::u64: return static_cast<double>(get(std::uint64_t{}));
    case DType::boolean: return get(bool{});
    case DType::c64: return get(std::complex<float>{}).real();
    case DType::c128: return get(std::complex<double>{}).real();
    case DType::f8e4m3:
    case DType::f8e5m2: break;
  }
  std::abort();
}

/// What the combination of value(r, index) over n ranks must be, as the dtype stores it.
inline double combined(ReduceOp op, DType dtype, int n, std::int64_t index) {
  double sum = 0, low = 1e9, high = -1e9;
  for (int r = 0; r < n; ++r) {
    const int x = value(r, index);
    sum += x;
    low = std::fmin(low, x);
    high = std::fmax(high, x);
  }
  switch (op.kind) {
    case ReduceOp::Kind::sum: return sum;
    case ReduceOp::Kind::min: return low;
    case ReduceOp::Kind::max: return high;
    case ReduceOp::Kind::avg: break;
    default: std::abort();
  }
  if (dtype == DType::f64) return sum / n;
  const float mean = static_cast<float>(sum) / static_cast<float>(n);
  if (dtype == DType::f32) return mean;
  if (dtype == DType::bf16) return static_cast<float>(bf16(mean));
  if (dtype == DType::f16) return static_cast<float>(f16(mean));
  return std::trunc(sum / n);
}

}  // namespace weft::test
