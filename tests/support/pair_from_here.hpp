// Where the messages of a rank of shm lie, for tests that look at them or write nonsense there.
#pragma once

#include <cstdint>

#include "backends/shm/control.hpp"
#include "host/arena.hpp"
#include "support/run_ranks.hpp"
#include "support/shared_memory.hpp"

namespace weft::test {

/// The messages from this rank to rank `to`. Null: it has not sent any.
inline shm::Pair* pair_from_here(Rank& r, const shm::Control& control, int to) {
  const std::uint64_t place = control.pair(r.rank, to).load();
  if (place == 0) return nullptr;
  const auto segment = static_cast<std::uint32_t>(place >> 48);
  if (segment == 0) return reinterpret_cast<shm::Pair*>(place);  // ranks are threads
  return reinterpret_cast<shm::Pair*>(arena_of(r.context).segment_base(segment - 1) +
                                      (place & ((std::uint64_t{1} << 48) - 1)));
}

}  // namespace weft::test
