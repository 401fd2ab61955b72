// Numbers that the ranks of a mesh send each other. Collective; the host waits. Included only inside models.
#pragma once

#include <cstdint>
#include <vector>

#include "weft/host/compute.hpp"
#include "weft/mesh/mesh.hpp"

namespace weft {

using Numbers = std::vector<std::int64_t>;

/// The least of each number over the ranks of `axes`.
Numbers least_of(Compute& compute, const DeviceMesh& axes, const Numbers& numbers);
/// The numbers of each rank of `axes`, one rank after the other.
Numbers gathered(Compute& compute, const DeviceMesh& axes, const Numbers& numbers);

}  // namespace weft
