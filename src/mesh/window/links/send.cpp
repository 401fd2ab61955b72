// What an exchange over links sends.
#include <cstring>

#include "host/arena.hpp"
#include "host/prefetch.hpp"
#include "mesh/window/links/exchange.hpp"
#include "weft/host/context.hpp"

namespace weft::windows {
namespace {

// Writes packed bytes in their order. Where it gathers, short runs come together in the first cache and are written in long pieces: line by line each
// store would first take its line away from the receiver's cache; memcpy writes a long piece by the processor's own instruction for strings,
// which does not wait for that.
class Packer {
 public:
  Packer(std::byte* to, bool gathers) noexcept : to_(to), gathers_(gathers) {}
  ~Packer() { flush(); }
  Packer(const Packer&) = delete;
  Packer& operator=(const Packer&) = delete;

  /// Elements first … first + count of a box that begins at `from`.
  void add(const Window::Plan::Program::Box& box, std::int64_t first, std::int64_t count,
           const std::byte* from) noexcept {
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
  static void copy(const Window::Plan::Program::Box& box, std::int64_t first, std::int64_t count,
                   const std::byte* from, std::byte* to) noexcept {
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

bool OverLinks::send(Out& o, const Program::Traffic& t) {
  Links::End& end = *o.end;
  if (o.phase == Phase::awaiting) {
    if (end.link->taken.load(std::memory_order_acquire) < o.until) return false;
    return end_of(o);
  }
  if (o.phase == Phase::queued) {
    if (end.turn != o.ticket || !links_->has_room(end)) return false;
    if (name_places(o, t)) {
      end_turn(o, t, o.way == Way::by_kernel ? Holds::by_kernel : Holds::in_place);
      o.until = end.next;
      o.phase = Phase::awaiting;
      return true;
    }
    o.phase = Phase::moving;
  }
  for (bool moved = false;; moved = true) {
    if (!links_->has_room(end)) return moved;
    pack(o, t);
    if (o.cursor.at_end(t)) break;
  }
  end_turn(o, t, Holds::packed);
  return end_of(o);
}

// All slots are filled.
void OverLinks::end_turn(Out& o, const Program::Traffic& t, Holds holds) {
  ++o.end->turn;
  ++o.end->sent[static_cast<std::size_t>(holds)];
  if (o.timing != 0) t.measured.last_slot = o.end->next;
}

// The slot's head but for its sequence, which is published last.
Slot& OverLinks::begin_slot(Links::End& end, const Program::Traffic& t, Holds holds, std::uint16_t timing) {
  const std::size_t place = end.next % kSlots;
  Slot& slot = end.link->slots[place];
  if (end.forms[place] != t.form) {
    end.forms[place] = t.form;
    const std::size_t length = std::min(t.about.size(), kAboutBytes - 1);
    std::memcpy(slot.about, t.about.data(), length);
    slot.about[length] = '\0';
  }
  slot.form = t.form;
  slot.holds = holds;
  slot.timing = timing;
  slot.segments = segments_;
  slot.taken = links_->from(end.rank).next;
  return slot;
}

void OverLinks::pack(Out& o, const Program::Traffic& t) {
  constexpr std::int64_t kPrefetched = 4 << 10;
  Links::End& end = *o.end;
  Slot& slot = end.link->slots[end.next % kSlots];
  if (t.bytes <= kFewBytes) {
    pack_few(slot, end, t);
    o.cursor.box = t.boxes.size();
  } else {
    const std::uint64_t since = o.timing == 0 ? 0 : now_ns();
    pack_many(slot, o, t);
    if (o.timing != 0) t.measured.ns += now_ns() - since;
    begin_slot(end, t, Holds::packed, o.timing);
  }
  links_->publish(end);
  // The next one is often like this one, and the reader has its lines in its cache. More of them are better taken one by one: 8 KiB are sent in 0.47 us so, and in 0.60
  // with prefetches.
  if (t.bytes > kPrefetched) return;
  auto* const next = reinterpret_cast<const char*>(&end.link->slots[end.next % kSlots]);
  for (std::int64_t line = 0; line < t.bytes + kBesideBytes; line += 64) __builtin_prefetch(next + line, 1);
}

// The slot's first line, which is polled, is written last.
void OverLinks::pack_few(Slot& slot, Links::End& end, const Program::Traffic& t) {
  if (t.moves.empty()) {
    std::array<std::byte, kFewBytes> few;
    for (const Program::Box& b : t.boxes)
      b.loops.copy(sent_from(pair(b.field)) + b.offset, few.data() + b.at);
    const std::int64_t beside = std::min(t.bytes, kBesideBytes);
    std::memcpy(slot.apart, few.data() + beside, static_cast<std::size_t>(t.bytes - beside));
    begin_slot(end, t, Holds::packed);
    std::memcpy(slot.beside, few.data(), static_cast<std::size_t>(beside));
    return;
  }
  const std::span<const Program::Move> moves = t.moves;
  const auto move = [&](const Program::Move& m, auto bytes) {
    copy_run(slot.beside + m.at, sent_from(pair(m.field)) + m.offset, bytes);
  };
  each_move(moves.subspan(t.moves_beside), t.move_bytes, move);
  begin_slot(end, t, Holds::packed);
  each_move(moves.first(t.moves_beside), t.move_bytes, move);
}

void OverLinks::pack_many(Slot& slot, Out& o, const Program::Traffic& t) {
  Packer packer(slot.apart, o.way == Way::gathered);
  o.cursor.slot(t, [&](const Program::Box& b, std::int64_t first, std::int64_t count, std::int64_t) {
    packer.add(b, first, count, sent_from(pair(b.field)) + b.offset);
  });
}

std::pair<const std::byte*, const std::byte*> OverLinks::span_sent(std::size_t f) const {
  const auto& [low, high] = program_->sent_spans[f];
  const std::byte* const data = sent_from(pair(f));
  return {data + low, data + high};
}

// Whether the receiver reaches the fields through the kernel, not at a loss; then `places` says where.
bool OverLinks::kernel_reaches(const Links::End& end, const Program::Traffic& t,
                               std::array<Place, kMostPlaces>& places) const {
  if (t.bytes < kKernelBytes || t.bytes < kLongRun * t.runs ||
      end.link->kernel.load(std::memory_order_acquire) == 0)
    return false;
  auto& copyable = t.copyable;
  const bool known = std::find(copyable.begin(), copyable.end(), judged_) != copyable.end();
  for (std::size_t f = 0; f < program_->forms.size(); ++f) {
    const auto [low, high] = span_sent(f);
    if (!known && low != high && !kernel_copies_from(low, static_cast<std::size_t>(high - low))) return false;
    places[f] = {Place::kAddress, reinterpret_cast<std::uint64_t>(sent_from(pair(f)))};
  }
  if (!known) copyable[judged_ % copyable.size()] = judged_;
  return true;
}

// How this exchange goes to that rank; first it hears what the last one that was measured took.
void OverLinks::choose_way(Out& o, const Program::Traffic& t, bool kernel_reaches) {
  o.way = Way::by_runs;
  if (t.bytes < kMeasuredBytes) return;
  Program::Traffic::Measured& m = t.measured;
  const Link& link = *o.end->link;
  if (m.last_slot != 0 && link.taken.load(std::memory_order_acquire) >= m.last_slot) {
    const std::uint64_t word = link.took[m.timing % kTimings].load(std::memory_order_relaxed);
    if (Took::is_of(word, m.last_slot)) m.ways.took(m.way, m.ns + Took::ns(word));
    m.timing = 0;
    m.last_slot = 0;
  }
  std::array<Way, kWays> possible{Way::gathered};
  std::size_t count = 1;
  if (t.bytes < kLongRun * t.runs) possible[count++] = Way::by_runs;
  if (kernel_reaches) possible[count++] = Way::by_kernel;
  const Ways::Next next = m.ways.next({possible.data(), count});
  o.way = next.way;
  if (!next.timed || m.timing != 0) return;
  std::uint16_t& timings = o.end->timings;
  if (++timings == 0) ++timings;
  o.timing = m.timing = timings;
  m.way = next.way;
  m.ns = 0;
}

// Where the receiver finds the fields; packed: it does not reach them, or not at a profit.
Holds OverLinks::find_places(Out& o, const Program::Traffic& t, std::array<Place, kMostPlaces>& places) {
  const Links::End& end = *o.end;
  const std::size_t fields = program_->forms.size();
  if (t.bytes <= kPackedBytes || fields > kMostPlaces ||
      t.boxes.size() * (2 + static_cast<std::size_t>(plan_->global.rank())) > kBoxNumbers)
    return Holds::packed;
  const std::uint32_t mapped = end.link->mapped.load(std::memory_order_acquire);
  const Arena& arena = plan_->mesh.context().arena();
  const Arena::Version version = arena.version();
  Program::Traffic::Placed& placed = t.placed;
  if (placed.judged == judged_ && placed.mapped == mapped && placed.arena == version) {
    std::copy_n(placed.places.begin(), fields, places.begin());
    return Holds::in_place;
  }
  if (find_shared(mapped, arena, places)) {
    placed.judged = judged_;
    placed.mapped = mapped;
    placed.arena = version;
    std::copy_n(places.begin(), fields, placed.places.begin());
    return Holds::in_place;
  }
  choose_way(o, t, kernel_reaches(end, t, places));
  return o.way == Way::by_kernel ? Holds::by_kernel : Holds::packed;
}

// Whether all fields lie in memory that the receiver has mapped, and where.
bool OverLinks::find_shared(std::uint32_t mapped, const Arena& arena,
                            std::array<Place, kMostPlaces>& places) {
  const bool same_process = links_->one_process();
  bool shared = true;
  for (std::size_t f = 0; f < program_->forms.size(); ++f) {
    const std::byte* const data = sent_from(pair(f));
    places[f] = {Place::kAddress, reinterpret_cast<std::uint64_t>(data)};
    if (same_process) continue;
    const auto [low, high] = span_sent(f);
    if (low == high) continue;
    const auto place = arena.find(low, static_cast<std::size_t>(high - low));
    if (place && place->segment < mapped) {
      places[f] = {place->segment, place->offset + static_cast<std::uint64_t>(data - low)};
      continue;
    }
    if (place) {
      plan_->mesh.context().host_peers().show_segments();
      segments_ = arena.segment_count();
    }
    shared = false;
  }
  return shared;
}

// Names the memory of the fields in the next slot. False: the receiver does not reach it.
bool OverLinks::name_places(Out& o, const Program::Traffic& t) {
  Links::End& end = *o.end;
  std::array<Place, kMostPlaces> places;
  const Holds holds = find_places(o, t, places);
  if (holds == Holds::packed) return false;
  const std::size_t fields = program_->forms.size();
  const auto rank = static_cast<std::size_t>(plan_->global.rank());
  Slot& slot = begin_slot(end, t, holds, o.timing);
  if (program_->boxes_id == 0) program_->boxes_id = links_->new_boxes_id();
  if (std::uint64_t& known = end.boxes_ids[end.next % kSlots]; known != program_->boxes_id) {
    known = slot.boxes_id = program_->boxes_id;
    std::int64_t* to = slot.boxes;
    for (const Program::Box& b : t.boxes) {
      *to++ = static_cast<std::int64_t>(b.field);
      *to++ = b.offset;
      for (std::size_t d = 0; d < rank; ++d) *to++ = b.steps[d];
    }
  }
  for (std::size_t f = 0; f < fields; ++f)
    if (!(slot.places[f] == places[f])) slot.places[f] = places[f];
  links_->publish(end);
  prefetch_to_write(&end.link->slots[end.next % kSlots],
                    1);  // the next head, which the receiver has in its cache
  return true;
}

}  // namespace weft::windows
