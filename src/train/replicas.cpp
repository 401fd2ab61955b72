#include "weft/train/replicas.hpp"

#include <vector>

namespace weft {

void check_replicas(std::span<Parameter* const> parameters, const DeviceMesh& axes, Compute* compute) {
  if (compute == nullptr && !parameters.empty()) compute = &parameters[0]->compute();
  std::vector<NamedView> values;
  values.reserve(parameters.size());
  for (const Parameter* p : parameters) values.push_back({p->path(), p->master().view(), p->layout()});
  check_replicas(values, axes, compute);
}

}  // namespace weft
