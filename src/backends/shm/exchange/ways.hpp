// The ways by which bytes can go from one rank to another in an exchange, if there are several.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/quickest.hpp"

namespace weft::shm {

enum class Way : std::uint8_t {
  gathered,   ///< packed: short runs are gathered in the first cache, and written to the slot in long pieces
  by_runs,    ///< packed: each run is written to the slot
  by_kernel,  ///< copied once, by the kernel
  in_place    ///< copied once, by the receiver, from memory that it has mapped
};
inline constexpr std::size_t kWays = 4;

/// The choice of a way for the exchanges of one plan with one rank
/// (docs/decisions/2026-11-25-ways-are-measured.md).
using Ways = Quickest<Way, kWays>;

/// How packed bytes are copied to their places.
enum class Unpacking : std::uint8_t { plain, streamed };  ///< streamed: past the caches
using Unpackings = Quickest<Unpacking, 2>;

}  // namespace weft::shm
