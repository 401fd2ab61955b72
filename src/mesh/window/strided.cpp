#include "mesh/window/strided.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

namespace weft::windows {
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

// To f32 such that rounding once more, to a dtype with fewer bits, gives what rounding `value` at once would ("round to odd": S. Boldo,
// G. Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
float to_odd(double value) {
  float f = static_cast<float>(value);
  if (static_cast<double>(f) == value || !std::isfinite(f)) return f;
  if (std::fabs(static_cast<double>(f)) > std::fabs(value)) f = std::nextafter(f, 0.0F);
  std::uint32_t bits = 0;
  std::memcpy(&bits, &f, sizeof(f));
  bits |= 1U;
  std::memcpy(&f, &bits, sizeof(f));
  return std::signbit(value) ? -std::fabs(f) : f;
}

// Calls see(T{}) for the type of an element that can be added.
template <class See>
void with_type(DType dtype, const See& see) {
  switch (dtype) {
    case DType::f64: return see(double{});
    case DType::f32: return see(float{});
    case DType::f16: return see(f16{});
    case DType::bf16: return see(bf16{});
    case DType::i8: return see(std::int8_t{});
    case DType::i16: return see(std::int16_t{});
    case DType::i32: return see(std::int32_t{});
    case DType::i64: return see(std::int64_t{});
    case DType::u8: return see(std::uint8_t{});
    case DType::u16: return see(std::uint16_t{});
    case DType::u32: return see(std::uint32_t{});
    case DType::u64: return see(std::uint64_t{});
    case DType::boolean:
    case DType::f8e4m3:
    case DType::f8e5m2:
    case DType::c64:
    case DType::c128: return;
  }
}

template <class T>
T rounded(double value) {
  if constexpr (std::is_same_v<T, bf16> || std::is_same_v<T, f16>) {
    return T(to_odd(value));
  } else if constexpr (std::is_integral_v<T>) {
    // The nearest that T has.
    if (!(value > static_cast<double>(std::numeric_limits<T>::min()))) return std::numeric_limits<T>::min();
    if (!(value < static_cast<double>(std::numeric_limits<T>::max()))) return std::numeric_limits<T>::max();
    return static_cast<T>(std::nearbyint(value));
  } else {
    return static_cast<T>(value);
  }
}

}  // namespace

void Loops::add(std::int64_t count, std::int64_t in_step, std::int64_t out_step) noexcept {
  if (count <= 0) empty_ = true;
  if (count <= 1) return;
  if (rank_ > 0) {
    Dim& outer = dims_[static_cast<std::size_t>(rank_ - 1)];
    if (outer.in == count * in_step && outer.out == count * out_step) {
      outer = {outer.count * count, in_step, out_step};
      return find_runs();
    }
  }
  dims_[static_cast<std::size_t>(rank_++)] = {count, in_step, out_step};
  find_runs();
}

void Loops::find_runs() noexcept {
  const bool pieces = rank_ > 0 && dim(rank_ - 1).in == element_ && dim(rank_ - 1).out == element_;
  outer_ = pieces ? rank_ - 1 : rank_;
  run_ = pieces ? dim(rank_ - 1).count * element_ : element_;
  copy_runs_ = copy_runs_of(run_);
}

std::int64_t Loops::one_piece() const noexcept {
  if (empty_) return 0;
  if (rank_ == 0) return element_;
  return rank_ == 1 && dims_[0].in == element_ && dims_[0].out == element_ ? dims_[0].count * element_ : 0;
}

bool Loops::same_steps() const noexcept {
  for (int d = 0; d < rank_; ++d)
    if (dims_[static_cast<std::size_t>(d)].in != dims_[static_cast<std::size_t>(d)].out) return false;
  return true;
}

// Calls row(in offset, out offset, innermost dimension) for each index of the others.
template <class Row>
void Loops::each_row(const Row& row) const {
  if (empty_) return;
  const Dim last = rank_ == 0 ? Dim{1, element_, element_} : dim(rank_ - 1);
  each_index(rank_ - 1, [&](std::int64_t in, std::int64_t out) { row(in, out, last); });
}

// Calls see(in offset, out offset, rows): runs of run_ bytes in two dimensions, as a device takes them, where neither side goes backwards or
// repeats one; else one by one.
template <class See>
void Loops::each_rows(const See& see) const {
  if (empty_) return;
  const auto run = static_cast<std::size_t>(run_);
  const bool rows = outer_ > 0 && dim(outer_ - 1).in >= run_ && dim(outer_ - 1).out >= run_;
  if (!rows)
    return each_run([&](std::int64_t in, std::int64_t out, std::int64_t) { see(in, out, Rows{run}); });
  const Dim& last = dim(outer_ - 1);
  const Rows all{run, last.count, static_cast<std::size_t>(last.in), static_cast<std::size_t>(last.out)};
  each_index(outer_ - 1, [&](std::int64_t in, std::int64_t out) { see(in, out, all); });
}

