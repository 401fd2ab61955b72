// The calls of a group that are in flight, each in a slot; the slots are a fixed number and are reused. Only
// the owner of the group uses the ring (group_state.hpp), except for functions marked "any thread".
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "weft/backends/backend.hpp"
#include "weft/backends/op_table.hpp"

namespace weft {

class Callback;
struct FoundMessage;
namespace detail {
struct PreparedExchange;
}

class Ring {
 public:
  static constexpr std::uint32_t kSlots = 64;

  struct alignas(64) Slot {
    std::atomic<std::uint32_t> generation{0};  // increases when the call is done
    std::uint64_t record = 0;                  // the call's number in the recorder
    // a poll was without success, so the time until the deadline counts
    bool waited = false;
    bool attended = false;          // callbacks, found or lent is set, so the end of the call needs more work
    std::atomic<Duration> limit{};  // the call's deadline
    Clock::time_point expires{}, warns{};
    OpState op;
    // for v-forms; op points into it; kept for the next call
    std::vector<BufferBlock> blocks;
    std::vector<std::shared_ptr<Callback>> callbacks;  // called when the call has ended
    // receives the found message; null: the message is not needed
    std::shared_ptr<FoundMessage> found;
    std::shared_ptr<const void> lent;  // the persistent call into whose blocks op points; null: none
    ExchangeCall exchange;             // op points to it, and it points to `fields`, if op is exchange
    const detail::PreparedExchange* exchanged = nullptr;
    std::vector<ExchangeField> fields;  // kept for the next call
    // The caller's buffers, for is_exposed() and exposed(): null if nothing is in flight.
    std::atomic<const std::byte*> in{nullptr}, out{nullptr};
    std::atomic<std::size_t> in_bytes{0}, out_bytes{0};
    /// Any thread may call it, since a waiting thread reads the deadline while another thread owns the group.
    Duration deadline() const noexcept { return limit.load(std::memory_order_relaxed); }
    void set_deadline(Duration d) noexcept { limit.store(d, std::memory_order_relaxed); }
  };

  Slot& operator[](std::uint32_t index) noexcept { return slots_[index]; }

  /// Any thread. `ticket`: the generation of the slot when the call was submitted.
  bool finished(std::uint32_t index, std::uint32_t ticket) const noexcept {
    return slots_[index].generation.load(std::memory_order_acquire) != ticket;
  }
  /// Any thread.
  bool idle() const noexcept { return in_flight_.load(std::memory_order_acquire) == 0; }
  int in_flight() const noexcept { return in_flight_.load(std::memory_order_relaxed); }

