// Where memory lives.
#pragma once

#include <cstdint>
#include <string>

namespace weft {

enum class DeviceKind : std::uint8_t { cpu, cuda };

struct Device {
  DeviceKind kind = DeviceKind::cpu;
  std::int16_t index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

/// "cpu" or "cuda:1".
std::string to_string(Device device);

}  // namespace weft
