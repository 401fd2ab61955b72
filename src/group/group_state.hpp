// What a ProcessGroup handle and its Works share: the backend, the ring of calls in flight, the first
// failure. The owner flag guards the ring and the backend: whoever holds it submits or polls; nobody blocks
// while holding it. It guards the count of Works, too, so that a call which is submitted and waited for takes
// the flag twice and needs no other locked instruction.
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/suspension.hpp"
#include "group/check.hpp"
#include "group/trace_files.hpp"
#include "host/arena.hpp"
#include "host/progress.hpp"
#include "weft/group/process_group.hpp"

namespace weft {

/// How a group came from another one.
struct Origin {
  std::vector<int> ranks{};  ///< by rank, the one in the other group; empty: there is no other
  std::string name{};        ///< of the first of a line of groups that were shrunk one from the other
  int shrinks = 0;           ///< how many lie between
};

class GroupState final : public Driven, public BlockHolder {
 public:
  static constexpr std::uint32_t kSlots = 64;

  /// Lives until its handle has let go of it and every Work was given back.
  /// `ranks_here`: see GroupInit. `rendezvous_store`: where the ranks meet now, where that is not the
  /// member's store.
  GroupState(Context& context, BackendFactory factory, const Membership& m, std::string token, int ranks_here,
             Origin origin = {}, const std::shared_ptr<Store>& rendezvous_store = {}, Duration patience = {});
  /// By the handle, once.
  void release() noexcept;

  Work submit(const Call& call);
  Work submit_all(std::span<const Call> calls);
  /// True: the call of that ticket is done, and its Work given back. Throws where it failed. Polls once.
  bool poll(std::uint32_t slot, std::uint32_t ticket);
  /// Drives until the call is done (true: and its Work given back) or `limit` passed (false). Throws where it
  /// failed.
  bool wait(std::uint32_t slot, std::uint32_t ticket, std::optional<Duration> limit);
  /// Stream backends: makes `stream` wait for the call. Throws where it failed.
  void wait_on(std::uint32_t slot, std::uint32_t ticket, void* stream);
  /// Of a call that failed, whose Work is spent.
  void give_back() noexcept;
  /// Of a call that may be in flight: then the group fails. The Work is given back.
  void dropped(std::uint32_t slot, std::uint32_t ticket) noexcept;

  void abort(std::string_view why);
  bool quiesce(Duration limit) noexcept;

  // Driven
  bool drive() noexcept override;
  void announce_sleep(bool asleep) noexcept override;
  bool rings() const noexcept override {
    return rings_ || idle();  // with nothing in flight nobody would
  }
  bool helped() const noexcept override { return helped_; }
  bool settled() noexcept override;
  void answer() noexcept override;
  void watch() noexcept override;
  // BlockHolder
  bool holds(const void* block, std::size_t bytes) const noexcept override;
  bool stand_still() noexcept override { return try_own(); }  // nobody submits or polls
  void go_on() noexcept override { disown(); }
  bool uses(const void* block, std::size_t bytes) const noexcept override {
    return !failed() && lent(block, bytes);
  }

  Context& context;
  const BackendFactory factory;
  const Membership member;
  const std::string token;
  const int ranks_here;
  /// Of a group of some of these ranks: if those here have a core each, it need not ask for the others.
  int ranks_here_of(int ranks) const noexcept { return spin_ ? ranks : ranks_here; }
  const Origin origin;
  Trace trace() const { return recorder_->read(); }
  std::map<std::string, int> generations;        ///< of subgroups, by name and ranks; guarded by mutex_
  std::string key(std::string_view what) const;  ///< of the store, under this group's token
  std::string next_token(std::string_view name, std::span<const int> ranks);
  /// What is done with the whole group by this rank, one thread at a time, and how often it was.
  struct Shrinking {
    std::mutex mutex;
    int rounds = 0;
    std::vector<int> members;  ///< who may take part in the next round; empty: all
  } shrinking;
  /// Ranks that died or left, as far as the transport knows now.
  std::vector<int> gone() const noexcept { return backend_->gone(); }
  /// The first cause, where the group has failed.
  std::optional<Failure> failure() const;
  void fail(const Failure& why) noexcept;
  /// While it lives, peers of all groups of this rank are answered in the waits of this thread, which waits
  /// for ranks elsewhere than in a call: they may ask who is there.
  CalledInWaits answering() const {
    return CalledInWaits([this] { progress_->answer(); });
  }
  const Traits& traits() const noexcept { return backend_->traits(); }
  bool streams() const noexcept { return traits().progress == ProgressStyle::stream; }
  std::string_view backend_name() const noexcept { return traits().name; }

 private:
  struct alignas(64) Slot {
    std::atomic<std::uint32_t> generation{0};  // moves on when the call is done
    std::uint64_t record = 0;
    bool waited = false;  // a poll has failed: the deadline's clock runs
    Duration deadline{};
    Clock::time_point expires{}, warns{};
    OpState op;
    std::vector<Block> blocks;  // of v-forms: op points into it; kept for the next
    // What the caller lent, for holds() and quiesce(): null when nothing is in flight.
    std::atomic<const std::byte*> in{nullptr}, out{nullptr};
    std::atomic<std::size_t> in_bytes{0}, out_bytes{0};
  };

