// Links between the ranks of a group that share memory: through them windows are exchanged without a call of the group. The layout of
// what they share, and a rank's ends of its links. They are driven by the rank's ProgressEngine: any thread of the rank that waits takes the next
// steps of its exchanges, and its helper thread where it has one.
//
// A link goes from one rank to another: a ring of slots that the sender fills and the receiver empties, in order. A slot holds packed
// bytes, or says where in the sender's memory they lie: then the receiver copies them from there, and the sender's memory is free
// once `taken` has reached the slot. Both sides write words of their own alone and never lock.
//
// Waiting: a rank spins for a few microseconds. Then it stores in a word of the link what it waits for, looks once more, and waits for
// a message of one byte (kTokenTag) in the group: so deadlines, dead ranks, whom to blame, sleeping and waking are the group's. A rank
// that has published something looks at that word after a full fence, takes the wish out of it and sends the message: one of the two
// sees the other's store, and exactly one takes the wish away.
//
// A sender that gives up while the other side may copy from memory that it has named: it stores `revoked`, and then waits until nobody
// is `reading`. A receiver stores `reading` and then looks at `revoked`: one of the two sees the other's store.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include "group/group_state.hpp"
#include "host/arena.hpp"
#include "host/peers.hpp"
#include "host/progress_engine.hpp"
#include "host/threads/owner_flag.hpp"
#include "mesh/window/links/kernel_reads.hpp"
#include "weft/group/process_group.hpp"

namespace weft::windows {

/// Of a link. With 2, a sender of many wrote lines that the receiver had just read, and which were still in its cache: 512 KiB took 37 us, now 28.
inline constexpr std::uint64_t kSlots = 16;
inline constexpr std::int64_t kSlotBytes = 32 << 10;  ///< packed bytes in one
inline constexpr std::int64_t kBesideBytes = 32;      ///< packed bytes in a slot's first line
inline constexpr std::int64_t kFewBytes = 1024;       ///< so many begin there
inline constexpr std::size_t kBoxNumbers = 1024;      ///< of the boxes of fields whose memory a slot names
inline constexpr std::size_t kAboutBytes = 192;       ///< text of what a slot holds
inline constexpr std::size_t kTimings = 32;           ///< of a link, that the sender may ask for at a time
inline constexpr std::size_t kMostPlaces = 32;        ///< fields whose memory a slot may name
inline constexpr int kTokenTag = 0x7fff0056;          ///< of the messages of one byte

/// Where a field of the sender begins.
struct Place {
  std::uint64_t segment;  ///< of its arena; kAddress: `offset` is an address of the sender's process
  std::uint64_t offset;
  static constexpr std::uint64_t kAddress = ~std::uint64_t{0};
  friend bool operator==(const Place&, const Place&) = default;
};

/// What a slot holds. `packed`: kSlotBytes or less, and perhaps more in the slots behind it. `in_place`: `places` and `boxes` say where.
/// `by_kernel`: the same, but the receiver reaches it through the kernel alone.
enum class Holds : std::uint16_t { packed, in_place, by_kernel };

/// Slot number k (from 0) is in place k mod kSlots. Written by the sender, its first cache line last; read by the receiver once `sequence`
/// is k + 1; written again when `taken` is greater than k.
struct alignas(64) Slot {
  std::atomic<std::uint64_t> sequence;
  std::uint64_t form;   ///< a hash of what is exchanged: equal on both sides
  std::uint64_t taken;  ///< slots that the sender has emptied of the link the other way
  Holds holds;
  std::uint16_t timing;  ///< not 0: the receiver tells under this number how long it took to copy
  std::uint32_t
      segments;  ///< segments of the sender's arena, where mapping them would let it be `in_place`; else 0
  std::byte beside[kBesideBytes];  ///< the first packed bytes, where they are few: they come with the head
  std::byte apart[kSlotBytes];     ///< the others, at lines of their own
  alignas(64) std::uint64_t boxes_id;  ///< what `boxes` are of: a number of the sender's
  Place places[kMostPlaces];
  alignas(64) char about[kAboutBytes];  ///< of `form`, in words
  alignas(64) std::int64_t boxes[kBoxNumbers];

