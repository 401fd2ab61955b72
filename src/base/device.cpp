#include "weft/base/device.hpp"

#include <fmt/format.h>

#include <limits>

#include "base/parse_number.hpp"
#include "weft/base/error.hpp"

namespace weft {

std::string to_string(Device device) {
  switch (device.kind) {
    case DeviceKind::cpu: return "cpu";
    case DeviceKind::cuda: return "cuda:" + std::to_string(device.index);
  }
  return "?";
}

std::string is_on(Device device, Device expected) {
  return fmt::format("is on {}; expected {}", to_string(device), to_string(expected));
}

Device parse_device(std::string_view text) {
  if (text == "cpu") return {};
  if (text == "cuda") return {DeviceKind::cuda, 0};
  constexpr std::string_view kCuda = "cuda:";
  if (text.starts_with(kCuda))
    if (const auto index = parse_integer<std::int16_t>(text.substr(kCuda.size())); index && *index >= 0)
      return {DeviceKind::cuda, *index};
  throw Error(ErrorCode::bad_argument, fmt::format("device \"{}\"; expected cpu, cuda or cuda:<0 to {}>",
                                                   text, std::numeric_limits<std::int16_t>::max()));
}

}  // namespace weft
