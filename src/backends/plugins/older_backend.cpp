#include "backends/plugins/older_backend.hpp"

#include <utility>

#include "backends/plugins/forwarding_backend.hpp"
#include "weft/backends/plugin.hpp"

namespace weft {
std::unique_ptr<Backend> as_built_for(std::uint32_t minor, std::unique_ptr<Backend> backend) {
  if (minor >= kBackendAbiMinor || backend == nullptr) return backend;
  return std::make_unique<ForwardingBackend>(std::move(backend));  // 5.0 is the only older one
}

}  // namespace weft
