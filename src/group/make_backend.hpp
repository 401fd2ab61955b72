// The only place that makes the transport of a group.
#pragma once

#include <memory>

#include "weft/backends/backend.hpp"

namespace weft {

/// Operations that the transport lacks are composed. If this rank cannot make the transport, it sends the
/// other ranks the reason, so that no rank blames a rank that only gave up because of another. Any exception
/// of a transport's library becomes an Error.
std::unique_ptr<Backend> make_backend(const BackendFactory& factory, const GroupInit& init);

}  // namespace weft
