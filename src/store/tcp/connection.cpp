#include "store/tcp/connection.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "base/waits/suspension.hpp"
#include "store/tcp/sockets.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

/// Returns whether a weft server gives this kind of reply to such a request.
bool answers(FrameKind reply, FrameKind request) {
  switch (reply) {
    case FrameKind::found:
    case FrameKind::refused: return request != FrameKind::join && request != FrameKind::prove;
    case FrameKind::absent: return request == FrameKind::try_get;
    case FrameKind::timed_out: return request == FrameKind::get;
    case FrameKind::challenge: return request == FrameKind::join;
    case FrameKind::welcome:
    case FrameKind::wrong_proof: return request == FrameKind::prove;
    case FrameKind::secret_demanded: return true;
    case FrameKind::get:
    case FrameKind::try_get:
    case FrameKind::set:
    case FrameKind::add:
    case FrameKind::compare_set:
    case FrameKind::remove:
    case FrameKind::join:
    case FrameKind::prove: return false;  // requests
  }
  return false;
}

}  // namespace

bool StoreConnection::open(const SocketAddress& to, Deadline give_up) {
  fd_ = Descriptor(::socket(to.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd_ && errno == EAFNOSUPPORT) return failed(errno);
  if (!fd_) throw_errno("store: socket", errno);
  if (to.family() == AF_UNIX) return open_local(to, give_up);
  if (::connect(fd_.get(), to.data(), to.length) != 0) {
    if (errno != EINPROGRESS && errno != EINTR) return failed(errno);
    if (!ready(POLLOUT, give_up)) return failed(ETIMEDOUT);
    int error_number = 0;
    socklen_t length = sizeof error_number;
    ::getsockopt(fd_.get(), SOL_SOCKET, SO_ERROR, &error_number, &length);
    if (error_number != 0) return failed(error_number);
  }
  // If nobody listens on a port of the ephemeral range, the system may give that port to this socket itself,
  // which is then connected to itself.
  SocketAddress own;
  if (::getsockname(fd_.get(), own.data(), &own.length) == 0 && own == to) return failed(ECONNREFUSED);
  set_tcp_options(fd_.get());
  return true;
}

bool StoreConnection::is_own_users() const { return server_.user == ::geteuid(); }

StoreConnection::Outcome StoreConnection::greet(const KeyBytes* secret, Deadline give_up) {
  greets_ = true;
  const Outcome outcome = introduce(secret, give_up);
  greets_ = false;
  return outcome;
}

StoreConnection::Outcome StoreConnection::introduce(const KeyBytes* secret, Deadline give_up) {
  StoreReply reply;
  if (secret == nullptr) return exchange(FrameKind::try_get, kHelloKey, {}, {}, 0, give_up, reply);
  Handshake handshake(*secret);
  if (const Outcome o = exchange(FrameKind::join, {}, handshake.own_half(), {}, 0, give_up, reply);
      o != Outcome::ok)
    return o;
  if (!handshake.meet(reply.value, true)) return Outcome::foreign;
  if (const Outcome o = exchange(FrameKind::prove, {}, handshake.proof(true), {}, 0, give_up, reply);
      o != Outcome::ok)
    return o;
  if (!handshake.holds(reply.value, false)) return Outcome::wrong_secret;
  sealed_.emplace(handshake.streams());
  return Outcome::ok;
}

StoreConnection::Outcome StoreConnection::exchange(FrameKind kind, std::string_view key,
                                                   std::string_view value, std::string_view extra,
                                                   std::int64_t number, Deadline give_up, StoreReply& reply) {
  std::string request = make_frame(kind, key, value, extra, number);
  if (sealed_) request = sealed_->to_server.seal(request);
  if (const Outcome o = send(request, give_up); o != Outcome::ok) {
    // Bytes that the server sent before it closed the connection can still be read.
    const bool told = greets_ && o == Outcome::closed && receive(Deadline::after({}), reply) == Outcome::ok;
    if (told) check_full(reply);
    return o;
  }
  const Outcome o = receive(give_up, reply);
  if (o != Outcome::ok) return o;
  if (greets_ && check_full(reply)) return Outcome::closed;
  if (!answers(reply.kind, kind)) {
    // A server that demands no secret refuses handshakes.
    return kind == FrameKind::join && reply.kind == FrameKind::refused ? Outcome::wrong_secret
                                                                       : Outcome::foreign;
  }
  if (reply.kind == FrameKind::wrong_proof) return Outcome::wrong_secret;
  return reply.kind == FrameKind::secret_demanded ? Outcome::secret_demanded : Outcome::ok;
}

// A refusal that arrives before authentication may contain text of any program, so only a limited part of it
// is shown.
bool StoreConnection::check_full(const StoreReply& reply) {
  constexpr std::size_t kShown = 200;
  if (reply.kind != FrameKind::refused || reply.number != static_cast<int>(ErrorCode::system)) return false;
  error_ = reply.value.substr(0, kShown);
  for (char& c : error_)
    if (c < ' ' || c > '~') c = '.';
  return full_ = true;
}

bool StoreConnection::open_local(const SocketAddress& to, Deadline give_up) {
  while (::connect(fd_.get(), to.data(), to.length) != 0) {
    // EAGAIN: the listener's queue is full. There is nothing to poll for.
    if (errno != EAGAIN && errno != EINTR) return failed(errno);
    if (give_up.passed()) return failed(ETIMEDOUT);
    sleep_noticing(std::chrono::milliseconds(1));
  }
  server_ = credentials(fd_.get());
  return true;
}

StoreConnection::Outcome StoreConnection::send(std::string_view bytes, Deadline give_up) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent >= 0) {
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    } else if (errno == EAGAIN) {
      if (!ready(POLLOUT, give_up)) return Outcome::silent;
    } else if (errno != EINTR) {
      error_ = system_words(errno);
      return Outcome::closed;
    }
  }
  return Outcome::ok;
}

