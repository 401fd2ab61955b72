// A Backend of a plug-in that was built for an older minor of the ABI (weft/backends/plugin.hpp).
#pragma once

#include <cstdint>
#include <memory>

#include "weft/backends/backend.hpp"

namespace weft {

/// The operations that later minors added.
OpSet ops_after(std::uint32_t minor) noexcept;

/// Returns `backend` unchanged if `minor` is this weft's or newer. The functions that later minors added to
/// Backend are never called on an older plug-in, because its class ends before them; they have their
/// defaults. The result has none of ops_after(minor), whatever the plug-in's traits say.
std::unique_ptr<Backend> as_built_for(std::uint32_t minor, std::unique_ptr<Backend> backend);

}  // namespace weft
