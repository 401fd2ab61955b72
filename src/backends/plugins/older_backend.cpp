#include "backends/plugins/older_backend.hpp"

#include <utility>

#include "backends/plugins/forwarding_backend.hpp"
#include "weft/backends/plugin.hpp"

namespace weft {
std::unique_ptr<Backend> as_built_for(std::uint32_t minor, std::unique_ptr<Backend> backend) {
  if (minor >= 1 || backend == nullptr) return backend;            // 5.2 added no function
  return std::make_unique<ForwardingBackend>(std::move(backend));  // of 5.0
}

}  // namespace weft
