// Calls in flight of one rank of this process, over all its groups: a waiting thread drives all of them.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "host/threads/idling.hpp"
#include "weft/base/clock.hpp"
#include "weft/base/log.hpp"
#include "weft/host/doorbell.hpp"

namespace weft {

class Context;

/// a sleeping thread looks for dead peers this often
inline constexpr auto kSleep = std::chrono::milliseconds(50);

/// An object with calls in flight: a process group.
class Driven {
 public:
  virtual ~Driven() = default;
  /// Takes the next steps of the calls in flight, without blocking. Returns true if something moved.
  virtual bool drive() noexcept = 0;
  /// Notifies peers that this rank is about to sleep on its doorbell (true) or is awake again (false).
  virtual void announce_sleep(bool asleep) noexcept = 0;
  /// Returns false if peers do not ring when they have made a step; then sleeping threads nap, and poll
  /// again.
  virtual bool rings() const noexcept { return true; }
  /// Returns whether the rank's helper thread drives this object, too.
  virtual bool helped() const noexcept { return false; }
  /// Answers roll-calls of peers. Called if this rank waits, in a call of any group.
  virtual void answer() noexcept {}
  /// Drives the group once more, before a thread sleeps. Returns false if the thread must not sleep.
  /// Something may have moved, or another thread may be driving the group and be past the step for which this
  /// thread waits.
  virtual bool settled() noexcept { return !drive(); }
  /// Checks deadlines and dead peers, by the clock. A sleeping thread calls it at every wake-up.
  virtual void watch() noexcept {}
};

/// All groups of one rank of this process. Thread-safe; several threads may drive a rank's groups. Log lines
/// of the groups go to Logger::write_later() while the groups are driven, and to the sink when the list is
/// unlocked.
///
/// One of these threads may be the helper thread. It drives the groups that request it (Driven::helped) while
/// the program computes. The helper rests if these groups have nothing in flight. It also rests if a thread
/// of the program waits, because that thread drives everything itself. If calls are in flight and nothing
/// moves, the helper sleeps like a waiting thread. It announces its sleep, so that peers ring. (It does not
/// announce a rest.) In both cases it sleeps on the rank's doorbell, which a submitted call then rings, too.
class ProgressEngine {
 public:
  ProgressEngine(Doorbell doorbell, Logger& log) : doorbell_(doorbell), log_(log) {}
  ~ProgressEngine();
  ProgressEngine(const ProgressEngine&) = delete;
  ProgressEngine& operator=(const ProgressEngine&) = delete;
  void add(Driven* d);
  /// After this function has returned, no thread drives `d` through this list.
  void remove(Driven* d) noexcept;
  /// Calls drive() on each group, except for a group that was just driven. Returns true if something moved.
  /// From time to time it also calls answer() on each group. A waiting rank may never sleep: it may only
  /// poll, or other groups may move.
  bool drive_all(const Driven* but = nullptr) noexcept;
  /// Calls answer() on each group. For a thread of this rank that waits outside of any group. Does not wait:
  /// if another thread drives the list, that thread answers.
  void answer() noexcept;
  /// Counts the threads of this rank that sleep. Calls announce_sleep(true) on each group when the first
  /// thread goes to sleep, and announce_sleep(false) when the last one is awake. Returns true if one of the
  /// groups does not ring. `announced` becomes false if a thread that is stuck in a step prevents the
  /// announcement; then the caller must nap.
  bool announce_sleep(bool asleep, bool& announced) noexcept;
  /// Sleeps on the rank's doorbell until a peer rings or `limit` has passed. After the announcement it drives
  /// everything once more and calls `finished`. If either reports a change, it does not sleep. No wake-up is
  /// lost, since a peer publishes its step first and checks for sleepers afterwards. So either the last drive
  /// sees the step, or the peer sees the announcement and rings, which changes the word that was read before.
  /// If peers do not ring, the thread sleeps for short times instead. The longer it has `waited`, the longer
  /// these times are.
  template <class Finished>
  void sleep(Duration limit, Duration waited, const Finished& finished) noexcept {
    sleep_unless(
        [&] {
          const bool moved = drive_all();
          watch_all();  // after the polls, because calls that a peer completed before it died count
          return moved || finished();
        },
        limit, waited);
  }
  Doorbell doorbell() const noexcept { return doorbell_; }
  /// How long threads of this rank spin before they yield.
  SpinLimit& spin_limit() noexcept { return spin_limit_; }

