// Makes the transport of a group. No other code does.
#pragma once

#include <memory>

#include "weft/backends/backend.hpp"

namespace weft {

/// The result composes operations that the transport lacks. If this rank cannot make the transport, it gives
/// the other ranks the reason. So no rank blames a rank that failed only because of another rank. Any
/// exception of a transport's library becomes an Error.
std::unique_ptr<Backend> make_backend(const BackendFactory& factory, const GroupInit& init);

}  // namespace weft
