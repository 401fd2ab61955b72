// The Backend of a transport of the host's own.
#pragma once

#include <memory>

#include "capi/transport/host_transport.hpp"

namespace weft::capi {

/// Meets the other ranks and opens this rank's end of the group's channel. Throws as BackendFactory says.
std::unique_ptr<Backend> make_host_backend(const GroupInit& b, std::shared_ptr<const HostTransport> host);

}  // namespace weft::capi
