// For transports that can only block: collectives are executed in order by a thread of the group's own, point
// to point by whatever the transport has for it, so that no message waits behind a collective.
//
// The waiting thread does not execute calls itself, though that would save a switch of threads: inside the
// transport it could look neither at the deadline nor at the rank's other groups.
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

/// All ranks hear of a failure because interrupt() ends the connections; they read its cause, the first one,
/// from the store.
class BlockingBackend : public Backend {
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

  /// A collective, in the group's thread; returns when it is done. May throw.
  virtual void run(const OpState& s) = 0;
  /// Starts a send or a receive, without waiting; finished(s) or refuse(s) follows, from any thread.
  virtual void start(OpState& s) noexcept = 0;
  /// Makes run() return soon, by throwing, and keeps the transport's own threads out of the callers' memory
  /// from when it returns. Called once, after failed() has become true. Any thread.
  virtual void interrupt() noexcept = 0;

  // The derived class calls the first when it is whole and the second, first of all, in its destructor.
  void begin();
  void end() noexcept;

  void finished(OpState& s) noexcept;
  /// A call that cannot be: the group fails with this when the call is polled.
  void refuse(OpState& s, Failure why) noexcept;
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
