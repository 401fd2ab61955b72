// The sending half of an exchange.
#include <fmt/format.h>

#include <array>
#include <cstring>

#include "backends/shm/exchange/exchanges.hpp"
#include "base/shared_words.hpp"
#include "host/prefetch.hpp"
#include "weft/host/context.hpp"

namespace weft::shm {
namespace {

// Writes packed bytes in their order. If it gathers, it collects short runs in the first-level cache, and
// writes them in long pieces. If it wrote line by line, each store would first fetch its line from the
// receiver's cache; memcpy writes a long piece by the processor's string instruction, which does not wait for
// that.
class Packer {
 public:
  using Box = ExchangeProgram::Box;
  Packer(std::byte* to, bool gathers) noexcept : to_(to), gathers_(gathers) {}
  ~Packer() { flush(); }
  Packer(const Packer&) = delete;
  Packer& operator=(const Packer&) = delete;

  /// Adds the elements [first, first + count) of the box; the memory of the box begins at `from`.
  void add(const Box& box, std::int64_t first, std::int64_t count, const std::byte* from) noexcept {
    const std::int64_t size = box.element;
    if (box.loops.one_piece() > 0 && count * size >= kPiece / 2) {
      flush();
      write(from + first * size, count * size);
      return;
    }
    if (!gathers_) {
      copy(box, first, count, from, to_);
      to_ += count * size;
      return;
    }
    while (count > 0) {
      const std::int64_t some = std::min(count, (kPiece - filled_) / size);
      if (some == 0) {
        flush();
        continue;
      }
      copy(box, first, some, from, piece_.data() + filled_);
      filled_ += some * size;
      first += some;
      count -= some;
    }
  }

