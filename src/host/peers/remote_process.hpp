// A peer process that is another process than this one. Its block and its segments are opened through /proc
// if the system allows it. Otherwise they are requested over its socket.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "base/memfd.hpp"
#include "host/arena.hpp"
#include "host/peers/descriptor_socket.hpp"
#include "host/peers/peer_process.hpp"
#include "host/peers/process_block.hpp"
#include "host/peers/region.hpp"
#include "weft/base/clock.hpp"
#include "weft/base/error.hpp"
#include "weft/base/log.hpp"

namespace weft {

class RemoteProcess final : public PeerProcess, public std::enable_shared_from_this<RemoteProcess> {
 public:
  // Maps the block. Throws the errors of HostPeers::meet().
  RemoteProcess(Logger& log, const ProcessAddress& address, Deadline deadline);

  const ProcessAddress& address() const noexcept override { return address_; }
  bool is_self() const noexcept override { return false; }
  bool alive() const noexcept override;
  State look() noexcept override;
  MappedSegment mapped(std::uint32_t index) const noexcept override;
  bool map_segments(std::uint32_t count, Deadline deadline) noexcept override;
  bool is_refused(std::uint64_t index) const noexcept override {
    return index < Arena::kMaxSegments && places_[index].refused.load(std::memory_order_acquire);
  }
  Doorbell doorbell(int number) const noexcept override { return doorbell_on(&block(), number); }

  // Returns the region that the process offers under `name`, or null if it offers no such region now.
  RegionRef open(const std::string& name, Deadline deadline);
  std::string who() const;  // "process 4711"
  Error lost(const char* how) const;

 private:
  struct Answer {
    SocketReply reply;
    Descriptor descriptor;
  };

  // There is one request at a time, each over its own connection. The thread that has the turn may use the
  // socket. A thread waits for the turn a bounded time, because the request before it may be to a stopped
  // process.
  class Turn {
   public:
    Turn(RemoteProcess& remote, Deadline deadline);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    RemoteProcess& remote_;
  };

  Error no_answer(Clock::time_point start) const;
  Error other_user() const;
  ProcessBlock& block() const noexcept { return *reinterpret_cast<ProcessBlock*>(block_.data()); }
  bool has_ended() const noexcept;
  bool watch();
  SharedMapping open_block() const;
  SharedMapping ask_for_block(Deadline deadline);
  void connect(Deadline deadline);
  Answer exchange(SocketRequest request, Deadline deadline);
  Answer ask(const SocketRequest& request, Deadline deadline, Clock::time_point start);
  static SharedMapping map(int fd, std::uint64_t bytes);
  bool map_segment(std::uint32_t index, Deadline deadline);

  Logger& log_;
  const ProcessAddress address_;
  Descriptor pidfd_;
  SharedMapping block_;
  std::atomic<bool> dumps_core_{false};

  std::mutex turn_mutex_;
  std::condition_variable turn_free_;
  bool turn_taken_ = false;
  // Only the thread that has the turn may use it.
  Descriptor socket_;
  std::uint64_t last_number_ = 0;
  std::map<std::uint32_t, SharedMapping> segments_;
  std::map<std::uint64_t, std::weak_ptr<HeldRegion>> opened_;
  // All threads may read it.
  struct Place {
    std::atomic<std::byte*> begin{nullptr};
    std::size_t bytes = 0;  // written before `begin`
    std::atomic<bool> refused{false};
  };
  std::array<Place, Arena::kMaxSegments> places_{};
};

/// For error texts.
inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace weft