  /// Code of the program that a step has made due. A thread that makes progress runs it as soon as that
  /// thread holds no lock.
  struct Later {
    virtual ~Later() = default;
    virtual void run() noexcept = 0;
    std::shared_ptr<Later> next{};  // the next entry of the list
  };
  /// Appends code to the list; does not run it.
  void run_later(std::shared_ptr<Later> what) noexcept;
  /// Runs the code in the list, in order. Cheap if the list is empty. The caller must not hold a lock.
  void run_due() noexcept {
    if (due_.load(std::memory_order_relaxed)) [[unlikely]]
      run_due_now();
  }
  /// The number of callbacks that run now. A thread must check whether it is inside a callback only if this
  /// number is not 0.
  int callbacks_running() const noexcept { return callbacks_running_.load(std::memory_order_relaxed); }
  void callback_runs(int change) noexcept { callbacks_running_.fetch_add(change, std::memory_order_relaxed); }

  /// Counts a group that requests the helper thread. The first such group starts the thread, and the last
  /// such group ends it. `spin`: whether the group allows the thread to spin; it does not spin if any group
  /// forbids that. Throws system if the thread cannot be created.
  void add_helped(bool spin);
  void remove_helped(bool spin) noexcept;
  /// Changes the number of calls in flight in groups with a helper.
  void in_flight(int change) noexcept {
    pending_.fetch_add(change, std::memory_order_seq_cst);
    if (change > 0 && resting_.load(std::memory_order_seq_cst)) doorbell_.ring();
  }
  /// Exists while a thread of the program waits and drives everything. Meanwhile the helper rests.
  class Waiter {
   public:
    explicit Waiter(ProgressEngine& list) noexcept
        : list_(list), counted_(list.helped_.load(std::memory_order_relaxed) > 0) {
      if (counted_) list_.waiters_.fetch_add(1, std::memory_order_seq_cst);
    }
    ~Waiter() {
      if (counted_ && list_.waiters_.fetch_sub(1, std::memory_order_seq_cst) == 1 &&
          list_.pending_.load(std::memory_order_seq_cst) > 0 &&
          list_.resting_.load(std::memory_order_seq_cst))
        list_.doorbell_.ring();
    }
    Waiter(const Waiter&) = delete;
    Waiter& operator=(const Waiter&) = delete;

   private:
    ProgressEngine& list_;
    const bool counted_;  // whether this waiter is in the count, which only a helper thread reads
  };

 private:
  template <class Awake>
  void sleep_unless(const Awake& awake, Duration limit, Duration waited) noexcept {
    const std::uint32_t seen = doorbell_.read();
    bool announced = false, over = false;
    const bool naps = announce_sleep(true, announced);
    if (!awake()) doorbell_.sleep(seen, naps ? std::min(limit, nap(waited)) : limit);
    if (announced) announce_sleep(false, over);
    log_.flush();
    run_due();
  }
  bool take_list(std::unique_lock<std::mutex>& lock) noexcept;
  void watch_all() noexcept;
  void help() noexcept;
  bool has_to_help() const noexcept {
    return pending_.load(std::memory_order_seq_cst) > 0 && waiters_.load(std::memory_order_seq_cst) == 0;
  }
  bool drive_helped() noexcept;
  bool settled_helped() noexcept;

  // A nap makes a wait longer by at most a fiftieth; the wait counts from the time at which the thread
  // stopped spinning. The shortest naps use a few percent of a core, the longest naps use a fraction of one
  // percent.
  static Duration nap(Duration waited) noexcept {
    return std::clamp<Duration>(waited / 50, std::chrono::microseconds(200), std::chrono::milliseconds(4));
  }
  std::mutex mutex_;
  std::vector<Driven*> driven_;
  int sleepers_ = 0;  // threads of this rank that sleep
  // the number of counted threads that do not sleep any more, but could not report that
  std::atomic<int> awake_{0};
  std::atomic<bool> stuck_{false};  // a thread has had the list for too long
  unsigned drives_ = 0;
  Doorbell doorbell_;
  Logger& log_;
  SpinLimit spin_limit_;

  [[gnu::cold]] void run_due_now() noexcept;
  std::atomic<bool> due_{false};  // the list of Later is not empty
  std::mutex due_mutex_;
  std::shared_ptr<Later> first_due_;
  Later* last_due_ = nullptr;
  std::atomic<int> callbacks_running_{0};

  std::mutex helper_mutex_;
  std::atomic<int> helped_{0};  // groups that are helped
  int quiet_ = 0;               // the number of these groups that forbid spinning
  std::thread helper_;
  std::atomic<bool> spin_{true}, ending_{false};
  // the helper sleeps or is about to sleep: threads with new work for it must ring
  std::atomic<bool> resting_{false};
  std::atomic<int> pending_{0};  // calls in flight in groups with the helper
  std::atomic<int> waiters_{0};
};

/// The progress engine of a rank of this process. Throws bad_argument if `process_rank` is negative, and
/// unsupported if 1024 other process ranks already have one.
ProgressEngine& progress_of(Context& context, int process_rank);

}  // namespace weft