// Receives one complete frame, with nothing after it.
StoreConnection::Outcome StoreConnection::receive(Deadline give_up, StoreReply& reply) {
  std::string in;
  char buffer[16 * 1024];  // a stack may be as small as 64 KiB
  for (;;) {
    const ssize_t got = ::recv(fd_.get(), buffer, sizeof buffer, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) {
      if (!ready(POLLIN, give_up)) return Outcome::silent;
      continue;
    }
    if (got <= 0) {
      error_ = got == 0 ? "it closed the connection" : system_words(errno);
      return Outcome::closed;
    }
    in.append(buffer, static_cast<std::size_t>(got));
    std::string opened;
    if (sealed_) {
      SealedStream::Opened record = sealed_->to_client.open(in);
      if (record.state == ParseState::more) continue;
      if (record.state == ParseState::bad || record.bytes != in.size()) return Outcome::foreign;
      opened = std::move(record.frame);
    }
    const std::string_view bytes = sealed_ ? opened : in;
    const Parsed parsed = parse_reply(bytes);
    if (parsed.state == ParseState::more && !sealed_) continue;
    if (parsed.state != ParseState::whole || parsed.bytes != bytes.size()) return Outcome::foreign;
    reply.kind = parsed.frame.kind;
    reply.number =
        reply.kind == FrameKind::refused ? static_cast<int>(refusal_code(parsed.frame)) : parsed.frame.number;
    reply.value = parsed.frame.value;
    return Outcome::ok;
  }
}

// Returns false if `give_up` came first.
bool StoreConnection::ready(short events, Deadline give_up) {
  for (;;) {
    pollfd p{fd_.get(), events, 0};
    int n = 0;
    {
      const Duration piece = std::min(give_up.left(), wait_piece());
      const TimedWait wait(piece);
      n = ::poll(&p, 1, static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(piece).count()));
    }
    if (n > 0) return true;
    if (n < 0 && errno != EINTR) throw_errno("store: poll", errno);
    if (give_up.passed()) return false;
  }
}

bool StoreConnection::failed(int error_number) {
  error_ = system_words(error_number);
  return false;
}

}  // namespace weft
