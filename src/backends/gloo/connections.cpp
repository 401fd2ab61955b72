#include "backends/gloo/connections.hpp"

#include <fmt/format.h>
#include <gloo/common/error.h>
#include <gloo/transport/context.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>
#include <sys/random.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <exception>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backends/gloo/close_on_exec.hpp"
#include "base/hash.hpp"
#include "base/signals.hpp"
#include "host/peers/process_state.hpp"
#include "store/forwarding_store.hpp"
#include "weft/backends/blocking.hpp"
#include "weft/backends/join.hpp"
#include "weft/base/name_ranks.hpp"

namespace weft::gloo_backend {
namespace {

namespace transport = ::gloo::transport;

constexpr int kAttempts = 4;
constexpr std::uint64_t kHello = 0x43ull << 56;  // slot, see links.cpp
// How long a rank of another host may take to join the next attempt. A live rank joins at once.
constexpr Duration kComesAgain = std::chrono::seconds(2), kComesAgainAtMost = std::chrono::seconds(10);
// how long the store may take to answer after a deadline has passed
constexpr Duration kAnswer = std::chrono::milliseconds(500);
constexpr std::string_view kMade = "made";

using Token = std::array<char, 16>;

Token random_token() {
  Token token;
  for (std::size_t have = 0; have < token.size();) {
    const ssize_t got = ::getrandom(token.data() + have, token.size() - have, 0);
    if (got < 0 && errno != EINTR) throw_errno("getrandom", errno);
    have += static_cast<std::size_t>(std::max<ssize_t>(got, 0));
  }
  return token;
}

// A context of Gloo with the connections that this code made.
class Connected final : public ::gloo::Context {
 public:
  Connected(int rank_in, int size_in, std::shared_ptr<transport::Device> device,
            std::shared_ptr<transport::Context> connections)
      : ::gloo::Context(rank_in, size_in) {
    device_ = std::move(device);
    transportContext_ = std::move(connections);
  }
};

// When one wait times out, Gloo ends all connections and wakes all threads that wait for them.
void end_all(transport::Context& connections) noexcept {
  try {
    std::byte nothing{};
    connections.createUnboundBuffer(&nothing, 1)->waitRecv(std::chrono::milliseconds(1));
  } catch (const std::exception&) {}
}

Error lost(const GroupInit& b, const std::vector<int>& ranks, std::string_view why) {
  const bool one = ranks.size() == 1;
  return Error(Failure{.code = ErrorCode::peer_lost,
                       .text = fmt::format("group \"{}\": {} {} lost while the group was made ({}) [rank {}]",
                                           b.name, name_ranks(ranks), one ? "was" : "were", why, b.rank),
                       .ranks = ranks});
}

// If a get() times out, this store checks whether the process that should set the key has ended, and then
// throws peer_lost. Keys that the process has set before its end still count.
class WatchingStore final : public ForwardingStore {
 public:
  WatchingStore(const GroupInit& b, std::vector<pid_t> processes)
      : ForwardingStore(b.store), b_(b), processes_(std::move(processes)) {}
  std::string get(std::string_view key, Deadline deadline) override {
    try {
      return ForwardingStore::get(key, deadline);
    } catch (const Error& e) {
      if (e.code() != ErrorCode::timeout) throw;
      std::vector<int> ended;
      for (int r = 0; r < b_.size; ++r)
        if (const pid_t p = processes_[static_cast<std::size_t>(r)]; p > 0 && has_ended(p))
          ended.push_back(r);
      if (ended.empty()) throw;
      if (auto held = try_get(key, Deadline::after(kAnswer))) return std::move(*held);
      throw lost(b_, ended, ended.size() == 1 ? "its process has ended" : "their processes have ended");
    }
  }

 private:
  const GroupInit& b_;
  const std::vector<pid_t> processes_;
};

class Attempt {
 public:
  Attempt(const GroupInit& b, const transport::tcp::attr& where, int number);
  /// Returns the group. Returns null if this attempt has failed on all ranks, or if some ranks have thrown.
  std::shared_ptr<::gloo::Context> run(Deadline comes, const std::string& former);
  /// The reason of the failure: the text of one of the ranks that failed.
  const std::string& failed() const noexcept { return failed_; }

