#include "host/peers/socket_server.hpp"

#include <fmt/format.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <new>
#include <utility>

#include "base/signals.hpp"
#include "host/peers/descriptor_socket.hpp"
#include "weft/base/clock.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

constexpr std::chrono::milliseconds kLookAgain{50};  // between two looks for free descriptors

}  // namespace

SocketServer::SocketServer(Logger& log, const Arena& arena, const ProcessAddress& self, ProcessBlock& block,
                           int refusal, std::shared_ptr<OfferTable> offers)
    : warnings_(log, LogLayer::host, "host_peers"),
      arena_(arena),
      user_(self.user),
      block_(block),
      block_descriptor_(self.block),
      block_refusal_(refusal),
      offers_(std::move(offers)),
      listener_(listen_abstract(self.socket)),
      stop_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!stop_) throw_errno("host peers: eventfd", errno);
  connections_.reserve(kPeers);
  watched_.reserve(2 + kPeers);
  thread_ = start_thread("host_peers", [this] { serve(); });
  marked_.wait();  // from now on peers notice if this process becomes another program
}

int SocketServer::refuses(int looks) const noexcept {
  return refused_looks_.load(std::memory_order_acquire) < looks ? 0
                                                                : refusal_.load(std::memory_order_relaxed);
}

SocketServer::~SocketServer() {
  const std::uint64_t one = 1;
  while (::write(stop_.get(), &one, sizeof one) < 0 && errno == EINTR) {}
  thread_.join();
}

void SocketServer::serve() noexcept {
  ::pthread_setname_np(::pthread_self(), "weft-socket");
  const LifeMark mark(block_.life);
  marked_.count_down();
  bool listen = true;
  while (true) {
    watched_.clear();
    watched_.push_back({.fd = stop_.get(), .events = POLLIN, .revents = 0});
    watched_.push_back({.fd = listen ? listener_.get() : -1, .events = POLLIN, .revents = 0});
    for (const Descriptor& c : connections_)
      watched_.push_back({.fd = c.get(), .events = POLLIN, .revents = 0});
    const int ready = ::poll(watched_.data(), watched_.size(), timeout(listen));
    if (watched_[0].revents != 0) break;
    warnings_.look(Clock::now());
    listen = true;
    if (ready <= 0) continue;
    // Runs backwards, because it erases elements.
    for (std::size_t i = connections_.size(); i-- > 0;)
      if (watched_[2 + i].revents != 0 && !answer(connections_[i].get()))
        connections_.erase(connections_.begin() + static_cast<std::ptrdiff_t>(i));
    if (watched_[1].revents != 0) {
      // Without memory or descriptors, a new connection waits in the listener's queue.
      int refusal = 0;
      if (!room_for_one()) {
        refusal = ENOMEM;
      } else if (Descriptor c = accept_connection(listener_.get())) {
        if (is_ours(c.get())) connections_.push_back(std::move(c));
      } else if (errno != EINTR && errno != EAGAIN && errno != ECONNABORTED) {
        refusal = errno;
      }
      listen = refusal == 0;
      refusal_.store(refusal, std::memory_order_relaxed);
      refused_looks_.store(listen ? 0 : refused_looks_.load(std::memory_order_relaxed) + 1,
                           std::memory_order_release);
    }
  }
  // A forked child may hold copies of the sockets, so close() alone would not end the connections.
  ::shutdown(listener_.get(), SHUT_RDWR);
  for (const Descriptor& c : connections_) ::shutdown(c.get(), SHUT_RDWR);
}

// Returns how long poll() may wait, in ms (-1: without limit), until it is time to check for descriptors
// again, or to report the number of omitted warnings.
int SocketServer::timeout(bool listen) const noexcept {
  const int soon = listen ? -1 : static_cast<int>(kLookAgain.count());
  if (warnings_.next() == Clock::time_point::max()) return soon;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(warnings_.next() - Clock::now()).count();
  const int then = static_cast<int>(std::clamp<std::int64_t>(left, 0, 60'000));
  return listen ? then : std::min(soon, then);
}

// Reserves room in both lists, so that no other function here allocates.
bool SocketServer::room_for_one() noexcept try {
  const std::size_t wanted = connections_.size() + 1;
  if (wanted > connections_.capacity()) connections_.reserve(2 * wanted);
  if (2 + wanted > watched_.capacity()) watched_.reserve(2 + 2 * wanted);
  return true;
} catch (const std::bad_alloc&) {
  return false;
}

bool SocketServer::is_ours(int socket) noexcept try {
  const Credentials c = credentials(socket);
  if (c.user == user_) return true;
  warnings_.write(
      fmt::format("refused process {} of user {}, which asked for memory of this process; "
                  "only user {} may",
                  c.process, c.user, user_));
  const SocketReply reply{.status = SocketReply::Status::other_user};
  send_message(socket, &reply, sizeof reply);
  return false;
} catch (...) {
  return false;
}

// Answers one request. Returns false if the connection is at its end.
bool SocketServer::answer(int socket) noexcept try {
  SocketRequest request;
  switch (receive_message(socket, &request, sizeof request)) {
    case Transfer::later: return true;
    case Transfer::closed:
    case Transfer::too_many_in_flight:
    case Transfer::no_descriptor: return false;
    case Transfer::done: break;
  }
  if (request.magic != SocketRequest::kMagic || request.name_bytes > SocketRequest::kNameBytes) {
    warnings_.write("refused a message on this process's socket that is not weft's");
    return false;
  }
  SocketReply reply{.status = SocketReply::Status::absent, .number = request.number};
  int descriptor = -1;
  std::shared_ptr<HeldRegion> region;  // keeps the region's descriptor open while it is sent
  switch (request.kind) {
    case SocketRequest::Kind::block:
      descriptor = block_descriptor_;
      reply.status = descriptor >= 0 ? SocketReply::Status::ok : SocketReply::Status::no_memory;
      if (descriptor < 0) reply.bytes = static_cast<std::uint64_t>(block_refusal_);
      break;
    case SocketRequest::Kind::segment:
      if (request.segment >= arena_.segment_count()) break;
      descriptor = arena_.segment_descriptor(request.segment);
      reply.status = SocketReply::Status::ok;
      reply.bytes = arena_.segment_bytes(request.segment);
      break;
    case SocketRequest::Kind::region: {
      const std::lock_guard lock(offers_->mutex);
      region = offers_->find({request.name, request.name_bytes});
      if (!region) break;
      descriptor = region->memfd.get();
      reply.status = descriptor >= 0 ? SocketReply::Status::ok : SocketReply::Status::no_memory;
      reply.bytes = descriptor >= 0 ? region->bytes : static_cast<std::uint64_t>(region->refusal);
      reply.id = region->id;
      break;
    }
  }
  const Transfer sent = send_message(socket, &reply, sizeof reply, descriptor);
  if (sent == Transfer::too_many_in_flight) {
    reply.status = SocketReply::Status::busy;
    return send_message(socket, &reply, sizeof reply) == Transfer::done;
  }
  // A peer process has one request open at a time: a full socket means that the peer never reads.
  return sent == Transfer::done;
} catch (...) {
  return false;
}

}  // namespace weft
