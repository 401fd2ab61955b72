// A sum of squares of floats without any rounding. It is a fixed-point number of some words, so that its bits
// do not depend on the order of the terms, nor on the ranks that hold them (U. Kulisch, "Computer Arithmetic
// and Validity", 2008, calls it a long accumulator). Private to dp.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace weft::dp {

/// A value. One thread at a time uses it. A finite float is m · 2^e with an integer m below 2^24. So its
/// square is m² · 2^2e: at least 2^-298, and below 2^256. 10 words of 64 bits hold the sum of 2^86 squares.
class FixedSum {
 public:
  static constexpr std::size_t kWords = 11;  ///< of words(): ten, and whether all terms were finite

  /// Adds the square of each element.
  void add(std::span<const float> x) noexcept;
  FixedSum& operator+=(const FixedSum& other) noexcept;
  /// For messages, and back.
  std::array<std::uint64_t, kWords> words() const noexcept;
  static FixedSum of(std::span<const std::uint64_t> words) noexcept;

  /// Whether every element was finite.
  bool finite() const noexcept { return finite_; }
  /// The square root of the sum, within two roundings of f64: a function of the sum alone.
  double root() const noexcept;

 private:
  void add_shifted(std::uint64_t value, int bit) noexcept;
  // Digit i counts 2^(32 i - 298). A digit is below 2^32 between calls.
  static constexpr std::size_t kDigits = 20;
  std::array<std::uint64_t, kDigits> digits_{};
  bool finite_ = true;
};

}  // namespace weft::dp
