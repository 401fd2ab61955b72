// The TCP store. The server's thread owns all of its state; a client takes a connection of its own for each
// call in flight, so that a get that waits holds up nobody.
//
// A frame is a FrameHeader (24 bytes, little-endian) and then key, value and extra, as long as the header
// says. A client sends one request and reads one reply before it sends the next. The server answers at once,
// but for a get of an absent key: it parks that connection until some request sets the key or the time the
// get gave has passed.
#include "weft/backends/store_tcp.hpp"

#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "backends/address.hpp"
#include "backends/store_table.hpp"
#include "base/memfd.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

static_assert(std::endian::native == std::endian::little, "frames are written as they lie in memory");

constexpr std::uint32_t kMagic = 0x53544657;  // "WFTS"
constexpr std::uint8_t kVersion = 1;

enum class Kind : std::uint8_t {
  // requests
  get = 1,  // number: nanoseconds to wait, kForever: no limit
  try_get,
  set,
  add,          // number: the delta
  compare_set,  // value: expected, extra: desired
  remove,
  // replies
  found = 64,  // value, or for add: number
  absent,
  timed_out,
  refused,  // value: the text of a bad_argument
};

struct FrameHeader {
  std::uint32_t magic = kMagic;
  std::uint8_t version = kVersion;
  Kind kind = Kind::found;
  std::uint16_t key_bytes = 0;
  std::uint32_t value_bytes = 0;
  std::uint32_t extra_bytes = 0;
  std::int64_t number = 0;
};
static_assert(sizeof(FrameHeader) == 24);

constexpr std::int64_t kForever = -1;
constexpr Duration kLongest = std::chrono::hours(24 * 365);  // longer waits count as this
constexpr Duration kAnswerLimit = std::chrono::seconds(30);  // for what the server answers at once
constexpr Duration kGrace =
    std::chrono::milliseconds(500);                   // for the server's word that a get's time has passed
constexpr std::string_view kHelloKey = "weft/hello";  // asked for once per client; never set

std::string make_frame(Kind kind, std::string_view key, std::string_view value, std::string_view extra,
                       std::int64_t number) {
  const FrameHeader header{.kind = kind,
                           .key_bytes = static_cast<std::uint16_t>(key.size()),
                           .value_bytes = static_cast<std::uint32_t>(value.size()),
                           .extra_bytes = static_cast<std::uint32_t>(extra.size()),
                           .number = number};
  std::string frame(reinterpret_cast<const char*>(&header), sizeof header);
  frame.append(key).append(value).append(extra);
  return frame;
}

std::string errno_words(int error_number) { return std::generic_category().message(error_number); }

void send_without_delay(int fd) {
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);  // only speed depends on it
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
  SocketAddress address;
};