  bool room(int slots) const noexcept {
    return slots == 1 ? free_ != 0 : __builtin_popcountll(free_) >= slots;
  }
  /// The slot of the next call, if there is room. The slot stays free until put().
  std::uint32_t next() const noexcept { return static_cast<std::uint32_t>(__builtin_ctzll(free_)); }
  /// The number of the next call of its kind.
  std::uint64_t number(bool collective) noexcept { return collective ? next_collective_++ : next_message_++; }
  /// Puts the call of slot next() in flight; its `op` must be filled in.
  void put(std::uint32_t index, bool collective) noexcept {
    Slot& slot = slots_[index];
    const OpState& s = slot.op;
    free_ &= free_ - 1;
    const auto element = static_cast<std::size_t>(size_bytes(s.dtype));
    slot.in_bytes.store(static_cast<std::size_t>(s.in_count) * element, std::memory_order_relaxed);
    slot.out_bytes.store(static_cast<std::size_t>(s.out_count) * element, std::memory_order_relaxed);
    slot.in.store(s.in, std::memory_order_relaxed);
    slot.out.store(s.out, std::memory_order_release);
    slot.waited = false;
    if (collective) {
      collectives_[last_++ % kSlots] = static_cast<std::uint8_t>(index);
    } else {
      messages_ |= std::uint64_t{1} << index;
    }
    in_flight_.store(in_flight_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
  /// Frees the slot of a call that is done. The last store is a release, so a thread that sees that nothing
  /// is in flight also sees all earlier stores.
  void free(std::uint32_t index) noexcept {
    Slot& slot = slots_[index];
    slot.in.store(nullptr, std::memory_order_relaxed);
    slot.out.store(nullptr, std::memory_order_relaxed);
    free_ |= std::uint64_t{1} << index;
    slot.generation.store(slot.generation.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    in_flight_.store(in_flight_.load(std::memory_order_relaxed) - 1, std::memory_order_release);
  }

  /// Polls collectives in order, until one is not done, then every message. Calls `done(index)` for each call
  /// that is done. `done` must free() the slot. If a call failed, returns Step::failed, and the remaining
  /// calls were not polled. Otherwise the result says whether any call made progress: Step::advanced or
  /// Step::pending.
  template <class Poll, class Done>
  Step poll(const Poll& poll, const Done& done) noexcept {
    bool moved = false;
    while (first_ != last_) {
      const std::uint32_t index = collectives_[first_ % kSlots];
      const Step step = poll(slots_[index].op);
      if (step == Step::failed) return step;
      moved |= step != Step::pending;
      if (step != Step::done) break;
      ++first_;
      done(index);
    }
    for (std::uint64_t left = messages_; left != 0; left &= left - 1) {
      const auto index = static_cast<std::uint32_t>(__builtin_ctzll(left));
      const Step step = poll(slots_[index].op);
      if (step == Step::failed) return step;
      moved |= step != Step::pending;
      if (step != Step::done) continue;
      messages_ &= ~(std::uint64_t{1} << index);
      done(index);
    }
    return moved ? Step::advanced : Step::pending;
  }

  /// Calls `look(slot)` for each call in flight, until it returns false.
  template <class Look>
  void each(const Look& look) noexcept {
    for (std::uint64_t left = ~free_; left != 0; left &= left - 1)
      if (!look(slots_[static_cast<std::uint32_t>(__builtin_ctzll(left))])) return;
  }
  /// The call behind which this call waits: for a collective, the first collective in flight; for a message,
  /// the message itself.
  Slot& head_of(Slot& slot) noexcept {
    return row(slot.op.op).collective ? slots_[collectives_[first_ % kSlots]] : slot;
  }
  /// The first collective in flight, or any message if there is none. There must be a call in flight.
  const OpState& oldest() const noexcept {
    return slots_[first_ != last_ ? collectives_[first_ % kSlots]
                                  : static_cast<std::uint32_t>(__builtin_ctzll(messages_))]
        .op;
  }

  /// The first and the last of the collectives in flight. Null if there are none.
  const OpState* first_collective() const noexcept {
    return first_ == last_ ? nullptr : &slots_[collectives_[first_ % kSlots]].op;
  }
  const OpState* last_collective() const noexcept {
    return first_ == last_ ? nullptr : &slots_[collectives_[(last_ - 1) % kSlots]].op;
  }
  /// The message in flight that was posted first. Null if there is none.
  const OpState* first_message() const noexcept {
    const OpState* first = nullptr;
    for (std::uint64_t left = messages_; left != 0; left &= left - 1) {
      const OpState& s = slots_[static_cast<std::uint32_t>(__builtin_ctzll(left))].op;
      if (first == nullptr || s.call < first->call) first = &s;
    }
    return first;
  }

  /// Copies the blocks of a v-form into `blocks`, and makes the operation point to the copy. `blocks` must
  /// have room for both sides of `ranks` ranks.
  static void keep_blocks(std::vector<BufferBlock>& blocks, OpState& op, const Call& call,
                          int ranks) noexcept;
  /// Returns whether a call in flight, or a failed call, uses a part of this memory. Any thread.
  bool is_exposed(const void* block, std::size_t bytes) const noexcept;
  /// Lists the memory that peers may write in `to`, which must have room for kSlots entries. Returns the
  /// number of entries. Any thread.
  std::size_t exposed(std::span<MemoryRange> to) const noexcept;

 private:
  std::array<Slot, kSlots> slots_;
  std::uint64_t free_ = ~std::uint64_t{0};  // bit per slot
  // the slots of the collectives in call order: [first_, last_)
  std::array<std::uint8_t, kSlots> collectives_{};
  std::uint32_t first_ = 0, last_ = 0;
  std::uint64_t messages_ = 0;  // bit per slot
  std::uint64_t next_collective_ = 0, next_message_ = 0;
  std::atomic<int> in_flight_{0};
};

}  // namespace weft
