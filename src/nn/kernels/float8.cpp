// weft/nn/float8.hpp on the CPU: scales, and what its casts (float8/casts.hpp) do for threads and for rows
// and columns.
#include "weft/nn/float8.hpp"

#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <vector>

#include "base/cpu/isa.hpp"
#include "host/clones.hpp"
#include "nn/kernels/cpu_context.hpp"
#include "nn/kernels/float8/casts.hpp"
#include "weft/base/error.hpp"

namespace weft::float8 {
namespace {

using kernels::KernelContext;
using kernels::cpu::parallel_for;

// The fastest table that cpu_isa() allows.
const Casts& casts() {
  static const Casts& best = [&]() -> const Casts& {
    const CpuIsa isa = cpu_isa();
    if (isa >= CpuIsa::avx512 && avx512_casts() != nullptr) return *avx512_casts();
    if (isa >= CpuIsa::avx2 && avx2_casts() != nullptr) return *avx2_casts();
    return neon_casts() != nullptr ? *neon_casts() : plain_casts();
  }();
  return best;
}

// Magnitudes rise with their bits, and those of NaNs are above all others: one maximum of integers, in any
// order, finds the largest magnitude or a NaN. The integers are as wide as T.
WEFT_INLINE inline std::int32_t magnitude_bits(float x) { return bits_of(x) & kMagnitude; }
WEFT_INLINE inline std::int16_t magnitude_bits(bf16 x) { return static_cast<std::int16_t>(x.bits & 0x7fff); }
template <class T>
using MagnitudeBits = decltype(magnitude_bits(T()));
template <class T>
constexpr int kBitsBelow = 32 - 8 * static_cast<int>(sizeof(T));  // the bits of f32 that T lacks

template <class T>
WEFT_INLINE inline std::int32_t largest_magnitude(const T* x, std::int64_t n) {
  // As the casts do, asks for memory two pages ahead.
  constexpr std::int64_t kBlock = 256, kLine = 64 / sizeof(T), kAhead = 8192 / sizeof(T);
  const auto largest = [&](std::int64_t begin, std::int64_t end) WEFT_INLINE {
    MagnitudeBits<T> found = 0;  // no block waits for the one before
    for (std::int64_t i = begin; i < end; ++i) found = std::max(found, magnitude_bits(x[i]));
    return found;
  };
  MagnitudeBits<T> most = 0;
  std::int64_t begin = 0;
  for (; begin + kBlock <= n; begin += kBlock) {
    for (std::int64_t at = 0; at < kBlock; at += kLine) __builtin_prefetch(x + begin + at + kAhead);
    most = std::max(most, largest(begin, begin + kBlock));
  }
  most = std::max(most, largest(begin, n));
  return std::int32_t{most} << kBitsBelow<T>;
}
// Several rows of n elements at once: fewer loads and stores of `most` than row by row. Near the end of its
// rows it asks for the beginning of the rows that come next.
constexpr std::int64_t kRowsAtOnce = 8;
template <std::int64_t kRows, class T>
WEFT_INLINE inline void raise_magnitudes(const T* x, std::int32_t* most, std::int64_t n) {
  constexpr std::int64_t kBlock = 64, kLine = 64 / sizeof(T), kAhead = 2048 / sizeof(T);
  const auto raise = [&](std::int64_t begin, std::int64_t end) WEFT_INLINE {
#pragma GCC ivdep
    for (std::int64_t i = begin; i < end; ++i) {
      MagnitudeBits<T> found = magnitude_bits(x[i]);
      for (std::int64_t row = 1; row < kRows; ++row) {
        const MagnitudeBits<T> m = magnitude_bits(x[row * n + i]);
        found = m > found ? m : found;
      }
      most[i] = std::max(most[i], std::int32_t{found} << kBitsBelow<T>);
    }
  };
  std::int64_t begin = 0;
  for (; begin + kBlock <= n; begin += kBlock) {
    const std::int64_t ahead = begin + kAhead, next = ahead < n ? ahead : ahead + (kRows - 1) * n;
    for (std::int64_t row = 0; row < kRows; ++row)
      for (std::int64_t at = 0; at < kBlock; at += kLine) __builtin_prefetch(x + row * n + next + at);
    raise(begin, begin + kBlock);
  }
  raise(begin, n);
}
#define WEFT_FLOAT8_AMAX(T)                                                                            \
  WEFT_CPU_CLONES(std::int32_t, amax_of_range, (const T* x, std::int64_t n), (x, n)) {                 \
    return largest_magnitude(x, n);                                                                    \
  }                                                                                                    \
  WEFT_CPU_CLONES(void, raise_range, (const T* x, std::int32_t* most, std::int64_t n), (x, most, n)) { \
    raise_magnitudes<1>(x, most, n);                                                                   \
  }                                                                                                    \
  WEFT_CPU_CLONES(void, raise_rows, (const T* x, std::int32_t* most, std::int64_t n), (x, most, n)) {  \
    raise_magnitudes<kRowsAtOnce>(x, most, n);                                                         \
  }
WEFT_FLOAT8_AMAX(float)
WEFT_FLOAT8_AMAX(bf16)
#undef WEFT_FLOAT8_AMAX

WEFT_CPU_CLONES(void, rescale_row,
                (const float* product, float row, const float* columns, float column, const float* bias,
                 float* out, bool add, std::int64_t n),
                (product, row, columns, column, bias, out, add, n)) {
  const auto each = [&](auto term) WEFT_INLINE {
    if (add) {
#pragma GCC ivdep
      for (std::int64_t i = 0; i < n; ++i) out[i] = out[i] + term(i);
    } else {
#pragma GCC ivdep
      for (std::int64_t i = 0; i < n; ++i) out[i] = term(i);
    }
  };
  if (columns != nullptr && bias != nullptr)
    each([&](std::int64_t i) WEFT_INLINE { return product[i] * row * columns[i] + bias[i]; });
  else if (columns != nullptr)
    each([&](std::int64_t i) WEFT_INLINE { return product[i] * row * columns[i]; });
  else if (bias != nullptr)
    each([&](std::int64_t i) WEFT_INLINE { return product[i] * row * column + bias[i]; });
  else
    each([&](std::int64_t i) WEFT_INLINE { return product[i] * row * column; });
}

constexpr std::int64_t kFlatBlock = std::int64_t{1} << 14;  // elements that one task takes

[[noreturn]] void refuse_float8(const std::string& text) {
  throw Error(ErrorCode::bad_argument, "float8: " + text);
}

const Float8Format& format_of(DType format) {
  if (format == DType::f8e4m3) return kE4m3;
  if (format == DType::f8e5m2) return kE5m2;
  refuse_float8(fmt::format("the format is {}; expected f8e4m3 or f8e5m2", name(format)));
}

void expect_on_cpu(const KernelContext& ctx) {
  if (ctx.stream().device != Device{})
    throw Error(ErrorCode::unsupported, fmt::format("float8: {} has no kernels for it; expected the CPU",
                                                    to_string(ctx.stream().device)));
}

void expect_matrix(const KernelContext& ctx, const char* what, const ConstTensorView& t) {
  expect_on_cpu(ctx);
  if (t.count() > 0 && !t.contiguous()) refuse_float8(fmt::format("{} is not contiguous", what));
}
void expect_operand(const KernelContext& ctx, const ConstTensorView& x) {
  expect_matrix(ctx, "x", x);
  if (x.dtype != DType::f32 && x.dtype != DType::bf16)
    refuse_float8(fmt::format("x is {}; expected f32 or bf16", name(x.dtype)));
}
void expect_shape(const char* what, const ConstTensorView& t, const Shape& shape) {
  if (!(t.shape == shape))
    refuse_float8(fmt::format("{} is {}; expected {}", what, to_string(t.shape), to_string(shape)));
}

// Calls body(first row, end) for ranges of rows that take about one flat block each.
template <class Body>
void by_rows(KernelContext& ctx, MatrixSize size, Body&& body) {
  const std::int64_t rows = std::max<std::int64_t>(1, kFlatBlock / std::max<std::int64_t>(1, size.columns));
  kernels::cpu::parallel_blocks(ctx.state(), size.rows, rows, body);
}

template <class T>
void amax_of(KernelContext& ctx, const T* x, MatrixSize size, Granularity granularity, std::int32_t* most) {
  if (granularity == Granularity::rowwise) {
    by_rows(ctx, size, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r) most[r] = amax_of_range(x + r * size.columns, size.columns);
    });
    return;
  }
  // A maximum for each thread's part, then the maximum of these.
  const bool flat = granularity == Granularity::tensorwise;
  const std::int64_t count = flat ? 1 : size.columns, whole = flat ? size.rows * size.columns : size.rows;
  const std::int64_t least = flat ? kFlatBlock : 16,
                     parts = std::clamp<std::int64_t>(whole / least, 1, ctx.threads());
  std::vector<std::int32_t> found(static_cast<std::size_t>(parts * count), 0);
  parallel_for(ctx.state(), parts, [&](std::int64_t part, int) {
    std::int32_t* const mine = found.data() + part * count;
    const std::int64_t begin = whole * part / parts, end = whole * (part + 1) / parts;
    if (flat) {
      *mine = amax_of_range(x + begin, end - begin);
      return;
    }
    std::int64_t r = begin;
    for (; r + kRowsAtOnce <= end; r += kRowsAtOnce) raise_rows(x + r * size.columns, mine, size.columns);
    for (; r < end; ++r) raise_range(x + r * size.columns, mine, size.columns);
  });
  std::fill(most, most + count, 0);
  for (std::int64_t part = 0; part < parts; ++part)
    for (std::int64_t i = 0; i < count; ++i) most[i] = std::max(most[i], found[part * count + i]);
}

