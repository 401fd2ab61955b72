#include "dp/fixed_sum.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

namespace weft::dp {
namespace {

constexpr int kDigitBits = 32, kLowest = -298;
constexpr std::uint64_t kDigitMask = (std::uint64_t{1} << kDigitBits) - 1;

// Squares of one exponent are added as integers below 2^48, so many at a time.
constexpr std::size_t kAtOnce = std::size_t{1} << 15;
constexpr std::size_t kExponents = 256,
                      kTables = 4;  // tables: so that an addition need not wait for the last

}  // namespace

void FixedSum::add_shifted(std::uint64_t value, int bit) noexcept {
  auto digit = static_cast<std::size_t>(bit / kDigitBits);
  const int shift = bit % kDigitBits;
  // value · 2^shift takes three digits.
  const std::uint64_t low = (value & kDigitMask) << shift, high = (value >> kDigitBits) << shift;
  std::uint64_t carry = 0;
  const std::uint64_t parts[] = {low & kDigitMask, (low >> kDigitBits) + (high & kDigitMask),
                                 high >> kDigitBits};
  for (std::size_t i = 0; digit < kDigits && (i < std::size(parts) || carry != 0); ++i, ++digit) {
    const std::uint64_t sum = digits_[digit] + (i < std::size(parts) ? parts[i] : 0) + carry;
    digits_[digit] = sum & kDigitMask;
    carry = sum >> kDigitBits;
  }
}

void FixedSum::add(std::span<const float> x) noexcept {
  for (std::size_t begin = 0; begin < x.size(); begin += kAtOnce) {
    const std::span<const float> part = x.subspan(begin, std::min(kAtOnce, x.size() - begin));
    std::uint64_t sums[kTables][kExponents] = {};
    for (std::size_t i = 0; i < part.size(); ++i) {
      const auto bits = std::bit_cast<std::uint32_t>(part[i]);
      const std::uint32_t exponent = bits >> 23 & 0xff;
      // Numbers without a leading one have the exponent of the next ones.
      const std::uint64_t m = (bits & 0x7fffffu) | (exponent == 0 ? 0u : 0x800000u);
      sums[i % kTables][exponent] += m * m;
    }
    for (std::size_t exponent = 0; exponent < kExponents; ++exponent) {
      const std::uint64_t sum = sums[0][exponent] + sums[1][exponent] + sums[2][exponent] + sums[3][exponent];
      if (sum == 0) continue;
      if (exponent == kExponents - 1)
        finite_ = false;
      else  // (m 2^(exponent - 150))², counted from 2^kLowest on
        add_shifted(sum, 2 * std::max(static_cast<int>(exponent), 1) - 300 - kLowest);
    }
  }
}

FixedSum& FixedSum::operator+=(const FixedSum& other) noexcept {
  std::uint64_t carry = 0;
  for (std::size_t i = 0; i < kDigits; ++i) {
    const std::uint64_t sum = digits_[i] + other.digits_[i] + carry;
    digits_[i] = sum & kDigitMask;
    carry = sum >> kDigitBits;
  }
  finite_ = finite_ && other.finite_;
  return *this;
}

std::array<std::uint64_t, FixedSum::kWords> FixedSum::words() const noexcept {
  std::array<std::uint64_t, kWords> all{};
  for (std::size_t i = 0; i < kDigits; ++i) all[i / 2] |= digits_[i] << (i % 2 * kDigitBits);
  all.back() = finite_ ? 1 : 0;
  return all;
}

FixedSum FixedSum::of(std::span<const std::uint64_t> words) noexcept {
  FixedSum sum;
  for (std::size_t i = 0; i < kDigits; ++i)
    sum.digits_[i] = words[i / 2] >> (i % 2 * kDigitBits) & kDigitMask;
  sum.finite_ = words[kWords - 1] == 1;
  return sum;
}

double FixedSum::root() const noexcept {
  double sum = 0;  // from the highest digit on: at most three digits count
  for (std::size_t i = kDigits; i-- > 0;)
    sum += std::ldexp(static_cast<double>(digits_[i]), static_cast<int>(i) * kDigitBits + kLowest);
  return std::sqrt(sum);
}

}  // namespace weft::dp
