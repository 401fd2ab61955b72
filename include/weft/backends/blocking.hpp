// For transports whose functions block. A thread of the group's own performs the collectives, in order.
// Messages are started separately, so that no message waits behind a collective.
//
// A waiting thread does not perform the call itself, although that would save a switch of threads. Inside the
// transport it could not check the deadline, and could not advance the rank's other groups.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>

#include "weft/backends/backend.hpp"
#include "weft/backends/first_cause.hpp"
#include "weft/host/doorbell.hpp"

namespace weft {

/// The functions that BlockingBackend calls and that a blocking transport implements. The class is separate
/// from Backend. So a new virtual function of Backend does not change the order of the functions of
/// BlockingCalls in the ABI.
class BlockingCalls {
 protected:
  ~BlockingCalls() = default;
  /// Performs a collective in the group's thread. Returns when the collective is done. Any exception that it
  /// throws fails the group.
  virtual void run(const OpState& s) = 0;
  /// Starts a send or a receive (or a wait_message, if the traits have it), without waiting. The transport
  /// later calls finished(s) or refuse(s), from any thread.
  virtual void start(OpState& s) noexcept = 0;
  /// Makes run() return soon, by throwing. After interrupt() has returned, the transport's own threads do not
  /// touch the callers' memory. Called once, after failed() has become true. From any thread.
  virtual void interrupt() noexcept = 0;
};

/// Implements Backend by means of BlockingCalls. A derived class adds traits() and missing(). It calls
/// begin() at the end of its constructor, and end() first of all in its destructor. interrupt() ends the
/// connections, so other ranks notice a failure. All ranks read the first cause from the store (FirstCause).
class BlockingBackend : public Backend, protected BlockingCalls {
 public:
  ~BlockingBackend() override;
  void post(OpState& s) noexcept final;
  Step poll(OpState& s) noexcept final;
  bool healthy() noexcept override { return !failed(); }
  void fail(const Failure& why) noexcept final;
  Failure failure() const final;
  bool quiet() const noexcept final;
  bool quiesce(Deadline deadline, std::span<const MemoryRange> exposed) noexcept final;
  void announce_sleep(bool asleep) noexcept final { asleep_.store(asleep, std::memory_order_seq_cst); }

 protected:
  explicit BlockingBackend(const GroupInit& b);

  /// Starts the group's thread. Throws std::system_error if the thread cannot be created.
  void begin();
  /// Ends the group's thread. Waits for a run() that has not returned.
  void end() noexcept;

  /// States that a send or a receive is done. From any thread.
  void finished(OpState& s) noexcept;
  /// Like finished(s), for a receive from any_source or a wait_message. It has found the message `found`.
  /// (Only the group's thread may write `s`. So the source in `s` is set when the call is polled.)
  void finished(OpState& s, const MessageInfo& found) noexcept;
  /// States that a send or a receive cannot be done. The group fails with `why` when the call is polled. From
  /// any thread.
  void refuse(OpState& s, Failure why) noexcept;
  /// From any thread.
  bool failed() const noexcept { return failed_.load(std::memory_order_acquire); }

 private:
  struct Flight;  // in OpState::scratch
  void work() noexcept;
  void ring() noexcept;

  const int rank_;
  const FirstCause cause_;
  const Doorbell doorbell_;
  std::atomic<bool> asleep_{false};

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<OpState*> queue_;
  bool busy_ = false, ending_ = false, failing_ = false;
  std::optional<Failure> refusal_;
  Failure failure_;
  std::atomic<bool> failed_{false}, interrupted_{false};
  std::uint64_t posted_ = 0;
  std::atomic<std::uint64_t> done_{0};
  std::thread thread_;
};

}  // namespace weft
