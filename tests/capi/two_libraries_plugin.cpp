// A plug-in that uses public headers alone, for two_versions_test. It is asked for its traits, and makes no
// group.
#include "weft/backends/plugin.hpp"

WEFT_BACKEND_PLUGIN {
  static const weft::BackendPlugin plugin = [] {
    weft::BackendPlugin p;
    p.name = NAME;
    p.version = "test";
    p.make = [](const weft::GroupInit&) { return std::unique_ptr<weft::Backend>(); };
    p.traits = [] { return *weft::known_traits("shm"); };
    return p;
  }();
  return &plugin;
}
