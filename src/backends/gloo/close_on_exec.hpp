// Closes Gloo's descriptors on exec: Gloo itself leaves them open in every program that a child of this
// process executes.
#pragma once

#include <span>
#include <vector>

namespace weft::gloo_backend {

/// Sets FD_CLOEXEC on the sockets of this process that have one of these addresses at either end, and on the
/// epolls that watch such a socket. An address has Gloo's form (transport::Address::bytes()). Other
/// descriptors do not change. Without /proc no descriptor changes.
void close_on_exec(std::span<const std::vector<char>> addresses) noexcept;

}  // namespace weft::gloo_backend
