// The one place where the transport of a group is made.
#pragma once

#include <memory>

#include "weft/backends/backend.hpp"

namespace weft {

/// Operations that the transport lacks are composed. If this rank cannot make it, it tells the others why,
/// so that none blames a rank that only gave up because of another. Whatever a transport's library throws
/// becomes an Error.
std::unique_ptr<Backend> make_backend(const BackendFactory& factory, const GroupInit& init);

}  // namespace weft
