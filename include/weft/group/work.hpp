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

/// A callback that the program passed to Work::then().
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
/// The coalesced calls after the first call, in order. `next`: the first of these calls for which no wait has
/// ended yet.
struct FurtherCalls {
  struct Ticket {
    std::uint32_t slot, ticket;
  };
  explicit FurtherCalls(std::size_t most) { many.reserve(most > few.size() ? most - few.size() : 0); }
  void add(Ticket call) noexcept {  // at most `most` times
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

/// Move-only. The caller must keep `in` and `out` of the call alive, and not touch them, until the Work is
/// done.
///
/// If an unfinished Work is destroyed, its group is aborted and quiesced (up to 2 s, once per group). A
/// program should never do so on purpose. A Work whose Error was thrown is invalid. The Work of coalesced
/// calls is done when all calls are done, and fails with the first call that fails. An invalid Work counts as
/// done: done(), wait() and wait_for() return at once, without an Error. So a second wait() reports nothing.
/// Any thread may call these three functions. Only one thread at a time may call them on one Work. Each of
/// them makes progress on all calls in flight of this rank, in all its groups. So ranks may wait in different
/// orders without deadlock.
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

  /// Takes the steps that are possible now. Never blocks. Returns true if the call is finished. Throws the
  /// call's Error if the call has failed.
  bool done();
  /// Makes progress until the call is done. Throws the call's Error. After the deadline it throws timeout.
  void wait();
  /// Like wait(), but returns false if the call is still pending after `limit`.
  bool wait_for(Duration limit);
  /// Makes `stream` wait for the call. Stream{} means the default stream of the group's device. With a stream
  /// backend the host does not wait, and the Work stays pending. wait() or done() still report how the call
  /// ended. With other backends the host waits here.
  void wait_on(Stream stream);
  /// weft calls f exactly once, when the call has ended (coalesced calls: when all have ended): `f(nullptr)`,
  /// or `f(&error)` if the call has failed or this Work was destroyed before. Several functions are called in
  /// the order in which they were given to then(). If the call has ended already, or this Work is invalid,
  /// then() itself calls f at once.
  ///
  /// f runs in the thread that took the last step of the call. This is a thread that waits for or polls any
  /// call of this rank, or, with Progress::thread, the helper thread. That thread holds no lock, so f may
  /// submit calls and call done(). f should be short, because the thread makes no progress meanwhile. f must
  /// not wait for a call of its own group (bad_argument), nor destroy the group. wait() returns, and done()
  /// and wait_for() return true, only after f has returned. So f may refer to objects that exist as long as
  /// the Work.
  ///
  /// If f throws and the call succeeded, wait(), done() or wait_for() of this Work throws the exception. If
  /// the call failed or the Work was destroyed, weft logs the exception as a warning. If then() itself calls
  /// f, then() throws the exception.
  template <std::invocable<const Error*> F>
  void then(F f) & {
    add(std::make_unique<detail::WorkCallbackOf<F>>(std::move(f)));
  }
  /// Like the function above, for a temporary Work: `Work w = group.all_reduce(x).then(f);`.
  template <std::invocable<const Error*> F>
  Work then(F f) && {
    then(std::move(f));
    return std::move(*this);
  }
  /// The rank that sent the message of a recv. For a recv from any_source the rank is known once the call is
  /// done, and stays known after wait(). Throws bad_argument if the rank is not known: the call is pending or
  /// has failed, or this is the Work of another operation, or of several calls.
  int source() const;
  /// Like source(), for coalesced calls: the sources of the calls that are recvs from any_source, in the
  /// order of the calls.
  std::vector<int> sources() const;
  /// False if this Work was made by default, was moved from, or has been waited for.
  bool valid() const noexcept {
    return group_ != nullptr || (callbacks_ != nullptr && source_now() != kAllEnded);
  }

 private:
  friend class GroupState;
  // Values of source_now() that are no rank. kNoSource: there is no source. kSeveral: there are several
  // sources, see sources(). kAllEnded: like kSeveral, and callbacks_ only stores the sources.
  static constexpr std::uint32_t kNoSource = 0xffffff, kSeveral = 0xfffffe, kAllEnded = 0xfffffd;
  Work(GroupState* group, std::uint32_t slot, std::uint32_t ticket) noexcept
      : group_(group), place_(kNoSource << 8 | slot), ticket_(ticket) {}
  std::uint32_t slot() const noexcept { return place_ & 0xff; }
  // A rank, or one of the values above.
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
  // Calls see(slot, ticket) for each call for which no wait has ended yet.
  template <class See>
  void each_call(const See& see) const {
    see(slot(), ticket_);
    for (std::size_t i = more_ ? more_->next : 0; more_ && i < more_->count; ++i)
      see((*more_)[i].slot, (*more_)[i].ticket);
  }
  GroupState* group_ = nullptr;  // counted once for each call; if null, there are no further calls either
  // The slot in the lower 8 bits and the source above them, written as one word. A processor that has just
  // written a part of a word must wait before it can read the whole word.
  std::uint32_t place_ = kNoSource << 8;
  std::uint32_t ticket_ = 0;                    // the generation of the slot that belongs to this call
  std::unique_ptr<detail::FurtherCalls> more_;  // coalesced calls after the first one
  // Owned. Null if there are no callbacks. If there is no group, the calls have ended, but some callbacks may
  // still have to run. It also holds the sources that receives from any_source have found.
  detail::WorkCallbacks* callbacks_ = nullptr;
};

/// Waits for all of the Works, of one group or of several, in any order. If some fail, it throws the Error of
/// the first of these in the list, after all have ended. No Work is pending or valid afterwards. The Works
/// must be lvalues: `wait_all(g.all_reduce(a), g.all_reduce(b))` does not compile, because ranks might submit
/// the two calls in different orders.
void wait_all(std::span<Work> works);
template <std::same_as<Work>... Works>
void wait_all(Work& first, Works&... works) {
  Work* const all[] = {&first, &works...};
  detail::wait_all(all);
}
/// Like wait_all(), but waits at most `limit`. Returns false if Works are still pending; these stay valid. If
/// a call has failed, it throws the Error when all have ended or the limit has passed, even if some are
/// pending.
bool wait_all_for(std::span<Work> works, Duration limit);

}  // namespace weft
