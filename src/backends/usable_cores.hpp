// How many cores this process may run on: with more ranks than that, nobody spins.
#pragma once

#include <sched.h>

namespace weft {

inline int usable_cores() noexcept {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

}  // namespace weft
