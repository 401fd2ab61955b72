// The state that a ProcessGroup handle and its Works share: the backend, the ring of calls in flight
// (ring.hpp), the watch over them (watch.hpp) and the failure (failure.hpp). This file adds ownership of the
// group, submission, and the end of the group. The owner flag guards the ring and the backend: a thread that
// submits or polls owns the group meanwhile, and does not block. The flag also guards the count of Works, so
// that a submit and a wait take the flag twice, and need no other atomic operation.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/waits/suspension.hpp"
#include "group/callback.hpp"
#include "group/check.hpp"
#include "group/failure.hpp"
#include "group/hosts/host_table.hpp"
#include "group/persistent/prepared_call.hpp"
#include "group/ring.hpp"
#include "group/trace/trace_files.hpp"
#include "group/user_numbers.hpp"
#include "group/wait.hpp"
#include "group/watch.hpp"
#include "host/arena.hpp"
#include "host/dependents.hpp"
#include "host/progress_engine.hpp"
#include "host/threads/owner_flag.hpp"
#include "weft/base/interrupt.hpp"
#include "weft/group/process_group.hpp"

namespace weft {

/// Describes the group from which this group was made.
struct Origin {
  std::vector<int> ranks{};  ///< entry r: the number that rank r has in the parent group; empty: no parent
  std::string name{};        ///< the name; after shrinks that of the group that was shrunk first
  int shrinks = 0;           ///< how often that group was shrunk
  std::shared_ptr<HostTable> hosts{};  ///< the table of the group that was made first
  std::vector<int> ranks_in_hosts{};   ///< entry r: the number of rank r in that group; empty: equal numbers
};

class GroupState final : public Driven, public BlockHolder {
 public:
  /// A GroupState deletes itself when the handle has released it and every Work was given back. `ranks_here`:
  /// see GroupInit. `rendezvous_store`: the store through which the ranks make the group, if it is not the
  /// store of `m`.
  GroupState(Context& context, BackendFactory factory, const Membership& m, std::string token, int ranks_here,
             Origin origin = {}, const std::shared_ptr<Store>& rendezvous_store = {}, Duration patience = {});
  /// Call it once, when the handle releases the group.
  void release() noexcept;

  Work submit(const Call& call);
  /// Checks a call and prepares it, so that it can be started any number of times. Does not communicate.
  std::shared_ptr<detail::PreparedCall> prepare(const Call& call);
  /// Starts the result of prepare() as one call, which it numbers and sends as submit() does. Allocates
  /// nothing, unless the call receives from any source.
  Work start(const std::shared_ptr<detail::PreparedCall>& prepared);
  /// Like start(), for several calls as one. No call may be listed twice.
  Work start_all(std::span<const std::shared_ptr<detail::PreparedCall>> calls);
  /// Checks a plan, and lets the transport prepare it. Does not communicate. `sound`: see PreparedExchange.
  std::shared_ptr<detail::PreparedExchange> prepare_exchange(const ExchangePlan& plan, bool sound = false);
  Work start_exchange(detail::PreparedExchange& prepared, std::span<const ExchangeField> fields,
                      const CallOptions& options);
  /// `apart`: the caller has checked that no call writes memory that another call uses.
  Work submit_all(std::span<const Call> calls, bool apart = false);
  /// See ProcessGroup.
  std::optional<MessageInfo> probe(int source, const CallOptions& options);
  MessageInfo wait_message(int source, const CallOptions& options);
  /// Polls once. Returns true if the call of that ticket is done; its Work is then given back. Throws if the
  /// call has failed.
  bool poll(std::uint32_t slot, std::uint32_t ticket);
  /// Drives the group until the call is done; then gives its Work back and returns true. Returns false if a
  /// `limit` is given and has passed. Throws if the call has failed.
  bool wait(std::uint32_t slot, std::uint32_t ticket, const Duration* limit);
  /// For stream backends: makes `stream` wait for the call. Throws if the call failed.
  void wait_on(std::uint32_t slot, std::uint32_t ticket, Stream stream);
  /// Gives back the Work of a failed call: no thread will wait for this Work again.
  void give_back() noexcept;
  /// Gives back a Work that was destroyed. If its call is still in flight, the group fails, and the Work's
  /// callbacks are called.
  void dropped(std::uint32_t slot, std::uint32_t ticket, const detail::WorkCallbacks* callbacks) noexcept;