  /// Where packed bytes begin, of an exchange that has so many.
  std::byte* packed(std::int64_t bytes) noexcept { return bytes <= kFewBytes ? beside : apart; }
  const std::byte* packed(std::int64_t bytes) const noexcept { return bytes <= kFewBytes ? beside : apart; }
};
static_assert(offsetof(Slot, apart) == 64 && sizeof(Slot::beside) == kBesideBytes);

/// How long a receiver took to copy what came in one exchange, and which: a word, so that both belong together.
struct Took {
  static constexpr int kShift = 40;
  static std::uint64_t word(std::uint64_t last_slot, std::uint64_t ns) noexcept {
    return last_slot << kShift | std::min(ns, (std::uint64_t{1} << kShift) - 1);
  }
  static bool is_of(std::uint64_t word, std::uint64_t last_slot) noexcept {
    return word >> kShift == (last_slot << kShift) >> kShift;
  }
  static std::uint64_t ns(std::uint64_t word) noexcept { return word & ((std::uint64_t{1} << kShift) - 1); }
};

struct Link {
  Slot slots[kSlots];
  alignas(64) std::atomic<std::uint64_t> taken;  ///< by the receiver: slots emptied
  std::atomic<std::uint32_t> mapped;  ///< by the receiver: segments of the sender's arena that it has mapped
  std::atomic<std::uint32_t> kernel;  ///< by the receiver: 1: the kernel lets it read the sender's memory
  alignas(
      64) std::atomic<std::uint64_t> took[kTimings];  ///< by the receiver, before `taken`: see Slot::timing
  alignas(64) std::atomic<
      std::
          uint64_t> sender_waits;  ///< the sender waits for `taken` to reach it; 0: it does not. Cleared by who answers
  alignas(64) std::atomic<std::uint64_t> receiver_waits;  ///< the receiver waits for a slot of this sequence
  alignas(64) std::atomic<
      std::uint32_t> revoked;  ///< by the sender: memory that it has named may be other memory by now
  alignas(64) std::atomic<
      std::uint32_t> reading;  ///< by the receiver: it copies from memory that the sender has named
};

/// An exchange over links. Links calls it while the calling thread owns them.
class LinkedSteps {
 public:
  virtual ~LinkedSteps() = default;
  /// What the program called: errors that all ranks see begin with it.
  virtual const char* name() const noexcept = 0;
  /// The next steps, without waiting. True: something moved. Throws where the exchange has failed.
  virtual bool step() = 0;
  virtual bool complete() const noexcept = 0;
  /// step() has thrown, in whatever thread: its own is to be told. Links has let go of it.
  virtual void broke(std::exception_ptr why) noexcept = 0;
  /// What it waits for: a slot from that rank, or (`receives` false) that this rank has emptied slots.
  struct Wish {
    int rank;
    bool receives;
    std::uint64_t value;  ///< of `sequence` or `taken`
  };
  virtual Wish wish() const = 0;
  /// Appends the ranks that it waits for.
  virtual void append_awaited(std::vector<int>& ranks) const = 0;
  /// Whether one of its fields, sent or received, has bytes in [begin, end).
  virtual bool touches(const std::byte* begin, const std::byte* end) const noexcept = 0;

  /// Its thread has given it up while another one was stuck in a step of it, which is the last one then; and that one has come back.
  std::atomic<bool> abandoned{false}, counted_back{false};
};

/// A rank has given up while another one copied from its memory.
struct Revoked {
  int rank;
};

/// A rank's links to and from the others of a group. Thread-safe where it says so; else for the thread that owns them.
class Links final : public Driven, public BlockHolder, public std::enable_shared_from_this<Links> {
 public:
  /// What stands at one side of a link, on this rank.
  struct End {
    Link* link = nullptr;
    int rank = 0;                         ///< the other one
    bool sends = false;                   ///< this rank is the sender
    std::uint64_t next = 0;               ///< slots filled, or emptied
    std::uint64_t tickets = 0;            ///< exchanges that have a part to send, or to receive
    std::uint64_t turn = 0;               ///< the one that may now
    std::uint64_t room_to = kSlots;       ///< sender: slots that were known to be free
    std::array<std::uint64_t, 3> sent{};  ///< sender: exchanges, by what their slots held
    std::uint16_t timings = 0;            ///< sender: that it has asked for
    bool touched = false;                 ///< published something since the last look for waiters
    std::array<std::uint64_t, kSlots> forms{},
        boxes_ids{};  ///< sender: what the slots' texts and boxes are of
    std::uint32_t mapped = 0,
                  asked = 0;  ///< receiver: segments of the peer, and how many it has tried to map
  };

