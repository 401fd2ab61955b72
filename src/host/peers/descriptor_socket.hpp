// Messages with descriptors between processes of one host, for the host peers. They are sequenced packets
// over an abstract Unix socket. No function blocks; callers poll.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "base/memfd.hpp"

namespace weft {

/// The request of one process to another. It has a fixed size, and the receiver checks it.
struct SocketRequest {
  enum class Kind : std::uint32_t { block, segment, region };
  static constexpr std::uint32_t kMagic = 0x57454654;
  static constexpr std::size_t kNameBytes = 1000;

  std::uint32_t magic = kMagic;
  Kind kind = Kind::block;
  /// The reply repeats this number, so that the sender notices a late reply to an abandoned request.
  std::uint64_t number = 0;
  std::uint32_t segment = 0;
  std::uint32_t name_bytes = 0;
  char name[kNameBytes] = {};
};

struct SocketReply {
  enum class Status : std::uint32_t {
    ok,      ///< the reply carries a descriptor
    absent,  ///< there is no such segment or region (yet)
    /// it exists, but the system refused memory that other processes can map; `bytes` is the errno
    no_memory,
    other_user,  ///< the asking process runs as another user
    busy,        ///< it exists, but too many descriptors of this user are in flight: repeat the request
  };
  std::uint32_t magic = SocketRequest::kMagic;
  Status status = Status::ok;
  std::uint64_t number = 0;
  std::uint64_t bytes = 0;
  std::uint64_t id = 0;  ///< for regions: unique in the process that offers the region, never reused
};

/// The process at the other end of a Unix socket, as reported by the kernel.
struct Credentials {
  pid_t process = 0;
  uid_t user = 0;
};
Credentials credentials(int socket);

/// Makes a listening socket with that abstract name. Throws system.
Descriptor listen_abstract(const std::string& name);
/// Returns a connected socket, or an empty one with errno set: ECONNREFUSED (nobody listens), EAGAIN (try
/// again).
Descriptor connect_abstract(const std::string& name) noexcept;
/// Returns the next connection, or an empty descriptor with errno set.
Descriptor accept_connection(int listener) noexcept;

enum class Transfer {
  done,
  later,
  closed,
  too_many_in_flight,  ///< the system carries no more descriptors for this user until some have arrived
  no_descriptor,       ///< the message is complete, but this process may open no more descriptors (or it had
                       ///< too many)
};
/// Sends one message, with a descriptor if `descriptor` >= 0.
Transfer send_message(int socket, const void* message, std::size_t bytes, int descriptor = -1) noexcept;
/// Receives one message of exactly `bytes`. Any other message counts as closed.
Transfer receive_message(int socket, void* message, std::size_t bytes,
                         Descriptor* descriptor = nullptr) noexcept;

}  // namespace weft