  detail::WorkCallbacks* new_callbacks() { return new detail::WorkCallbacks(context, progress_); }
  /// Takes `f`, which will be called when the calls of this Work have ended. Returns null if the calls have
  /// ended already. `error` then says how, and `f` still belongs to the caller.
  std::shared_ptr<Callback> add_callback(const Work& work, std::unique_ptr<detail::WorkCallback>& f,
                                         std::optional<Error>& error);
  /// Returns whether this thread is in a callback of this group.
  bool inside_callback() const noexcept;
  /// Throws if this thread is in a callback of this group.
  void check_may_wait() const;
  /// Like check_may_wait(), but does nothing if this call has ended.
  void check_may_wait(std::uint32_t slot, std::uint32_t ticket) const {
    if (!ring_.finished(slot, ticket)) check_may_wait();
  }

  /// A collective that all ranks make last. It compares the calls that they have made. Throws like
  /// ProcessGroup::leave().
  void compare_with_all(Duration deadline);
  void abort(std::string_view why);
  bool quiesce(Duration limit) noexcept;

  // The functions of Driven.
  bool drive() noexcept override;
  void announce_sleep(bool asleep) noexcept override;
  bool rings() const noexcept override {
    return rings_ || ring_.idle();  // if nothing is in flight, no peer must ring
  }
  bool helped() const noexcept override { return helped_; }
  bool settled() noexcept override;
  void answer() noexcept override;
  void watch() noexcept override;
  // The functions of BlockHolder.
  bool holds(const void* block, std::size_t bytes) const noexcept override;
  bool stand_still() noexcept override;
  void go_on() noexcept override;
  bool uses(const void* block, std::size_t bytes) const noexcept override {
    return !failed() && (ring_.is_exposed(block, bytes) || exchanges_touch(block, bytes));
  }

  Context& context;
  const BackendFactory factory;
  const Membership member;
  const std::string token;
  const int ranks_here;
  /// Returns GroupInit::ranks_here for a group of `ranks` ranks of this group. If each rank of this host has
  /// its own core, other ranks need not be counted.
  int ranks_here_of(int ranks) const noexcept { return spin_ ? ranks : ranks_here; }
  const Origin origin;
  /// Returns the Origin of a group that is made of these ranks.
  Origin origin_of(std::span<const int> ranks) const;
  /// The ranks on this rank's host, including this rank, in order. Throws the errors of HostTable.
  std::vector<int> local_ranks() const;
  /// Numbers for users of this group whose calls have an order of their own (dp's reducers).
  const std::shared_ptr<UserNumbers> users = std::make_shared<UserNumbers>();
  Trace trace() const { return recorder_->read(); }
  /// the generations of subgroups, by name and ranks; guarded by mutex_
  std::map<std::string, int> generations;
  std::string key(std::string_view what) const;  ///< a key of the store, under this group's token
  std::string next_token(std::string_view name, std::span<const int> ranks);
  /// The state of shrink(). Only one thread of this rank runs shrink() at a time.
  struct Shrinking {
    std::mutex mutex;
    int rounds = 0;            ///< how many rounds this rank has completed
    std::vector<int> members;  ///< the ranks that may take part in the next round; empty: all
  } shrinking;
  /// Ranks that died or left, as far as the transport knows now.
  std::vector<int> gone() const noexcept { return backend_->gone(); }
  /// The first cause, if the group has failed.
  std::optional<Failure> failure() const { return failure_.first_cause(); }
  /// For a thread that waits for ranks of this group outside of a call. Asks the transport whether these
  /// ranks are alive. Returns true if the group has failed.
  bool look_after() noexcept;
  void fail(const Failure& why) noexcept;
  /// Fails the group because another unfinished object than a Work was destroyed, and warns as for a Work.
  void fail_dropped(const Failure& why) noexcept;
  /// Returns whether this rank knows that the group has failed.
  bool failed() const noexcept { return failure_.happened(); }
  /// For a thread that waits for ranks outside of a call (in the Store, for example). While the result
  /// exists, the thread's waits answer the roll-calls of peers in all groups of this rank.
  CalledInWaits answering() const {
    return CalledInWaits([this] { progress_.answer(); });
  }
  /// The list of this rank that drives this group.
  ProgressEngine& progress() const noexcept { return progress_; }
  const Traits& traits() const noexcept { return backend_->traits(); }
  bool streams() const noexcept { return traits().progress == ProgressStyle::stream; }
  std::string_view backend_name() const noexcept { return traits().name; }