template <class In, class Out>
void cast_matrix(KernelContext& ctx, Casts::Cast<In, Out> cast, const ConstTensorView& of,
                 Granularity granularity, const float* scales, const Float8Format& format, Out* out) {
  const auto* const x = reinterpret_cast<const In*>(of.data);
  const MatrixSize size = matrix_size(of.shape);
  if (granularity == Granularity::tensorwise) {
    kernels::cpu::parallel_blocks(ctx.state(), size.rows * size.columns, kFlatBlock,
                                  [&](std::int64_t begin, std::int64_t end) {
                                    cast(x + begin, {scales, false}, format, out + begin, 1, end - begin);
                                  });
    return;
  }
  if (granularity == Granularity::rowwise) {
    by_rows(ctx, size, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r)
        cast(x + r * size.columns, {scales + r, false}, format, out + r * size.columns, 1, size.columns);
    });
    return;
  }
  // Many rows in one task: a cast may first compute something for each column.
  const std::int64_t flat = kFlatBlock / std::max<std::int64_t>(1, size.columns);
  kernels::cpu::parallel_blocks(ctx.state(), size.rows, std::max<std::int64_t>(32, flat),
                                [&](std::int64_t begin, std::int64_t end) {
                                  const std::int64_t at = begin * size.columns;
                                  cast(x + at, {scales, true}, format, out + at, end - begin, size.columns);
                                });
}

}  // namespace

