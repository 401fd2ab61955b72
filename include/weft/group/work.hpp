// A ticket for a call in flight.
#pragma once

#include <array>
#include <concepts>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "weft/base/clock.hpp"
#include "weft/base/device.hpp"

namespace weft {

class Error;
class GroupState;
class Work;

namespace detail {
class Access;  // of weft's own layers

/// The callbacks that Work::then() got.
class WorkCallback {
 public:
  virtual ~WorkCallback() = default;
  virtual void call(const Error* error) = 0;
};
template <class F>
class WorkCallbackOf final : public WorkCallback {
 public:
  explicit WorkCallbackOf(F f) : f_(std::move(f)) {}
  void call(const Error* error) override { f_(error); }

 private:
  F f_;
};
class WorkCallbacks;
/// Coalesced calls after the first, in order; `next`: the first of them that nobody has waited for.
struct FurtherCalls {
  struct Ticket {
    std::uint32_t slot, ticket;
  };
  explicit FurtherCalls(std::size_t most) { many.reserve(most > few.size() ? most - few.size() : 0); }
  void add(Ticket call) noexcept {  // as many as were said
    if (count++ < few.size())
      few[count - 1] = call;
    else
      many.push_back(call);
  }
  const Ticket& operator[](std::size_t i) const noexcept {
    return i < few.size() ? few[i] : many[i - few.size()];
  }
  std::array<Ticket, 12> few;
  std::vector<Ticket> many;
  std::size_t count = 0, next = 0;
};
void wait_all(std::span<Work* const> works);

}  // namespace detail

/// Move-only. `in` and `out` of the call must live, and not be touched, until it is done.
///
/// Dropping an unfinished Work aborts its group and quiesces (up to 2 s, once a group): never do it on
/// purpose. A Work whose Error was thrown is invalid. The Work of coalesced calls is done when all are, and
/// fails with the first that fails. An invalid Work counts as done: done(), wait() and wait_for() return at
/// once, without an Error, so a second wait() reports nothing. They may be called from any thread, one at a
/// time per Work; each makes progress on all calls in flight of this rank, in all its groups, so that waiting
/// in different orders on different ranks cannot deadlock.
class [[nodiscard]] Work {
 public:
  Work() = default;
  Work(Work&& other) noexcept
      : group_(other.group_),
        place_(other.place_),
        ticket_(other.ticket_),
        more_(std::move(other.more_)),
        callbacks_(std::exchange(other.callbacks_, nullptr)) {
    other.group_ = nullptr;
  }
  Work& operator=(Work&& other) noexcept;
  ~Work() {
    if (group_ != nullptr || callbacks_ != nullptr) drop();
  }

  /// Takes the next possible steps; never blocks. True: finished. Throws the call's Error if it failed.
  bool done();
  /// Makes progress until it is done. Throws the call's Error; after the deadline, timeout.
  void wait();
  /// Like wait(), but returns false after `limit`, the call still pending.
  bool wait_for(Duration limit);
  /// Makes `stream` wait for it; Stream{}: the default one of the group's device. Stream backends do not
  /// block the host and leave the Work pending: wait() or done() still report how it ended. With others the
  /// host waits here.
  void wait_on(Stream stream);
  /// f is called exactly once, when the call has ended (of coalesced calls: when all have): `f(nullptr)`, or
  /// `f(&error)` if it failed, which includes that this Work was dropped. Several are called in the order
  /// in which they were given. If the call has ended already, or this Work is invalid, f is called at
  /// once, here.
  ///
  /// It runs in the thread that made the last step: one that waits or asks done(), for whatever call of this
  /// rank, or with Progress::thread the helper thread. No lock is held, so f may submit calls and ask done().
  /// It should be short: that thread makes no progress meanwhile. It may not wait for a call of its own group
  /// (bad_argument), nor destroy the group. wait(), and done() or wait_for() that says true, return after f
  /// has returned, so f may refer to objects that live as long as the Work.
  ///
  /// If f throws and the call succeeded, wait(), done() or wait_for() of this Work throws the exception; if
  /// the call failed or the Work was dropped, the exception is logged as a warning. If f is called at once
  /// it is thrown here.
  template <std::invocable<const Error*> F>
  void then(F f) & {
    add(std::make_unique<detail::WorkCallbackOf<F>>(std::move(f)));
  }
  /// The same where the Work is made: `Work w = group.all_reduce(x).then(f);`.
  template <std::invocable<const Error*> F>
  Work then(F f) && {
    then(std::move(f));
    return std::move(*this);
  }
  /// The rank that sent the message of a recv. For a recv from any_source it is known once the call is done,
  /// and stays known after wait(). Throws bad_argument if it is not known: the call is pending or has
  /// failed, this is the Work of another call, or of several.
  int source() const;
  /// The same for coalesced calls: the source of each recv from any_source among them, in the order of the
  /// calls.
  std::vector<int> sources() const;
  /// False: default-made, moved from, or already waited for.
  bool valid() const noexcept {
    return group_ != nullptr || (callbacks_ != nullptr && source_now() != kAllEnded);
  }