  /// Those of this group; null where its ranks do not all share memory, or its transport is not shm. The first call is collective among them, and
  /// throws the group's errors.
  static std::shared_ptr<Links> of(ProcessGroup& group);

  /// `readable`: whose memory the kernel lets this rank read.
  Links(GroupState& group, RegionRef region, std::vector<PeerProcessRef> processes,
        const std::vector<bool>& readable);
  ~Links() override { close(); }
  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;
  /// From now on they are driven, until close().
  void open();
  /// The group ends: nobody drives them any more, and what is still in flight fails. Any thread.
  void close() noexcept;

  // Driven
  bool drive() noexcept override;
  void announce_sleep(bool) noexcept override {}
  bool rings() const noexcept override { return flying_.load(std::memory_order_relaxed) == 0; }
  bool helped() const noexcept override { return helped_; }
  bool settled() noexcept override;
  // BlockHolder: an exchange in flight has told neighbours where its fields lie, and any thread of this rank may write to them.
  bool holds(const void* block, std::size_t bytes) const noexcept override;
  bool stand_still() noexcept override;
  void go_on() noexcept override;
  bool uses(const void* block, std::size_t bytes) const noexcept override;

  /// One thread of this rank owns them at a time, and does not block meanwhile, except where the kernel copies for it.
  class Owning {
   public:
    /// False afterwards: another thread has owned them for that long, or, where `well` is asked for, the group has failed.
    explicit Owning(Links& links, Duration limit = kStuck, bool well = false) noexcept
        : links_(links), owns_(links_.own(limit, well)) {}
    ~Owning() {
      if (owns_) links_.owned_.disown();
    }
    Owning(const Owning&) = delete;
    Owning& operator=(const Owning&) = delete;
    explicit operator bool() const noexcept { return owns_; }

   private:
    Links& links_;
    const bool owns_;
  };

  // For the threads of transfers, which do not own them. Any thread.
  /// Throws where the group has failed, or has ended.
  void check_group();
  /// in_flight: or another thread owns them, and takes the next steps. over: it has failed, or was given up, or the group has ended.
  enum class State : std::uint8_t { in_flight, complete, over };
  State state(const LinkedSteps& x) noexcept;
  /// The next steps of all exchanges in flight, and of the rank's groups; then how `x` is.
  State ask(LinkedSteps& x);
  /// Waits until `x` is complete (true) or it or the group has failed. Throws the group's errors: at the deadline, timeout. It is
  /// that of the group from when it has to wait on. `expired`: it has passed already.
  bool finish(LinkedSteps& x, bool expired = false);
  /// `x` ends before it is complete. Afterwards nothing touches its memory any more: neither this rank's threads nor a neighbour; unless a thread is
  /// stuck in a step of it: then it is abandoned.
  void give_up(LinkedSteps& x) noexcept;
  /// Whether an abandoned one is no thread's any more.
  bool take_back(LinkedSteps& x) noexcept;
  /// The group fails with a timeout, because a thread of this rank is stuck; and throws.
  [[noreturn]] void raise_stuck(const LinkedSteps& x);
  /// Sends the messages that steps have made due, where any are: until they are sent, the group must live.
  void send_due() noexcept;
  void fail(const Failure& why) noexcept;
  void fail_dropped(const Failure& why) noexcept;
  /// Throws why that rank has given up. `name`: of this rank's exchange.
  [[noreturn]] void raise_revoked(int rank, const char* name);
  Duration deadline() const noexcept { return deadline_; }

  // For its owner.
  End& to(int rank) noexcept { return ends_[0][static_cast<std::size_t>(rank)]; }
  End& from(int rank) noexcept { return ends_[1][static_cast<std::size_t>(rank)]; }
  PeerProcess& process(int rank) noexcept { return *processes_[static_cast<std::size_t>(rank)]; }
  /// Whether all ranks are threads of this process: so no other process can write to an address that one tells the other.
  bool one_process() const noexcept { return one_process_; }
  /// `taken`, which a rank has told of the slots that this one has filled; throws corrupt where it is more than these.
  static std::uint64_t sound_taken(const End& to, std::uint64_t taken) {
    if (taken > to.next) [[unlikely]]
      raise_taken(to, taken);
    return taken;
  }
  std::uint64_t new_boxes_id() noexcept { return ++boxes_ids_; }
  /// Whether its thread may have the kernel copy, which takes as long as pages take to come. False: a thread without locks does it soon.
  bool may_read() noexcept {
    reads_due_ |= !may_read_;
    return may_read_;
  }
  /// The same kernel's pace, for the owner; and from which rank it copies now (-1: from none), for others.
  KernelPace& pace() noexcept { return pace_; }
  void reads_from(int rank) noexcept { reads_from_.store(rank, std::memory_order_relaxed); }
  /// Whether the group has failed, as its transport knows.
  bool has_failed() noexcept;

