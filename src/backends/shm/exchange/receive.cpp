// The receiving half of an exchange: copies, unpacks and adds.
#include <fmt/format.h>

#include <array>
#include <cstdint>
#include <cstring>

#include "backends/exchange/head.hpp"
#include "backends/shm/exchange/exchanges.hpp"
#include "base/shared_words.hpp"
#include "reduce/reduce.hpp"
#include "reduce/strided_sums.hpp"
#include "weft/base/error.hpp"
#include "weft/host/context.hpp"

namespace weft::shm {
namespace {

// Bytes that one step copies from a peer's memory.
constexpr auto kMostInPlace = static_cast<std::int64_t>(kChunkBytes);

// A separate function, so that the code of each exchange contains no texts.
[[noreturn, gnu::cold, gnu::noinline]] void raise_boxes_id(int rank) {
  throw Error(damaged(rank, "the number of a slot's boxes", 0, "1 or more"));
}
[[noreturn, gnu::cold, gnu::noinline]] void raise_holds(int rank, Holds holds, bool packed_alone) {
  throw Error(damaged(rank, "what a slot holds", static_cast<int>(holds), packed_alone ? "0" : "0 to 2"));
}

// Returns the number that a slot gives its boxes.
std::uint64_t boxes_id_of(const Slot& slot, const Traffic& t) {
  const std::uint64_t id = read_once(slot.boxes_id);
  if (id == 0) [[unlikely]]
    raise_boxes_id(t.peer);
  return id;
}

// Reads the boxes of a slot, one after the other, with their places in the sender's memory.
class Boxes {
 public:
  struct There {
    std::int64_t offset = 0;
    std::array<std::int64_t, Dims::kMaxDims> steps{};
    ExchangeProgram::Span span{};  // the bytes of the box, from the beginning of the field
    std::vector<std::int64_t> indices{};
    const std::int64_t* list() const noexcept { return indices.empty() ? nullptr : indices.data(); }
  };
  Boxes(const Slot& slot, const Traffic& t) : slot_(slot), rank_(t.peer) {}

  There next(const ExchangeProgram::Box& b) {
    const std::int64_t field = number();
    const bool listed = field == (static_cast<std::int64_t>(b.field) | kListed) && b.counts.rank() > 0;
    if (!listed && field != static_cast<std::int64_t>(b.field))
      throw Error(damaged(rank_, "the field of a box", field, fmt::format("{}", b.field)));
    There there;
    if (listed) there.indices = list(b.counts[0]);
    there.offset = there.span.low = number();
    bool bad = __builtin_add_overflow(there.offset, b.element, &there.span.high);
    for (int d = 0; d < b.counts.rank(); ++d) {
      const std::int64_t step = there.steps[static_cast<std::size_t>(d)] = number();
      std::int64_t first = 0, last = b.counts[d] - 1;
      if (d == 0 && listed) {
        const auto [least, most] = std::minmax_element(there.indices.begin(), there.indices.end());
        first = *least, last = *most;
      }
      bad |= __builtin_mul_overflow(first, step, &first) || __builtin_mul_overflow(last, step, &last);
      bad |= __builtin_add_overflow(there.span.low, std::min(first, last), &there.span.low);
      bad |= __builtin_add_overflow(there.span.high, std::max(first, last), &there.span.high);
    }
    if (bad || there.span.low < -kMost || there.span.high > kMost)
      throw Error(damaged(rank_, "the place of a box", fmt::format("offset {}", there.offset),
                          "one from which its steps stay within 2^56 bytes"));
    return there;
  }