 private:
  std::vector<std::vector<char>> own_addresses() const;
  void exchange_addresses(Deadline comes, const std::string& former);
  void connect_and_greet();
  void tell(const std::optional<std::string>& trouble);
  std::string settle(std::string_view verdict);
  std::string await_verdict();
  std::string what(std::string_view part) const { return fmt::format("gloo/{}/{}", number_, part); }
  std::string key(std::string_view part) const { return fmt::format("{}/{}", b_.token, what(part)); }

  const GroupInit& b_;
  const int number_;
  const Token token_ = random_token();
  const std::shared_ptr<transport::Device> device_;
  const std::shared_ptr<transport::Context> connections_;
  std::vector<Token> tokens_;                 // by rank
  std::vector<std::vector<char>> addresses_;  // the addresses at which this process listens for this rank
  Deadline limit_;
  int connecting_ = -1;
  std::string failed_;
};

Attempt::Attempt(const GroupInit& b, const transport::tcp::attr& where, int number)
    : b_(b),
      number_(number),
      device_(transport::tcp::CreateDevice(where)),
      connections_(device_->createContext(b.rank, b.size)),
      limit_(b.deadline) {
  b.context.log().write(LogLayer::backends, LogLevel::info,
                        fmt::format("group \"{}\": {}", b.name, device_->str()));
  // Gloo waits five times as long as the time-out that is passed to it.
  connections_->setTimeout(std::chrono::duration_cast<std::chrono::milliseconds>(limit_.left() / 5) +
                           std::chrono::milliseconds(1));
  for (int r = 0; r < b.size; ++r)
    if (r != b.rank) connections_->createPair(r);
  close_on_exec(own_addresses());
}

// Returns the addresses at which this rank listens, one for each other rank.
std::vector<std::vector<char>> Attempt::own_addresses() const {
  std::vector<std::vector<char>> all;
  for (int r = 0; r < b_.size; ++r)
    if (r != b_.rank) all.push_back(connections_->getPair(r)->address().bytes());
  return all;
}

// A rank's info is a token and then, for each rank (itself included), the length of an address and the
// address.
void Attempt::exchange_addresses(Deadline comes, const std::string& former) {
  std::string info(token_.data(), token_.size());
  for (int r = 0; r < b_.size; ++r) {
    const std::vector<char> bytes =
        r == b_.rank ? std::vector<char>() : connections_->getPair(r)->address().bytes();
    info += static_cast<char>(bytes.size());
    info.append(bytes.data(), bytes.size());
  }
  GroupInit b = b_;
  b.deadline = comes;
  std::vector<std::string> infos;
  try {
    infos = join(b, what("ports"), info, digest_of(kHello, sizeof(Token)));
  } catch (const Error& e) {
    if (e.code() != ErrorCode::timeout || e.ranks().empty() || former.empty()) throw;
    throw lost(b, {e.ranks().begin(), e.ranks().end()}, former);
  }
  for (const std::string& text : infos) {
    std::memcpy(tokens_.emplace_back().data(), text.data(), std::min(text.size(), sizeof(Token)));
    std::size_t at = sizeof(Token);
    for (int r = 0; at < text.size(); ++r) {
      const std::size_t bytes = static_cast<unsigned char>(text[at++]);
      const std::string_view address = std::string_view(text).substr(at, bytes);
      if (r == b_.rank) addresses_.emplace_back(address.begin(), address.end());
      at += bytes;
    }
  }
}

// Throws Gloo's exceptions, and runtime_error if the other end is not that rank.
void Attempt::connect_and_greet() {
  const auto of = [&](auto& by_rank) -> auto& { return by_rank[static_cast<std::size_t>(connecting_)]; };
  const auto each = [&](const auto& f) {
    for (connecting_ = 0; connecting_ < b_.size; ++connecting_)
      if (connecting_ != b_.rank) f();
  };
  each([&] { connections_->getPair(connecting_)->connect(of(addresses_)); });
  Token mine = token_;
  const auto out = connections_->createUnboundBuffer(mine.data(), mine.size());
  std::vector<Token> theirs(static_cast<std::size_t>(b_.size));
  std::vector<std::unique_ptr<transport::UnboundBuffer>> in(theirs.size());
  each([&] {
    of(in) = connections_->createUnboundBuffer(of(theirs).data(), sizeof(Token));
    of(in)->recv(connecting_, kHello);
    out->send(connecting_, kHello);
  });
  const auto left = [&] {
    return std::chrono::duration_cast<std::chrono::milliseconds>(limit_.left()) +
           std::chrono::milliseconds(1);
  };
  each([&] {
    of(in)->waitRecv(left());
    if (of(theirs) != of(tokens_))
      throw std::runtime_error("another process connected in place of that rank");
  });
  each([&] { out->waitSend(left()); });
  // The ends of accepted and of opened connections; all of them are present now.
  std::vector<std::vector<char>> ends = own_addresses();
  ends.insert(ends.end(), addresses_.begin(), addresses_.end());
  close_on_exec(ends);
}

// The verdict is one key for all ranks: the rank that sets it first decides. Returns the value of the key.
std::string Attempt::settle(std::string_view verdict) {
  return b_.store->compare_set(key("verdict"), "", verdict, Deadline::after(kAnswer));
}

// A rank that could not connect sets the verdict. If all ranks could connect, the last rank sets the verdict
// that all are connected.
void Attempt::tell(const std::optional<std::string>& trouble) {
  if (trouble) {
    settle(*trouble);
  } else if (b_.store->add(key("connected"), 1, Deadline::after(kAnswer)) == b_.size) {
    settle(kMade);
  }
}

std::string Attempt::await_verdict() {
  GroupInit limited = b_;
  limited.deadline = limit_;
  if (auto verdict = await(limited, key("verdict"))) return *verdict;
  return settle(fmt::format("rank {} waited for all connections without success", b_.rank));
}

std::shared_ptr<::gloo::Context> Attempt::run(Deadline comes, const std::string& former) {
  exchange_addresses(comes, former);
  // Attempts share the remaining time; the last attempt gets all of it.
  limit_ = Deadline::after(b_.deadline.left() / (kAttempts - number_));
  std::string verdict;
  std::exception_ptr gone;  // an error of the store, or of a rank that has given up or ended
  // Ends the connections if another rank could not connect, so that this rank does not wait for it.
  std::thread listener([&] {
    try {
      verdict = await_verdict();
    } catch (...) {
      gone = std::current_exception();
    }
    if (verdict != kMade) end_all(*connections_);
  });
  std::optional<std::string> trouble;
  try {
    connect_and_greet();
  } catch (const std::exception& e) {
    trouble =
        fmt::format("rank {} could not connect rank {}: {}", b_.rank, connecting_, with_limits(e.what()));
  }
  std::exception_ptr mute;
  try {
    tell(trouble);
  } catch (...) {
    mute = std::current_exception();
  }
  listener.join();
  if (gone || mute) std::rethrow_exception(gone ? gone : mute);
  if (verdict == kMade) {
    withdraw(b_, what("ports"));
    return std::make_shared<Connected>(b_.rank, b_.size, device_, connections_);
  }
  failed_ = verdict;
  return nullptr;
}

}  // namespace

std::shared_ptr<::gloo::Context> connect_all(const GroupInit& asked, const transport::tcp::attr& where,
                                             std::vector<pid_t> processes) {
  const NoSignals inherited;  // Gloo's own thread inherits this, too
  GroupInit b = asked;
  b.store = std::make_shared<WatchingStore>(asked, std::move(processes));
  std::string former;
  for (int number = 0; number < kAttempts && !b.deadline.passed(); ++number) {
    const Duration again = std::clamp<Duration>(b.deadline.left() / 4, kComesAgain, kComesAgainAtMost);
    try {
      Attempt attempt(b, where, number);
      auto made =
          attempt.run(number == 0 ? b.deadline : Deadline::after(std::min(again, b.deadline.left())), former);
      if (made) return made;
      former = attempt.failed();
    } catch (
        const ::gloo::Exception& e) {  // no descriptors, or no such interface: another attempt would not help
      throw Error(Failure{.code = ErrorCode::system,
                          .text = fmt::format("group \"{}\": gloo cannot listen: {} [rank {}]", b.name,
                                              with_limits(e.what()), b.rank),
                          .ranks = {b.rank}});
    }
    b.context.log().write(
        LogLayer::backends, LogLevel::info,
        fmt::format("group \"{}\": attempt {} to connect the ranks failed: {}", b.name, number + 1, former));
  }
  throw Error(Failure{
      .code = b.deadline.passed() ? ErrorCode::timeout : ErrorCode::system,
      .text =
          fmt::format("group \"{}\": gloo cannot connect the ranks: {}; does somebody else connect to the "
                      "ports? [rank {}]",
                      b.name, former, b.rank),
      .ranks = {}});
}

}  // namespace weft::gloo_backend