  ~GroupState() override;
  Work submit_checked(const Call& call, const Operands& have);
  [[gnu::cold]] void check_stream(void* stream, std::string_view what, bool calls) const;
  // Owns the group, with so many slots free.
  void own_room(int slots, Op op, Duration deadline) {
    if (!try_own() && !contend(Deadline::never(), true)) [[unlikely]]
      throw_failure(op);
    if (failed() || !room(slots)) [[unlikely]]
      await_room(slots, op, deadline);
  }
  bool room(int slots) const noexcept {
    return slots == 1 ? free_ != 0 : __builtin_popcountll(free_) >= slots;
  }
  [[gnu::cold]] void await_room(int slots, Op op, Duration deadline);
  void alone(const Call& call, const Operands& have);
  void keep_blocks(Slot& slot, const Call& call) noexcept;
  void batch(int begun) noexcept;
  void arrange_batch() noexcept;
  bool finished(std::uint32_t slot, std::uint32_t ticket) const noexcept {
    return slots_[slot].generation.load(std::memory_order_acquire) != ticket;
  }
  bool failed() const noexcept { return failed_.load(std::memory_order_acquire); }
  bool try_own() noexcept {
    return !owned_.load(std::memory_order_relaxed) && !owned_.exchange(true, std::memory_order_acquire);
  }
  void own() noexcept {
    if (!try_own()) [[unlikely]]
      contend(Deadline::never(), false);
  }
  // False: not by then, or, where `well` is asked for, the group has failed. The owner never blocks, but for
  // a kernel that waits for a peer's page (shm/single_copy.hpp).
  [[gnu::cold]] bool contend(Deadline limit, bool well) noexcept;
  bool own_within(Duration limit) noexcept { return try_own() || contend(Deadline::after(limit), false); }
  void disown() noexcept { owned_.store(false, std::memory_order_release); }

  bool lent(const void* block, std::size_t bytes) const noexcept;  // a call in flight, or failed, has it
  bool idle() const noexcept { return in_flight_.load(std::memory_order_acquire) == 0; }
  bool drive_owned() noexcept;  // polls what is in flight; true: moved
  template <class After>
  bool drive_and(const After& after) noexcept;  // `after` while the group is held
  void finish(std::uint32_t index) noexcept;
  [[gnu::cold]] void inspect() noexcept;  // slow path: health, deadlines
  void inspect_each_tick() noexcept;
  void pass_over(Duration gap) noexcept;
  void expire(const Slot& slot, const Slot& head) noexcept;
  void warn(Slot& slot) noexcept;
  [[gnu::cold]] void mark_failed() noexcept;  // takes over the backend's first cause
  void tell_failed() noexcept;                // the part of it that needs no owner
  template <class Done, class After>
  bool drive_until(const Done& done, Deadline limit, const After& after) noexcept;
  template <class Done>
  bool drive_until(const Done& done, Deadline limit) noexcept {
    return drive_until(done, limit, [] {});
  }
  // True: it was the last, and nobody else holds the group. Called by the owner.
  bool count_back() noexcept {
    if (given_up_.load(std::memory_order_relaxed) != 0) [[unlikely]]
      take_given_up();
    return --works_ == 0 && !handle_;
  }
  void take_given_up() noexcept;
  void end() noexcept;
  class Taking;
  void drop(std::uint32_t slot, std::uint32_t ticket) noexcept;
  [[noreturn]] void throw_failure(Op op, std::uint64_t call = kNoCall);
  std::string tail(const OpState* op = nullptr) const;

  std::unique_ptr<Backend> backend_;
  ProgressEngine* progress_ = nullptr;
  bool spin_ = true, rings_ = true;
  const bool helped_;  // Progress::thread, and peers to meet

  std::atomic<bool> owned_{false};
  bool handle_ = true;      // the owner's
  std::int64_t works_ = 0;  // handed out and not given back; the owner's
  // What was given back while the owner was stuck: Works, and kHandle. Whoever gives back a Work takes it
  // over.
  static constexpr std::int64_t kHandle = std::int64_t{1} << 32;
  std::atomic<std::int64_t> given_up_{0};
  bool accounted_ = false;  // of the failure; the owner's
  // Threads in a coalesced(), threads that wait for slots, and what the backend was told; the owner's.
  int batches_ = 0, stalled_ = 0;
  bool batch_open_ = false;
  std::array<Slot, kSlots> slots_;
  std::uint64_t free_ = ~std::uint64_t{0};          // bit per slot
  std::array<std::uint8_t, kSlots> collectives_{};  // slots in call order: [first_, last_)
  std::uint32_t first_ = 0, last_ = 0;
  std::uint64_t point_to_point_ = 0;  // bit per slot
  std::uint64_t next_collective_ = 0, next_message_ = 0;
  std::atomic<int> in_flight_{0};
  // The watch, which is the owner's: polls since the last look at the clock that left something in flight;
  // when that was, and suspended_time() then; the longest time between two looks while calls wait; the
  // kernel's tick at which done() looked.
  int polls_ = 0;
  Clock::time_point inspected_{};
  Duration suspended_{}, gap_{};
  std::int64_t tick_ = 0;
  std::atomic<int> asleep_{0};  // threads of this rank asleep

  std::atomic<bool> failed_{false};
  TraceFiles& trace_files_;
  std::shared_ptr<Recorder> recorder_;
  mutable std::mutex mutex_;
  std::optional<Failure> failure_;
  std::atomic<bool> told_{false};  // an Error of the failure was thrown
  std::atomic<bool> quiesced_{false};
  std::atomic<bool> drop_quiesced_{false};  // a dropped Work has waited for quiet once
};

}  // namespace weft
