// How many cores this process may run on: with more ranks than that, nobody spins. And how many memory nodes
// the machine has.
#pragma once

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>

namespace weft {

inline int usable_cores() noexcept {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

/// The numbers in a list as the kernel writes it, "0-3,8".
inline int count_listed(const std::string& list) {
  int count = 0;
  for (const char* p = list.c_str(); *p >= '0' && *p <= '9';) {
    char* end = nullptr;
    const long first = std::strtol(p, &end, 10), last = *end == '-' ? std::strtol(end + 1, &end, 10) : first;
    count += static_cast<int>(last - first + 1);
    p = *end == ',' ? end + 1 : end;
  }
  return count;
}

/// 1 where the kernel does not tell.
inline int memory_nodes() {
  std::string list;
  std::ifstream("/sys/devices/system/node/online") >> list;
  return std::max(1, count_listed(list));
}

}  // namespace weft
