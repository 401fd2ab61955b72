// A Backend of a plug-in that was built for an older minor of the ABI (weft/backends/plugin.hpp).
#pragma once

#include <cstdint>
#include <memory>

#include "weft/backends/backend.hpp"

namespace weft {

/// Returns the operations that minors after `minor` have added.
OpSet ops_after(std::uint32_t minor) noexcept;

/// Returns `backend` unchanged if `minor` is that of this weft, or newer. Otherwise the result never calls
/// functions of Backend that later minors have added, because the plug-in's class ends before them. It uses
/// their defaults. It has no operation of ops_after(minor), whatever the plug-in's traits say.
std::unique_ptr<Backend> as_built_for(std::uint32_t minor, std::unique_ptr<Backend> backend);

}  // namespace weft
