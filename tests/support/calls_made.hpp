// How many calls a rank has made on a group.
#pragma once

#include <string>

#include "weft/group/process_group.hpp"

namespace weft::test {

/// Of the last 1024, as the flight recorder has them.
inline std::size_t calls_made(const ProcessGroup& group) {
  const std::string trace = group.trace_json();
  std::size_t n = 0;
  for (std::size_t at = trace.find("\"op\""); at != std::string::npos; at = trace.find("\"op\"", at + 1)) ++n;
  return n;
}

}  // namespace weft::test