 private:
  ~GroupState() override;
  Work submit_checked(const Call& call, const Operands& have);
  // Whether a call needs no slot, because the group has one rank and performs the call at once.
  bool runs_alone(bool collective) const noexcept {
    return member.size == 1 && collective && !traits().device;
  }
  static void run_alone(const Call& call, const Operands& have);
  static void run_alone(const detail::PreparedCall& prepared);
  std::uint32_t prepare_slot(const Call& call, const Operands& have, detail::WorkCallbacks*& found);
  std::uint32_t send_off(std::uint32_t index, bool collective, std::uint64_t& when) noexcept;
  Work post(std::uint32_t index, bool collective, detail::WorkCallbacks* found);
  bool exchanges_touch(const void* block, std::size_t bytes) const noexcept;
  std::vector<std::shared_ptr<detail::PreparedExchange>> take_unused_exchanges();
  template <bool kPlain>
  Work start_as(const std::shared_ptr<detail::PreparedCall>& prepared);
  [[gnu::cold, noreturn]] void throw_in_flight(const detail::PreparedCall& prepared);
  [[gnu::cold]] detail::WorkCallbacks* await_found(Ring::Slot& slot);
  template <class Head, class Begin>
  Work begin_all(const char* function, std::size_t count, std::size_t from_any, const Head& head,
                 const Begin& begin);
  template <class Head, class Begin>
  void begin_batches(std::size_t count, std::size_t from_any, const Head& head, const Begin& begin,
                     Work& first, std::size_t& sent);
  bool in_flight(const detail::PreparedCall& p) const noexcept {
    return p.begun && !ring_.finished(p.slot, p.ticket);
  }
  /// Fills a slot for a start. For a recv from any source, returns the object that the Work must keep.
  detail::WorkCallbacks* fill_slot(std::uint32_t index, const std::shared_ptr<detail::PreparedCall>& p);
  template <bool kPlain>
  detail::WorkCallbacks* fill_slot_as(std::uint32_t index, const std::shared_ptr<detail::PreparedCall>& p);
  [[gnu::cold, noreturn]] void raise_interrupted(Op op, std::uint64_t call);
  void fail_batch(const char* function, const std::exception& reason, std::size_t sent, std::size_t calls);
  [[gnu::cold]] void check_stream(Stream stream, std::string_view what, bool calls) const;
  // Waits until this thread owns the group and that many slots are free.
  void own_room(int slots, Op op, Duration deadline) {
    if (!try_own()) [[unlikely]]
      await_owner(op, deadline);
    if (failed() || !ring_.room(slots)) [[unlikely]]
      await_room(slots, op, deadline);
  }
  [[gnu::cold]] void await_owner(Op op, Duration deadline);
  [[gnu::cold]] void await_room(int slots, Op op, Duration deadline);
  void fill(OpState& s, const Call& call, const Operands& have) noexcept;
  void arrange_batch() noexcept;
  bool try_own() noexcept { return owned_.try_own(); }
  void own() noexcept {
    if (!try_own()) [[unlikely]]
      contend(Deadline::never(), false);
  }
  // Returns false if ownership was not obtained within `limit`, or if `well` is set and the group has failed.
  [[gnu::cold]] bool contend(Deadline limit, bool well) noexcept {
    return owned_.contend(spin_, limit, [&] { return well && failed(); });
  }
  bool own_within(Duration limit) noexcept { return try_own() || contend(Deadline::after(limit), false); }
  void disown() noexcept { owned_.disown(); }

