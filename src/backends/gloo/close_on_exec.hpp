// Descriptors that Gloo opens: it leaves them to every program that a child of this process executes.
#pragma once

#include <span>
#include <vector>

namespace weft::gloo_backend {

/// Sets FD_CLOEXEC on the sockets of this process that have one of these addresses, at this end or at the
/// other one, and on the epolls that watch such a socket. An address is one of Gloo's
/// (transport::Address::bytes()). Descriptors of others stay as they are; without /proc all do.
void close_on_exec(std::span<const std::vector<char>> addresses) noexcept;

}  // namespace weft::gloo_backend
