#include "reduce/strided_sums.hpp"

#include <cstring>
#include <type_traits>

#include "reduce/reduce.hpp"
#include "reduce/sum_types.hpp"

namespace weft {
namespace {

template <class T>
using SumOf = std::conditional_t<std::is_same_v<T, bf16> || std::is_same_v<T, f16>, float, T>;

template <class T>
void add_elements(const std::byte* in, std::byte* out, std::int64_t count, std::int64_t in_step,
                  std::int64_t out_step) {
  for (std::int64_t i = 0; i < count; ++i) {
    SumOf<T> a;
    T b;
    std::memcpy(&a, out + i * out_step, sizeof(a));
    std::memcpy(&b, in + i * in_step, sizeof(b));
    if constexpr (std::is_integral_v<T>)
      a = static_cast<T>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));  // wraps
    else
      a += static_cast<SumOf<T>>(b);
    std::memcpy(out + i * out_step, &a, sizeof(a));
  }
}

template <class T>
void round_elements(const std::byte* in, std::byte* out, std::int64_t count, std::int64_t in_step,
                    std::int64_t out_step) {
  for (std::int64_t i = 0; i < count; ++i) {
    SumOf<T> sum;
    std::memcpy(&sum, in + i * in_step, sizeof(sum));
    const T rounded(sum);
    std::memcpy(out + i * out_step, &rounded, sizeof(T));
  }
}

template <class T>
void widen_elements(const std::byte* in, std::byte* out, std::int64_t count, std::int64_t in_step,
                    std::int64_t out_step) {
  for (std::int64_t i = 0; i < count; ++i) {
    T narrow;
    std::memcpy(&narrow, in + i * in_step, sizeof(narrow));
    const SumOf<T> wide = static_cast<SumOf<T>>(narrow);
    std::memcpy(out + i * out_step, &wide, sizeof(wide));
  }
}

}  // namespace

void stream_runs(const std::byte* in, std::byte* out, std::int64_t count, std::int64_t in_step,
                 std::int64_t out_step, std::int64_t run) {
  for (std::int64_t i = 0; i < count; ++i, in += in_step, out += out_step) stream_bytes(out, in, run);
}

void add_to(const Loops& loops, DType dtype, const std::byte* in, std::byte* out) {
  with_sum_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    loops.each_row(
        [&](std::int64_t from, std::int64_t to, std::int64_t count, std::int64_t in_step,
            std::int64_t out_step) { add_elements<T>(in + from, out + to, count, in_step, out_step); });
  });
}

void widen_to(const Loops& loops, DType dtype, const std::byte* in, std::byte* out) {
  with_sum_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    loops.each_row(
        [&](std::int64_t from, std::int64_t to, std::int64_t count, std::int64_t in_step,
            std::int64_t out_step) { widen_elements<T>(in + from, out + to, count, in_step, out_step); });
  });
}

void round_to(const Loops& loops, DType dtype, const std::byte* in, std::byte* out) {
  with_sum_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    loops.each_row(
        [&](std::int64_t from, std::int64_t to, std::int64_t count, std::int64_t in_step,
            std::int64_t out_step) { round_elements<T>(in + from, out + to, count, in_step, out_step); });
  });
}

DType sum_dtype(DType dtype) noexcept {
  return dtype == DType::bf16 || dtype == DType::f16 ? DType::f32 : dtype;
}

bool can_add(DType dtype) noexcept {
  bool can = false;
  with_sum_type(dtype, [&](auto) { can = true; });
  return can;
}

}  // namespace weft