  /// Whether the sender may fill the next slot; cheap where it may.
  bool has_room(End& to) noexcept;
  /// Says that the next slot is filled, or emptied.
  void publish(End& to);
  void take(End& from);
  /// Looks who waits for what was published since the last call: send_due() tells them.
  void tell();
  void add(LinkedSteps& x);
  /// It is complete, or over.
  void remove(LinkedSteps& x) noexcept;
  /// Maps the peer's segments, as far as they can be had, and tells it. Not where it may not wait.
  void map(End& from, std::uint32_t segments) noexcept;

  /// While it lives, memory that the sender has named stays: copies from there are made meanwhile. Its constructor and check(), which is called
  /// after them, throw Revoked where it may be other memory.
  class Reading {
   public:
    explicit Reading(const End& from);
    ~Reading() { link_.reading.store(0, std::memory_order_release); }
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;
    void check() const;

   private:
    Link& link_;
    const int rank_;
  };

 private:
  class Answer;
  [[noreturn]] static void raise_taken(const End& to, std::uint64_t taken);
  bool own(Duration limit, bool well) noexcept {
    if (owned_.try_own()) [[likely]]
      return true;
    return owned_.contend(spins_, Deadline::after(limit), [&] { return well && has_failed(); });
  }
  bool in_flight(const LinkedSteps& x) const noexcept;
  void came_back(LinkedSteps& x) noexcept;
  State state_owned(const LinkedSteps& x) const noexcept;
  bool progress(bool patient, bool may_read) noexcept;
  void read_due() noexcept;
  bool append_awaited(std::vector<int>& ranks) noexcept;
  LinkedSteps::Wish what_holds_up(const LinkedSteps& x) noexcept;
  void touch(End& end);
  [[gnu::cold]] void fail_interrupted(const LinkedSteps& x) noexcept;
  GroupState& group() const;
  void look();
  bool behind(const LinkedSteps& x) noexcept;
  bool is_fulfilled(const LinkedSteps::Wish& wish) noexcept;
  void nap(const LinkedSteps& x, Duration left, Duration waited);
  void await(const LinkedSteps& x, Duration left, bool asks);
  void revoke() const noexcept;
  bool touches(const void* block, std::size_t bytes) const noexcept;
  void await_readers() noexcept;

  std::atomic<GroupState*> group_;  // null: it has ended
  ProgressEngine& engine_;          // while the group lives, and
  Arena& arena_;
  const Duration deadline_;
  const RegionRef region_;
  const std::vector<PeerProcessRef> processes_;
  const bool spins_, helped_, one_process_;
  const int rank_;

  mutable OwnerFlag owned_;
  std::atomic<int> flying_{0};  // how many are active
  // The owner's.
  std::array<std::vector<End>, 2> ends_;  // to, from
  std::vector<LinkedSteps*> active_;
  std::vector<End*> touched_;
  std::vector<int> due_;    // ranks that are to get a message
  bool patient_ = false;    // the owner may wait a little
  bool may_read_ = false;   // and in the kernel
  bool reads_due_ = false;  // and it may not, though there is something to read
  KernelPace pace_{KernelReads::kMostBytes};
  std::uint64_t boxes_ids_ = 0;

  std::atomic<bool> awaiting_{false};  // a thread waits for a message
  std::atomic<int> reads_from_{-1};
  std::atomic<std::int64_t> looked_{0};  // when look() last looked, in 4 ms
  std::atomic<bool> has_due_{false}, sending_{false};
  std::atomic<bool> answers_later_{false};  // answer_ is in the engine's list
  std::shared_ptr<Answer> answer_;
  std::shared_ptr<Links> stuck_;  // this: a thread was stuck when the group ended
};

}  // namespace weft::windows