MatrixSize matrix_size(const Shape& shape) noexcept {
  if (shape.rank() == 0) return {1, 1};
  const std::int64_t columns = shape.back();
  std::int64_t rows = 1;
  for (int d = 0; d + 1 < shape.rank(); ++d) rows *= shape[d];
  return {rows, columns};
}

std::int64_t scale_count(const Shape& shape, Granularity granularity) noexcept {
  switch (granularity) {
    case Granularity::tensorwise: return 1;
    case Granularity::rowwise: return matrix_size(shape).rows;
    case Granularity::columnwise: return matrix_size(shape).columns;
  }
  return 0;
}

double largest_of(DType format) {
  return static_cast<double>(std::bit_cast<float>(format_of(format).largest));
}

float scale_of(float amax, DType format, bool power_of_two) {
  constexpr double kLeast = 1e-12;
  const double wide = amax;
  const auto scale = static_cast<float>(largest_of(format) / (wide < kLeast ? kLeast : wide));
  if (!power_of_two || !(scale > 0)) return scale;
  // The logarithm is rounded to f32, as torchao's is: a scale just below a power of two becomes that power.
  const auto log = static_cast<float>(std::log2(static_cast<double>(scale)));
  return std::ldexp(1.0F, static_cast<int>(std::floor(log)));
}

