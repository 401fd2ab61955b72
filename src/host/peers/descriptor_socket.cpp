#include "host/peers/descriptor_socket.hpp"

#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "weft/base/error.hpp"

namespace weft {
namespace {

constexpr int kBacklog = 1024;

struct AbstractAddress {
  sockaddr_un address{};
  socklen_t bytes = 0;
};

// An abstract name begins with a zero byte, and its length is part of the address. It is no file, and
// disappears with its socket.
AbstractAddress abstract_address(const std::string& name) noexcept {
  AbstractAddress a;
  a.address.sun_family = AF_UNIX;
  const std::size_t n = std::min(name.size(), sizeof a.address.sun_path - 1);
  std::memcpy(a.address.sun_path + 1, name.data(), n);
  a.bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + n);
  return a;
}

Descriptor open_socket() noexcept {
  return Descriptor(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

Transfer transfer_error() noexcept {
  if (errno == ETOOMANYREFS) return Transfer::too_many_in_flight;
  return errno == EAGAIN || errno == EINTR || errno == ENOBUFS ? Transfer::later : Transfer::closed;
}

}  // namespace

Credentials credentials(int socket) {
  ucred c{};
  socklen_t bytes = sizeof c;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &c, &bytes) != 0)
    throw_errno("host peers: the other side's credentials", errno);
  return {c.pid, c.uid};
}

Descriptor listen_abstract(const std::string& name) {
  Descriptor s = open_socket();
  if (!s) throw_errno("host peers: no Unix socket", errno);
  const AbstractAddress a = abstract_address(name);
  if (::bind(s.get(), reinterpret_cast<const sockaddr*>(&a.address), a.bytes) != 0)
    throw_errno("host peers: bind", errno);
  if (::listen(s.get(), kBacklog) != 0) throw_errno("host peers: listen", errno);
  return s;
}

Descriptor connect_abstract(const std::string& name) noexcept {
  Descriptor s = open_socket();
  if (!s) return s;
  const AbstractAddress a = abstract_address(name);
  if (::connect(s.get(), reinterpret_cast<const sockaddr*>(&a.address), a.bytes) == 0) return s;
  const int error = errno;
  s = Descriptor();
  errno = error;
  return s;
}

Descriptor accept_connection(int listener) noexcept {
  return Descriptor(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
}

Transfer send_message(int socket, const void* message, std::size_t bytes, int descriptor) noexcept {
  iovec part{const_cast<void*>(message), bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (descriptor >= 0) {
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    cmsghdr* c = CMSG_FIRSTHDR(&header);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(c), &descriptor, sizeof(int));
  }
  const ssize_t sent = ::sendmsg(socket, &header, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent < 0) return transfer_error();
  return static_cast<std::size_t>(sent) == bytes ? Transfer::done : Transfer::closed;
}

Transfer receive_message(int socket, void* message, std::size_t bytes, Descriptor* descriptor) noexcept {
  iovec part{message, bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  const ssize_t got = ::recvmsg(socket, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got < 0) return transfer_error();
  Descriptor received;  // a descriptor is received in any case, so that no sent descriptor stays open
  for (cmsghdr* c = CMSG_FIRSTHDR(&header); c != nullptr; c = CMSG_NXTHDR(&header, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(c), sizeof(int));
    received = Descriptor(fd);
  }
  if (static_cast<std::size_t>(got) != bytes || (header.msg_flags & MSG_TRUNC) != 0) return Transfer::closed;
  if ((header.msg_flags & MSG_CTRUNC) != 0) return Transfer::no_descriptor;
  if (descriptor != nullptr) *descriptor = std::move(received);
  return Transfer::done;
}

}  // namespace weft
