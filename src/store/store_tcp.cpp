// The TCP store. On loopback without a secret it is a Unix socket instead, whose two sides the kernel names
// to each other: both must run as one user. The server's thread owns all of its state; a client takes a
// connection of its own for each call in flight, so that a get that waits holds up nobody.
//
// What goes over a connection is in store_frames.hpp, and where a secret is demanded sealed as store_seal.hpp
// says; what the server makes of the bytes of one connection is in store_session.hpp. The server answers at
// once, but for a get of an absent key: it parks that connection until some request sets the key or the time
// the get gave has passed.
#include "weft/store/store_tcp.hpp"

#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "base/memfd.hpp"
#include "base/no_signals.hpp"
#include "base/suspension.hpp"
#include "host/descriptor_socket.hpp"
#include "host/warnings.hpp"
#include "store/address.hpp"
#include "store/store_session.hpp"
#include "store/store_table.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

constexpr Duration kLongest = std::chrono::hours(24 * 365);  // longer waits count as this
constexpr Duration kAnswerLimit = std::chrono::seconds(30);  // for what the server answers at once
constexpr Duration kFullPatience = std::chrono::seconds(2);  // with a server that has no more descriptors
constexpr Duration kGrace =
    std::chrono::milliseconds(500);  // for the server's word that a get's time has passed

/// Small frames at once; and a host that vanished is noticed within half a minute, by who waits in a get,
/// too.
void set_up(int fd) {
  const int on = 1, idle = 10, between = 5, count = 4, unacknowledged = 30'000;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &between, sizeof between);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
  ::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unacknowledged, sizeof unacknowledged);
}

/// poll(2)'s timeout for a wait until `when`: rounded up, so that a loop does not spin through the last
/// millisecond.
int poll_timeout(Clock::time_point when) {
  if (when == Clock::time_point::max()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(when - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 3'600'000));
}

}  // namespace

// ---- server ----

namespace {

struct Listening {
  Descriptor socket;
  SocketAddress address;  // of TCP, also where the socket is a Unix socket
};

/// The process at the other end of a connected Unix socket: " (process 4711 of user 1000)".
std::string shown(const Credentials& c) { return fmt::format("process {} of user {}", c.process, c.user); }

/// Who listens on a Unix socket, to be put after an error's text; empty where nobody can be found there.
std::string holder_of(const SocketAddress& local) {
  const Descriptor fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd || ::connect(fd.get(), local.data(), local.length) != 0) return {};
  return fmt::format(" ({} serves there; this is process {})", shown(credentials(fd.get())), ::getpid());
}

/// Listens on the Unix socket of an address on loopback, on a free one where its port is 0. `elsewhere`: as
/// for listen_on().
Listening listen_locally(SocketAddress address, bool elsewhere) {
  const bool any = address.port() == 0;
  std::random_device random;
  for (int attempt = 0;; ++attempt) {
    if (any) address.set_port(std::uniform_int_distribution<std::uint16_t>(1024)(random));
    const SocketAddress at = local_socket_of(address);
    Descriptor fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (fd && ::bind(fd.get(), at.data(), at.length) == 0 && ::listen(fd.get(), SOMAXCONN) == 0)
      return {std::move(fd), address};
    const int error_number = errno;
    if (error_number == EADDRINUSE && any && attempt < 1000) continue;
    if (error_number == EADDRINUSE && elsewhere) return {};
    throw Error(ErrorCode::system, fmt::format("store server: cannot listen on {}: {}{}", address.text(),
                                               system_words(error_number),
                                               error_number == EADDRINUSE ? holder_of(at) : std::string()));
  }
}

