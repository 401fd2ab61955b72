// Values for tests of collectives: small integers that depend on rank and index. They are exact in every
// dtype, so a misplaced block cannot pass and no tolerance is needed.
//
//   for (i …) store(in, i, input(op, in.dtype, rank, i));
//   … all_reduce(in, out, {.op = op}) …
//   for (i …) EXPECT_EQ(load(out, i), combined(op, out.dtype, size, i));
#pragma once

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <vector>

#include "weft/base/op.hpp"
#include "weft/base/tensor.hpp"

namespace weft::test {

/// 0 … 6: a sum over 7 ranks stays below 128, exact in i8, bf16 and f8.
inline int value(int rank, std::int64_t index) {
  return static_cast<int>((rank * 5 + index * 3 + index / 7) % 7);
}

/// A complex number is stored with an imaginary part of -2 times its real part. It is loaded as its real part
/// if that relation still holds. If it does not (a product, a mistake), the deviation makes the number unlike
/// any other.
inline std::complex<double> as_complex(double x) { return {x, -2 * x}; }
inline double from_complex(std::complex<double> z) { return z.real() + 4096 * (z.imag() + 2 * z.real()); }

/// Sets element i of v to x; for bool to x != 0; for integers to x wrapped.
inline void store(std::byte* data, DType dtype, std::int64_t i, double x) {
  std::byte* const at = data + i * size_bytes(dtype);
  const auto put = [&](auto y) { std::memcpy(at, &y, sizeof y); };
  const auto whole = [&] { return static_cast<std::int64_t>(x); };
  switch (dtype) {
    case DType::f64: return put(x);
    case DType::f32: return put(static_cast<float>(x));
    case DType::f16: return put(f16(static_cast<float>(x)));
    case DType::bf16: return put(bf16(static_cast<float>(x)));
    case DType::i8: return put(static_cast<std::int8_t>(whole()));
    case DType::i16: return put(static_cast<std::int16_t>(whole()));
    case DType::i32: return put(static_cast<std::int32_t>(whole()));
    case DType::i64: return put(whole());
    case DType::u8: return put(static_cast<std::uint8_t>(whole()));
    case DType::u16: return put(static_cast<std::uint16_t>(whole()));
    case DType::u32: return put(static_cast<std::uint32_t>(whole()));
    case DType::u64: return put(static_cast<std::uint64_t>(whole()));
    case DType::boolean: return put(x != 0);
    case DType::f8e4m3: return put(f8e4m3(static_cast<float>(x)));
    case DType::f8e5m2: return put(f8e5m2(static_cast<float>(x)));
    case DType::c64: return put(std::complex<float>(as_complex(x)));
    case DType::c128: return put(as_complex(x));
  }
  std::abort();
}

inline double load(const std::byte* data, DType dtype, std::int64_t i) {
  const std::byte* const at = data + i * size_bytes(dtype);
  const auto get = [&]<class T>(T x) {
    std::memcpy(static_cast<void*>(&x), at, sizeof x);
    return x;
  };
  switch (dtype) {
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
    case DType::boolean:
      return get(std::uint8_t{});  // unchanged: a byte that is neither 0 nor 1 must not pass
    case DType::f8e4m3: return static_cast<float>(get(f8e4m3{}));
    case DType::f8e5m2: return static_cast<float>(get(f8e5m2{}));
    case DType::c64: return from_complex(get(std::complex<float>{}));
    case DType::c128: return from_complex(get(std::complex<double>{}));
  }
  std::abort();
}
// Reads a Tensor without its view, because making the view for every element would be slow.
inline void store(const Tensor& t, std::int64_t i, double x) { store(t.data(), t.dtype(), i, x); }
inline void store(const TensorView& v, std::int64_t i, double x) { store(v.data, v.dtype, i, x); }
inline double load(const Tensor& t, std::int64_t i) { return load(t.data(), t.dtype(), i); }
inline double load(const ConstTensorView& v, std::int64_t i) { return load(v.data, v.dtype, i); }

/// The value of `load` after x was stored: x as the dtype can represent it.
inline double stored(DType dtype, double x) {
  alignas(16) std::byte room[16];
  store(room, dtype, 0, x);
  return load(room, dtype, 0);
}

/// The lowest rank's element that is not zero: an operation that is associative, not commutative, and defined
/// for every dtype.
inline const UserReduction& first_not_zero() {
  static const UserReduction reduction{
      "first_not_zero", [](const void* left, const void* right, void* out, std::int64_t count, DType dtype) {
        const int size = size_bytes(dtype);
        static constexpr std::byte zero[16] = {};
        for (std::int64_t i = 0; i < count * size; i += size) {
          const auto* const l = static_cast<const std::byte*>(left) + i;
          const auto* const r = static_cast<const std::byte*>(right) + i;
          std::memmove(static_cast<std::byte*>(out) + i, std::memcmp(l, zero, size) == 0 ? r : l, size);
        }
      }};
  return reduction;
}

/// One reduction of each kind: premul_sum by 3; the user's reduction is first_not_zero.
inline ReduceOp reduction(ReduceOp::Kind kind) {
  if (kind == ReduceOp::Kind::premul_sum) return ReduceOp::premul_sum(3);
  if (kind == ReduceOp::Kind::user) return ReduceOp::of(first_not_zero());
  return ReduceOp{kind};
}

/// The input of a rank to a call that reduces by `op`: value(rank, index), or numbers whose products, bits
/// and truth values stay distinct.
inline double input(ReduceOp op, DType dtype, int rank, std::int64_t index) {
  using Kind = ReduceOp::Kind;
  std::uint32_t x =
      static_cast<std::uint32_t>(rank + 1) * 0x9e3779b9u + static_cast<std::uint32_t>(index) * 0x85ebca6bu;
  x = (x ^ (x >> 15)) * 0x2c1b3c6du;
  x ^= x >> 12;
  double y = value(rank, index);
  switch (op.kind) {
    case Kind::sum:
    case Kind::avg:
    case Kind::min:
    case Kind::max:
    case Kind::premul_sum: break;
    case Kind::prod: y = y < 1 ? 3 : y < 3 ? 2 : 1; break;  // the product over 7 consecutive ranks is 12
    case Kind::bit_and: y = (x | x >> 8) & 0x7fu; break;
    case Kind::bit_or: y = x & x >> 8 & 0x7fu; break;
    case Kind::bit_xor: y = x & 0x7fu; break;
    case Kind::logical_and: y = x % 8 ? x % 5 + 1 : 0; break;
    case Kind::logical_or: y = x % 8 ? 0 : x % 5 + 1; break;
    case Kind::logical_xor: y = x % 2 ? x % 5 + 1 : 0; break;
    case Kind::user: y = x % 3 ? 0 : value(rank, index); break;
  }
  // The bits of a bool are one of these.
  const bool bits = op.kind == Kind::bit_and || op.kind == Kind::bit_or || op.kind == Kind::bit_xor;
  if (dtype == DType::boolean) y = bits ? static_cast<int>(y) & 1 : y != 0;
  return y;
}

/// The result of rank 0 of an exscan, as `load` returns it; nothing if the output stays unchanged.
inline std::optional<double> identity_of(ReduceOp op, DType dtype) {
  using Kind = ReduceOp::Kind;
  const int bits = 8 * size_bytes(dtype);
  const bool is_unsigned =
      dtype == DType::u8 || dtype == DType::u16 || dtype == DType::u32 || dtype == DType::u64;
  const double infinity = std::numeric_limits<double>::infinity();
  switch (op.kind) {
    case Kind::sum:
    case Kind::premul_sum:
    case Kind::bit_or:
    case Kind::bit_xor:
    case Kind::logical_or:
    case Kind::logical_xor: return 0;
    case Kind::logical_and: return 1;
    case Kind::prod: return dtype == DType::c64 || dtype == DType::c128 ? from_complex(1) : 1;
    case Kind::min:
      if (dtype == DType::boolean) return 1;
      return is_floating(dtype) ? infinity : std::ldexp(1, is_unsigned ? bits : bits - 1) - 1;
    case Kind::max:
      return is_floating(dtype)                       ? -infinity
             : is_unsigned || dtype == DType::boolean ? 0
                                                      : -std::ldexp(1, bits - 1);
    case Kind::bit_and: return dtype == DType::boolean ? 1 : is_unsigned ? std::ldexp(1, bits) - 1 : -1;
    case Kind::avg:
    case Kind::user: break;
  }
  return std::nullopt;
}

/// The combination of input(op, dtype, r, index) over n ranks, as `load` returns it.
inline double combined(ReduceOp op, DType dtype, int n, std::int64_t index) {
  using Kind = ReduceOp::Kind;
  std::vector<double> in;
  for (int r = 0; r < n; ++r) in.push_back(input(op, dtype, r, index));
  const auto fold = [&](auto f) {
    double y = in[0];
    for (int r = 1; r < n; ++r) y = static_cast<double>(f(y, in[r]));
    return y;
  };
  const auto bits = [&](auto f) {
    return fold([&](double a, double b) { return f(static_cast<int>(a), static_cast<int>(b)); });
  };
  const auto truths = [&](auto f) {
    for (double& x : in) x = x != 0;
    return fold([&](double a, double b) { return f(a != 0, b != 0); });
  };
  switch (op.kind) {
    case Kind::sum: return stored(dtype, fold(std::plus<>{}));
    case Kind::min: return fold([](double a, double b) { return std::min(a, b); });
    case Kind::max: return fold([](double a, double b) { return std::max(a, b); });
    case Kind::premul_sum: return stored(dtype, op.scale * fold(std::plus<>{}));
    case Kind::prod: {
      if (dtype != DType::c64 && dtype != DType::c128) return stored(dtype, fold(std::multiplies<>{}));
      std::complex<double> z = 1;
      for (const double x : in) z *= as_complex(x);
      return from_complex(z);
    }
    case Kind::bit_and: return bits(std::bit_and<>{});
    case Kind::bit_or: return bits(std::bit_or<>{});
    case Kind::bit_xor: return bits(std::bit_xor<>{});
    case Kind::logical_and: return truths(std::logical_and<>{});
    case Kind::logical_or: return truths(std::logical_or<>{});
    case Kind::logical_xor: return truths(std::not_equal_to<>{});
    case Kind::user: {
      alignas(16) std::byte room[2][16];
      const TensorView total{room[0], dtype, Device{}, {1}}, next{room[1], dtype, Device{}, {1}};
      store(total, 0, in[0]);
      for (int r = 1; r < n; ++r) {
        store(next, 0, in[r]);
        op.user->combine(room[0], room[1], room[0], 1, dtype);
      }
      return load(total, 0);
    }
    case Kind::avg: break;
  }
  // The division happens in the accumulator, which is f32 for all shorter dtypes. Then the result is rounded
  // once.
  const double sum = fold(std::plus<>{});
  if (dtype == DType::f64 || dtype == DType::c128) return sum / n;
  if (is_floating(dtype) || dtype == DType::c64)
    return stored(dtype, static_cast<float>(sum) / static_cast<float>(n));
  return std::trunc(sum / n);
}

}  // namespace weft::test