 private:
  static constexpr std::int64_t kPiece = 16 << 10;
  static void copy(const Box& box, std::int64_t first, std::int64_t count, const std::byte* from,
                   std::byte* to) noexcept {
    if (count == box.elements)
      box.loops.copy(from, to);
    else
      box.loops.copy_some(first, count, from, to - first * box.element);
  }
  void write(const std::byte* from, std::int64_t bytes) noexcept {
    std::memcpy(to_, from, static_cast<std::size_t>(bytes));
    to_ += bytes;
  }
  void flush() noexcept {
    write(piece_.data(), filled_);
    filled_ = 0;
  }
  std::byte* to_;
  const bool gathers_;
  std::int64_t filled_ = 0;
  alignas(64) std::array<std::byte, kPiece> piece_;
};

}  // namespace

// Makes the memory of this pair, at its first exchange.
void Exchanges::open(RingEnd& end) {
  auto* const ring = reinterpret_cast<Ring*>(memory_.make(end.rank, sizeof(Ring)));
  ring->clear();
  const std::uint64_t place = memory_.place(reinterpret_cast<std::byte*>(ring), sizeof(Ring));
  end.mapped = memory_.is_mapped(end.rank, place);
  group_.control.ring(group_.rank, end.rank).store(place, std::memory_order_seq_cst);
  end.ring = ring;
}

bool Exchanges::is_mapped(RingEnd& end) noexcept {
  if (!end.mapped) [[unlikely]]
    end.mapped = end.ring->found.load(std::memory_order_seq_cst) != 0;
  return end.mapped;
}

// Checks `taken`, the number of slots that were filled by this rank and that the other rank has reported as
// emptied.
std::uint64_t Exchanges::sound_taken(const RingEnd& end, std::uint64_t taken) const {
  if (taken <= end.next) [[likely]]
    return taken;
  throw Error(damaged(end.rank, "its count of slots emptied", taken,
                      fmt::format("up to {}, as many as were filled", end.next)));
}

bool Exchanges::has_room(RingEnd& end) {
  if (end.next < end.room_to) return true;
  end.room_to = sound_taken(end, end.ring->taken.load(std::memory_order_seq_cst)) + kExchangeSlots;
  return end.next < end.room_to;
}

bool Exchanges::send(Flight& f, Out& o, Traffic& t) {
  RingEnd& end = *o.end;
  if (o.phase == Phase::awaiting) {
    if (end.ring->taken.load(std::memory_order_seq_cst) < o.until || !is_mapped(end)) return false;
    return end_of(f, o);
  }
  if (o.phase == Phase::queued) {
    if (end.turn != o.ticket || !has_room(end)) return false;
    if (name_places(f, o, t)) {
      end_turn(o, t, o.way == Way::by_kernel ? Holds::by_kernel : Holds::in_place);
      o.until = end.next;
      o.phase = Phase::awaiting;
      return true;
    }
    o.phase = Phase::moving;
  }
  for (int filled = 0; filled < kSlotsAtOnce; ++filled) {
    if (!has_room(end)) return filled > 0;
    pack(f, o, t);
    if (o.cursor.box != t.side->boxes.size()) continue;
    end_turn(o, t, Holds::packed);
    if (is_mapped(end)) [[likely]]
      return end_of(f, o);
    // this rank may end when the exchange is done, and then its memory cannot be mapped any more
    o.until = 0;
    o.phase = Phase::awaiting;
    return true;
  }
  return true;
}

// Call this when all slots are filled.
void Exchanges::end_turn(Out& o, Traffic& t, Holds holds) {
  ++o.end->turn;
  ++o.end->sent[static_cast<std::size_t>(holds)];
  if (o.timing != 0) t.measured.last_slot = o.end->next;
}

// Fills the slot's head except for its sequence, which is published last.
Slot& Exchanges::begin_slot(RingEnd& end, const Traffic& t, Holds holds, std::uint16_t timing) {
  const std::size_t place = end.next % kExchangeSlots;
  Slot& slot = end.ring->slots[place];
  if (end.forms[place] != t.form) {
    end.forms[place] = t.form;
    const std::string& about = t.side->about;
    const std::size_t length = std::min(about.size(), kAboutBytes - 1);
    std::memcpy(slot.about, about.data(), length);
    slot.about[length] = '\0';
  }
  slot.form = t.form;
  slot.holds = holds;
  slot.timing = timing;
  slot.taken = from(end.rank).next;
  return slot;
}

void Exchanges::pack(Flight& f, Out& o, Traffic& t) {
  constexpr std::int64_t kPrefetched = 4 << 10;
  RingEnd& end = *o.end;
  Slot& slot = end.ring->slots[end.next % kExchangeSlots];
  if (t.bytes <= kFewBytes) {
    pack_few(f, slot, end, t);
    o.cursor.box = t.side->boxes.size();
  } else {
    const std::uint64_t since = o.timing == 0 ? 0 : now_ns();
    pack_many(f, slot, o, t);
    if (o.timing != 0) t.measured.ns += now_ns() - since;
    begin_slot(end, t, Holds::packed, o.timing);
  }
  publish(end);
  // Prefetches the lines of the next slot: the next exchange is often like this one, and the reader has these
  // lines in its cache. If there are more lines, prefetches do not help: 8 KiB are sent in 0.47 us without
  // them, and in 0.60 us with them.
  if (t.bytes <= kPrefetched)
    prefetch_to_write(&end.ring->slots[end.next % kExchangeSlots], t.bytes + kBesideBytes);
}

// The slot's first line is written last, because the receiver polls it.
void Exchanges::pack_few(const Flight& f, Slot& slot, RingEnd& end, const Traffic& t) {
  if (t.moves.empty()) {
    std::array<std::byte, kFewBytes> few;
    for (const ExchangeProgram::Box& b : t.side->boxes)
      b.loops.copy(sent_from(f, b.field) + b.offset, few.data() + b.at);
    const std::int64_t beside = std::min(t.bytes, kBesideBytes);
    std::memcpy(slot.apart, few.data() + beside, static_cast<std::size_t>(t.bytes - beside));
    begin_slot(end, t, Holds::packed);
    std::memcpy(slot.beside, few.data(), static_cast<std::size_t>(beside));
    return;
  }
  const std::span<const Move> moves = t.moves;
  const auto move = [&](const Move& m, auto bytes) {
    copy_run(slot.beside + m.at, sent_from(f, m.field) + m.offset, bytes);
  };
  each_move(moves.subspan(t.moves_beside), t.move_bytes, move);
  begin_slot(end, t, Holds::packed);
  each_move(moves.first(t.moves_beside), t.move_bytes, move);
}

void Exchanges::pack_many(const Flight& f, Slot& slot, Out& o, const Traffic& t) {
  Packer packer(slot.apart, o.way == Way::gathered);
  o.cursor.slot(*t.side,
                [&](const ExchangeProgram::Box& b, std::int64_t first, std::int64_t count, std::int64_t) {
                  packer.add(b, first, count, sent_from(f, b.field) + b.offset);
                });
}

// Always writes them, because packed bytes of another exchange may have taken their place in the slot.
void Exchanges::write_lists(const ExchangeProgram::Side& side, Slot& slot) noexcept {
  std::byte* to = slot.apart;
  for (const ExchangeProgram::Box& b : side.boxes)
    for (std::int64_t i = 0; b.list != nullptr && i < b.counts[0]; ++i, to += sizeof(std::uint32_t)) {
      const auto index = static_cast<std::uint32_t>(b.list[i]);
      std::memcpy(to, &index, sizeof(index));
    }
}

// Names the memory of the fields in the next slot. Returns false if they must be packed.
bool Exchanges::name_places(Flight& f, Out& o, Traffic& t) {
  const std::array<Buffer, kMostPlaces>* const places = find_places(f, o, t);
  if (places == nullptr) return false;
  RingEnd& end = *o.end;
  Slot& slot = begin_slot(end, t, o.way == Way::in_place ? Holds::in_place : Holds::by_kernel, o.timing);
  Planned& p = f.planned;
  if (p.boxes_id == 0) p.boxes_id = ++boxes_ids_;
  if (std::uint64_t& known = end.boxes_ids[end.next % kExchangeSlots]; known != p.boxes_id) {
    known = slot.boxes_id = p.boxes_id;
    std::int64_t* to = slot.boxes;
    for (const ExchangeProgram::Box& b : t.side->boxes) {
      *to++ = static_cast<std::int64_t>(b.field) | (b.list != nullptr ? kListed : 0);
      *to++ = b.offset;
      for (int d = 0; d < b.counts.rank(); ++d) *to++ = b.steps[static_cast<std::size_t>(d)];
    }
  }
  if (t.listed) write_lists(*t.side, slot);
  for (std::size_t i = 0; i < p.program.fields.size(); ++i)
    if (std::memcmp(&slot.places[i], &(*places)[i], sizeof(Buffer)) != 0) slot.places[i] = (*places)[i];
  publish(end);
  // Prefetches the next head, which the receiver has in its cache.
  prefetch_to_write(&end.ring->slots[end.next % kExchangeSlots], 1);
  return true;
}

// Returns the places at which the receiver finds the fields. Returns null if they must be packed, because the
// receiver does not reach them, or because that would not be faster.
const std::array<Buffer, kMostPlaces>* Exchanges::find_places(Flight& f, Out& o, Traffic& t) {
  bool in_place = false, by_kernel = false;
  if (t.nameable && (!group_.oversubscribed || t.bytes > kPackedOnSharedCores)) {
    const std::uint32_t mapped = group_.control.mapped(t.peer, group_.rank).load(std::memory_order_acquire);
    const Arena::Version version = arena_of(group_.context).version();
    Traffic::Placed& placed = t.placed;
    in_place = placed.memory == f.memory && placed.mapped == mapped && placed.arena == version;
    if (!in_place) {
      placed.memory = 0;
      in_place = find_shared(f, t, placed.places);
      if (in_place) placed.memory = f.memory, placed.mapped = mapped, placed.arena = version;
      if (!in_place) by_kernel = kernel_reaches(f, t, placed.places);
    }
  }
  o.way = choose_way(o, t, in_place, by_kernel);
  return o.way == Way::in_place || o.way == Way::by_kernel ? &t.placed.places : nullptr;
}

// Returns whether all fields lie in memory that the receiver reaches itself; then `places` gives their
// places.
bool Exchanges::find_shared(const Flight& f, const Traffic& t, std::array<Buffer, kMostPlaces>& places) {
  bool shared = true;
  for (std::size_t i = 0; i < f.planned.program.fields.size(); ++i) {
    const auto [low, high] = f.planned.program.sent[i];
    Buffer& place = places[i] =
        group_.publish(sent_from(f, i) + low, static_cast<std::size_t>(high - low), t.peer);
    place.offset -= static_cast<std::uint64_t>(low);
    shared &= place.kind != Buffer::foreign && place.kind != Buffer::remote;
  }
  return shared;
}

// Returns whether the receiver may reach the fields through the kernel, and that is not slower; then `places`
// gives their places.
bool Exchanges::kernel_reaches(const Flight& f, Traffic& t, std::array<Buffer, kMostPlaces>& places) {
  if (!group_.may_pull || t.bytes < kKernelBytes || t.short_runs) return false;
  const bool known = std::find(t.copyable.begin(), t.copyable.end(), f.memory) != t.copyable.end();
  for (std::size_t i = 0; i < f.planned.program.fields.size(); ++i) {
    const auto [low, high] = f.planned.program.sent[i];
    const std::byte* const data = sent_from(f, i);
    if (!known && low != high && !kernel_copies_from(data + low, static_cast<std::size_t>(high - low)))
      return false;
    places[i] = {Buffer::remote, 0, reinterpret_cast<std::uint64_t>(data)};
  }
  if (!known) t.copyable[f.memory % t.copyable.size()] = f.memory;
  return true;
}

// Returns the way that this exchange takes to that rank. First reads how long the last measured exchange
// took.
Way Exchanges::choose_way(Out& o, Traffic& t, bool in_place, bool by_kernel) {
  if (t.bytes < kMeasuredBytes || (in_place && !t.scattered)) return in_place ? Way::in_place : Way::by_runs;
  Traffic::Measured& m = t.measured;
  const Ring& ring = *o.end->ring;
  if (m.last_slot != 0 && ring.taken.load(std::memory_order_acquire) >= m.last_slot) {
    const std::uint64_t word = ring.took[m.timing % kTimings].load(std::memory_order_relaxed);
    if (Took::is_of(word, m.last_slot)) m.ways.took(m.way, m.ns + Took::ns(word));
    m.timing = 0;
    m.last_slot = 0;
  }
  std::array<Way, kWays> possible;
  std::size_t count = 0;
  if (in_place) possible[count++] = Way::in_place;
  if (!in_place || t.scattered) possible[count++] = Way::gathered;
  if (in_place ? t.scattered : t.short_runs) possible[count++] = Way::by_runs;
  if (by_kernel) possible[count++] = Way::by_kernel;
  const Ways::Next next = m.ways.next({possible.data(), count});
  if (!next.timed || m.timing != 0) return next.way;
  std::uint16_t& timings = o.end->timings;
  if (++timings == 0) ++timings;
  o.timing = m.timing = timings;
  m.way = next.way;
  m.ns = 0;
  return next.way;
}

}  // namespace weft::shm
