// Copies many short runs of bytes at equal distances, like the rows of a face of a field. There is one loop
// for each length, so that no copy calls memcpy for a few bytes. The functions have no state; any thread may
// call them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace weft {

/// Copies `count` runs of `run` bytes. Run i is at in + i * in_step and goes to out + i * out_step. Steps may
/// be negative, or 0. The memory that is read and the memory that is written must not overlap.
using CopyRuns = void (*)(const std::byte* in, std::byte* out, std::int64_t count, std::int64_t in_step,
                          std::int64_t out_step, std::int64_t run);

/// Returns the fastest function for runs of `run` bytes; `run` is 1 or more.
CopyRuns copy_runs_of(std::int64_t run) noexcept;

/// Calls see(move, number of bytes) for each move. `bytes`: the number of bytes of all moves if it is the
/// same, otherwise 0. If it is a usual number, it is passed as a constant that the compiler knows.
template <class Moves, class See>
inline void each_move(const Moves& moves, std::uint32_t bytes, const See& see) {
  const auto all = [&](auto known) {
    for (const auto& m : moves) see(m, known);
  };
  switch (bytes) {
    case 4: return all(std::integral_constant<std::size_t, 4>{});
    case 8: return all(std::integral_constant<std::size_t, 8>{});
    case 16: return all(std::integral_constant<std::size_t, 16>{});
    case 32: return all(std::integral_constant<std::size_t, 32>{});
    default:
      for (const auto& m : moves) see(m, std::size_t{m.bytes});
  }
}

/// Copies one run, usually of a few bytes.
inline void copy_run(std::byte* out, const std::byte* in, std::size_t bytes) noexcept {
  switch (bytes) {
    case 4: std::memcpy(out, in, 4); return;
    case 8: std::memcpy(out, in, 8); return;
    case 16: std::memcpy(out, in, 16); return;
    case 32: std::memcpy(out, in, 32); return;
    case 64: std::memcpy(out, in, 64); return;
    default: std::memcpy(out, in, bytes);
  }
}

}  // namespace weft
