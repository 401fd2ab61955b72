// A callback of Work::then(), from its registration until it has been called.
//
// Each slot of the ring has a list of the callbacks of its call. The thread that finishes the last of a
// callback's calls, or fails the group, owns the group and so cannot call the callback. It puts the callback
// into the list of the rank's ProgressEngine, whose entries run when the thread holds no lock. If a waiting
// thread notices the failure first, it calls the callback itself at once. The thread that claims a callback
// calls it.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "host/progress_engine.hpp"
#include "weft/backends/call.hpp"
#include "weft/base/error.hpp"
#include "weft/group/process_group.hpp"
#include "weft/group/work.hpp"
#include "weft/host/context.hpp"

namespace weft {

class Callback final : public ProgressEngine::Later {
 public:
  Callback(std::unique_ptr<detail::WorkCallback> f, const GroupState* group, std::string title,
           ProgressEngine& progress);

  int left = 0;                ///< the number of calls that have not ended; used by the group's owner
  bool queued = false;         ///< used by the group's owner
  std::optional<Error> error;  ///< if it is set, it is set before the callback is queued

  void run() noexcept override { call(error ? &*error : nullptr); }
  /// Calls the callback, unless another thread has claimed it. Any thread.
  void call(const Error* e) noexcept;
  /// Waits until the callback has returned; returns false if it still runs at `limit`. Also returns true if
  /// this thread is inside the callback.
  bool await(Deadline limit) const noexcept;
  /// Returns the exception that the callback threw, once. Nothing if it threw nothing.
  std::exception_ptr take_thrown() noexcept { return std::exchange(thrown_, nullptr); }
  /// "the callback of all_reduce [group "x", rank 0, call 3]"
  const std::string& title() const noexcept { return title_; }

  /// Returns whether this thread runs a callback of that group.
  static bool inside(const GroupState* group) noexcept;

 private:
  enum class State : std::uint8_t { waiting, running, over };
  std::unique_ptr<detail::WorkCallback> f_;
  // compared, but never followed, because the group may be destroyed; this is also so for the objects below
  const GroupState* const group_;
  const std::shared_ptr<UserNumbers>* const users_;
  const std::string title_;
  ProgressEngine& progress_;
  std::atomic<State> state_{State::waiting};
  std::atomic<std::thread::id> runner_{};
  std::exception_ptr thrown_;
};

/// For code that has only the ProcessGroup, and is about to begin a call and wait for it. Throws bad_argument
/// in a callback of that group, because such a callback may not wait for calls of the group.
void check_may_wait(const ProcessGroup& group);

/// The message that a recv from any_source took, or that wait_message found. The slot of the call shares this
/// object with the call's Work, which may need it after the slot has been given to another call.
struct FoundMessage {
  MessageInfo message{};           ///< valid if `known`
  std::atomic<bool> known{false};  ///< set by the group's owner when the call is done
};

namespace detail {

/// The callbacks of one Work.
class WorkCallbacks {
 public:
  explicit WorkCallbacks(Context& context, ProgressEngine& progress)
      : context_(context), progress_(progress) {}
  std::vector<std::shared_ptr<Callback>> all;
  // of the recvs from any_source, in the order of the calls
  std::vector<std::shared_ptr<FoundMessage>> found;

  /// Calls the callbacks that have not been called yet, with this error. Waits for the others.
  void fail(const Error& e) noexcept;
  /// Waits until all callbacks have returned whose calls have ended.
  void await() noexcept;
  /// Like await(), but returns false if callbacks still run at `limit`. Then rethrows the first exception.
  bool settle(Deadline limit);
  /// Like await(), for a Work that is destroyed. It logs exceptions of the callbacks.
  void drop() noexcept;

 private:
  void log_thrown(std::exception_ptr thrown, const Callback& from) noexcept;
  Context& context_;
  ProgressEngine& progress_;
};

}  // namespace detail
}  // namespace weft
