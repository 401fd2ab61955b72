#include "weft/group/work.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <vector>

#include "group/callback.hpp"
#include "group/group_state.hpp"

namespace weft {

Work& Work::operator=(Work&& other) noexcept {
  if (this != &other) {
    if (group_ != nullptr || callbacks_ != nullptr) drop();
    take(other);
    set_source(other.source_now());
    callbacks_ = std::exchange(other.callbacks_, nullptr);
  }
  return *this;
}

void Work::take(Work& other) noexcept {
  group_ = std::exchange(other.group_, nullptr);
  set_slot(other.slot());
  ticket_ = other.ticket_;
  more_ = std::move(other.more_);
}

// The Work's present call was given back: goes on with the next call.
void Work::finish() noexcept {
  if (!more_ || more_->next == more_->count) {
    group_ = nullptr;
    more_.reset();
    return;
  }
  const detail::FurtherCalls::Ticket& next = (*more_)[more_->next++];
  set_slot(next.slot & 0xff);
  ticket_ = next.ticket;
}

void Work::drop() noexcept {
  const std::unique_ptr<detail::WorkCallbacks> callbacks(std::exchange(callbacks_, nullptr));
  bool forked = false;
  for (; group_; finish()) {
    forked = group_->context.forked();
    group_->dropped(slot(), ticket_, callbacks.get());
  }
  if (callbacks && !forked && source_now() != kAllEnded) callbacks->drop();
}

void Work::spend() noexcept {
  for (; group_; finish()) group_->give_back();
  delete std::exchange(callbacks_, nullptr);
  set_source(kNoSource);
}

void Work::add(std::unique_ptr<detail::WorkCallback> f) {
  std::optional<Error> error;
  if (group_) {
    if (!callbacks_) callbacks_ = group_->new_callbacks();
    callbacks_->all.reserve(callbacks_->all.size() + 1);
    if (auto callback = group_->add_callback(*this, f, error)) {
      callbacks_->all.push_back(std::move(callback));
      return;
    }
    if (error) {
      callbacks_->fail(*error);
    } else {
      callbacks_->await();
    }
  }
  f->call(error ? &*error : nullptr);
}

void Work::check_may_wait() const {
  if (group_ && group_->inside_callback()) [[unlikely]]
    group_->check_may_wait(slot(), ticket_);
}

// Call this when all calls have ended without an error.
bool Work::settle_callbacks(Deadline limit) {
  try {
    if (!callbacks_->settle(limit)) return false;
  } catch (...) {
    end_callbacks();
    throw;
  }
  end_callbacks();
  return true;
}

// Call this when all callbacks have returned. Keeps the results of receives.
void Work::end_callbacks() noexcept {
  if (!callbacks_->found.empty() && source_now() == kSeveral) {
    callbacks_->all.clear();
    set_source(kAllEnded);
    return;
  }
  if (!callbacks_->found.empty())
    set_source(static_cast<std::uint32_t>(callbacks_->found.front()->message.source));
  delete std::exchange(callbacks_, nullptr);
}

int Work::source() const {
  const auto wrong = [](const char* why) {
    throw Error(ErrorCode::bad_argument, fmt::format("source: {}", why));
  };
  if (source_now() == kSeveral || source_now() == kAllEnded)
    wrong("the Work is of coalesced calls; expected one recv, or call sources()");
  if (callbacks_ != nullptr && !callbacks_->found.empty()) {
    if (!callbacks_->found.front()->known.load(std::memory_order_acquire)) wrong("the recv is not done yet");
    return callbacks_->found.front()->message.source;
  }
  if (source_now() == kNoSource)
    wrong("the Work is of no recv, or of one that has failed; expected one that is done");
  return static_cast<int>(source_now());
}

std::vector<int> Work::sources() const {
  std::vector<int> ranks;
  if (source_now() != kSeveral && source_now() != kAllEnded)
    throw Error(ErrorCode::bad_argument,
                "sources: the Work is not of coalesced calls, or of some that have failed; call source()");
  if (callbacks_ == nullptr) return ranks;
  for (const auto& f : callbacks_->found) {
    if (!f->known.load(std::memory_order_acquire))
      throw Error(ErrorCode::bad_argument,
                  fmt::format("sources: recv {} from any_source is not done yet", ranks.size()));
    ranks.push_back(f->message.source);
  }
  return ranks;
}

// If a call has failed and thrown its Error, its Work is spent, and so are the calls after it, because the
// group has failed. The caller must quiesce().
template <class Ask>
bool Work::ask(const Ask& ask) {
  for (; group_; finish()) {
    bool finished = false;
    try {
      finished = ask();
    } catch (const Error& e) {
      if (callbacks_ && !group_->context.forked()) callbacks_->fail(e);
      spend();
      throw;
    } catch (...) {
      spend();
      throw;
    }
    if (!finished) return false;
  }
  return true;
}

bool Work::done() {
  return ask([&] { return group_->poll(slot(), ticket_); }) &&
         (!calls_back() || settle_callbacks(Deadline::after(Duration::zero())));
}

void Work::wait() {
  check_may_wait();
  ask([&] { return group_->wait(slot(), ticket_, nullptr); });
  if (calls_back()) [[unlikely]]
    settle_callbacks(Deadline::never());
}

bool Work::wait_for(Duration limit) {
  const Deadline deadline = Deadline::after(limit);
  if (limit > Duration::zero()) check_may_wait();
  bool first = true;
  return ask([&] {
           const Duration left = std::exchange(first, false) ? limit : deadline.left();
           return group_->wait(slot(), ticket_, &left);
         }) &&
         (!calls_back() || settle_callbacks(deadline));
}

void Work::wait_on(Stream stream) {
  if (!group_ || !group_->streams()) return wait();
  check_may_wait();
  // This does not give back the call, since wait() or done() still reports how the call ended.
  try {
    each_call([&](std::uint32_t slot, std::uint32_t ticket) { group_->wait_on(slot, ticket, stream); });
  } catch (const Error& e) {
    if (group_->failure()) {  // if the group has not failed, the stream cannot wait
      if (callbacks_) callbacks_->fail(e);
      spend();
    }
    throw;
  }
}

namespace {

// Waits until the deadline for the Work of each entry of a list, except for null entries. Keeps the first
// exception. Returns true if all Works have ended.
template <class List, class WorkOf>
bool wait_for_each(const List& works, const WorkOf& work_of, const Deadline* limit) {
  std::exception_ptr first;
  bool all = true;
  for (auto& entry : works) {
    Work& work = work_of(entry);
    try {
      if (limit == nullptr) {
        work.wait();
      } else {
        all &= work.wait_for(limit->left());
      }
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
  return all;
}

}  // namespace

void detail::wait_all(std::span<Work* const> works) {
  wait_for_each(
      works, [](Work* w) -> Work& { return *w; }, nullptr);
}
void wait_all(std::span<Work> works) {
  wait_for_each(
      works, [](Work& w) -> Work& { return w; }, nullptr);
}
bool wait_all_for(std::span<Work> works, Duration limit) {
  const Deadline deadline = Deadline::after(limit);
  return wait_for_each(
      works, [](Work& w) -> Work& { return w; }, &deadline);
}

}  // namespace weft