/// Listens on the first address of the host that this machine has. `elsewhere`: whether an address that is
/// not this machine's, or a port that is taken, gives no socket rather than an Error.
Listening listen_on(const TcpStoreOptions& options, bool elsewhere) {
  std::string why;
  const std::vector<SocketAddress> all = resolve_loopback(options.host, options.port, why);
  if (all.empty()) throw Error(ErrorCode::system, fmt::format("store server: {}", why));
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
    Descriptor fd;
    std::string name;      // "127.0.0.1:51234"
    std::string in;        // received, not yet a whole frame
    std::string out;       // to be sent
    bool waiting = false;  // parked in a get of `key` until `give_up`
    std::string key;
    Clock::time_point give_up;
    bool gone = false;  // to be removed at the end of the round
  };

  Impl(Logger& logger, TcpStoreOptions opts, Listening listening)
      : log(logger),
        options(std::move(opts)),
        address(listening.address),
        listener(std::move(listening.socket)) {
    wake = Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!wake) throw_errno("store server: eventfd", errno);
    thread = std::thread([this] {
      try {
        serve();
      } catch (const std::exception& e) {  // out of memory; clients find their connections closed
        log.write(LogLevel::error, fmt::format("store server: ends: {}", e.what()));
        clients.clear();
        listener = Descriptor();
      }
    });
  }

  ~Impl() {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(wake.get(), &one, sizeof one);
    thread.join();
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
      Clock::time_point next = stop_at;
      if (Clock::now() < accept_again) next = std::min(next, accept_again);
      for (const auto& c : clients) {
        // Nothing is read from a client whose request has no full answer yet; only its leaving is noticed.
        const int events = !c->out.empty() ? POLLOUT : c->waiting ? POLLRDHUP : POLLIN;
        polled.push_back({c->fd.get(), static_cast<short>(events), 0});
        if (c->waiting) next = std::min(next, c->give_up);
      }
      if (::poll(polled.data(), polled.size(), poll_timeout(next)) < 0 && errno != EINTR) {
        throw_errno("store server: poll", errno);
      }
      if (polled[0].revents != 0) {
        stopping = true;
        stop_at = Clock::now() + options.linger;
      }
      for (std::size_t i = 0; i < clients.size(); ++i) {
        Client& c = *clients[i];
        const short happened = polled[i + 2].revents;
        if (happened == 0) continue;
        if (!c.out.empty()) {
          flush(c);
        } else if (c.waiting) {
          c.gone = true;
        } else {
          receive(c);
        }
      }
      expire_waits();
      std::erase_if(clients, [](const auto& c) { return c->gone; });
      if (polled[1].revents != 0) accept_all();
    }
  }

  void accept_all() {
    for (;;) {
      SocketAddress from;
      Descriptor fd(::accept4(listener.get(), from.data(), &from.length, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!fd) {
        if (errno == EINTR || errno == ECONNABORTED) continue;
        if (errno !=
            EAGAIN) {  // out of descriptors: look again later, rather than spin on the ready listener
          log.write(LogLevel::warning, fmt::format("store server: accept: {}", errno_words(errno)));
          accept_again = Clock::now() + std::chrono::seconds(1);
        }
        return;
      }
      if (clients.size() >= options.max_clients) {
        log.write(LogLevel::warning, fmt::format("store server: closed {}: there are {} clients already",
                                                 from.text(), clients.size()));
        continue;
      }
      send_without_delay(fd.get());
      auto client = std::make_unique<Client>();
      client->fd = std::move(fd);
      client->name = from.text();
      clients.push_back(std::move(client));
    }
  }

  void receive(Client& c) {
    char buffer[64 * 1024];
    const ssize_t got = ::recv(c.fd.get(), buffer, sizeof buffer, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) {
      if (!c.in.empty())
        return close_bad(c, fmt::format("it left within a frame, after {} bytes", c.in.size()));
      c.gone = true;
      return;
    }
    c.in.append(buffer, static_cast<std::size_t>(got));
    take_frame(c);
  }

  /// One warning, and the connection ends.
  void close_bad(Client& c, std::string_view why) {
    log.write(LogLevel::warning, fmt::format("store server: closed {}: {}", c.name, why));
    c.gone = true;
  }

  // Handles the frame at the front of c.in once it is whole; looks at each field as soon as it is there.
  void take_frame(Client& c) {
    const FrameHeader ours;
    if (std::memcmp(c.in.data(), &ours.magic, std::min(c.in.size(), sizeof ours.magic)) != 0) {
      return close_bad(c, fmt::format("it does not speak this protocol (it sent {})", shown_key(c.in)));
    }
    if (c.in.size() < sizeof(FrameHeader)) return;
    FrameHeader header;
    std::memcpy(static_cast<void*>(&header), c.in.data(), sizeof header);
    if (header.version != kVersion) {
      return close_bad(
          c, fmt::format("it speaks version {} of the protocol; expected {}", header.version, kVersion));
    }
    if (header.kind < Kind::get || header.kind > Kind::remove) {
      return close_bad(c, fmt::format("it sent a request of unknown kind {}", static_cast<int>(header.kind)));
    }
    if (header.key_bytes == 0 || header.key_bytes > kMaxStoreKeyBytes ||
        header.value_bytes > kMaxStoreValueBytes || header.extra_bytes > kMaxStoreValueBytes) {
      return close_bad(c,
                       fmt::format("it announced a frame beyond the limits (key {} bytes, values {} and {})",
                                   header.key_bytes, header.value_bytes, header.extra_bytes));
    }
    const std::size_t bytes = sizeof header + header.key_bytes + header.value_bytes + header.extra_bytes;
    if (c.in.size() < bytes) return;
    if (c.in.size() > bytes) return close_bad(c, "it sent a second request before the first was answered");
    const std::string frame = std::exchange(c.in, {});
    const std::string_view key(frame.data() + sizeof header, header.key_bytes);
    const std::string_view value(key.data() + key.size(), header.value_bytes);
    const std::string_view extra(value.data() + value.size(), header.extra_bytes);
    try {
      answer(c, header, key, value, extra);
    } catch (const Error& e) {
      reply(c, Kind::refused, e.what());
    }
  }

  void answer(Client& c, const FrameHeader& request, std::string_view key, std::string_view value,
              std::string_view extra) {
    switch (request.kind) {
      case Kind::get:
        if (const std::string* held = table.find(key)) return reply(c, Kind::found, *held);
        c.waiting = true;
        c.key = key;
        c.give_up = request.number == kForever
                        ? Clock::time_point::max()
                        : Clock::now() + std::clamp(Duration(request.number), Duration::zero(), kLongest);
        return;
      case Kind::try_get: {
        const std::string* const held = table.find(key);
        return held ? reply(c, Kind::found, *held) : reply(c, Kind::absent, {});
      }
      case Kind::set:
        table.set(key, value);
        reply(c, Kind::found, {});
        return wake_waiters(key);
      case Kind::add: {
        const std::int64_t sum = table.add(key, request.number);
        reply(c, Kind::found, {}, sum);
        return wake_waiters(key);
      }
      case Kind::compare_set:
        reply(c, Kind::found, table.compare_set(key, value, extra));
        return wake_waiters(key);
      case Kind::remove: table.remove(key); return reply(c, Kind::found, {});
      case Kind::found:
      case Kind::absent:
      case Kind::timed_out:
      case Kind::refused: return;  // take_frame lets only requests through
    }
  }

  void wake_waiters(std::string_view key) {
    const std::string* const value = table.find(key);
    if (value == nullptr) return;
    for (const auto& c : clients) {
      if (c->waiting && c->key == key) reply(*c, Kind::found, *value);
    }
  }

  void expire_waits() {
    const auto now = Clock::now();
    for (const auto& c : clients) {
      if (c->waiting && c->give_up <= now) reply(*c, Kind::timed_out, {});
    }
  }

  void reply(Client& c, Kind kind, std::string_view value, std::int64_t number = 0) {
    c.waiting = false;
    c.out = make_frame(kind, {}, value, {}, number);
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
  }

  Logger& log;
  const TcpStoreOptions options;
  SocketAddress address;
  Descriptor listener;
  Descriptor wake;
  // The thread's own.
  std::vector<std::unique_ptr<Client>> clients;
  StoreTable table;
  Clock::time_point accept_again{};
  std::thread thread;
};