void amax(KernelContext& ctx, const ConstTensorView& x, Granularity granularity, float* amax) {
  expect_operand(ctx, x);
  const MatrixSize size = matrix_size(x.shape);
  std::vector<std::int32_t> most(static_cast<std::size_t>(scale_count(x.shape, granularity)));
  if (x.dtype == DType::bf16)
    amax_of(ctx, reinterpret_cast<const bf16*>(x.data), size, granularity, most.data());
  else
    amax_of(ctx, reinterpret_cast<const float*>(x.data), size, granularity, most.data());
  for (std::size_t i = 0; i < most.size(); ++i) amax[i] = std::bit_cast<float>(most[i]);
}

void quantise(KernelContext& ctx, const ConstTensorView& x, Granularity granularity, const float* scales,
              const TensorView& codes) {
  expect_operand(ctx, x);
  expect_matrix(ctx, "codes", codes);
  expect_shape("codes", codes, x.shape);
  const Float8Format& format = format_of(codes.dtype);
  auto* const out = reinterpret_cast<std::uint8_t*>(codes.data);
  if (x.dtype == DType::bf16)
    cast_matrix(ctx, casts().bf16_to_codes, x, granularity, scales, format, out);
  else
    cast_matrix(ctx, casts().f32_to_codes, x, granularity, scales, format, out);
}

void quantise_to_bf16(KernelContext& ctx, const ConstTensorView& x, Granularity granularity,
                      const float* scales, DType format, const TensorView& values) {
  expect_operand(ctx, x);
  expect_matrix(ctx, "values", values);
  expect_shape("values", values, x.shape);
  if (values.dtype != DType::bf16)
    refuse_float8(fmt::format("values are {}; expected bf16", name(values.dtype)));
  auto* const out = reinterpret_cast<bf16*>(values.data);
  if (x.dtype == DType::bf16)
    cast_matrix(ctx, casts().bf16_to_values, x, granularity, scales, format_of(format), out);
  else
    cast_matrix(ctx, casts().f32_to_values, x, granularity, scales, format_of(format), out);
}

void widen(KernelContext& ctx, const ConstTensorView& codes, const TensorView& values) {
  expect_matrix(ctx, "codes", codes);
  expect_matrix(ctx, "values", values);
  expect_shape("values", values, codes.shape);
  const Float8Format& format = format_of(codes.dtype);
  if (values.dtype != DType::bf16 && values.dtype != DType::f32)
    refuse_float8(fmt::format("values are {}; expected bf16 or f32", name(values.dtype)));
  const auto* const from = reinterpret_cast<const std::uint8_t*>(codes.data);
  kernels::cpu::parallel_blocks(
      ctx.state(), codes.count(), kFlatBlock, [&](std::int64_t begin, std::int64_t end) {
        if (values.dtype == DType::bf16)
          casts().codes_to_bf16(from + begin, format, reinterpret_cast<bf16*>(values.data) + begin,
                                end - begin);
        else
          casts().codes_to_f32(from + begin, format, reinterpret_cast<float*>(values.data) + begin,
                               end - begin);
      });
}

void rescale(KernelContext& ctx, const float* product, MatrixSize size, ScaleList rows, ScaleList columns,
             const float* bias, float* out, bool add) {
  expect_on_cpu(ctx);
  std::vector<float> of_columns(columns.each ? static_cast<std::size_t>(size.columns) : 0);
  for (std::size_t i = 0; i < of_columns.size(); ++i) of_columns[i] = 1.0F / columns.scales[i];
  const float column = columns.each ? 0.0F : 1.0F / *columns.scales;
  by_rows(ctx, size, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const float row = 1.0F / rows.scales[rows.each ? r : 0];
      const std::int64_t at = r * size.columns;
      rescale_row(product + at, row, columns.each ? of_columns.data() : nullptr, column, bias, out + at, add,
                  size.columns);
    }
  });
}

}  // namespace weft::float8
