// The server of the TCP store. Its thread owns all of its state.
//
// wire.hpp defines the format on a connection. seal.hpp defines the sealing, if a secret is needed.
// session.hpp has the server's state of one connection. The server answers every request at once, except for
// a get of an absent key. It parks that connection until a request sets the key, or until the time of the get
// has passed.
#include <fmt/format.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/memfd.hpp"
#include "base/signals.hpp"
#include "host/dependents.hpp"
#include "host/peers/descriptor_socket.hpp"
#include "host/warnings.hpp"
#include "store/duration_text.hpp"
#include "store/table.hpp"
#include "store/tcp/session.hpp"
#include "store/tcp/sockets.hpp"
#include "weft/base/error.hpp"
#include "weft/host/context.hpp"
#include "weft/store/tcp.hpp"

namespace weft {
namespace {

/// poll(2)'s timeout for a wait until `when`. It is rounded up, so that a loop does not spin during the last
/// millisecond.
int poll_timeout(Clock::time_point when) {
  if (when == Clock::time_point::max()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(when - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 3'600'000));
}

}  // namespace

struct TcpStoreServer::Impl {
  struct Client {
    Client(Descriptor socket, std::string shown, const KeyBytes* secret)
        : fd(std::move(socket)), name(std::move(shown)), session(secret) {}
    // A forked child may hold a copy, so close() alone would not end the connection.
    ~Client() { ::shutdown(fd.get(), SHUT_RDWR); }
    Client(const Client&) = delete;
    Client& operator=(const Client&) = delete;