 private:
  static constexpr std::int64_t kMost = std::int64_t{1} << 56;
  std::int64_t number() {
    if (next_ == kBoxNumbers)
      throw Error(damaged(rank_, "what a slot holds", "places of many boxes", "packed bytes"));
    return read_once(slot_.boxes[next_++]);
  }
  // The indices are copied before they are checked, because the other rank could change them.
  std::vector<std::int64_t> list(std::int64_t count) {
    if (count > static_cast<std::int64_t>(kListNumbers - next_index_))
      throw Error(damaged(rank_, "what a slot holds", "places of boxes with many indices", "packed bytes"));
    std::vector<std::uint32_t> numbers(static_cast<std::size_t>(count));
    std::memcpy(numbers.data(), slot_.apart + next_index_ * sizeof(numbers[0]),
                numbers.size() * sizeof(numbers[0]));
    next_index_ += numbers.size();
    return {numbers.begin(), numbers.end()};
  }
  const Slot& slot_;
  const int rank_;
  std::size_t next_ = 0, next_index_ = 0;
};

}  // namespace

// Finds the memory that the other rank has made. Returns false if there is none yet.
bool Exchanges::find_ring(RingEnd& end) {
  const std::uint64_t place = group_.control.ring(end.rank, group_.rank).load(std::memory_order_seq_cst);
  if (place == 0) return false;
  end.ring = reinterpret_cast<Ring*>(memory_.find(end.rank, place, sizeof(Ring)));
  if (end.ring == nullptr) return false;
  end.ring->found.store(1, std::memory_order_release);
  group_.wake(end.rank);
  return true;
}

void Exchanges::find_rings() noexcept {
  for (int r = 0; r < group_.size; ++r) try {
      const RingEnd* const known = ends_[1][static_cast<std::size_t>(r)].get();
      if (r == group_.rank || (known != nullptr && known->ring != nullptr)) continue;
      if (group_.control.ring(r, group_.rank).load(std::memory_order_seq_cst) != 0) find_ring(from(r));
    } catch (...) {  // the exchange with that rank reports it
    }
}

// Checks the properties that all slots of this exchange must have.
void Exchanges::check_head(const Flight& f, const Slot& slot, const Traffic& t, Holds holds) const {
  if (read_once(slot.form) != t.form) [[unlikely]]
    disagree(slot, t);
  if (holds == Holds::packed) return;
  const bool packed_alone = t.bytes <= kPackedBytes || f.planned.program.fields.size() > kMostPlaces;
  if (packed_alone || holds > Holds::by_kernel) [[unlikely]]
    raise_holds(t.peer, holds, packed_alone);
}

void Exchanges::disagree(const Slot& slot, const Traffic& t) const {
  throw Error(Failure{.code = ErrorCode::mismatch,
                      .text = exchange_difference(t.peer, text_in(slot.about), group_.rank, t.side->about),
                      .ranks = {t.peer, group_.rank}});
}

bool Exchanges::receive(Flight& f, In& in, Traffic& t) {
  RingEnd& end = *in.end;
  if (in.phase == Phase::queued) {
    if (end.turn != in.ticket || (end.ring == nullptr && !find_ring(end))) return false;
    in.phase = Phase::moving;
  }
  const bool adds = f.planned.program.adds;
  for (int emptied = 0; emptied < kSlotsAtOnce; ++emptied) {
    const Slot& slot = end.ring->slots[end.next % kExchangeSlots];
    if (slot.sequence.load(std::memory_order_seq_cst) != end.next + 1) return emptied > 0;
    // prefetched together, because otherwise this rank would wait for one after the other
    if (t.bytes <= kFewBytes)
      for (std::int64_t line = 0; line < t.bytes - kBesideBytes; line += 64)
        __builtin_prefetch(slot.apart + line);
    const Holds holds = read_once(slot.holds);
    const std::uint16_t timing = read_once(slot.timing);
    check_head(f, slot, t, holds);
    RingEnd& back = to(end.rank);
    back.room_to = std::max(back.room_to, sound_taken(back, read_once(slot.taken)) + kExchangeSlots);
    if (t.bytes > kPackedBytes && holds != Holds::in_place)
      group_.map_news(t.peer);  // so that the next exchange may be in place
    if (adds && (holds == Holds::in_place || (holds == Holds::packed && t.bytes <= kPackedBytes))) {
      in.held = true;
      in.holds = holds;
      in.phase = Phase::there;
      ++f.there;
      return true;
    }
    if (!t.streamed.empty() && holds == Holds::packed && in.cursor.box == 0 && in.cursor.element == 0)
      choose_unpacking(in, t);
    const bool timed = timing != 0 || in.unpacking_timed;
    const std::uint64_t since = timed ? now_ns() : 0;
    const bool all = copy_slot(f, in, t, slot, holds);
    const bool at_end = in.cursor.box == t.side->boxes.size();
    if (timed) {
      in.ns += now_ns() - since;
      if (all && at_end) end_timing(in, t, timing);
    }
    if (!all) return true;
    take(end);
    if (!at_end) continue;
    ++end.turn;
    if (!adds) return end_of(f, in);
    in.phase = Phase::there;
    ++f.there;
    return true;
  }
  return true;
}

// Chooses how to unpack an exchange that arrives packed; not for the first exchanges, in which the sender
// tries its ways.
void Exchanges::choose_unpacking(In& in, Traffic& t) {
  if (t.came++ < (kWays + 1) * Ways::kTries) return;
  constexpr std::array kBoth{Unpacking::plain, Unpacking::streamed};
  const Unpackings::Next next = t.unpackings.next(kBoth);
  in.unpacking = next.way;
  in.unpacking_timed = next.timed;
  in.trial = next.way != t.unpackings.best(kBoth);
}

// Reports to the sender the time that it has requested, but not the time of this rank's own trial, which says
// nothing about the sender's way.
void Exchanges::end_timing(const In& in, Traffic& t, std::uint16_t timing) {
  if (timing != 0 && !in.trial)
    in.end->ring->took[timing % kTimings].store(Took::word(in.end->next + 1, in.ns),
                                                std::memory_order_relaxed);
  if (in.unpacking_timed) t.unpackings.took(in.unpacking, in.ns);
}

// Copies the bytes that the slot holds, or names, to their place on this rank. Returns false if there are
// more of them.
bool Exchanges::copy_slot(Flight& f, In& in, Traffic& t, const Slot& slot, Holds holds) {
  if (holds == Holds::in_place) return copy_in_place(f, in, t, slot);
  if (holds == Holds::by_kernel) return read(f, in, t, slot);
  if (f.planned.program.adds) {  // the bytes need several slots, so they are kept until all have arrived
    make_room(f);
    in.cursor.slot(
        *t.side, [&](const ExchangeProgram::Box& b, std::int64_t first, std::int64_t count, std::int64_t at) {
          std::memcpy(f.came.data() + t.at + b.at + first * b.element, slot.packed(t.bytes) + at,
                      static_cast<std::size_t>(count * b.element));
        });
  } else if (!t.moves.empty()) {
    each_move(std::span<const Move>(t.moves), t.move_bytes, [&](const Move& m, auto bytes) {
      copy_run(received_in(f, m.field) + m.offset, slot.beside + m.at, bytes);
    });
    in.cursor.box = t.side->boxes.size();
  } else {
    unpack(f, in, t, slot);
  }
  return true;
}

void Exchanges::unpack(const Flight& f, In& in, const Traffic& t, const Slot& slot) const {
  in.cursor.slot(
      *t.side, [&](const ExchangeProgram::Box& b, std::int64_t first, std::int64_t count, std::int64_t at) {
        std::byte* const to = received_in(f, b.field) + b.offset;
        const Loops& loops = in.unpacking == Unpacking::streamed ? t.streamed[in.cursor.box] : b.loops;
        if (count == b.elements)
          loops.copy(slot.packed(t.bytes) + at, to);
        else
          loops.copy_some(first, count, slot.packed(t.bytes) + at - first * b.element, to);
      });
  if (in.unpacking == Unpacking::streamed) stream_fence();
}

// While an Inside exists, this rank reads the memory of other ranks. A failed group gives that memory other
// pages only after that.
class Exchanges::Inside {
 public:
  Inside(const Group& group, const Flight& f) : group_(group) {
    if (!group_.enter(f.call->call)) throw GroupFailed{};
    if (group_.in_chunk) group_.in_chunk(f.call->call);
  }
  ~Inside() {
    if (!left_) group_.leave();
  }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
  /// Throws if the group has failed meanwhile, because this rank may then have read other memory.
  void leave() {
    left_ = true;
    if (!group_.leave()) throw GroupFailed{};
  }