// Dimensions d and those inside it, where dimension d has `count` indices.
void Loops::copy_from_dim(int d, std::int64_t count, const std::byte* in, std::byte* out) const {
  if (d >= outer_) {  // a part of a run
    const std::int64_t bytes = count * element_;
    return (copy_runs_ == stream_runs ? stream_runs : copy_runs_of(bytes))(in, out, 1, 0, 0, bytes);
  }
  const Dim& row = dim(outer_ - 1);
  if (d == outer_ - 1) return copy_runs_(in, out, count, row.in, row.out, run_);
  std::array<std::int64_t, Dims::kMaxDims + 1> index{};
  for (;;) {
    copy_runs_(in, out, row.count, row.in, row.out, run_);
    int e = outer_ - 2;
    for (; e >= d; --e) {
      const std::int64_t all = e == d ? count : dim(e).count;
      std::int64_t& at = index[static_cast<std::size_t>(e)];
      in += dim(e).in, out += dim(e).out;
      if (++at < all) break;
      in -= dim(e).in * all, out -= dim(e).out * all;
      at = 0;
    }
    if (e < d) return;
  }
}

void Loops::copy_runs(const std::byte* in, std::byte* out) const {
  if (!empty_) copy_from_dim(0, dim(0).count, in, out);
}

void Loops::copy(DeviceRuntime& runtime, Stream stream, const std::byte* in, std::byte* out) const {
  if (stream.device == Device{}) return copy(in, out);
  each_rows([&](std::int64_t from, std::int64_t to, const Rows& rows) {
    runtime.copy(in + from, stream.device, out + to, stream.device, rows, stream);
  });
}

// Elements `first` … `first + count` of those that dimension d and those inside it have: the end of one of its indices, whole ones, and the
// beginning of another.
void Loops::copy_part(int d, std::int64_t first, std::int64_t count, const std::byte* in,
                      std::byte* out) const {
  if (d == rank_) return copy_from_dim(d, count, in, out);
  std::int64_t inside = 1;
  for (int e = d + 1; e < rank_; ++e) inside *= dim(e).count;
  const Dim& here = dim(d);
  std::int64_t index = first / inside;
  if (const std::int64_t begin = first % inside; begin > 0) {
    const std::int64_t some = std::min(inside - begin, count);
    copy_part(d + 1, begin, some, in + index * here.in, out + index * here.out);
    count -= some, ++index;
  }
  const std::int64_t whole = count / inside;
  if (whole > 0) copy_from_dim(d, whole, in + index * here.in, out + index * here.out);
  index += whole;
  if (count %= inside; count > 0) copy_part(d + 1, 0, count, in + index * here.in, out + index * here.out);
}

void Loops::copy_some(std::int64_t first, std::int64_t count, const std::byte* in, std::byte* out) const {
  if (!empty_ && count > 0) copy_part(0, first, count, in, out);
}

void Loops::fill(DeviceRuntime& runtime, Stream stream, const std::byte* element, std::byte* out) const {
  const bool host = stream.device == Device{};
  const CopyRuns copy_elements = copy_runs_of(element_);
  const auto size = static_cast<std::size_t>(element_);
  bool zero = true;
  for (std::size_t i = 0; i < size; ++i) zero &= element[i] == std::byte{0};
  if (!host && zero)
    return each_rows(
        [&](std::int64_t, std::int64_t to, const Rows& rows) { runtime.fill(out + to, 0, rows, stream); });
  each_row([&](std::int64_t, std::int64_t to, const Dim& row) {
    if (!host)
      for (std::int64_t i = 0; i < row.count; ++i)
        runtime.copy(element, Device{}, out + to + i * row.out, stream.device, {size}, stream);
    else if (zero && row.out == element_)
      std::memset(out + to, 0, static_cast<std::size_t>(row.count * element_));
    else
      copy_elements(element, out + to, row.count, 0, row.out, element_);
  });
}

void Loops::add_to(DType dtype, const std::byte* in, std::byte* out) const {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    each_row([&](std::int64_t from, std::int64_t to, const Dim& row) {
      add_elements<T>(in + from, out + to, row.count, row.in, row.out);
    });
  });
}

void Loops::round_to(DType dtype, const std::byte* in, std::byte* out) const {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    each_row([&](std::int64_t from, std::int64_t to, const Dim& row) {
      round_elements<T>(in + from, out + to, row.count, row.in, row.out);
    });
  });
}

DType sum_dtype(DType dtype) noexcept {
  return dtype == DType::bf16 || dtype == DType::f16 ? DType::f32 : dtype;
}

bool can_add(DType dtype) noexcept {
  bool can = false;
  with_type(dtype, [&](auto) { can = true; });
  return can;
}

std::array<std::byte, 16> element_of(double value, DType dtype) noexcept {
  std::array<std::byte, 16> bytes{};
  const auto put = [&](const auto& element) { std::memcpy(bytes.data(), &element, sizeof(element)); };
  switch (dtype) {
    case DType::boolean: put(static_cast<std::uint8_t>(value != 0)); break;
    case DType::f8e4m3: put(f8e4m3(to_odd(value))); break;
    case DType::f8e5m2: put(f8e5m2(to_odd(value))); break;
    case DType::c64: put(static_cast<float>(value)); break;
    case DType::c128: put(value); break;
    default: with_type(dtype, [&](auto zero) { put(rounded<decltype(zero)>(value)); });
  }
  return bytes;
}

}  // namespace weft::windows
