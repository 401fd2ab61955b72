// The failure of a group: its first cause, which every Error reports, and whether the callers may use the
// memory of the failed calls again. All functions may be called from any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "group/ring.hpp"
#include "group/trace/recorder.hpp"
#include "group/trace/trace_files.hpp"
#include "host/progress_engine.hpp"
#include "weft/group/process_group.hpp"

namespace weft {

/// The end of every error text of a group: ` [group "tp", rank 3, call 17]`.
std::string tail(const Membership& member, std::uint64_t call = kNoCall);

class GroupFailure {
 public:
  GroupFailure(Context& context, const Membership& member, Backend& backend, ProgressEngine& progress,
               TraceFiles& trace_files, std::shared_ptr<Recorder> recorder) noexcept
      : context_(context),
        member_(member),
        backend_(backend),
        progress_(progress),
        trace_files_(trace_files),
        recorder_(std::move(recorder)) {}

  bool happened() const noexcept { return failed_.load(std::memory_order_acquire); }
  /// Returns the first cause if the group has failed.
  std::optional<Failure> first_cause() const;
  /// Call it when the backend has failed. It takes over the backend's first cause, writes the trace and wakes
  /// waiting threads. Only the first call has an effect. It calls `last_calls()` if ranks are late or dead.
  /// Null: this thread cannot know the last calls.
  void take_over(const std::function<std::vector<LastCall>()>& last_calls = nullptr) noexcept;
  /// Throws the first cause, for a call of `op` that fails because of it. The cause may lie in another call,
  /// or in none.
  [[noreturn]] void raise(Op op, std::uint64_t call = kNoCall);
  /// Returns the Error that raise() would throw, for a callback.
  Error error(Op op, std::uint64_t call) const;

  bool quiesced() const noexcept { return quiesced_.load(std::memory_order_acquire); }
  /// Waits up to `limit`; returns true if no rank can access the memory of the calls in `ring` any more.
  bool quiesce(Duration limit, const Ring& ring) noexcept;
  /// Like quiesce(), for Works that are destroyed. If there are several, only the first one waits.
  bool quiesce_dropped(const Ring& ring) noexcept;
  /// Call this if a Work was destroyed before its call has ended. If the program gets no Error about that,
  /// logs a warning once per group, and notifies `weft run`.
  void warn_of_dropped(Op op, std::uint64_t call, bool had_failed) noexcept;

 private:
  Context& context_;
  const Membership& member_;
  Backend& backend_;
  ProgressEngine& progress_;
  TraceFiles& trace_files_;
  const std::shared_ptr<Recorder> recorder_;
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  std::optional<Failure> first_cause_;  // guarded by mutex_, …
  std::vector<LastCall> last_calls_;    // … and so is this; set if ranks are late or dead
  std::atomic<bool> told_{false};       // an Error of the failure was thrown
  std::atomic<bool> warned_{false};     // a warning about a destroyed Work was logged
  std::atomic<bool> quiesced_{false};
  std::atomic<bool> drop_quiesced_{false};  // a destroyed Work has waited in quiesce() once
};

}  // namespace weft
