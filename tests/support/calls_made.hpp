// How many calls a rank has made on a group.
#pragma once

#include <string>

#include "weft/group/process_group.hpp"

namespace weft::test {

/// The last 1024 calls, as the flight recorder has them.
inline std::size_t calls_made(const ProcessGroup& group) {
  const std::string trace = group.trace_json();
  std::size_t n = 0;
  for (std::size_t at = trace.find("\"op\""); at != std::string::npos; at = trace.find("\"op\"", at + 1)) ++n;
  return n;
}

/// The count of the last call: of an all-gather the elements that it gives.
inline long long elements_of_last_call(const ProcessGroup& group) {
  const std::string trace = group.trace_json();
  const std::size_t at = trace.rfind("\"count\": ");
  return at == std::string::npos ? -1 : std::stoll(trace.substr(at + 9));
}

}  // namespace weft::test
