// Counter-based random numbers: each number is a pure function of a key and a counter. So any rank can
// compute any element without the other ranks. Thread-safe, no state.
//
// Philox-4x32 with ten rounds: J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel Random Numbers: As Easy as
// 1, 2, 3", SC 2011. Normal numbers by Box and Muller, "A Note on the Generation of Random Normal Deviates",
// 1958.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "weft/base/cxx20.hpp"

namespace weft {

/// Four independent, uniformly distributed 32-bit numbers.
std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter,
                                    std::array<std::uint32_t, 2> key) noexcept;

/// One stream of numbers for each (seed, path). Element i of it is a function of (seed, path, i).
class RandomStream {
 public:
  RandomStream(std::uint64_t seed, std::string_view path) noexcept;

  /// out[j] = standard normal number first + j of the stream, for j < count.
  void normal(std::uint64_t first, std::int64_t count, float* out) const noexcept;
  /// out[j] = number first + j of the stream, uniform on [0, 1).
  void uniform(std::uint64_t first, std::int64_t count, float* out) const noexcept;

 private:
  std::array<std::uint32_t, 4> block(std::uint64_t index) const noexcept;
  std::array<std::uint32_t, 2> key_;
  std::array<std::uint32_t, 2> path_hash_;
};

}  // namespace weft
