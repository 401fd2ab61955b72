// One small plug-in, compiled several times with one thing wrong in each.
#include "weft/backends/plugin.hpp"
#include "backends/shm/shm_backend.hpp"

#ifdef HAS_ENTRY
namespace {
[[maybe_unused]] std::string full_moon() { return "the moon is full"; }
}  // namespace

WEFT_BACKEND_PLUGIN {
  static const weft::BackendPlugin plugin = [] {
    weft::BackendPlugin p;
    p.name = NAME;
    p.version = "test";
    p.make = weft::make_shm_backend;
    p.traits = [] { return *weft::known_traits("shm"); };
    CHANGE;
    return p;
  }();
  return &plugin;
}
#endif