  [[gnu::cold]] bool is_stuck(Duration deadline) noexcept;
  [[noreturn, gnu::cold]] void raise_stuck(const Ring::Slot& slot);
  bool drive_owned() noexcept;  // polls the calls in flight; returns true if something moved
  template <class After>
  bool drive_and(const After& after) noexcept;  // calls `after` while this thread still owns the group
  void finish(std::uint32_t index) noexcept;
  [[gnu::cold]] void call_back(Ring::Slot& slot) noexcept;
  [[gnu::cold]] void fail_back(Ring::Slot& slot) noexcept;
  [[gnu::cold]] void fail_callbacks(const detail::WorkCallbacks& callbacks) noexcept;
  [[gnu::cold]] void inspect() noexcept;
  [[gnu::cold]] void mark_failed() noexcept;
  template <class Done, class After>
  bool drive_until(const Done& done, Deadline limit, const After& after) noexcept {
    ProgressEngine& progress = progress_;  // copied, because the group may be destroyed when the call is done
    const bool there = wait_until(
        progress_, spin_, limit, done,
        [&] {
          const bool moved = drive_and(after);
          progress.run_due();
          return moved;
        },
        [this] { return settled(); });
    progress.run_due();
    return there;
  }
  template <class Done>
  bool drive_until(const Done& done, Deadline limit) noexcept {
    return drive_until(done, limit, [] {});
  }
  // Returns true if this was the last Work, and the handle is gone. Called by the owner.
  bool count_back() noexcept {
    if (given_up_.load(std::memory_order_relaxed) != 0) [[unlikely]]
      take_given_up();
    return --works_ == 0 && !handle_;
  }
  void take_given_up() noexcept;
  void unlist() noexcept;
  void end() noexcept;
  class Batch;
  class Taking;
  void drop(std::uint32_t slot, std::uint32_t ticket) noexcept;

  ProgressEngine& progress_;
  const bool helped_;  // the helper thread drives this group: Progress::thread, and more than one rank
  const std::unique_ptr<Backend> backend_;
  const bool spin_, rings_;  // as the backend's traits say
  TraceFiles& trace_files_;
  const std::shared_ptr<Recorder> recorder_;

  // How long a wait without a limit lasts in a thread that an Interrupt may end. In practice only the
  // Interrupt ends it.
  static constexpr Duration kUnlessInterrupted = std::chrono::hours(100 * 365 * 24);
  mutable OwnerFlag owned_;
  std::atomic<std::int64_t> unowned_since_{
      // when a waiting thread first found the group owned by another thread; 0: a waiting thread owned it
      0};
  bool handle_ = true;      // whether the handle exists; used by the owner
  std::int64_t works_ = 0;  // Works that were handed out and not given back; used by the owner
  // Handles and Works that were given back while the owner was stuck: the number of Works, plus kHandle for
  // the handle. The next thread that gives back a Work applies this number to the counts above.
  static constexpr std::int64_t kHandle = std::int64_t{1} << 32;
  std::atomic<std::int64_t> given_up_{0};
  bool accounted_ = false;  // the failure was noted in recorder and progress; used by the owner
  // Threads in coalesced(), threads that wait for slots, and whether the backend's batch is open. Only the
  // owner uses these members.
  int batches_ = 0, stalled_ = 0;
  bool batch_open_ = false;
  mutable Ring ring_;
  // All exchanges that were made and can still be started. Only the owner uses the list. The flag says
  // whether an exchange was ever started.
  std::vector<std::shared_ptr<detail::PreparedExchange>> exchanges_;
  std::atomic<bool> exchanges_begun_{false};
  Watch watch_;
  std::atomic<int> asleep_{0};  // the number of sleeping threads of this rank

  mutable std::mutex mutex_;
  std::optional<Dependents::Entry> listed_{std::in_place, context,
                                           "group \"" + member.name + "\""};  // guarded by mutex_
  GroupFailure failure_;
};

namespace detail {

/// Access for weft's own layers. Programs do not need it.
class Access {
 public:
  /// Returns the group itself, whose address stays the same when its handle moves. Throws bad_argument,
  /// naming `call`, if the handle is empty.
  static GroupState& state(const ProcessGroup& group, const char* call = "state");
};

}  // namespace detail

}  // namespace weft