TcpStoreServer::TcpStoreServer(Logger& log, TcpStoreOptions options) {
  Listening listening = listen_on(options, false);
  impl_ = std::make_unique<Impl>(log, std::move(options), std::move(listening));
}
TcpStoreServer::TcpStoreServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TcpStoreServer::~TcpStoreServer() = default;

std::unique_ptr<TcpStoreServer> TcpStoreServer::try_serve(Logger& log, TcpStoreOptions options) {
  Listening listening = listen_on(options, true);
  if (!listening.socket) return nullptr;
  return std::unique_ptr<TcpStoreServer>(
      new TcpStoreServer(std::make_unique<Impl>(log, std::move(options), std::move(listening))));
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

/// One connection. Used by one thread at a time; after a failure it is thrown away.
class Connection {
 public:
  enum class Outcome : std::uint8_t { ok, closed, silent, foreign };

  /// Connects; false: error() says why not.
  bool open(const SocketAddress& to, Clock::time_point give_up) {
    fd_ = Descriptor(::socket(to.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!fd_ && errno == EAFNOSUPPORT) return failed(errno);
    if (!fd_) throw_errno("store: socket", errno);
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
    send_without_delay(fd_.get());
    return true;
  }

  Outcome exchange(std::string_view request, Clock::time_point give_up, Reply& reply) {
    while (!request.empty()) {
      const ssize_t sent = ::send(fd_.get(), request.data(), request.size(), MSG_NOSIGNAL);
      if (sent >= 0) {
        request.remove_prefix(static_cast<std::size_t>(sent));
      } else if (errno == EAGAIN) {
        if (!ready(POLLOUT, give_up)) return Outcome::silent;
      } else if (errno != EINTR) {
        error_ = errno_words(errno);
        return Outcome::closed;
      }
    }
    FrameHeader header;
    if (const Outcome o = receive(reinterpret_cast<char*>(&header), sizeof header, give_up); o != Outcome::ok)
      return o;
    if (header.magic != kMagic || header.version != kVersion || header.kind < Kind::found ||
        header.kind > Kind::refused || header.value_bytes > kMaxStoreValueBytes || header.key_bytes != 0 ||
        header.extra_bytes != 0) {
      return Outcome::foreign;
    }
    reply.kind = header.kind;
    reply.number = header.number;
    reply.value.resize(header.value_bytes);
    return receive(reply.value.data(), reply.value.size(), give_up);
  }

  const std::string& error() const { return error_; }

 private:
  Outcome receive(char* to, std::size_t bytes, Clock::time_point give_up) {
    while (bytes > 0) {
      const ssize_t got = ::recv(fd_.get(), to, bytes, 0);
      if (got > 0) {
        to += got;
        bytes -= static_cast<std::size_t>(got);
      } else if (got < 0 && errno == EAGAIN) {
        if (!ready(POLLIN, give_up)) return Outcome::silent;
      } else if (got == 0 || errno != EINTR) {
        error_ = got == 0 ? "it closed the connection" : errno_words(errno);
        return Outcome::closed;
      }
    }
    return Outcome::ok;
  }

  /// False: `give_up` came first.
  bool ready(short events, Clock::time_point give_up) {
    for (;;) {
      pollfd p{fd_.get(), events, 0};
      const int n = ::poll(&p, 1, poll_timeout(give_up));
      if (n > 0) return true;
      if (n < 0 && errno != EINTR) throw_errno("store: poll", errno);
      if (Clock::now() >= give_up) return false;
    }
  }

  bool failed(int error_number) {
    error_ = errno_words(error_number);
    return false;
  }

  Descriptor fd_;
  std::string error_;
};

class TcpStore final : public Store {
 public:
  TcpStore(std::string_view host, std::uint16_t port, Deadline deadline) {
    const Duration limit = deadline.left();
    std::vector<SocketAddress> addresses;
    auto pause = std::chrono::milliseconds(5);
    for (;;) {
      std::string why;
      if (addresses.empty()) addresses = resolve_loopback(host, port, why);
      for (const SocketAddress& address : addresses)
        if (reach(address, addresses.size() == 1, deadline, why)) return;
      if (deadline.passed()) {
        throw Error(ErrorCode::timeout, fmt::format("store: no server at {} within {} ({})",
                                                    shown_host_port(host, port), shown_duration(limit), why));
      }
      std::this_thread::sleep_for(std::min<Duration>(pause, deadline.left()));
      pause = std::min(2 * pause, std::chrono::milliseconds(200));
    }
  }

  void set(std::string_view key, std::string_view value) override {
    check_store_key(key);
    check_store_value(key, value);
    call(Kind::set, key, value);
  }

  std::string get(std::string_view key, Deadline deadline) override {
    check_store_key(key);
    const bool forever = deadline.when() == Clock::time_point::max();
    const Duration limit = deadline.left();
    const auto give_up =
        forever ? Clock::time_point::max() : Clock::now() + std::min(limit, kLongest) + kGrace;
    Reply reply;
    if (!try_call(make_frame(Kind::get, key, {}, {}, forever ? kForever : limit.count()), key, give_up,
                  reply)) {
      throw Error(ErrorCode::timeout,
                  fmt::format("{} (the server at {} does not answer)", timeout_text(key, limit), name_));
    }
    if (reply.kind == Kind::timed_out) throw Error(ErrorCode::timeout, timeout_text(key, limit));
    return std::move(reply.value);
  }

  std::optional<std::string> try_get(std::string_view key) override {
    check_store_key(key);
    Reply reply = call(Kind::try_get, key);
    return reply.kind == Kind::absent ? std::nullopt : std::optional(std::move(reply.value));
  }

  std::int64_t add(std::string_view key, std::int64_t delta) override {
    check_store_key(key);
    return call(Kind::add, key, {}, {}, delta).number;
  }

  std::string compare_set(std::string_view key, std::string_view expected,
                          std::string_view desired) override {
    check_store_key(key);
    check_store_value(key, expected);
    check_store_value(key, desired);
    return call(Kind::compare_set, key, expected, desired).value;
  }

  void remove(std::string_view key) override {
    check_store_key(key);
    call(Kind::remove, key);
  }

 private:
  /// True where our server is there: a request whose answer does not matter shows it. One of several
  /// addresses gets two seconds, so that what is silent there does not hide the others.
  bool reach(const SocketAddress& address, bool only, Deadline deadline, std::string& why) {
    const auto give_up =
        only ? deadline.when() : std::min(deadline.when(), Clock::now() + std::chrono::seconds(2));
    auto connection = std::make_unique<Connection>();
    if (!connection->open(address, give_up)) {
      why = connection->error();
      return false;
    }
    Reply reply;
    switch (connection->exchange(make_frame(Kind::try_get, kHelloKey, {}, {}, 0), give_up, reply)) {
      case Connection::Outcome::ok:
        address_ = address;
        name_ = address.text();
        idle_.push_back(std::move(connection));
        return true;
      case Connection::Outcome::foreign:
        why = fmt::format("what listens on {} is not a weft store", address.text());
        if (only) throw Error(ErrorCode::system, "store: " + why);
        return false;
      case Connection::Outcome::silent: why = "what listens there does not answer"; return false;
      case Connection::Outcome::closed: why = connection->error(); return false;  // it ends, or is full
    }
    return false;
  }

  /// A request that is answered at once.
  Reply call(Kind kind, std::string_view key, std::string_view value = {}, std::string_view extra = {},
             std::int64_t number = 0) {
    Reply reply;
    if (!try_call(make_frame(kind, key, value, extra, number), key, Clock::now() + kAnswerLimit, reply)) {
      throw lost(key, fmt::format("it did not answer within {}", shown_duration(kAnswerLimit)));
    }
    return reply;
  }

  /// False: no answer until `give_up`. The connection is used again only after a whole answer.
  bool try_call(std::string_view request, std::string_view key, Clock::time_point give_up, Reply& reply) {
    std::unique_ptr<Connection> connection = take(key);
    switch (connection->exchange(request, give_up, reply)) {
      case Connection::Outcome::ok: break;
      case Connection::Outcome::silent: return false;
      case Connection::Outcome::closed: throw lost(key, connection->error());
      case Connection::Outcome::foreign: throw lost(key, "it sent what is not an answer");
    }
    {
      const std::lock_guard lock(mutex_);
      idle_.push_back(std::move(connection));
    }
    if (reply.kind == Kind::refused) throw Error(ErrorCode::bad_argument, reply.value);
    return true;
  }

  std::unique_ptr<Connection> take(std::string_view key) {
    {
      const std::lock_guard lock(mutex_);
      if (!idle_.empty()) {
        auto connection = std::move(idle_.back());
        idle_.pop_back();
        return connection;
      }
    }
    auto connection = std::make_unique<Connection>();
    if (!connection->open(address_, Clock::now() + kAnswerLimit)) throw lost(key, connection->error());
    return connection;
  }

  Error lost(std::string_view key, std::string_view why) const {
    return Error(ErrorCode::peer_lost,
                 fmt::format("store: key {}: the server at {} is gone ({})", shown_key(key), name_, why));
  }

  SocketAddress address_;  // that answered
  std::string name_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Connection>> idle_;  // as many as calls were in flight at once
};

}  // namespace

std::shared_ptr<Store> make_tcp_store(std::string_view host, std::uint16_t port, Deadline deadline) {
  return std::make_shared<TcpStore>(host, port, deadline);
}

}  // namespace weft
