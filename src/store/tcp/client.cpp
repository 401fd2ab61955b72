// The client of the TCP store. It uses a separate connection for each call in flight, so that a waiting get
// does not delay other calls.
#include <fmt/format.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/waits/suspension.hpp"
#include "store/duration_text.hpp"
#include "store/maker_process.hpp"
#include "store/table.hpp"
#include "store/tcp/connection.hpp"
#include "store/tcp/sockets.hpp"
#include "weft/base/error.hpp"
#include "weft/store/tcp.hpp"

namespace weft {
namespace {

using Outcome = StoreConnection::Outcome;

constexpr Duration kAnswerLimit = std::chrono::seconds(30);  // for requests that the server answers at once
// how long the client waits for a server that has no more descriptors
constexpr Duration kFullPatience = std::chrono::seconds(2);
// Additional time in which the server can report that the time of a get has passed.
constexpr Duration kGrace = std::chrono::milliseconds(500);

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
    call(FrameKind::set, key, deadline, value);
  }

  std::string get(std::string_view key, Deadline deadline) override {
    check_store_key(key);
    const bool forever = deadline.when() == Clock::time_point::max();
    const Duration limit = deadline.left();
    for (Duration left = limit;; left = deadline.left()) {
      const Deadline give_up =
          forever ? Deadline::never() : Deadline::after(std::min(left, kLongestStoreWait) + kGrace);
      StoreReply reply;
      if (!try_call(FrameKind::get, key, {}, {}, forever ? kForever : left.count(), give_up, reply)) {
        throw Error(ErrorCode::timeout,
                    fmt::format("{} (the server at {} does not answer)", timeout_text(key, limit), name_));
      }
      if (reply.kind != FrameKind::timed_out) return std::move(reply.value);
      // If this process was suspended, the server's clock went on. So the request is repeated if the deadline
      // has not passed.
      if (deadline.passed()) throw Error(ErrorCode::timeout, timeout_text(key, limit));
    }
  }

  std::optional<std::string> try_get(std::string_view key, Deadline deadline) override {
    check_store_key(key);
    StoreReply reply = call(FrameKind::try_get, key, deadline);
    return reply.kind == FrameKind::absent ? std::nullopt : std::optional(std::move(reply.value));
  }

