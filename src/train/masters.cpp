#include "train/masters.hpp"

#include "weft/mesh/replicas.hpp"

namespace weft {

void expect_same_masters(const std::vector<Parameter*>& parameters, std::span<const DeviceMesh> axes) {
  for (const DeviceMesh& along : axes) {
    if (!along) continue;
    std::vector<NamedView> masters;
    Compute* compute = nullptr;
    for (const Parameter* p : parameters) {
      if (!p->has_values()) continue;
      compute = &p->compute();
      masters.push_back({p->path(), p->master().view(),
                         p->layout() != nullptr ? p->layout() : replicated_layout(along, p->global_shape())});
    }
    if (!masters.empty()) check_replicas(masters, along, compute);
  }
}

}  // namespace weft
