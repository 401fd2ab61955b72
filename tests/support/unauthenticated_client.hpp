// A client of the TCP store that keeps to no rule.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <string>
#include <string_view>

#include "store/tcp/address.hpp"

namespace weft::test {

/// A connection that says whatever it likes, to the Unix socket of that address or else to its port.
class UnauthenticatedClient {
 public:
  explicit UnauthenticatedClient(std::uint16_t port, const char* host = "127.0.0.1") {
    std::string why;
    const SocketAddress to = resolve(host, port, why).at(0);
    const SocketAddress local = local_socket_of(to);
    fd_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (::connect(fd_, local.data(), local.length) == 0) return;
    ::close(fd_);
    fd_ = ::socket(to.family(), SOCK_STREAM | SOCK_CLOEXEC, 0);
    EXPECT_EQ(::connect(fd_, to.data(), to.length), 0);
  }
  ~UnauthenticatedClient() { ::close(fd_); }
  UnauthenticatedClient(const UnauthenticatedClient&) = delete;
  UnauthenticatedClient& operator=(const UnauthenticatedClient&) = delete;

  void say(std::string_view bytes) {
    EXPECT_EQ(::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }

  /// The same, where the server may have hung up meanwhile.
  void say_if_heard(std::string_view bytes) { ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL); }

  /// True if the server has hung up.
  bool hears_the_end() {
    char byte = 0;
    const ssize_t got = ::recv(fd_, &byte, 1, MSG_DONTWAIT);
    return got == 0 || (got < 0 && errno != EAGAIN);
  }

  /// True if the server hangs up within ten seconds, whatever it says before.
  bool is_cut_off() {
    for (;;) {
      pollfd p{fd_, POLLIN, 0};
      if (::poll(&p, 1, 10'000) != 1) return false;
      char buffer[256];
      if (::recv(fd_, buffer, sizeof buffer, 0) <= 0) return true;
    }
  }

  /// True if the server says something within ten seconds, which is then read as far as it has come.
  bool is_answered() {
    pollfd p{fd_, POLLIN, 0};
    char buffer[256];
    return ::poll(&p, 1, 10'000) == 1 && ::recv(fd_, buffer, sizeof buffer, 0) > 0;
  }

 private:
  int fd_ = -1;
};

}  // namespace weft::test
