#include "weft/base/random.hpp"

#include <cmath>
#include <numbers>

#include "base/hash.hpp"

namespace weft {

std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> c, std::array<std::uint32_t, 2> k) noexcept {
  // Multipliers and key increments from the paper (the increments: golden ratio and sqrt(3) − 1).
  constexpr std::uint64_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  constexpr std::uint32_t kIncrement0 = 0x9E3779B9, kIncrement1 = 0xBB67AE85;
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = kMultiplier0 * c[0], p1 = kMultiplier1 * c[2];
    c = {static_cast<std::uint32_t>(p1 >> 32) ^ c[1] ^ k[0], static_cast<std::uint32_t>(p1),
         static_cast<std::uint32_t>(p0 >> 32) ^ c[3] ^ k[1], static_cast<std::uint32_t>(p0)};
    k[0] += kIncrement0;
    k[1] += kIncrement1;
  }
  return c;
}

RandomStream::RandomStream(std::uint64_t seed, std::string_view path) noexcept
    : key_{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)} {
  const std::uint64_t hash = hash_of(path);
  path_hash_ = {static_cast<std::uint32_t>(hash), static_cast<std::uint32_t>(hash >> 32)};
}

std::array<std::uint32_t, 4> RandomStream::block(std::uint64_t index) const noexcept {
  return philox({static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32), path_hash_[0],
                 path_hash_[1]},
                key_);
}

namespace {

// Element i of a stream is number i % 4 of block i / 4. Calls `numbers(block)` for each block that [first,
// first + count) touches, and copies the numbers that lie inside the range.
template <class Numbers>
void fill_from_blocks(std::uint64_t first, std::int64_t count, float* out, Numbers numbers) {
  std::int64_t done = 0;
  while (done < count) {
    const std::uint64_t i = first + static_cast<std::uint64_t>(done);
    const std::array<float, 4> four = numbers(i / 4);
    for (std::uint64_t lane = i % 4; lane < 4 && done < count; ++lane) out[done++] = four[lane];
  }
}

}  // namespace

void RandomStream::normal(std::uint64_t first, std::int64_t count, float* out) const noexcept {
  fill_from_blocks(first, count, out, [&](std::uint64_t index) {
    const auto u = block(index);
    std::array<float, 4> z;
    for (std::size_t pair = 0; pair < 4; pair += 2) {
      // the logarithm is that of a number in (0, 1]
      const double radius = std::sqrt(-2.0 * std::log((u[pair] + 1.0) * 0x1p-32));
      const double angle = 2.0 * std::numbers::pi * (u[pair + 1] * 0x1p-32);
      z[pair] = static_cast<float>(radius * std::cos(angle));
      z[pair + 1] = static_cast<float>(radius * std::sin(angle));
    }
    return z;
  });
}

void RandomStream::uniform(std::uint64_t first, std::int64_t count, float* out) const noexcept {
  fill_from_blocks(first, count, out, [&](std::uint64_t index) {
    const auto u = block(index);
    std::array<float, 4> x;
    for (std::size_t lane = 0; lane < 4; ++lane) x[lane] = static_cast<float>(u[lane] >> 8) * 0x1p-24f;
    return x;
  });
}

}  // namespace weft
