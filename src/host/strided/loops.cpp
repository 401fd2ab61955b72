#include "host/strided/loops.hpp"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <type_traits>

namespace weft {
namespace {

// Copies runs of a known number of bytes. One side or both sides have a list of indices. A side without a
// list uses index i itself.
template <std::size_t kBytes, bool kIn, bool kOut>
void copy_listed(const std::byte* in, std::byte* out, std::int64_t count, const std::int64_t* in_list,
                 std::int64_t in_step, const std::int64_t* out_list, std::int64_t out_step) {
  for (std::int64_t i = 0; i < count; ++i)
    std::memcpy(out + (kOut ? out_list[i] : i) * out_step, in + (kIn ? in_list[i] : i) * in_step, kBytes);
}

}  // namespace

bool reaches_too_far(const Shape& shape, const Strides& strides, DType dtype) noexcept {
  std::int64_t reach = 0;
  bool beyond = false;
  for (int d = 0; d < shape.rank(); ++d) {
    if (shape[d] == 0) return false;
    std::int64_t step = 0;
    beyond |= __builtin_mul_overflow(strides[d], strides[d] < 0 ? 1 - shape[d] : shape[d] - 1, &step);
    beyond |= __builtin_mul_overflow(step, size_bytes(dtype), &step);
    beyond |= __builtin_add_overflow(reach, step, &reach);
  }
  return beyond;
}

void Loops::add(std::int64_t count, std::int64_t in_step, std::int64_t out_step) noexcept {
  if (count <= 0) empty_ = true;
  if (count <= 1) return;
  if (rank_ > (listed() ? 1 : 0)) {
    Dim& outer = dims_[static_cast<std::size_t>(rank_ - 1)];
    if (outer.in == count * in_step && outer.out == count * out_step) {
      outer = {outer.count * count, in_step, out_step};
      return find_runs();
    }
  }
  dims_[static_cast<std::size_t>(rank_++)] = {count, in_step, out_step};
  find_runs();
}

void Loops::add_list(std::int64_t count, const std::int64_t* in_list, std::int64_t in_step,
                     const std::int64_t* out_list, std::int64_t out_step) noexcept {
  assert(rank_ == 0);
  if (in_list == nullptr && out_list == nullptr) return add(count, in_step, out_step);
  if (count <= 0) empty_ = true;
  if (empty_) return;
  in_list_ = in_list;
  out_list_ = out_list;
  dims_[static_cast<std::size_t>(rank_++)] = {count, in_step, out_step};
  find_runs();
}

void Loops::find_runs() noexcept {
  const bool pieces =
      rank_ > (listed() ? 1 : 0) && dim(rank_ - 1).in == element_ && dim(rank_ - 1).out == element_;
  outer_ = pieces ? rank_ - 1 : rank_;
  run_ = pieces ? dim(rank_ - 1).count * element_ : element_;
  copy_runs_ = copy_runs_of(run_);
}

std::int64_t Loops::one_piece() const noexcept {
  if (empty_) return 0;
  if (rank_ == 0) return element_;
  return rank_ == 1 && !listed() && dims_[0].in == element_ && dims_[0].out == element_
             ? dims_[0].count * element_
             : 0;
}

bool Loops::same_steps() const noexcept {
  for (std::int64_t i = 0; listed() && i < dim(0).count; ++i)
    if (in_of(i) != out_of(i)) return false;
  for (int d = listed() ? 1 : 0; d < rank_; ++d)
    if (dims_[static_cast<std::size_t>(d)].in != dims_[static_cast<std::size_t>(d)].out) return false;
  return true;
}

// Calls see(in offset, out offset, rows) for rows of run_ bytes, in two dimensions, as a device copies them.
// If a side goes backwards or repeats a run, calls it for each run separately.
template <class See>
void Loops::each_rows(const See& see) const {
  if (empty_) return;
  const auto run = static_cast<std::size_t>(run_);
  const bool rows = outer_ > (listed() ? 1 : 0) && dim(outer_ - 1).in >= run_ && dim(outer_ - 1).out >= run_;
  if (!rows)
    return each_run([&](std::int64_t in, std::int64_t out, std::int64_t) { see(in, out, Rows{run}); });
  const Dim& last = dim(outer_ - 1);
  const Rows all{run, last.count, static_cast<std::size_t>(last.in), static_cast<std::size_t>(last.out)};
  each_index(outer_ - 1, [&](std::int64_t in, std::int64_t out) { see(in, out, all); });
}

// Copies dimensions d and those inside it; dimension d has `count` indices.
void Loops::copy_from_dim(int d, std::int64_t count, const std::byte* in, std::byte* out) const {
  if (d >= outer_) {  // a part of a run
    const std::int64_t bytes = count * element_;
    return (any_run_ ? copy_runs_ : copy_runs_of(bytes))(in, out, 1, 0, 0, bytes);
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
  if (empty_) return;
  if (listed()) return copy_list(0, dim(0).count, in, out);
  copy_from_dim(0, dim(0).count, in, out);
}

// Copies indices first … first + count of a listed dimension, with all dimensions inside it.
void Loops::copy_list(std::int64_t first, std::int64_t count, const std::byte* in, std::byte* out) const {
  const auto all = [&](auto bytes) {
    constexpr std::size_t kBytes = decltype(bytes)::value;
    const std::int64_t* const in_list = in_list_ != nullptr ? in_list_ + first : nullptr;
    const std::int64_t* const out_list = out_list_ != nullptr ? out_list_ + first : nullptr;
    const auto [n, in_step, out_step] = dim(0);
    if (out_list == nullptr)
      copy_listed<kBytes, true, false>(in, out + first * out_step, count, in_list, in_step, nullptr,
                                       out_step);
    else if (in_list == nullptr)
      copy_listed<kBytes, false, true>(in + first * in_step, out, count, nullptr, in_step, out_list,
                                       out_step);
    else
      copy_listed<kBytes, true, true>(in, out, count, in_list, in_step, out_list, out_step);
  };
  if (outer_ == 1 && !any_run_) switch (run_) {
      case 1: return all(std::integral_constant<std::size_t, 1>{});
      case 2: return all(std::integral_constant<std::size_t, 2>{});
      case 4: return all(std::integral_constant<std::size_t, 4>{});
      case 8: return all(std::integral_constant<std::size_t, 8>{});
      case 12: return all(std::integral_constant<std::size_t, 12>{});
      case 16: return all(std::integral_constant<std::size_t, 16>{});
      case 24: return all(std::integral_constant<std::size_t, 24>{});
      case 32: return all(std::integral_constant<std::size_t, 32>{});
      case 40: return all(std::integral_constant<std::size_t, 40>{});
      default: break;
    }
  for (std::int64_t i = first; i < first + count; ++i) {
    if (outer_ == 1)
      copy_runs_(in + in_of(i), out + out_of(i), 1, 0, 0, run_);
    else
      copy_from_dim(1, dim(1).count, in + in_of(i), out + out_of(i));
  }
}

void Loops::copy(DeviceRuntime& runtime, Stream stream, const std::byte* in, Device in_device, std::byte* out,
                 Device out_device) const {
  if (stream.device == Device{}) return copy(in, out);
  each_rows([&](std::int64_t from, std::int64_t to, const Rows& rows) {
    runtime.copy(in + from, in_device, out + to, out_device, rows, stream);
  });
}

// Copies elements `first` … `first + count` of dimension d and those inside it: the end of one of its
// indices, complete indices, and the beginning of another.
void Loops::copy_part(int d, std::int64_t first, std::int64_t count, const std::byte* in,
                      std::byte* out) const {
  if (d == rank_) return copy_from_dim(d, count, in, out);
  std::int64_t inside = 1;
  for (int e = d + 1; e < rank_; ++e) inside *= dim(e).count;
  const bool list = d == 0 && listed();
  const auto in_at = [&](std::int64_t i) { return in + (list ? in_of(i) : i * dim(d).in); };
  const auto out_at = [&](std::int64_t i) { return out + (list ? out_of(i) : i * dim(d).out); };
  std::int64_t index = first / inside;
  if (const std::int64_t begin = first % inside; begin > 0) {
    const std::int64_t some = std::min(inside - begin, count);
    copy_part(d + 1, begin, some, in_at(index), out_at(index));
    count -= some, ++index;
  }
  const std::int64_t whole = count / inside;
  if (whole > 0 && list)
    copy_list(index, whole, in, out);
  else if (whole > 0)
    copy_from_dim(d, whole, in_at(index), out_at(index));
  index += whole;
  if (count %= inside; count > 0) copy_part(d + 1, 0, count, in_at(index), out_at(index));
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
  each_row([&](std::int64_t, std::int64_t to, std::int64_t count, std::int64_t, std::int64_t step) {
    if (!host)
      for (std::int64_t i = 0; i < count; ++i)
        runtime.copy(element, Device{}, out + to + i * step, stream.device, {size}, stream);
    else if (zero && step == element_)
      std::memset(out + to, 0, static_cast<std::size_t>(count * element_));
    else
      copy_elements(element, out + to, count, 0, step, element_);
  });
}

}  // namespace weft