  std::int64_t add(std::string_view key, std::int64_t delta, Deadline deadline) override {
    check_store_key(key);
    return call(FrameKind::add, key, deadline, {}, {}, delta).number;
  }

  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                          Deadline deadline) override {
    check_store_key(key);
    check_store_value(key, expected);
    check_store_value(key, desired);
    return call(FrameKind::compare_set, key, deadline, expected, desired).value;
  }

  void remove(std::string_view key, Deadline deadline) override {
    check_store_key(key);
    call(FrameKind::remove, key, deadline);
  }

 private:
  /// Tries one address. Returns true if the job's server answers there. If there are several addresses, the
  /// client tries each for two seconds, so that a silent address does not prevent the others.
  bool reach(const SocketAddress& address, bool only, std::string_view secret, Deadline deadline,
             std::string& why) {
    const Deadline soon = Deadline::after(std::chrono::seconds(2));
    const Deadline give_up = only || deadline.when() < soon.when() ? deadline : soon;
    if (address.is_loopback()) {
      const SocketAddress local = local_socket_of(address);
      auto connection = std::make_unique<StoreConnection>();
      if (connection->open(local, give_up))
        return keep_local(std::move(connection), local, address, give_up, why);
    }
    auto connection = std::make_unique<StoreConnection>();
    if (!connection->open(address, give_up)) {
      why = connection->error();
      return false;
    }
    // On loopback the client sends a request, and the server answers if it needs a secret. Off loopback the
    // client sends nothing before the handshake. (A server on TCP that needs no secret is no weft server.)
    sealed_ = !address.is_loopback();
    Outcome outcome = Outcome::secret_demanded;
    if (!sealed_) outcome = connection->greet(nullptr, give_up);
    if (outcome == Outcome::ok) outcome = Outcome::foreign;
    if (outcome == Outcome::secret_demanded && !secret.empty()) {
      sealed_ = true;
      if (!key_) key_ = key_of_secret(secret);
      outcome = connection->greet(&*key_, give_up);
    }
    switch (outcome) {
      case Outcome::ok:
        address_ = address;
        name_ = address.text();
        idle_.push_back(std::move(connection));
        return true;
      case Outcome::foreign:
        why = fmt::format("the process that listens on {} is not a weft store", address.text());
        if (only) throw Error(ErrorCode::system, "store: " + why);
        return false;
      case Outcome::secret_demanded:
        throw Error(
            ErrorCode::bad_argument,
            fmt::format("store: the server at {} requires a secret; expected it in a file of mode 0600 "
                        "(WEFT_STORE_SECRET_FILE) or in WEFT_STORE_SECRET",
                        address.text()));
      case Outcome::wrong_secret: throw wrong_secret(address.text());
      case Outcome::silent: why = "the process that listens there does not answer"; return false;
      case Outcome::closed: note_closed(*connection, why); return false;  // the server is ending, or full
    }
    return false;
  }

  /// Like keep(), for a connection to the Unix socket of a loopback address.
  bool keep_local(std::unique_ptr<StoreConnection> connection, const SocketAddress& local,
                  const SocketAddress& address, Deadline give_up, std::string& why) {
    if (!connection->is_own_users())
      throw Error(ErrorCode::system,
                  fmt::format("store: the server at {} is {}; expected user {}, as this process",
                              address.text(), shown(connection->server()), ::geteuid()));
    switch (connection->greet(nullptr, give_up)) {
      case Outcome::ok: break;
      case Outcome::silent: why = "the process that listens there does not answer"; return false;
      case Outcome::closed: note_closed(*connection, why); return false;  // the server is ending, or full
      case Outcome::foreign:
      case Outcome::secret_demanded:
      case Outcome::wrong_secret:
        throw Error(ErrorCode::system,
                    fmt::format("store: the process that listens on {} is not a weft store ({})",
                                address.text(), shown(connection->server())));
    }
    sealed_ = false;
    address_ = local;
    name_ = address.text();
    idle_.push_back(std::move(connection));
    return true;
  }

  /// A full server may have room again when unauthenticated clients have left.
  void note_closed(const StoreConnection& connection, std::string& why) {
    why = connection.error();
    if (!connection.is_full()) {
      full_.reset();
      return;
    }
    full_why_ = why;  // kept, because the next attempt may report something else
    if (!full_) full_ = Deadline::after(kFullPatience);
  }

  static Error wrong_secret(std::string_view where) {
    return Error(
        ErrorCode::mismatch,
        fmt::format("store: the server at {} has another secret than this process, or none; expected "
                    "the same one on all hosts (WEFT_STORE_SECRET_FILE, WEFT_STORE_SECRET)",
                    where));
  }

  /// Sends a request that the server answers at once.
  StoreReply call(FrameKind kind, std::string_view key, Deadline deadline, std::string_view value = {},
                  std::string_view extra = {}, std::int64_t number = 0) {
    const Duration limit = std::min(kAnswerLimit, deadline.left());
    StoreReply reply;
    if (try_call(kind, key, value, extra, number, Deadline::after(limit), reply)) return reply;
    const std::string why = fmt::format("it did not answer within {}", shown_duration(limit));
    if (limit == kAnswerLimit) throw lost(key, why);
    throw Error(ErrorCode::timeout,
                fmt::format("store: key {}: the server at {}: {}", shown_key(key), name_, why));
  }

  /// Returns false if there was no answer until `give_up`. The connection is reused only after a complete
  /// answer.
  bool try_call(FrameKind kind, std::string_view key, std::string_view value, std::string_view extra,
                std::int64_t number, Deadline give_up, StoreReply& reply) {
    maker_.check("the connection to the server at " +
                 name_);  // checked first, because in a forked child the mutex may be locked forever
    std::unique_ptr<StoreConnection> connection = take(key, give_up);
    if (connection == nullptr) return false;
    switch (connection->exchange(kind, key, value, extra, number, give_up, reply)) {
      case Outcome::ok: break;
      case Outcome::silent: return false;
      case Outcome::closed: throw lost(key, connection->error());
      case Outcome::foreign:
      case Outcome::secret_demanded:
      case Outcome::wrong_secret: throw lost(key, "it sent bytes that are not an answer");
    }
    {
      const std::lock_guard lock(mutex_);
      idle_.push_back(std::move(connection));
    }
    if (reply.kind == FrameKind::refused) throw Error(error_code(reply.number), reply.value);
    return true;
  }

  /// Returns null if there was no connection until `give_up`.
  std::unique_ptr<StoreConnection> take(std::string_view key, Deadline give_up) {
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
      auto connection = std::make_unique<StoreConnection>();
      if (!connection->open(address_, limit)) {
        if (give_up.passed()) return nullptr;
        throw lost(key, connection->error());
      }
      if (address_.family() == AF_UNIX && !connection->is_own_users())
        throw lost(key, "another server has this address now");
      switch (connection->greet(sealed_ ? &*key_ : nullptr, limit)) {
        case Outcome::ok: return connection;
        case Outcome::silent:
          if (give_up.passed()) return nullptr;
          throw lost(key, fmt::format("it did not answer within {}", shown_duration(kAnswerLimit)));
        case Outcome::closed:
          // If there are many unauthenticated clients, the server may have closed this connection before the
          // client was authenticated.
          if (pause > std::chrono::seconds(1) && connection->is_full())
            throw Error(ErrorCode::system, fmt::format("store: key {}: the server at {}: {}", shown_key(key),
                                                       name_, connection->error()));
          if (pause > std::chrono::seconds(1)) throw lost(key, connection->error());
          if (give_up.passed()) return nullptr;
          sleep_noticing(std::min<Duration>(pause, give_up.left()));
          continue;
        case Outcome::foreign:
        case Outcome::secret_demanded:
        case Outcome::wrong_secret: throw lost(key, "another server has this address now");
      }
    }
  }

  Error lost(std::string_view key, std::string_view why) const {
    return Error(ErrorCode::peer_lost,
                 fmt::format("store: key {}: the server at {} is gone ({})", shown_key(key), name_, why));
  }

  const MakerProcess maker_;
  std::string full_why_;
  std::optional<Deadline> full_;  // until when a full server is tried again
  SocketAddress address_;         // the address that answered
  std::string name_;
  std::optional<KeyBytes> key_;  // the key of the secret, if one was needed
  bool sealed_ = false;          // connections prove that they know the secret
  std::mutex mutex_;
  // at most as many as there were calls in flight at once
  std::vector<std::unique_ptr<StoreConnection>> idle_;
};

}  // namespace

std::shared_ptr<Store> make_tcp_store(std::string_view host, std::uint16_t port, Deadline deadline,
                                      std::string_view secret) {
  return std::make_shared<TcpStore>(host, port, deadline, secret);
}

}  // namespace weft
