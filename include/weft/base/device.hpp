// Devices of memory, and the streams that order the work on them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "weft/base/cxx20.hpp"

namespace weft {

enum class DeviceKind : std::uint8_t { cpu, cuda };

struct Device {
  DeviceKind kind = DeviceKind::cpu;
  std::int16_t index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

/// "cpu" or "cuda:1".
std::string to_string(Device device);
/// "is on cpu; expected cuda:0": this text follows a name in the text of an error.
std::string is_on(Device device, Device expected);
/// The reverse of to_string(); "cuda" is "cuda:0". Throws bad_argument:
/// `device "gpu"; expected cpu, cuda or cuda:<0 to 32767>`.
Device parse_device(std::string_view text);

/// A queue of work on a device, in order. `handle` is the driver's handle (a cudaStream_t). Null means the
/// device's default stream. The CPU has one stream, which performs all work at once. In calls on another
/// device, Stream{} means the default stream of that device.
struct Stream {
  Device device{};
  void* handle = nullptr;

  constexpr Stream() noexcept = default;
  constexpr Stream(Device of, void* native = nullptr) noexcept : device(of), handle(native) {}
  friend bool operator==(const Stream&, const Stream&) = default;
};

}  // namespace weft
