#include "group/callback.hpp"

#include <fmt/format.h>
#include <sched.h>

#include "base/errors/caught.hpp"
#include "group/group_state.hpp"

namespace weft {
namespace {

// The callbacks that this thread is running, the innermost first. A callback may wait for a call of another
// group, and run other callbacks meanwhile.
struct Running {
  const GroupState* group;
  const std::shared_ptr<UserNumbers>* users;
  const Running* outer;
};
thread_local const Running* innermost = nullptr;

[[noreturn]] void refuse_wait(const std::string& tail) {
  throw Error(Failure{.code = ErrorCode::bad_argument,
                      .text = fmt::format("wait: this thread is in a callback of the same group, which may "
                                          "not wait for its calls; call done(), or wait in another thread{}",
                                          tail),
                      .ranks = {}});
}

}  // namespace

Callback::Callback(std::unique_ptr<detail::WorkCallback> f, const GroupState* group, std::string title,
                   ProgressEngine& progress)
    : f_(std::move(f)), group_(group), users_(&group->users), title_(std::move(title)), progress_(progress) {}

bool Callback::inside(const GroupState* group) noexcept {
  for (const Running* r = innermost; r != nullptr; r = r->outer)
    if (r->group == group) return true;
  return false;
}

void Callback::call(const Error* e) noexcept {
  State expected = State::waiting;
  if (!state_.compare_exchange_strong(expected, State::running, std::memory_order_acq_rel)) return;
  runner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  const Running running{group_, users_, innermost};
  innermost = &running;
  progress_.callback_runs(+1);
  try {
    f_->call(e);
  } catch (...) {
    thrown_ = std::current_exception();
  }
  f_.reset();  // destroys the function, with all objects that it holds
  progress_.callback_runs(-1);
  innermost = running.outer;
  state_.store(State::over, std::memory_order_release);
}

bool Callback::await(Deadline limit) const noexcept {
  for (int looks = 0; state_.load(std::memory_order_acquire) != State::over; ++looks) {
    if (state_.load(std::memory_order_relaxed) == State::running &&
        runner_.load(std::memory_order_relaxed) == std::this_thread::get_id())
      return true;
    if (limit.passed()) return false;
    if (looks < kYields) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
  return true;
}

namespace detail {

void WorkCallbacks::log_thrown(std::exception_ptr thrown, const Callback& from) noexcept {
  try {
    std::rethrow_exception(std::move(thrown));
  } catch (...) {
    try {
      context_.log().write(LogLayer::group, LogLevel::warning,
                           fmt::format("{} threw: {}", from.title(), caught_words()));
    } catch (...) {  // no memory for the message
    }
  }
}

void WorkCallbacks::fail(const Error& e) noexcept {
  for (const auto& c : all) c->call(&e);
  drop();
}

void WorkCallbacks::await() noexcept {
  progress_.run_due();
  for (const auto& c : all) c->await(Deadline::never());
}

void WorkCallbacks::drop() noexcept {
  await();
  for (const auto& c : all) {
    if (std::exception_ptr thrown = c->take_thrown()) log_thrown(std::move(thrown), *c);
  }
}

bool WorkCallbacks::settle(Deadline limit) {
  progress_.run_due();
  for (const auto& c : all)
    if (!c->await(limit)) return false;
  std::exception_ptr first;
  for (const auto& c : all) {
    std::exception_ptr thrown = c->take_thrown();
    if (thrown && first) {
      log_thrown(std::move(thrown), *c);
    } else if (thrown) {
      first = std::move(thrown);
    }
  }
  if (first) std::rethrow_exception(first);
  return true;
}

}  // namespace detail

// Adds the callback of the calls of `work`. Returns null if all calls have ended already, so that no thread
// would call the callback. `error` then says how they ended.
std::shared_ptr<Callback> GroupState::add_callback(const Work& work, std::unique_ptr<detail::WorkCallback>& f,
                                                   std::optional<Error>& error) {
  own();
  try {
    std::vector<std::uint32_t> pending;  // the slots of the calls that have not ended
    work.each_call([&](std::uint32_t slot, std::uint32_t ticket) {
      if (!ring_.finished(slot, ticket)) pending.push_back(slot);
    });
    if (pending.empty() || failed()) {
      if (!pending.empty())
        error = failure_.error(ring_[pending.front()].op.op, ring_[pending.front()].op.call);
      disown();
      return nullptr;
    }
    const OpState& s = ring_[pending.front()].op;
    const auto callback = std::make_shared<Callback>(
        std::move(f), this, fmt::format("the callback of {}{}", name(s.op), tail(member, s.call)), progress_);
    for (const std::uint32_t slot : pending) ring_[slot].callbacks.reserve(ring_[slot].callbacks.size() + 1);
    for (const std::uint32_t slot : pending) {
      ring_[slot].callbacks.push_back(callback);
      ring_[slot].attended = true;
      ++callback->left;
    }
    disown();
    return callback;
  } catch (...) {
    disown();
    throw;
  }
}

// Called by the owner when the call of this slot is done.
void GroupState::call_back(Ring::Slot& slot) noexcept {
  slot.attended = false;
  slot.lent.reset();
  if (const auto found = std::move(slot.found)) {
    const OpState& s = slot.op;
    found->message = {s.peer, s.tag, s.dtype, s.out_count};
    found->known.store(true, std::memory_order_release);
    recorder_->found(slot.record, s);
  }
  for (auto& c : slot.callbacks)
    if (--c->left == 0) progress_.run_later(std::move(c));
  slot.callbacks.clear();
}

// Called by the owner when the call of this slot fails with the group.
void GroupState::fail_back(Ring::Slot& slot) noexcept {
  slot.attended = false;
  slot.found.reset();
  for (auto& c : slot.callbacks) {
    if (c->queued) continue;  // a callback of several calls may be queued already
    try {
      c->error = failure_.error(slot.op.op, slot.op.call);
    } catch (...) {
      continue;  // no memory for the text: the thread that polls the Work
                 // calls it
    }
    c->queued = true;
    progress_.run_later(c);
  }
  slot.callbacks.clear();
}

// For a Work that is destroyed: calls its waiting callbacks, with the Error.
void GroupState::fail_callbacks(const detail::WorkCallbacks& callbacks) noexcept {
  if (!failed()) return;
  if (own_within(kStuckInFailure)) {
    mark_failed();
    disown();
    return;
  }
  try {
    const Error e = failure_.error(Op::none, kNoCall);
    for (const auto& c : callbacks.all) c->call(&e);
  } catch (...) {}
}

bool GroupState::inside_callback() const noexcept {
  return progress_.callbacks_running() > 0 && Callback::inside(this);
}

void GroupState::check_may_wait() const {
  if (inside_callback()) [[unlikely]]
    refuse_wait(tail(member));
}

void check_may_wait(const ProcessGroup& group) {
  for (const Running* r = innermost; r != nullptr; r = r->outer)
    if (r->users == &detail::Access::state(group).users)
      refuse_wait(fmt::format(" [group \"{}\", rank {}]", group.name(), group.rank()));
}

}  // namespace weft
