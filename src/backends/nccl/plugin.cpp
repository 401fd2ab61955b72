// The entry of libweft_backend_nccl.so.
#include <fmt/format.h>

#include "backends/nccl/nccl_backend.hpp"
#include "weft/backends/plugin.hpp"

namespace weft::nccl {
namespace {

std::string obstacle_here() {
  const LoadedApi& loaded = loaded_api();
  return loaded.problem.empty() ? obstacle(loaded.api) : loaded.problem;
}

std::unique_ptr<Backend> make(const GroupInit& init) {
  if (const std::string& problem = loaded_api().problem; !problem.empty())
    throw Error(ErrorCode::unsupported,
                fmt::format("group \"{}\": nccl: {} [rank {}]", init.name, problem, init.rank));
  return make_backend(loaded_api().api, init);
}

}  // namespace
}  // namespace weft::nccl

WEFT_BACKEND_PLUGIN {
  static const std::string version = weft::nccl::loaded_api().problem.empty()
                                         ? weft::nccl::version_text(weft::nccl::loaded_api().api)
                                         : "NCCL";
  static const weft::BackendPlugin plugin{.name = "nccl",
                                          .version = version.c_str(),
                                          .make = weft::nccl::make,
                                          .traits = [] { return *weft::known_traits("nccl"); },
                                          .obstacle = weft::nccl::obstacle_here};
  return &plugin;
}
