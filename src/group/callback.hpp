// A callback of Work::then(), from there until it has been called.
//
// Each slot of the ring knows the callbacks of its call. The thread that finishes the last of a callback's
// calls, or fails the group, owns the group and so cannot call the callback: it puts it into the list of the
// rank's ProgressEngine, whose entries are run once the thread holds nothing. If a thread that waits finds
// the failure first, it does not wait for that, but calls the callback itself. The thread that claims a
// callback calls it.
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

  int left = 0;                ///< calls that have not ended; the group's owner's
  bool queued = false;         ///< the group's owner's
  std::optional<Error> error;  ///< set before it is queued, if at all

  void run() noexcept override { call(error ? &*error : nullptr); }
  /// Calls it, unless another thread has claimed it. Any thread.
  void call(const Error* e) noexcept;
  /// Waits until it has returned; false: not by `limit`. True, too, where this thread is in it.
  bool await(Deadline limit) const noexcept;
  /// The exception that it threw, once; nothing if it threw nothing.
  std::exception_ptr take_thrown() noexcept { return std::exchange(thrown_, nullptr); }
  /// "the callback of all_reduce [group "x", rank 0, call 3]"
  const std::string& title() const noexcept { return title_; }

  /// Whether this thread runs a callback of that group.
  static bool inside(const GroupState* group) noexcept;

 private:
  enum class State : std::uint8_t { waiting, running, over };
  std::unique_ptr<detail::WorkCallback> f_;
  const GroupState* const group_;  // compared, never followed: it may be gone; so is what follows
  const std::shared_ptr<UserNumbers>* const users_;
  const std::string title_;
  ProgressEngine& progress_;
  std::atomic<State> state_{State::waiting};
  std::atomic<std::thread::id> runner_{};
  std::exception_ptr thrown_;
};

/// For code that has only the ProcessGroup, and is about to begin a call and wait for it: throws
/// bad_argument in a callback of that group, which may not wait for calls of the group.
void check_may_wait(const ProcessGroup& group);

/// Which message a recv from any_source took, or wait_message found. Shared by the slot of the call and its
/// Work, which may ask after the slot has been given to another call.
struct FoundMessage {
  MessageInfo message{};           ///< once `known`
  std::atomic<bool> known{false};  ///< set by the group's owner when the call is done
};

namespace detail {

/// The callbacks of one Work.
class WorkCallbacks {
 public:
  explicit WorkCallbacks(Context& context, ProgressEngine& progress)
      : context_(context), progress_(progress) {}
  std::vector<std::shared_ptr<Callback>> all;
  std::vector<std::shared_ptr<FoundMessage>> found;  // in the order of the calls

  /// Calls those that nobody has called yet, with this error; waits for the others.
  void fail(const Error& e) noexcept;
  /// Waits until all have returned, of calls that have ended.
  void await() noexcept;
  /// The same; false: not by `limit`. Then throws what the first threw.
  bool settle(Deadline limit);
  /// The same for a Work that is dropped: what they threw is logged.
  void drop() noexcept;

 private:
  void log_thrown(std::exception_ptr thrown, const Callback& from) noexcept;
  Context& context_;
  ProgressEngine& progress_;
};

}  // namespace detail
}  // namespace weft
