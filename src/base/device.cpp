#include "weft/base/device.hpp"

namespace weft {

std::string to_string(Device device) {
  switch (device.kind) {
    case DeviceKind::cpu: return "cpu";
    case DeviceKind::cuda: return "cuda:" + std::to_string(device.index);
  }
  return "?";
}

}  // namespace weft