 private:
  friend class GroupState;
  // Values of source_now() that are no rank: there is no source; there are several, see sources(); the same,
  // and callbacks_ is kept for them alone.
  static constexpr std::uint32_t kNoSource = 0xffffff, kSeveral = 0xfffffe, kAllEnded = 0xfffffd;
  Work(GroupState* group, std::uint32_t slot, std::uint32_t ticket) noexcept
      : group_(group), place_(kNoSource << 8 | slot), ticket_(ticket) {}
  std::uint32_t slot() const noexcept { return place_ & 0xff; }
  // A rank, or one of the above.
  std::uint32_t source_now() const noexcept { return place_ >> 8; }
  void set_source(std::uint32_t source) noexcept { place_ = source << 8 | slot(); }
  void set_slot(std::uint32_t slot) noexcept { place_ = source_now() << 8 | slot; }
  template <class Ask>
  bool ask(const Ask& ask);
  void take(Work& other) noexcept;
  void drop() noexcept;
  void finish() noexcept;
  void spend() noexcept;
  void add(std::unique_ptr<detail::WorkCallback> callback);
  void check_may_wait() const;
  bool calls_back() const noexcept { return callbacks_ != nullptr && source_now() != kAllEnded; }
  bool settle_callbacks(Deadline limit);
  void end_callbacks() noexcept;
  // Calls see(slot, ticket) for each call that nobody has waited for yet.
  template <class See>
  void each_call(const See& see) const {
    see(slot(), ticket_);
    for (std::size_t i = more_ ? more_->next : 0; more_ && i < more_->count; ++i)
      see((*more_)[i].slot, (*more_)[i].ticket);
  }
  GroupState* group_ = nullptr;  // counted, once for each call; null: there are no further calls either
  // The slot, below 256, and above it the source: one word, for a processor that has just written a part of a
  // word waits before it can read the whole.
  std::uint32_t place_ = kNoSource << 8;
  std::uint32_t ticket_ = 0;                    // the slot's generation while the call is in flight
  std::unique_ptr<detail::FurtherCalls> more_;  // coalesced: waited for after this
  // Owned; null: none. Without a group: the calls have ended, the callbacks perhaps not. It also holds the
  // sources that receives from any_source have found.
  detail::WorkCallbacks* callbacks_ = nullptr;
};

/// Waits for all of them, of one group or of several, in any order. If some fail it throws the Error of
/// the first in the list that did, after all have ended: none is pending or valid afterwards. The Works have
/// names: in `wait_all(g.all_reduce(a), g.all_reduce(b))`, which does not compile, ranks might submit in
/// different orders.
void wait_all(std::span<Work> works);
template <std::same_as<Work>... Works>
void wait_all(Work& first, Works&... works) {
  Work* const all[] = {&first, &works...};
  detail::wait_all(all);
}
/// The same until `limit` has passed: false if some are pending then, which stay valid. An Error is thrown
/// when all have ended or the limit has passed, even if some are pending.
bool wait_all_for(std::span<Work> works, Duration limit);

}  // namespace weft
