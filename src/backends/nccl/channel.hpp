// A communicator, its stream, and the calls that wait to be started there. Used by one thread at a time.
//
// Communicators are non-blocking: NCCL may return "in progress". weft must then poll it until it is done,
// before it accepts the next call. So calls are queued, and advance() starts them one after the other. A call
// goes through three stages:
//
//   queued its `ready` event is recorded on the caller's stream launching given to NCCL on the channel's
//   stream, behind `ready`; NCCL has not finished the launch running its `done` event is recorded behind it;
//   the device performs it
//
// NCCL plans calls that are started together as one call. So all ranks must start the same calls together.
// Only the calls of one batch, which the caller has made as one batch on every rank, share a group start and
// end.
#pragma once

#include <deque>
#include <vector>

#include "backends/nccl/nccl_api.hpp"
#include "weft/backends/backend.hpp"

namespace weft::nccl {

/// The table of functions. check() throws an Error if a result is wrong: "ncclAllReduce: invalid usage (…)".
struct Driver {
  const NcclApi& api;
  int device = 0;
  void check(const char* what, Result r, Comm* comm = nullptr) const;  // in_progress is no error
  void check(const char* what, CudaResult r) const;
};

/// Makes the driver's device the current device of this thread, and restores the former one at the end.
/// Meanwhile this thread may query events although another thread captures a stream into a graph. In CUDA's
/// global mode such a query would end the capture with an error.
class DeviceScope {
 public:
  explicit DeviceScope(const Driver& driver);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  const Driver& driver_;
  int before_ = 0;
  CaptureMode mode_ = CaptureMode::relaxed;
};

/// Events, kept for reuse, because creating an event takes the driver's lock. The destructor destroys all
/// events, including those that failed calls have not given back.
class EventPool {
 public:
  explicit EventPool(const Driver& driver) : driver_(driver) {}
  ~EventPool();
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;
  Event take();
  void give_back(Event& event) noexcept;  // sets `event` to null

 private:
  const Driver& driver_;
  std::vector<Event> all_, free_;
};

class Channel;
enum class Stage : std::uint8_t { queued, launching, running };

/// The state of a call, in the scratch of its slot.
struct Ticket {
  Stage stage = Stage::queued;
  Channel* channel = nullptr;
  std::uint64_t batch = 0;  ///< calls with the same number are started together; 0: the call is started alone
  Event ready = nullptr, done = nullptr;
};
static_assert(sizeof(Ticket) <= sizeof(OpState::scratch));
inline Ticket& ticket(OpState& s) noexcept { return *reinterpret_cast<Ticket*>(s.scratch.data()); }

class Channel {
 public:
  /// `word`: a byte of device memory for barriers. The constructor makes the stream.
  Channel(const Driver& driver, EventPool& events, int rank, int size, std::byte* word);
  /// Aborts the communicator if it still exists.
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  /// Begins to connect; advance() continues.
  void connect(const UniqueId& id);
  bool connected() const noexcept { return comm_ != nullptr && !busy_; }
  void queue(OpState& s) { queue_.push_back(&s); }
  /// Takes the steps that are possible now, but does not start calls of `open_batch` yet. Returns whether it
  /// took a step. Throws if NCCL reports an error.
  bool advance(std::uint64_t open_batch);
  /// Throws an error that NCCL has found since the launch.
  void check_health() const;
  CudaStream stream() const noexcept { return stream_; }
  /// Gives the communicator to the caller, which must end it.
  Comm* release_comm() noexcept {
    Comm* const comm = comm_;
    comm_ = nullptr;
    return comm;
  }

 private:
  void start();
  void enqueue(const OpState& s) const;  // ops.cpp
  void send(const OpState& s, BufferBlock block, int to) const;
  void recv(const OpState& s, BufferBlock block, int from) const;
  void copy_own(const OpState& s, BufferBlock from, BufferBlock to) const;

  const Driver& driver_;
  EventPool& events_;
  const int rank_, size_;
  std::byte* const word_;
  CudaStream stream_ = nullptr;
  Comm* comm_ = nullptr;
  bool busy_ = false;  // connecting or launching
  std::deque<OpState*> queue_;
  std::vector<OpState*> launching_;
};

}  // namespace weft::nccl
