// Exchanges between ranks that share memory. The sender packs the bytes for a rank into slots of a ring. But
// if there are many bytes and the receiver reaches the sender's memory, the receiver copies them itself, from
// their place in the sender's memory to their place in its own memory. Only the owner of the group uses it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "backends/shm/exchange/planned.hpp"
#include "backends/shm/group.hpp"
#include "backends/shm/pair_memory.hpp"
#include "backends/shm/single_copy.hpp"
#include "weft/backends/backend.hpp"

namespace weft::shm {

inline constexpr int kSlotsAtOnce = 8;  ///< slots that one step fills, or empties

/// Walks through packed bytes, a slot at a time. Both sides cut the bytes at the same places, between
/// elements.
struct Cursor {
  std::size_t box = 0;
  std::int64_t element = 0;

  /// Calls move(box, first element, count, place in the slot) for the elements of the next slot.
  template <class Move>
  void slot(const ExchangeProgram::Side& side, const Move& move) {
    std::int64_t at = 0;
    for (; box < side.boxes.size(); ++box, element = 0) {
      const ExchangeProgram::Box& b = side.boxes[box];
      const std::int64_t count = std::min(b.elements - element, (kSlotBytes - at) / b.element);
      if (count > 0) move(b, element, count, at);
      at += count * b.element;
      element += count;
      if (element < b.elements) return;
    }
  }
};

/// One side of a ring, on this rank.
struct RingEnd {
  Ring* ring = nullptr;  ///< null: the ring is not made, or not found, yet
  int rank = 0;          ///< the other rank
  bool touched = false;  ///< data was published since the last look for sleepers
  /// sender: the receiver has mapped the ring, so it reaches the ring even after this rank has ended
  bool mapped = false;
  std::uint16_t timings = 0;  ///< sender: the number of measurements that it has requested
  std::uint64_t next = 0;     ///< the number of slots filled, or emptied
  std::uint64_t tickets = 0;  ///< the number of exchanges with a part to send, or to receive
  std::uint64_t turn = 0;     ///< the number of the exchange whose turn it is
  /// sender: the number of the first slot that is not known to be free
  std::uint64_t room_to = kExchangeSlots;
  std::array<std::uint64_t, 3> sent{};  ///< sender: the number of exchanges, by Holds
  std::array<std::uint64_t, kExchangeSlots> forms{},
      boxes_ids{};  ///< sender: the numbers of the boxes whose texts and boxes are in the slots
};

/// Memory that begins at a cache line. (It is not a Tensor, because a group whose thread is stuck ends after
/// its Context.)
class Room {
 public:
  /// Allocates `bytes` uninitialised bytes, unless there is memory already. Throws bad_alloc.
  void make(std::int64_t bytes) {
    if (!memory_) memory_.reset(new (std::align_val_t(kLine)) std::byte[static_cast<std::size_t>(bytes)]);
  }
  std::byte* data() const noexcept { return memory_.get(); }

 private:
  struct Free {
    void operator()(std::byte* memory) const noexcept {
      ::operator delete[](memory, std::align_val_t(kLine));
    }
  };
  std::unique_ptr<std::byte[], Free> memory_;
};

/// An exchange in flight.
struct Flight {
  enum class Phase : std::uint8_t { queued, moving, awaiting, there, done };
  struct Out {
    RingEnd* end = nullptr;
    std::uint64_t ticket = 0, until = 0;
    Cursor cursor{};
    Phase phase = Phase::queued;
    Way way = Way::gathered;
    std::uint16_t timing = 0;  // not 0: this exchange is measured
  };
  struct In {
    RingEnd* end = nullptr;
    std::uint64_t ticket = 0;
    Cursor cursor{};
    std::int64_t read = 0;  // bytes that the kernel has copied
    std::uint64_t ns = 0;   // the time that the copy took, if it is measured
    Phase phase = Phase::queued;
    Unpacking unpacking = Unpacking::plain;
    Holds holds = Holds::packed;
    bool unpacking_timed = false, trial = false;
    bool held = false;  // kind add: the slot stays until its bytes are added, or set aside
  };
  explicit Flight(Planned& p) : planned(p), outs(p.to.size()), ins(p.from.size()) {}

  Planned& planned;
  const OpState* call = nullptr;
  const ExchangeField* fields = nullptr;
  std::uint64_t memory = 0;
  std::vector<Out> outs;
  std::vector<In> ins;
  std::size_t left = 0, there = 0;
  bool added = false;
  // the number of looks that are left without a pause; later negative: counts polls without progress
  int looks = 0;
  // for kind add, and for bytes that the kernel reads for short runs; kept for the next exchange
  Room came, sums;
};

class Exchanges {
 public:
  /// `memory`: the memory of the pairs, which must outlive this object.
  Exchanges(const Group& group, PairMemory& memory);
  /// Whether all ranks reach each other in this way; otherwise exchanges are made of messages. Equal on all
  /// ranks.
  bool usable() const noexcept { return memory_.usable(); }

  std::unique_ptr<PlannedExchange> plan(const ExchangePlan& plan) const;
  void post(OpState& s) noexcept;
  Step poll(OpState& s) noexcept;
  /// Maps memory that other ranks have made for exchanges with this rank, because they wait for that.
  void find_rings() noexcept;
  /// The ranks for which this rank waits in an exchange; in all exchanges.
  std::vector<int> awaited(const OpState& s) const;
  std::vector<int> awaited() const;
  std::string story(const OpState& s, std::span<const int> late) const;

