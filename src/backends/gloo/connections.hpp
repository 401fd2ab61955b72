// The connections between all ranks of a group.
//
// For each pair of ranks Gloo listens on a separate port, accepts the first client that connects as the peer,
// and then stops listening. An unauthenticated client that connects in those milliseconds (a port scanner,
// for example) takes the peer's place. So before a connection is used, each end sends the other end a token
// over it. Only the ranks know the tokens, because they exchange them through the store. If a connection
// fails, all ranks try again together, on new ports.
#pragma once

#include <gloo/context.h>
#include <gloo/transport/tcp/attr.h>
#include <sys/types.h>

#include <memory>
#include <vector>

#include "weft/backends/backend.hpp"

namespace weft::gloo_backend {

/// Collective. `where`: the address to listen on. `processes`: the process of each rank, if it is another
/// process of this host; otherwise 0. Throws timeout or peer_lost, naming the ranks that do not arrive.
/// Throws peer_lost within half a second if a process in `processes` ends, system if several attempts to
/// connect the ranks have failed, and the store's errors.
std::shared_ptr<::gloo::Context> connect_all(const GroupInit& b, const ::gloo::transport::tcp::attr& where,
                                             std::vector<pid_t> processes);

}  // namespace weft::gloo_backend
