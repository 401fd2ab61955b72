#include "host/peers/region.hpp"

namespace weft {

HeldRegion::~HeldRegion() {
  if (process != ::getpid()) return;  // in a forked child the table's lock may be held forever
  if (const auto table = offers.lock()) {
    const std::lock_guard lock(table->mutex);
    const auto i = table->regions.find(name);
    if (i != table->regions.end() && i->second.first == id) table->regions.erase(i);
  }
}

}  // namespace weft
