// Finding and loading transports.
#include <fmt/format.h>

#include "backends/shm/shm_backend.hpp"
#include "weft/backends/plugin.hpp"

namespace weft {

BackendFactory load_backend(Context&, std::string_view name) {
  if (name == "shm") return make_shm_backend;
  throw Error(ErrorCode::unsupported, fmt::format("backend \"{}\" is not known; expected \"shm\"", name));
}

}  // namespace weft