    Descriptor fd;
    std::string name;  // "10.1.0.7:51234" or "process 4711"
    StoreSession session;
    Clock::time_point since = Clock::now();
    std::string out;       // to be sent
    bool waiting = false;  // the client is parked in a get of `key` until `give_up`
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
      } catch (const std::exception& e) {  // out of memory; the clients see that their connections end
        say_end(e.what());
      }
      clients.clear();
      ::shutdown(listener.get(), SHUT_RDWR);  // a forked child may hold a copy
      listener = Descriptor();
    });
  }

  ~Impl() {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(wake.get(), &one, sizeof one);
    thread.join();
  }

  void say_end(std::string_view why) noexcept try {
    log.write(LogLayer::store, LogLevel::error, fmt::format("store server: ends: {}", why));
  } catch (const std::bad_alloc&) {  // no memory even for the warning
  }

  // Serves until the destructor wakes it, and then until the last client has left or `linger` has passed.
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
        // The server reads nothing from a client until the client's request is fully answered. It only
        // notices if the client leaves.
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

  // Accepts a few clients at a time, so that it answers the present clients before more clients arrive.
  void accept_some() {
    for (int i = 0; i < 64; ++i) {
      SocketAddress from;
      Descriptor fd(::accept4(listener.get(), from.data(), &from.length, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!fd) {
        if (errno == EINTR || errno == ECONNABORTED) continue;
        if (errno == EAGAIN) return;
        const int error_number = errno;
        pollfd waiting{listener.get(), POLLIN, 0};
        if (::poll(&waiting, 1, 0) == 0)
          return;  // accept() needs a descriptor even if there is no connection
        // Perhaps there are no more descriptors: then the server first closes connections of unauthenticated
        // clients.
        const std::string why = system_words(error_number);
        if (close_oldest_unauthenticated("there are too few descriptors for it: " + why, full_text(why)))
          continue;
        if (refuse_next(full_text(why))) continue;
        // Tries again later, because the listener stays ready and poll() would spin.
        warnings.write(fmt::format("store server: accept: {}", system_words(error_number)));
        accept_again = Clock::now() + std::chrono::seconds(1);
        return;
      }
      const std::string name = name_of(fd.get(), from);
      if (name.empty()) continue;
      const auto unauthenticated = static_cast<std::size_t>(std::count_if(
          clients.begin(), clients.end(), [](const auto& c) { return c->is_unauthenticated(); }));
      if (unauthenticated >= options.max_unauthenticated)
        close_oldest_unauthenticated(
            fmt::format("it was the oldest of {} that have not joined", unauthenticated));
      if (clients.size() >= options.max_clients &&
          !close_oldest_unauthenticated(
              fmt::format("there are {} clients, and it has not joined", clients.size()))) {
        warnings.write(
            fmt::format("store server: closed {}: there are {} clients already", name, clients.size()));
        continue;
      }
      if (secret) set_tcp_options(fd.get());
      clients.push_back(std::make_unique<Client>(std::move(fd), name, secret ? &*secret : nullptr));
    }
  }

  /// Returns the name of a new connection for warnings. Returns "" if the connection came over the Unix
  /// socket from a process of another user. It must then be closed.
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

  /// `told`: bytes to send to the client first, or nothing.
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

  /// Sends the next client the reason why it is refused. If the server had no free descriptor to accept that
  /// client, the client would wait until its deadline. So the server keeps a spare descriptor. Returns false
  /// if the answer could not be sent.
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
        flush(c);  // sends as much as the system takes at once
        return close_bad(c, result.why);
    }
  }

  /// Writes one warning, and ends the connection.
  void close_bad(Client& c, std::string_view why) {
    warnings.write(fmt::format("store server: closed {}: {}", c.name, why));
    c.gone = true;
  }

  // The server keeps a limited number of bytes of incomplete requests and of answers that clients do not
  // read. It closes the connection of a client that exceeds the limit.
  void check_unanswered(Client& c) {
    if (c.session.unread() + c.out.size() < 4096) return;  // small amounts cannot add up to much
    std::size_t all = 0;
    for (const auto& other : clients) all += other->session.unread() + other->out.size();
    if (all > options.max_unanswered)
      close_bad(c, fmt::format("{} bytes of requests and answers are in progress; at most {} are allowed",
                               all, options.max_unanswered));
  }

  void answer(Client& c, const StoreFrame& request) {
    const std::string_view key = request.key;
    switch (request.kind) {
      case FrameKind::get:
        if (const std::string* held = table.find(key)) return reply(c, found(*held));
        c.waiting = true;
        c.key = key;
        c.give_up =
            request.number == kForever
                ? Clock::time_point::max()
                : Clock::now() + std::clamp(Duration(request.number), Duration::zero(), kLongestStoreWait);
        return;
      case FrameKind::try_get: {
        const std::string* const held = table.find(key);
        return reply(c, held ? found(*held) : make_frame(FrameKind::absent, {}, {}));
      }
      case FrameKind::set:
        table.set(key, request.value);
        reply(c, found({}));
        return wake_waiters(key);
      case FrameKind::add: {
        const std::int64_t sum = table.add(key, request.number);
        reply(c, found({}, sum));
        return wake_waiters(key);
      }
      case FrameKind::compare_set:
        reply(c, found(table.compare_set(key, request.value, request.extra)));
        return wake_waiters(key);
      case FrameKind::remove: table.remove(key); return reply(c, found({}));
      case FrameKind::join:
      case FrameKind::prove:
      case FrameKind::found:
      case FrameKind::absent:
      case FrameKind::timed_out:
      case FrameKind::refused:
      case FrameKind::challenge:
      case FrameKind::welcome:
      case FrameKind::secret_demanded:
      case FrameKind::wrong_proof: return;  // a session returns only requests
    }
  }

  static std::string found(std::string_view value, std::int64_t number = 0) {
    return make_frame(FrameKind::found, {}, value, {}, number);
  }

  void wake_waiters(std::string_view key) {
    const std::string* const value = table.find(key);
    if (value == nullptr) return;
    for (const auto& c : clients) {
      if (c->waiting && c->key == key) reply(*c, found(*value));
    }
  }

  /// Ends waits whose time is over, and connections that did not authenticate in time.
  void expire(bool stopping) {
    const auto now = Clock::now();
    for (const auto& c : clients) {
      if (c->waiting && c->give_up <= now) reply(*c, make_frame(FrameKind::timed_out, {}, {}));
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
    std::string().swap(c.out);  // an idle client uses no memory
  }

  void list_in(Context& context) {
    listed.emplace(context, fmt::format("the store server at {}", address.text()));
  }

  std::optional<Dependents::Entry> listed;
  Logger& log;
  const TcpStoreOptions options;
  const std::optional<KeyBytes> secret;  // nothing if the listener is a Unix socket
  const uid_t user = ::geteuid();
  const pid_t process = ::getpid();
  SocketAddress address;
  Descriptor listener;
  Descriptor wake;
  Descriptor spare;  // a spare descriptor of any kind; see refuse_next()
  // Only the thread uses these members.
  std::vector<std::unique_ptr<Client>> clients;  // in the order of their arrival
  StoreTable table{{.keys = options.max_keys, .bytes = options.max_bytes}};
  // not on the stack, which may be as small as 64 KiB
  std::vector<char> buffer = std::vector<char>(64 * 1024);
  Warnings warnings{log, LogLayer::store, "store server"};
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
TcpStoreServer::TcpStoreServer(Context& context, TcpStoreOptions options)
    : TcpStoreServer(context.log(), std::move(options)) {
  impl_->list_in(context);
}
TcpStoreServer::TcpStoreServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TcpStoreServer::~TcpStoreServer() {
  // A forked child has no such thread. Without this check it would wake and end the parent's thread.
  if (impl_ && impl_->process != ::getpid()) static_cast<void>(impl_.release());
}

std::unique_ptr<TcpStoreServer> TcpStoreServer::try_serve(Logger& log, TcpStoreOptions options) {
  auto key = key_of(options);
  Listening listening = listen_on(options, true);
  if (!listening.socket) return nullptr;
  return std::unique_ptr<TcpStoreServer>(new TcpStoreServer(
      std::make_unique<Impl>(log, std::move(options), std::move(listening), std::move(key))));
}

std::unique_ptr<TcpStoreServer> TcpStoreServer::try_serve(Context& context, TcpStoreOptions options) {
  std::unique_ptr<TcpStoreServer> server = try_serve(context.log(), std::move(options));
  if (server) server->impl_->list_in(context);
  return server;
}

std::uint16_t TcpStoreServer::port() const noexcept { return impl_->address.port(); }
std::string TcpStoreServer::address() const { return impl_->address.text(); }

}  // namespace weft