 private:
  const Group& group_;
  bool left_ = false;
};

bool Exchanges::copy_in_place(Flight& f, In& in, Traffic& t, const Slot& slot) {
  find_joint(f, slot, t);
  std::size_t field = f.planned.program.fields.size();
  const std::byte* from = nullptr;
  const auto begin_of = [&](std::size_t wanted) {
    if (wanted != field) from = place_of(slot, t, field = wanted);
    return from;
  };
  Inside inside(group_, f);
  if (!t.joint_runs.empty() && t.bytes <= kMostInPlace) {
    for (const Traffic::Run& r : t.joint_runs)
      r.copy(begin_of(r.field) + r.from, received_in(f, r.field) + r.to, 1, 0, 0, r.bytes);
    in.cursor.box = t.side->boxes.size();
  } else {
    std::int64_t left = kMostInPlace;
    for (; in.cursor.box < t.joint.size() && left > 0; in.cursor.element = 0) {
      const Traffic::Joint& j = t.joint[in.cursor.box];
      const std::byte* const in_field = begin_of(j.field) + j.from;
      std::byte* const out = received_in(f, j.field) + j.to;
      const std::int64_t some =
          std::min(j.elements - in.cursor.element, std::max<std::int64_t>(left / j.element, 1));
      if (some == j.elements)
        j.loops.copy(in_field, out);
      else
        j.loops.copy_some(in.cursor.element, some, in_field, out);
      left -= some * j.element;
      if ((in.cursor.element += some) < j.elements) break;
      ++in.cursor.box;
    }
  }
  inside.leave();
  return in.cursor.box == t.side->boxes.size();
}

// Makes memory for the packed bytes that all ranks send.
void Exchanges::make_room(Flight& f) { f.came.make(f.planned.came_bytes); }

// Copies through the kernel, directly to the places of the fields; or to packed bytes if they are added, or
// if runs are short on this rank. Returns false if there are more bytes; the caller then first checks for
// other work.
bool Exchanges::read(Flight& f, In& in, Traffic& t, const Slot& slot) {
  const ExchangeProgram& program = f.planned.program;
  if (const std::uint64_t id = boxes_id_of(slot, t); t.pieces_id != id) {
    t.there.clear();
    t.here.clear();
    t.pieces_id = 0;
    Boxes boxes(slot, t);
    for (const ExchangeProgram::Box& b : t.side->boxes) {
      const Boxes::There there = boxes.next(b);
      add_pieces(b.counts, there.steps, there.list(), b.element, b.field, there.offset, t.there);
      add_pieces(b.counts, b.steps, b.list, b.element, b.field, b.offset, t.here);
    }
    t.pieces_id = id;
  }
  const bool packed = program.adds || t.short_runs;
  if (packed) make_room(f);
  std::array<std::uint64_t, kMostPlaces> fields_there, fields_here;
  for (std::size_t i = 0; i < program.fields.size(); ++i) {
    fields_there[i] = read_once(slot.places[i].offset);
    fields_here[i] = reinterpret_cast<std::uint64_t>(received_in(f, i));
  }
  const std::uint64_t room = packed ? reinterpret_cast<std::uint64_t>(f.came.data() + t.at) : 0;
  const std::vector<Piece> all{{0, 0, t.bytes}};
  const std::int64_t some = std::min(t.bytes - in.read, peer_memory_.most());
  Inside inside(group_, f);
  const bool copied =
      peer_memory_.read(*f.call, t.peer, {t.there, fields_there.data()},
                        packed ? Pieces{all, &room} : Pieces{t.here, fields_here.data()}, in.read, some);
  inside.leave();
  if (!copied) throw GroupFailed{};
  if ((in.read += some) < t.bytes) return false;
  if (packed && !program.adds)
    for (const ExchangeProgram::Box& b : t.side->boxes)
      b.loops.copy(f.came.data() + t.at + b.at, received_in(f, b.field) + b.offset);
  in.cursor.box = t.side->boxes.size();
  return true;
}

// Returns the address, in this process, of a field of the sender.
const std::byte* Exchanges::place_of(const Slot& slot, const Traffic& t, std::size_t field) const {
  const auto [low, high] = t.joint_spans[field];
  if (low >= high) return nullptr;  // the field has no bytes to copy
  const Buffer b{read_once(slot.places[field].kind), read_once(slot.places[field].segment),
                 read_once(slot.places[field].offset)};
  if (b.kind == Buffer::pointer && group_.one_process) return reinterpret_cast<const std::byte*>(b.offset);
  const std::byte* const first = b.kind == Buffer::shared
                                     ? group_.processes[static_cast<std::size_t>(t.peer)]->find(
                                           b.segment, b.offset + static_cast<std::uint64_t>(low), high - low)
                                     : nullptr;
  if (first == nullptr) [[unlikely]]
    throw Error(damaged(t.peer, fmt::format("the place of field {}", field),
                        fmt::format("bytes {} to {} from offset {} of segment {} (kind {})", low, high,
                                    b.offset, b.segment, static_cast<std::uint32_t>(b.kind)),
                        "bytes of a segment that is mapped"));
  return first - low;
}

// Finds the copies from the sender's memory to this rank's memory: each box with the steps of both ranks.
void Exchanges::find_joint(const Flight& f, const Slot& slot, Traffic& t) const {
  const std::uint64_t id = boxes_id_of(slot, t);
  if (t.joint_id == id) return;
  const ExchangeProgram& program = f.planned.program;
  t.joint.clear();
  t.joint_runs.clear();
  t.joint_lists.clear();
  t.joint_id = 0;
  t.joint_spans.assign(program.fields.size(), {INT64_MAX, INT64_MIN});
  Boxes boxes(slot, t);
  for (const ExchangeProgram::Box& b : t.side->boxes) {
    Boxes::There there = boxes.next(b);
    const std::int64_t* const list = there.list();
    t.joint_lists.push_back(std::move(there.indices));
    const std::int64_t times = program.adds ? program.sums[b.field].widen : 1;
    Loops loops(static_cast<std::size_t>(b.element));
    if (b.counts.rank() > 0) loops.add_list(b.counts[0], list, there.steps[0], b.list, b.steps[0] * times);
    for (int d = 1; d < b.counts.rank(); ++d)
      loops.add(b.counts[d], there.steps[static_cast<std::size_t>(d)],
                b.steps[static_cast<std::size_t>(d)] * times);
    ExchangeProgram::Span& span = t.joint_spans[b.field];
    span = {std::min(span.low, there.span.low), std::max(span.high, there.span.high)};
    const std::int64_t to = program.adds ? program.sums[b.field].place(b.offset) : b.offset;
    t.joint.push_back({b.field, loops, there.offset, to, b.elements, b.element, there.steps, list});
  }
  for (const Traffic::Joint& j : t.joint)
    if (const std::int64_t bytes = j.loops.one_piece(); bytes > 0)
      t.joint_runs.push_back({j.field, j.from, j.to, bytes, copy_runs_of(bytes)});
  if (t.joint_runs.size() != t.joint.size()) t.joint_runs.clear();
  t.joint_id = id;
}

// Copies out parts that wait in their slots for the parts of other ranks, because their senders may have to
// finish before the other ranks begin. Returns true if something was copied.
bool Exchanges::set_aside(Flight& f) {
  bool moved = false;
  for (std::size_t i = 0; i < f.ins.size(); ++i) {
    In& in = f.ins[i];
    if (!in.held) continue;
    moved = true;
    make_room(f);
    Traffic& t = f.planned.from[i];
    const Slot& slot = in.end->ring->slots[in.end->next % kExchangeSlots];
    if (in.holds == Holds::packed)
      std::memcpy(f.came.data() + t.at, slot.packed(t.bytes), static_cast<std::size_t>(t.bytes));
    else if (!pack_there(f, in, t, slot))
      continue;
    in.held = false;
    take(*in.end);
    ++in.end->turn;
  }
  return moved;
}

// Copies elements from the sender's memory to packed bytes. Returns false if there are more elements.
bool Exchanges::pack_there(Flight& f, In& in, Traffic& t, const Slot& slot) {
  find_joint(f, slot, t);
  Inside inside(group_, f);
  std::int64_t left = kMostInPlace;
  for (; in.cursor.box < t.joint.size() && left > 0; in.cursor.element = 0) {
    const Traffic::Joint& j = t.joint[in.cursor.box];
    const ExchangeProgram::Box& b = t.side->boxes[in.cursor.box];
    const Strides packed = row_major(b.counts);
    Loops loops(static_cast<std::size_t>(b.element));
    if (b.counts.rank() > 0) loops.add_list(b.counts[0], j.list, j.steps[0], nullptr, packed[0] * b.element);
    for (int d = 1; d < b.counts.rank(); ++d)
      loops.add(b.counts[d], j.steps[static_cast<std::size_t>(d)], packed[d] * b.element);
    const std::byte* const from = place_of(slot, t, j.field) + j.from;
    std::byte* const to = f.came.data() + t.at + b.at;
    const std::int64_t some =
        std::min(j.elements - in.cursor.element, std::max<std::int64_t>(left / j.element, 1));
    loops.copy_some(in.cursor.element, some, from, to);
    left -= some * j.element;
    if ((in.cursor.element += some) < j.elements) break;
    ++in.cursor.box;
  }
  inside.leave();
  return in.cursor.box == t.joint.size();
}

void Exchanges::add_from(Flight& f, std::size_t i) {
  In& in = f.ins[i];
  Traffic& t = f.planned.from[i];
  const ExchangeProgram& program = f.planned.program;
  std::byte* const sums = f.sums.data();
  if (!in.held) return program.add_packed(i, f.came.data() + t.at, f.fields, sums);
  RingEnd& end = *in.end;
  const Slot& slot = end.ring->slots[end.next % kExchangeSlots];
  if (in.holds == Holds::packed) {
    program.add_packed(i, slot.packed(t.bytes), f.fields, sums);
  } else {
    find_joint(f, slot, t);
    Inside inside(group_, f);
    for (const Traffic::Joint& j : t.joint)
      add_to(j.loops, program.fields[j.field], place_of(slot, t, j.field) + j.from,
             program.sums_of(j.field, f.fields, sums) + j.to);
    inside.leave();
  }
  take(end);
  ++end.turn;
}

void Exchanges::add_all(Flight& f) {
  const ExchangeProgram& program = f.planned.program;
  if (program.sums_bytes > 0) f.sums.make(program.sums_bytes);
  program.add_all(f.fields, f.sums.data(), [&](std::size_t i) {
    add_from(f, i);
    end_of(f, f.ins[i]);
  });
  f.added = true;
  --f.left;
}

}  // namespace weft::shm
