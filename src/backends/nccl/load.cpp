#include <dlfcn.h>
#include <fmt/format.h>

#include "backends/nccl/nccl_api.hpp"

namespace weft::nccl {
namespace {

// the first version with split_share in the configuration, and with abort of a communicator that is still
// being made
constexpr int kOldest = 21800;

// NCCL writes version 2.18.3 as 21803; before 2.9 it wrote 2.8.3 as 2803.
std::string version_text(int version) {
  return version < 10000 ? fmt::format("NCCL {}.{}.{}", version / 1000, version / 100 % 10, version % 100)
                         : fmt::format("NCCL {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

void* open_first(std::initializer_list<const char*> names, std::string& problem) {
  for (const char* const name : names)
    if (void* const there = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD)) return there;
  for (const char* const name : names)
    if (void* const loaded = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE)) return loaded;
  const char* const why = dlerror();
  problem = fmt::format("{} cannot be loaded: {}", *names.begin(), why ? why : "no reason is given");
  return nullptr;
}

template <class Function>
bool find(void* library, const char* name, Function& function, std::string& problem) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) problem = fmt::format("the library has no {}", name);
  return function != nullptr;
}

}  // namespace

LoadedApi load_api(std::initializer_list<const char*> nccl, std::initializer_list<const char*> cudart) {
  LoadedApi loaded;
  NcclApi& api = loaded.api;
  void* const nccl_library = open_first(nccl, loaded.problem);
  void* const cuda_library = nccl_library ? open_first(cudart, loaded.problem) : nullptr;
  if (cuda_library == nullptr) return loaded;
#define WEFT_FIND(name, ...) \
  if (!find(WEFT_LIBRARY, #name, api.name, loaded.problem)) return loaded;
#define WEFT_LIBRARY nccl_library
  WEFT_NCCL_FUNCTIONS(WEFT_FIND)
#undef WEFT_LIBRARY
#define WEFT_LIBRARY cuda_library
  WEFT_CUDA_FUNCTIONS(WEFT_FIND)
#undef WEFT_LIBRARY
#undef WEFT_FIND
  return loaded;
}

const LoadedApi& loaded_api() {
  static const LoadedApi loaded = load_api();
  return loaded;
}

std::string version_text(const NcclApi& api) {
  int version = 0;
  return api.ncclGetVersion(&version) == Result::success ? version_text(version) : "NCCL of unknown version";
}

std::string obstacle(const NcclApi& api) {
  int version = 0;
  if (const Result r = api.ncclGetVersion(&version); r != Result::success)
    return fmt::format("ncclGetVersion: {}", api.ncclGetErrorString(r));
  if (version < kOldest) return fmt::format("{} is too old; expected 2.18 or newer", version_text(version));
  int devices = 0;
  if (const CudaResult r = api.cudaGetDeviceCount(&devices); r != CudaResult::success)
    return fmt::format("no CUDA device: {}", api.cudaGetErrorString(r));
  if (devices == 0) return "no CUDA device";
  return {};
}

}  // namespace weft::nccl
