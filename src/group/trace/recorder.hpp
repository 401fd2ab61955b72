// The last calls of one rank in one group. Only the owner of the group writes it. Any thread may read at any
// time. It may see a half-written entry, but never reads out of bounds.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

#include "backends/call_word.hpp"
#include "group/trace/tick.hpp"
#include "group/trace/trace.hpp"
#include "weft/backends/backend.hpp"

namespace weft {

class Recorder {
 public:
  static constexpr std::uint64_t kEntries = 1024;

  /// `about`: the part of the Trace that describes the group, without times and calls.
  explicit Recorder(Trace about);

  /// Records a call. Returns its number for finished(). `when`: the time in ticks. If it is 0, the time is
  /// read and stored there. Calls that begin together need only one reading (8 ns).
  std::uint64_t posted(const OpState& s, std::uint64_t& when) noexcept {
    const std::uint64_t number = next_.load(std::memory_order_relaxed);
    Entry& e = entries_[number % kEntries];
    const CallWord word(s.op, s.dtype, s.reduce.kind, static_cast<unsigned>(TracedState::pending),
                        s.peer >= 0 ? s.peer : s.root);
    e.word.store(word.bits(), std::memory_order_relaxed);
    e.call.store(s.call, std::memory_order_relaxed);
    e.count.store(s.in_count > s.out_count ? s.in_count : s.out_count, std::memory_order_relaxed);
    if (when == 0) when = tick();
    e.posted.store(when, std::memory_order_relaxed);
    e.finished.store(0, std::memory_order_relaxed);
    next_.store(number + 1, std::memory_order_release);
    return number;
  }
  /// Records the end of a call. `waited`: whether the call took the slow path, on which reading the clock
  /// adds little.
  void finished(std::uint64_t number, TracedState state, bool waited) noexcept {
    if (next_.load(std::memory_order_relaxed) - number > kEntries)
      return;  // a later call has overwritten the entry
    Entry& e = entries_[number % kEntries];
    const CallWord word(e.word.load(std::memory_order_relaxed));
    e.word.store(word.noted(static_cast<unsigned>(state)).bits(), std::memory_order_relaxed);
    if (waited) e.finished.store(tick(), std::memory_order_relaxed);
  }
  /// Records the message that a recv from any_source took, or that wait_message found. Call it after
  /// finished().
  void found(std::uint64_t number, const OpState& s) noexcept {
    if (next_.load(std::memory_order_relaxed) - number > kEntries) return;
    Entry& e = entries_[number % kEntries];
    e.word.store(
        CallWord(s.op, s.dtype, s.reduce.kind, static_cast<unsigned>(TracedState::done), s.peer).bits(),
        std::memory_order_relaxed);
    e.count.store(s.out_count, std::memory_order_relaxed);
  }
  /// Records that the group has failed. Only the first call counts.
  void failed(const Failure& why) noexcept;

  /// The whole trace, with the oldest calls first.
  Trace read() const;

 private:
  struct Entry {
    std::atomic<std::uint64_t> word{0}, call{0}, posted{0},
        finished{0};  // `word` is a CallWord, `noted` is a TracedState
    std::atomic<std::int64_t> count{0};
  };
  std::array<Entry, kEntries> entries_;
  std::atomic<std::uint64_t> next_{0};  // the number of calls recorded so far
  TickScale scale_;
  Trace about_;
  mutable std::mutex mutex_;
  std::optional<Trace::Failed> failure_;
};

}  // namespace weft
