// Sizes and strides of tensors: a list of 64-bit integers with a fixed capacity, without allocation.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include "weft/base/cxx20.hpp"

namespace weft {

/// Up to kMaxDims numbers. In a Shape the numbers are the elements per dimension, all >= 0. In Strides they
/// count elements, not bytes.
class Dims {
 public:
  static constexpr int kMaxDims = 8;

  constexpr Dims() noexcept {}
  constexpr Dims(const Dims& other) noexcept : rank_(other.rank_) { take(other); }
  constexpr Dims& operator=(const Dims& other) noexcept {
    rank_ = other.rank_;
    take(other);
    return *this;
  }
  /// Throws bad_argument if there are more than kMaxDims values.
  Dims(std::initializer_list<std::int64_t> values) : Dims(std::span(values.begin(), values.size())) {}
  explicit Dims(std::span<const std::int64_t> values);
  /// One dimension, without a check: the common case of a collective's buffer.
  static constexpr Dims line(std::int64_t count) noexcept {
    Dims d;
    d.rank_ = 1;
    d.values_[0] = count;
    return d;
  }

  int rank() const noexcept { return rank_; }
  std::int64_t operator[](int i) const noexcept { return values_[i]; }
  std::int64_t& operator[](int i) noexcept { return values_[i]; }
  std::int64_t back() const noexcept { return values_[rank_ - 1]; }
  const std::int64_t* begin() const noexcept { return values_; }
  const std::int64_t* end() const noexcept { return values_ + rank_; }
  std::span<const std::int64_t> values() const noexcept { return {values_, static_cast<std::size_t>(rank_)}; }
  void push_back(std::int64_t value);

  /// The product of all extents. 1 for no dimensions.
  std::int64_t count() const noexcept {
    std::int64_t n = 1;
    for (int i = 0; i < rank_; ++i) n *= values_[i];
    return n;
  }
  friend bool operator==(const Dims& a, const Dims& b) noexcept {
    if (a.rank_ != b.rank_) return false;
    for (int i = 0; i < a.rank_; ++i)
      if (a.values_[i] != b.values_[i]) return false;
    return true;
  }

 private:
  // Copies only the used dimensions: views are made and copied for every call, and most have one dimension.
  constexpr void take(const Dims& other) noexcept {
    if (rank_ == 1) {
      values_[0] = other.values_[0];
    } else {
      for (int i = 0; i < rank_; ++i) values_[i] = other.values_[i];
    }
  }

  int rank_ = 0;
  std::int64_t values_[kMaxDims];  // the first rank_ values
};

using Shape = Dims;
using Strides = Dims;

/// Row-major strides of a shape.
Strides row_major(const Shape& shape) noexcept;

/// "(2, 3, 4)"
std::string to_string(const Dims& dims);

}  // namespace weft