/// Listens on the first address of the host that this machine has. `elsewhere`: whether an address that is
/// not this machine's, or a port that is taken, gives no socket rather than an Error.
Listening listen_on(const TcpStoreOptions& options, bool elsewhere) {
  std::string why;
  const std::vector<SocketAddress> all =
      resolve_for_store(options.host, options.port, !options.secret.empty(), why);
  if (all.empty()) throw Error(ErrorCode::system, fmt::format("store server: {}", why));
  if (options.secret.empty()) return listen_locally(all.front(), elsewhere);
  for (std::size_t i = 0; i < all.size(); ++i) {
    Listening l{Descriptor(::socket(all[i].family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)), all[i]};
    const int on = 1;
    if (l.socket) ::setsockopt(l.socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (l.socket && l.address.family() == AF_INET6)
      ::setsockopt(l.socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
    if (l.socket && ::bind(l.socket.get(), l.address.data(), l.address.length) == 0 &&
        ::listen(l.socket.get(), SOMAXCONN) == 0 &&
        ::getsockname(l.socket.get(), l.address.data(), &l.address.length) == 0)
      return l;
    const bool not_here = errno == EADDRNOTAVAIL || errno == EAFNOSUPPORT;
    if (not_here && i + 1 < all.size()) continue;  // a host without IPv4, or without IPv6
    if (elsewhere && (not_here || errno == EADDRINUSE)) break;
    throw_errno(fmt::format("store server: cannot listen on {}", all[i].text()), errno);
  }
  return {};
}

}  // namespace

struct TcpStoreServer::Impl {
  struct Client {
    Client(Descriptor socket, std::string shown, const KeyBytes* secret)
        : fd(std::move(socket)), name(std::move(shown)), session(secret) {}
    // A forked child may hold copies: closing alone would not tell the client.
    ~Client() { ::shutdown(fd.get(), SHUT_RDWR); }
    Client(const Client&) = delete;
    Client& operator=(const Client&) = delete;

    Descriptor fd;
    std::string name;  // "10.1.0.7:51234" or "process 4711"
    StoreSession session;
    Clock::time_point since = Clock::now();
    std::string out;       // to be sent
    bool waiting = false;  // parked in a get of `key` until `give_up`
    std::string key;
    Clock::time_point give_up;
    bool gone = false;  // to be removed at the end of the round
    bool is_unauthenticated() const { return session.is_unauthenticated(); }
  };

  Impl(Logger& logger, TcpStoreOptions opts, Listening listening, std::optional<KeyBytes> key_of)
      : log(logger),
        options(std::move(opts)),
        secret(std::move(key_of)),
        address(listening.address),
        listener(std::move(listening.socket)) {
    wake = Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    spare = Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!wake || !spare) throw_errno("store server: eventfd", errno);
    if (!options.served_by.empty()) table.set(kServedByKey, options.served_by);
    thread = start_thread("store server", [this] {
      ::pthread_setname_np(::pthread_self(), "weft-store");
      try {
        serve();
      } catch (const std::exception& e) {  // out of memory; clients find their connections closed
        say_end(e.what());
      }
      clients.clear();
      ::shutdown(listener.get(), SHUT_RDWR);  // a forked child may hold a copy of it, too
      listener = Descriptor();
    });
  }

  ~Impl() {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(wake.get(), &one, sizeof one);
    thread.join();
  }

  void say_end(std::string_view why) noexcept try {
    log.write(LogLevel::error, fmt::format("store server: ends: {}", why));
  } catch (const std::bad_alloc&) {  // not even for that
  }

  // Serves until woken by the destructor, and then until the last client has left or `linger` has passed.
  void serve() {
    std::vector<pollfd> polled;
    Clock::time_point stop_at = Clock::time_point::max();
    bool stopping = false;
    while (!stopping || (!clients.empty() && Clock::now() < stop_at)) {
      polled.clear();
      polled.push_back({stopping ? -1 : wake.get(), POLLIN, 0});
      polled.push_back({Clock::now() < accept_again ? -1 : listener.get(), POLLIN, 0});
      Clock::time_point next = std::min(stop_at, warnings.next());
      if (Clock::now() < accept_again) next = std::min(next, accept_again);
      for (const auto& c : clients) {
        // Nothing is read from a client whose request has no full answer yet; only its leaving is noticed.
        const int events = !c->out.empty() ? POLLOUT : c->waiting ? POLLRDHUP : POLLIN;
        polled.push_back({c->fd.get(), static_cast<short>(events), 0});
        if (c->waiting) next = std::min(next, c->give_up);
        if (c->is_unauthenticated()) next = std::min(next, c->since + options.join_limit);
      }
      if (::poll(polled.data(), polled.size(), poll_timeout(next)) < 0 && errno != EINTR) {
        throw_errno("store server: poll", errno);
      }
      if (polled[0].revents != 0) {
        stopping = true;
        if (table.find(kServedByKey) != nullptr) table.set(kServedByKey, {});
        stop_at = Clock::now() + options.linger;
      }
      for (std::size_t i = 0; i < clients.size(); ++i) {
        Client& c = *clients[i];
        const short happened = polled[i + 2].revents;
        if (happened == 0 || c.gone) continue;
        if (!c.out.empty()) {
          flush(c);
        } else if (c.waiting) {
          c.gone = true;
        } else {
          receive(c);
        }
      }
      expire(stopping);
      warnings.look(Clock::now());
      std::erase_if(clients, [](const auto& c) { return c->gone; });
      if (polled[1].revents != 0) accept_some();
    }
  }

  // A few at a time, so that those who came are heard before more are let in.
  void accept_some() {
    for (int i = 0; i < 64; ++i) {
      SocketAddress from;
      Descriptor fd(::accept4(listener.get(), from.data(), &from.length, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!fd) {
        if (errno == EINTR || errno == ECONNABORTED) continue;
        if (errno == EAGAIN) return;
        const int error_number = errno;
        pollfd knocks{listener.get(), POLLIN, 0};
        if (::poll(&knocks, 1, 0) == 0)
          return;  // accept() wants a descriptor before it looks for a connection
        // Out of descriptors, perhaps: strangers give theirs back first.
        const std::string why = system_words(error_number);
        if (close_oldest_unauthenticated("there are too few descriptors for it: " + why, full_text(why)))
          continue;
        if (refuse_next(full_text(why))) continue;
        // Look again later, rather than spin on the ready listener.
        warnings.write(fmt::format("store server: accept: {}", system_words(error_number)));
        accept_again = Clock::now() + std::chrono::seconds(1);
        return;
      }
      const std::string name = name_of(fd.get(), from);
      if (name.empty()) continue;
      const auto strangers = static_cast<std::size_t>(std::count_if(
          clients.begin(), clients.end(), [](const auto& c) { return c->is_unauthenticated(); }));
      if (strangers >= options.max_unauthenticated)
        close_oldest_unauthenticated(fmt::format("it was the oldest of {} that have not joined", strangers));
      if (clients.size() >= options.max_clients &&
          !close_oldest_unauthenticated(
              fmt::format("there are {} clients, and it has not joined", clients.size()))) {
        warnings.write(
            fmt::format("store server: closed {}: there are {} clients already", name, clients.size()));
        continue;
      }
      if (secret) set_up(fd.get());
      clients.push_back(std::make_unique<Client>(std::move(fd), name, secret ? &*secret : nullptr));
    }
  }

  /// What a new connection is called in warnings. Empty: it came over the Unix socket from a process of
  /// another user, and is to be closed.
  std::string name_of(int fd, const SocketAddress& from) {
    if (secret) return from.text();
    const Credentials c = credentials(fd);
    if (c.user == user) return fmt::format("process {}", c.process);
    warnings.write(
        fmt::format("store server: closed {}: expected processes of user {} only", shown(c), user));
    return {};
  }

  static std::string full_text(const std::string& why) {
    return fmt::format("its process can take no more connections: {}", why);
  }

  /// `told`: what it hears itself, if anything.
  bool close_oldest_unauthenticated(std::string_view why, std::string_view told = {}) {
    const auto oldest =
        std::find_if(clients.begin(), clients.end(), [](const auto& c) { return c->is_unauthenticated(); });
    if (oldest == clients.end()) return false;
    if (!told.empty()) refuse((*oldest)->fd.get(), told);
    close_bad(**oldest, why);
    clients.erase(oldest);
    return true;
  }

  static void refuse(int fd, std::string_view why) {
    const std::string frame = make_refusal(ErrorCode::system, why);
    ::send(fd, frame.data(), frame.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }

  /// Whoever knocks where there is no descriptor for it would wait until its deadline: a spare one is kept,
  /// to tell it why. False: it could not be told.
  bool refuse_next(std::string_view why) {
    if (!spare) return false;
    spare = Descriptor();
    SocketAddress from;
    {
      const Descriptor fd(::accept4(listener.get(), from.data(), &from.length, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (fd && !name_of(fd.get(), from).empty()) {
        refuse(fd.get(), why);
        warnings.write(fmt::format("store server: refused a connection: {}", why));
      }
    }
    spare = Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    return static_cast<bool>(spare);
  }

  void receive(Client& c) {
    const ssize_t got = ::recv(c.fd.get(), buffer.data(), buffer.size(), 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) {
      if (c.session.unread() > 0)
        return close_bad(c, fmt::format("it left within a frame, after {} bytes", c.session.unread()));
      if (c.session.was_told_of_secret()) return close_bad(c, "it left when it was asked for the secret");
      c.gone = true;
      return;
    }
    const StoreSession::Result result = c.session.take({buffer.data(), static_cast<std::size_t>(got)});
    switch (result.state) {
      case StoreSession::Result::State::more: return check_unanswered(c);
      case StoreSession::Result::State::reply: c.out = result.out; return flush(c);
      case StoreSession::Result::State::request: try { answer(c, result.frame);
        } catch (const Error& e) {
          reply(c, make_refusal(e.code(), e.what()));
        }
        c.session.answered();
        return check_unanswered(c);
      case StoreSession::Result::State::bad:
        c.out = result.out;
        flush(c);  // as much of it as the system takes at once
        return close_bad(c, result.why);
    }
  }

  /// One warning, and the connection ends.
  void close_bad(Client& c, std::string_view why) {
    warnings.write(fmt::format("store server: closed {}: {}", c.name, why));
    c.gone = true;
  }

  // Of half requests and answers that nobody reads only so much is kept; who would add to it has to go.
  void check_unanswered(Client& c) {
    if (c.session.unread() + c.out.size() < 4096) return;  // small ones cannot add up to much
    std::size_t all = 0;
    for (const auto& other : clients) all += other->session.unread() + other->out.size();
    if (all > options.max_unanswered)
      close_bad(c, fmt::format("{} bytes of requests and answers are under way; at most {} are allowed", all,
                               options.max_unanswered));
  }

  void answer(Client& c, const StoreFrame& request) {
    const std::string_view key = request.key;
    switch (request.kind) {
      case Kind::get:
        if (const std::string* held = table.find(key)) return reply(c, found(*held));
        c.waiting = true;
        c.key = key;
        c.give_up = request.number == kForever
                        ? Clock::time_point::max()
                        : Clock::now() + std::clamp(Duration(request.number), Duration::zero(), kLongest);
        return;
      case Kind::try_get: {
        const std::string* const held = table.find(key);
        return reply(c, held ? found(*held) : make_frame(Kind::absent, {}, {}));
      }
      case Kind::set:
        table.set(key, request.value);
        reply(c, found({}));
        return wake_waiters(key);
      case Kind::add: {
        const std::int64_t sum = table.add(key, request.number);
        reply(c, found({}, sum));
        return wake_waiters(key);
      }
      case Kind::compare_set:
        reply(c, found(table.compare_set(key, request.value, request.extra)));
        return wake_waiters(key);
      case Kind::remove: table.remove(key); return reply(c, found({}));
      case Kind::join:
      case Kind::prove:
      case Kind::found:
      case Kind::absent:
      case Kind::timed_out:
      case Kind::refused:
      case Kind::challenge:
      case Kind::welcome:
      case Kind::secret_demanded:
      case Kind::wrong_proof: return;  // a session lets only requests through
    }
  }

  static std::string found(std::string_view value, std::int64_t number = 0) {
    return make_frame(Kind::found, {}, value, {}, number);
  }

  void wake_waiters(std::string_view key) {
    const std::string* const value = table.find(key);
    if (value == nullptr) return;
    for (const auto& c : clients) {
      if (c->waiting && c->key == key) reply(*c, found(*value));
    }
  }

  /// Waits that are over, and strangers whose time is.
  void expire(bool stopping) {
    const auto now = Clock::now();
    for (const auto& c : clients) {
      if (c->waiting && c->give_up <= now) reply(*c, make_frame(Kind::timed_out, {}, {}));
      if (!c->is_unauthenticated() || c->gone) continue;
      if (now - c->since >= options.join_limit)
        close_bad(*c, fmt::format("it has not joined within {}", shown_duration(options.join_limit)));
      if (stopping) c->gone = true;
    }
  }

  void reply(Client& c, std::string frame) {
    c.waiting = false;
    c.out = c.session.wire(std::move(frame));
    flush(c);
  }

  void flush(Client& c) {
    while (!c.out.empty()) {
      const ssize_t sent = ::send(c.fd.get(), c.out.data(), c.out.size(), MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0) {
        c.gone = errno != EAGAIN;
        return;
      }
      c.out.erase(0, static_cast<std::size_t>(sent));
    }
    std::string().swap(c.out);  // a client that waits or thinks keeps nothing
  }

  Logger& log;
  const TcpStoreOptions options;
  const std::optional<KeyBytes> secret;  // none: the listener is a Unix socket
  const uid_t user = ::geteuid();
  const pid_t process = ::getpid();
  SocketAddress address;
  Descriptor listener;
  Descriptor wake;
  Descriptor spare;  // of any kind: see refuse_next()
  // The thread's own.
  std::vector<std::unique_ptr<Client>> clients;  // in the order in which they came
  StoreTable table{{.keys = options.max_keys, .bytes = options.max_bytes}};
  std::vector<char> buffer = std::vector<char>(64 * 1024);  // a stack may be as small as that
  Warnings warnings{log, "store server"};
  Clock::time_point accept_again{};
  std::thread thread;
};

namespace {

std::optional<KeyBytes> key_of(TcpStoreOptions& options) {
  if (options.secret.empty()) return std::nullopt;
  return key_of_secret(options.secret);
}

}  // namespace

TcpStoreServer::TcpStoreServer(Logger& log, TcpStoreOptions options) {
  auto key = key_of(options);
  Listening listening = listen_on(options, false);
  impl_ = std::make_unique<Impl>(log, std::move(options), std::move(listening), std::move(key));
}
TcpStoreServer::TcpStoreServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TcpStoreServer::~TcpStoreServer() {
  // In a forked child there is no thread, and the parent's would be woken to end.
  if (impl_ && impl_->process != ::getpid()) static_cast<void>(impl_.release());
}

std::unique_ptr<TcpStoreServer> TcpStoreServer::try_serve(Logger& log, TcpStoreOptions options) {
  auto key = key_of(options);
  Listening listening = listen_on(options, true);
  if (!listening.socket) return nullptr;
  return std::unique_ptr<TcpStoreServer>(new TcpStoreServer(
      std::make_unique<Impl>(log, std::move(options), std::move(listening), std::move(key))));
}

std::uint16_t TcpStoreServer::port() const noexcept { return impl_->address.port(); }
std::string TcpStoreServer::address() const { return impl_->address.text(); }

// ---- client ----

namespace {

struct Reply {
  Kind kind = Kind::found;
  std::int64_t number = 0;
  std::string value;
};

/// Whether a server of ours answers such a request so.
bool answers(Kind reply, Kind request) {
  switch (reply) {
    case Kind::found:
    case Kind::refused: return request != Kind::join && request != Kind::prove;
    case Kind::absent: return request == Kind::try_get;
    case Kind::timed_out: return request == Kind::get;
    case Kind::challenge: return request == Kind::join;
    case Kind::welcome:
    case Kind::wrong_proof: return request == Kind::prove;
    case Kind::secret_demanded: return true;
    default: return false;
  }
}

/// One connection. Used by one thread at a time; after a failure it is thrown away.
class Connection {
 public:
  enum class Outcome : std::uint8_t {
    ok,
    closed,           // error() says how; is_full(): because the server may have no more
    silent,           // until the time was over
    foreign,          // what is there is no store
    secret_demanded,  // by the server
    wrong_secret,     // the server has another one, or none
  };

  /// Connects; false: error() says why not.
  bool open(const SocketAddress& to, Deadline give_up) {
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
    // Where nobody listens on a port that clients' own ports are taken from, a socket can be connected to
    // itself.
    SocketAddress own;
    if (::getsockname(fd_.get(), own.data(), &own.length) == 0 && own == to) return failed(ECONNREFUSED);
    set_up(fd_.get());
    return true;
  }

  /// Who serves, where open() was given a Unix socket.
  const Credentials& server() const { return server_; }
  bool is_own_users() const { return server_.user == ::geteuid(); }

  /// Finds out whether a store of ours is there: by the handshake where there is a secret, else by a request
  /// whose answer does not matter. After it, this connection counts as a rank's.
  Outcome greet(const KeyBytes* secret, Deadline give_up) {
    greets_ = true;
    const Outcome outcome = introduce(secret, give_up);
    greets_ = false;
    return outcome;
  }

 private:
  Outcome introduce(const KeyBytes* secret, Deadline give_up) {
    Reply reply;
    if (secret == nullptr) return exchange(Kind::try_get, kHelloKey, {}, {}, 0, give_up, reply);
    Handshake handshake(*secret);
    if (const Outcome o = exchange(Kind::join, {}, handshake.own_half(), {}, 0, give_up, reply);
        o != Outcome::ok)
      return o;
    if (!handshake.meet(reply.value, true)) return Outcome::foreign;
    if (const Outcome o = exchange(Kind::prove, {}, handshake.proof(true), {}, 0, give_up, reply);
        o != Outcome::ok)
      return o;
    if (!handshake.holds(reply.value, false)) return Outcome::wrong_secret;
    sealed_.emplace(handshake.streams());
    return Outcome::ok;
  }

 public:
  Outcome exchange(Kind kind, std::string_view key, std::string_view value, std::string_view extra,
                   std::int64_t number, Deadline give_up, Reply& reply) {
    std::string request = make_frame(kind, key, value, extra, number);
    if (sealed_) request = sealed_->to_server.seal(request);
    if (const Outcome o = send(request, give_up); o != Outcome::ok) {
      // What it said before it closed is here.
      const bool told = greets_ && o == Outcome::closed && receive(Deadline::after({}), reply) == Outcome::ok;
      if (told) check_full(reply);
      return o;
    }
    const Outcome o = receive(give_up, reply);
    if (o != Outcome::ok) return o;
    if (greets_ && check_full(reply)) return Outcome::closed;
    if (!answers(reply.kind, kind)) {
      // A server that demands no secret refuses to begin a handshake.
      return kind == Kind::join && reply.kind == Kind::refused ? Outcome::wrong_secret : Outcome::foreign;
    }
    if (reply.kind == Kind::wrong_proof) return Outcome::wrong_secret;
    return reply.kind == Kind::secret_demanded ? Outcome::secret_demanded : Outcome::ok;
  }

  const std::string& error() const { return error_; }
  bool is_full() const { return full_; }

 private:
  /// What is said before anything was asked for, perhaps by a stranger: so much of it is shown.
  bool check_full(const Reply& reply) {
    constexpr std::size_t kShown = 200;
    if (reply.kind != Kind::refused || reply.number != static_cast<int>(ErrorCode::system)) return false;
    error_ = reply.value.substr(0, kShown);
    for (char& c : error_)
      if (c < ' ' || c > '~') c = '.';
    return full_ = true;
  }

  bool open_local(const SocketAddress& to, Deadline give_up) {
    while (::connect(fd_.get(), to.data(), to.length) != 0) {
      // The listener's queue is full: the kernel tells at once, and there is nothing to poll.
      if (errno != EAGAIN && errno != EINTR) return failed(errno);
      if (give_up.passed()) return failed(ETIMEDOUT);
      sleep_noticing(std::chrono::milliseconds(1));
    }
    server_ = credentials(fd_.get());
    return true;
  }

  Outcome send(std::string_view bytes, Deadline give_up) {
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

  /// One whole frame, and nothing after it.
  Outcome receive(Deadline give_up, Reply& reply) {
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
        if (record.state == SealedStream::Opened::State::more) continue;
        if (record.state == SealedStream::Opened::State::bad || record.bytes != in.size())
          return Outcome::foreign;
        opened = std::move(record.frame);
      }
      const std::string_view bytes = sealed_ ? opened : in;
      const Parsed parsed = parse_reply(bytes);
      if (parsed.state == Parsed::State::more && !sealed_) continue;
      if (parsed.state != Parsed::State::whole || parsed.bytes != bytes.size()) return Outcome::foreign;
      reply.kind = parsed.frame.kind;
      reply.number =
          reply.kind == Kind::refused ? static_cast<int>(refusal_code(parsed.frame)) : parsed.frame.number;
      reply.value = parsed.frame.value;
      return Outcome::ok;
    }
  }

  /// False: `give_up` came first.
  bool ready(short events, Deadline give_up) {
    for (;;) {
      pollfd p{fd_.get(), events, 0};
      int n = 0;
      {
        const Duration piece = std::min(give_up.left(), kWaitPiece);
        const TimedWait wait(piece);
        n = ::poll(&p, 1, static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(piece).count()));
      }
      if (n > 0) return true;
      if (n < 0 && errno != EINTR) throw_errno("store: poll", errno);
      if (give_up.passed()) return false;
    }
  }

  bool failed(int error_number) {
    error_ = system_words(error_number);
    return false;
  }

  Descriptor fd_;
  Credentials server_;
  std::string error_;
  bool greets_ = false, full_ = false;
  std::optional<SealedPair> sealed_;
};

class TcpStore final : public Store {
 public:
  TcpStore(std::string_view host, std::uint16_t port, Deadline deadline, std::string_view secret) {
    const Duration limit = deadline.left();
    std::vector<SocketAddress> addresses;
    auto pause = std::chrono::milliseconds(5);
    for (;;) {
      std::string why;
      if (addresses.empty()) addresses = resolve_for_store(host, port, !secret.empty(), why);
      for (const SocketAddress& address : addresses)
        if (reach(address, addresses.size() == 1, secret, deadline, why)) return;
      if (full_ && full_->passed())
        throw Error(ErrorCode::system,
                    fmt::format("store: the server at {}: {}", shown_host_port(host, port), full_why_));
      if (deadline.passed()) {
        throw Error(ErrorCode::timeout, fmt::format("store: no server at {} within {} ({})",
                                                    shown_host_port(host, port), shown_duration(limit), why));
      }
      sleep_noticing(std::min<Duration>(pause, deadline.left()));
      pause = std::min(2 * pause, std::chrono::milliseconds(200));
    }
  }

  void set(std::string_view key, std::string_view value, Deadline deadline) override {
    check_store_key(key);
    check_store_value(key, value);
    call(Kind::set, key, deadline, value);
  }

  std::string get(std::string_view key, Deadline deadline) override {
    check_store_key(key);
    const bool forever = deadline.when() == Clock::time_point::max();
    const Duration limit = deadline.left();
    for (Duration left = limit;; left = deadline.left()) {
      const Deadline give_up =
          forever ? Deadline::never() : Deadline::after(std::min(left, kLongest) + kGrace);
      Reply reply;
      if (!try_call(Kind::get, key, {}, {}, forever ? kForever : left.count(), give_up, reply)) {
        throw Error(ErrorCode::timeout,
                    fmt::format("{} (the server at {} does not answer)", timeout_text(key, limit), name_));
      }
      if (reply.kind != Kind::timed_out) return std::move(reply.value);
      // The server does not know that this process was suspended meanwhile: then it is asked again.
      if (deadline.passed()) throw Error(ErrorCode::timeout, timeout_text(key, limit));
    }
  }

  std::optional<std::string> try_get(std::string_view key, Deadline deadline) override {
    check_store_key(key);
    Reply reply = call(Kind::try_get, key, deadline);
    return reply.kind == Kind::absent ? std::nullopt : std::optional(std::move(reply.value));
  }

  std::int64_t add(std::string_view key, std::int64_t delta, Deadline deadline) override {
    check_store_key(key);
    return call(Kind::add, key, deadline, {}, {}, delta).number;
  }

  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                          Deadline deadline) override {
    check_store_key(key);
    check_store_value(key, expected);
    check_store_value(key, desired);
    return call(Kind::compare_set, key, deadline, expected, desired).value;
  }

  void remove(std::string_view key, Deadline deadline) override {
    check_store_key(key);
    call(Kind::remove, key, deadline);
  }

 private:
  /// True where our server is there. One of several addresses gets two seconds, so that what is silent there
  /// does not hide the others.
  bool reach(const SocketAddress& address, bool only, std::string_view secret, Deadline deadline,
             std::string& why) {
    const Deadline soon = Deadline::after(std::chrono::seconds(2));
    const Deadline give_up = only || deadline.when() < soon.when() ? deadline : soon;
    if (address.is_loopback()) {
      const SocketAddress local = local_socket_of(address);
      auto connection = std::make_unique<Connection>();
      if (connection->open(local, give_up))
        return keep_local(std::move(connection), local, address, give_up, why);
    }
    auto connection = std::make_unique<Connection>();
    if (!connection->open(address, give_up)) {
      why = connection->error();
      return false;
    }
    // On loopback the server says that it demands the secret; elsewhere nothing is said without it. One of
    // TCP that demands none is not ours.
    sealed_ = !address.is_loopback();
    Connection::Outcome outcome = Connection::Outcome::secret_demanded;
    if (!sealed_) outcome = connection->greet(nullptr, give_up);
    if (outcome == Connection::Outcome::ok) outcome = Connection::Outcome::foreign;
    if (outcome == Connection::Outcome::secret_demanded && !secret.empty()) {
      sealed_ = true;
      if (!key_) key_ = key_of_secret(secret);
      outcome = connection->greet(&*key_, give_up);
    }
    switch (outcome) {
      case Connection::Outcome::ok:
        address_ = address;
        name_ = address.text();
        idle_.push_back(std::move(connection));
        return true;
      case Connection::Outcome::foreign:
        why = fmt::format("what listens on {} is not a weft store", address.text());
        if (only) throw Error(ErrorCode::system, "store: " + why);
        return false;
      case Connection::Outcome::secret_demanded:
        throw Error(
            ErrorCode::bad_argument,
            fmt::format("store: the server at {} demands a secret; expected it in a file of mode 0600 "
                        "(WEFT_STORE_SECRET_FILE) or in WEFT_STORE_SECRET",
                        address.text()));
      case Connection::Outcome::wrong_secret: throw wrong_secret(address.text());
      case Connection::Outcome::silent: why = "what listens there does not answer"; return false;
      case Connection::Outcome::closed: note_closed(*connection, why); return false;  // it ends, or is full
    }
    return false;
  }

  /// The same, where something listens on the Unix socket of an address.
  bool keep_local(std::unique_ptr<Connection> connection, const SocketAddress& local,
                  const SocketAddress& address, Deadline give_up, std::string& why) {
    if (!connection->is_own_users())
      throw Error(ErrorCode::system,
                  fmt::format("store: the server at {} is {}; expected user {}, as this process",
                              address.text(), shown(connection->server()), ::geteuid()));
    switch (connection->greet(nullptr, give_up)) {
      case Connection::Outcome::ok: break;
      case Connection::Outcome::silent: why = "what listens there does not answer"; return false;
      case Connection::Outcome::closed: note_closed(*connection, why); return false;  // it ends, or is full
      case Connection::Outcome::foreign:
      case Connection::Outcome::secret_demanded:
      case Connection::Outcome::wrong_secret:
        throw Error(ErrorCode::system, fmt::format("store: what listens on {} is not a weft store ({})",
                                                   address.text(), shown(connection->server())));
    }
    sealed_ = false;
    address_ = local;
    name_ = address.text();
    idle_.push_back(std::move(connection));
    return true;
  }

  /// One that is full may have room again, when strangers have left.
  void note_closed(const Connection& connection, std::string& why) {
    why = connection.error();
    if (!connection.is_full()) {
      full_.reset();
      return;
    }
    full_why_ = why;  // it may be gone at the next attempt
    if (!full_) full_ = Deadline::after(kFullPatience);
  }

  static Error wrong_secret(std::string_view where) {
    return Error(
        ErrorCode::mismatch,
        fmt::format("store: the server at {} has another secret than this process, or none; expected "
                    "the same one on all hosts (WEFT_STORE_SECRET_FILE, WEFT_STORE_SECRET)",
                    where));
  }

  /// A request that is answered at once.
  Reply call(Kind kind, std::string_view key, Deadline deadline, std::string_view value = {},
             std::string_view extra = {}, std::int64_t number = 0) {
    const Duration limit = std::min(kAnswerLimit, deadline.left());
    Reply reply;
    if (try_call(kind, key, value, extra, number, Deadline::after(limit), reply)) return reply;
    const std::string why = fmt::format("it did not answer within {}", shown_duration(limit));
    if (limit == kAnswerLimit) throw lost(key, why);
    throw Error(ErrorCode::timeout,
                fmt::format("store: key {}: the server at {}: {}", shown_key(key), name_, why));
  }

  /// False: no answer until `give_up`. The connection is used again only after a whole answer.
  bool try_call(Kind kind, std::string_view key, std::string_view value, std::string_view extra,
                std::int64_t number, Deadline give_up, Reply& reply) {
    std::unique_ptr<Connection> connection = take(key, give_up);
    if (connection == nullptr) return false;
    switch (connection->exchange(kind, key, value, extra, number, give_up, reply)) {
      case Connection::Outcome::ok: break;
      case Connection::Outcome::silent: return false;
      case Connection::Outcome::closed: throw lost(key, connection->error());
      case Connection::Outcome::foreign:
      case Connection::Outcome::secret_demanded:
      case Connection::Outcome::wrong_secret: throw lost(key, "it sent what is not an answer");
    }
    {
      const std::lock_guard lock(mutex_);
      idle_.push_back(std::move(connection));
    }
    if (reply.kind == Kind::refused) throw Error(static_cast<ErrorCode>(reply.number), reply.value);
    return true;
  }

  /// Null: there was none until `give_up`.
  std::unique_ptr<Connection> take(std::string_view key, Deadline give_up) {
    {
      const std::lock_guard lock(mutex_);
      if (!idle_.empty()) {
        auto connection = std::move(idle_.back());
        idle_.pop_back();
        return connection;
      }
    }
    const Deadline answer = Deadline::after(kAnswerLimit);
    const Deadline limit = give_up.when() < answer.when() ? give_up : answer;
    for (auto pause = std::chrono::milliseconds(5);; pause *= 2) {
      auto connection = std::make_unique<Connection>();
      if (!connection->open(address_, limit)) {
        if (give_up.passed()) return nullptr;
        throw lost(key, connection->error());
      }
      if (address_.family() == AF_UNIX && !connection->is_own_users())
        throw lost(key, "another server is there now");
      switch (connection->greet(sealed_ ? &*key_ : nullptr, limit)) {
        case Connection::Outcome::ok: return connection;
        case Connection::Outcome::silent:
          if (give_up.passed()) return nullptr;
          throw lost(key, fmt::format("it did not answer within {}", shown_duration(kAnswerLimit)));
        case Connection::Outcome::closed:
          // Before it was known it may have been closed in favour of others, in a crowd of strangers.
          if (pause > std::chrono::seconds(1) && connection->is_full())
            throw Error(ErrorCode::system, fmt::format("store: key {}: the server at {}: {}", shown_key(key),
                                                       name_, connection->error()));
          if (pause > std::chrono::seconds(1)) throw lost(key, connection->error());
          if (give_up.passed()) return nullptr;
          sleep_noticing(std::min<Duration>(pause, give_up.left()));
          continue;
        case Connection::Outcome::foreign:
        case Connection::Outcome::secret_demanded:
        case Connection::Outcome::wrong_secret: throw lost(key, "another server is there now");
      }
    }
  }

  Error lost(std::string_view key, std::string_view why) const {
    return Error(ErrorCode::peer_lost,
                 fmt::format("store: key {}: the server at {} is gone ({})", shown_key(key), name_, why));
  }

  std::string full_why_;
  std::optional<Deadline> full_;  // how long one that has no more room is tried again
  SocketAddress address_;         // that answered
  std::string name_;
  std::optional<KeyBytes> key_;  // of the secret, where it was needed
  bool sealed_ = false;          // connections prove that they know it
  std::mutex mutex_;
  std::vector<std::unique_ptr<Connection>> idle_;  // as many as calls were in flight at once
};

}  // namespace

std::shared_ptr<Store> make_tcp_store(std::string_view host, std::uint16_t port, Deadline deadline,
                                      std::string_view secret) {
  return std::make_shared<TcpStore>(host, port, deadline, secret);
}

}  // namespace weft