  /// For tests: the number of sends to a rank so far, by Holds.
  std::array<std::uint64_t, 3> sent_to(int rank) { return to(rank).sent; }

 private:
  using Phase = Flight::Phase;
  using Out = Flight::Out;
  using In = Flight::In;
  using Move = Traffic::Move;
  class Inside;
  struct GroupFailed {};  // thrown if the group has failed meanwhile

  static Flight*& flight_of(OpState& s) noexcept { return *reinterpret_cast<Flight**>(s.scratch.data()); }
  static const Flight* flight_of(const OpState& s) noexcept {
    return *reinterpret_cast<const Flight* const*>(s.scratch.data());
  }
  RingEnd& to(int rank) { return end(0, rank); }
  RingEnd& from(int rank) { return end(1, rank); }
  RingEnd& end(std::size_t side, int rank) {
    std::unique_ptr<RingEnd>& end = ends_[side][static_cast<std::size_t>(rank)];
    if (end == nullptr) [[unlikely]]
      end.reset(new RingEnd{.rank = rank});
    return *end;
  }
  static const std::byte* sent_from(const Flight& f, std::size_t field) noexcept {
    return static_cast<const std::byte*>(f.fields[field].in);
  }
  static std::byte* received_in(const Flight& f, std::size_t field) noexcept {
    return static_cast<std::byte*>(f.fields[field].out);
  }
  template <class Side>
  static bool end_of(Flight& f, Side& side) noexcept {
    side.phase = Phase::done;
    --f.left;
    return true;
  }

  void add_flight(Planned& planned);
  Flight& begin(OpState& s);
  template <class Body>
  bool guarded(const OpState& s, const Body& body) noexcept;
  bool step(Flight& f);
  void end(Flight& f) noexcept;
  [[gnu::cold]] void fail(const OpState& s, const Error& e) noexcept;
  void awaited(const Flight& f, std::vector<int>& ranks) const;
  static std::vector<int> each_once(std::vector<int> ranks);
  bool has_slot(const RingEnd& end) const noexcept;
  void publish(RingEnd& to);
  void take(RingEnd& from);
  void touch(RingEnd& end);
  void wake() noexcept;

  // send.cpp
  void open(RingEnd& end);
  bool has_room(RingEnd& end);
  static bool is_mapped(RingEnd& end) noexcept;
  std::uint64_t sound_taken(const RingEnd& end, std::uint64_t taken) const;
  bool send(Flight& f, Out& o, Traffic& t);
  void end_turn(Out& o, Traffic& t, Holds holds);
  Slot& begin_slot(RingEnd& end, const Traffic& t, Holds holds, std::uint16_t timing = 0);
  void pack(Flight& f, Out& o, Traffic& t);
  void pack_few(const Flight& f, Slot& slot, RingEnd& end, const Traffic& t);
  void pack_many(const Flight& f, Slot& slot, Out& o, const Traffic& t);
  bool name_places(Flight& f, Out& o, Traffic& t);
  static void write_lists(const ExchangeProgram::Side& side, Slot& slot) noexcept;
  const std::array<Buffer, kMostPlaces>* find_places(Flight& f, Out& o, Traffic& t);
  bool find_shared(const Flight& f, const Traffic& t, std::array<Buffer, kMostPlaces>& places);
  bool kernel_reaches(const Flight& f, Traffic& t, std::array<Buffer, kMostPlaces>& places);
  Way choose_way(Out& o, Traffic& t, bool in_place, bool by_kernel);

  // receive.cpp
  bool find_ring(RingEnd& end);
  bool receive(Flight& f, In& in, Traffic& t);
  void check_head(const Flight& f, const Slot& slot, const Traffic& t, Holds holds) const;
  [[noreturn]] void disagree(const Slot& slot, const Traffic& t) const;
  static void choose_unpacking(In& in, Traffic& t);
  static void end_timing(const In& in, Traffic& t, std::uint16_t timing);
  bool copy_slot(Flight& f, In& in, Traffic& t, const Slot& slot, Holds holds);
  bool copy_in_place(Flight& f, In& in, Traffic& t, const Slot& slot);
  bool read(Flight& f, In& in, Traffic& t, const Slot& slot);
  void unpack(const Flight& f, In& in, const Traffic& t, const Slot& slot) const;
  static void make_room(Flight& f);
  void find_joint(const Flight& f, const Slot& slot, Traffic& t) const;
  const std::byte* place_of(const Slot& slot, const Traffic& t, std::size_t field) const;
  bool set_aside(Flight& f);
  bool pack_there(Flight& f, In& in, Traffic& t, const Slot& slot);
  void add_from(Flight& f, std::size_t i);
  void add_all(Flight& f);

  const Group& group_;
  PairMemory& memory_;
  PeerMemory peer_memory_;
  // ends for sending, and for receiving; null: there was no exchange with that rank
  std::array<std::vector<std::unique_ptr<RingEnd>>, 2> ends_;
  std::vector<Flight*> active_;  // the oldest first
  std::vector<RingEnd*> touched_;
  std::uint64_t boxes_ids_ = 0;
};

}  // namespace weft::shm
