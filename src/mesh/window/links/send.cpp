// What an exchange over links sends.
#include <cstring>

#include "host/arena.hpp"
#include "mesh/window/links/exchange.hpp"
#include "weft/host/context.hpp"

namespace weft::windows {
namespace {

// Writes packed bytes in their order, in long pieces: what has short runs is gathered in the first cache. Line by line each store would first take
// its line away from the receiver's cache; memcpy writes a long piece by the processor's own instruction for strings, which does not wait for that.
class Gatherer {
 public:
  explicit Gatherer(std::byte* to) noexcept : to_(to) {}
  ~Gatherer() { flush(); }
  Gatherer(const Gatherer&) = delete;
  Gatherer& operator=(const Gatherer&) = delete;

  /// Elements first … first + count of a box that begins at `from`.
  void add(const Loops& loops, std::int64_t size, std::int64_t first, std::int64_t count,
           const std::byte* from) noexcept {
    if (loops.one_piece() > 0 && count * size >= kPiece / 2) {
      flush();
      write(from + first * size, count * size);
      return;
    }
    while (count > 0) {
      const std::int64_t some = std::min(count, (kPiece - filled_) / size);
      if (some == 0) {
        flush();
        continue;
      }
      loops.copy_some(first, some, from, piece_.data() + filled_ - first * size);
      filled_ += some * size;
      first += some;
      count -= some;
    }
  }

 private:
  static constexpr std::int64_t kPiece = 16 << 10;
  void write(const std::byte* from, std::int64_t bytes) noexcept {
    std::memcpy(to_, from, static_cast<std::size_t>(bytes));
    to_ += bytes;
  }
  void flush() noexcept {
    write(piece_.data(), filled_);
    filled_ = 0;
  }
  std::byte* to_;
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
    if (name_places(end, t)) {
      ++end.turn;
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
  ++end.turn;
  return end_of(o);
}

// The slot's head but for its sequence, which is published last.
Slot& OverLinks::begin_slot(Links::End& end, const Program::Traffic& t, Holds holds, std::uint32_t segments) {
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
  slot.segments = segments;
  slot.taken = links_->from(end.rank).next;
  return slot;
}

void OverLinks::pack(Out& o, const Program::Traffic& t) {
  Links::End& end = *o.end;
  Slot& slot = end.link->slots[end.next % kSlots];
  if (t.bytes <= kFewBytes) {
    pack_few(slot, end, t);
    o.cursor.box = t.boxes.size();
  } else {
    pack_many(slot, o, t);
    begin_slot(end, t, Holds::packed, segments_);
  }
  links_->publish(end);
  // The next one is often like this one, and the reader has its lines in its cache.
  auto* const next = reinterpret_cast<const char*>(&end.link->slots[end.next % kSlots]);
  for (std::int64_t line = 0; line < std::min<std::int64_t>(t.bytes + kBesideBytes, 4096); line += 64)
    __builtin_prefetch(next + line, 1);
}

// The slot's first line, which is polled, is written last.
void OverLinks::pack_few(Slot& slot, Links::End& end, const Program::Traffic& t) {
  const auto move = [&](const Program::Move& m) {
    copy_run(slot.beside + m.at, sent_from(pair(m.field)) + m.offset, m.bytes);
  };
  if (t.moves.empty()) {
    std::array<std::byte, kFewBytes> few;
    for (const Program::Box& b : t.boxes)
      b.loops.copy(runtime_, stream_, sent_from(pair(b.field)) + b.offset, few.data() + b.at);
    const std::int64_t beside = std::min(t.bytes, kBesideBytes);
    std::memcpy(slot.apart, few.data() + beside, static_cast<std::size_t>(t.bytes - beside));
    begin_slot(end, t, Holds::packed, segments_);
    std::memcpy(slot.beside, few.data(), static_cast<std::size_t>(beside));
    return;
  }
  std::size_t i = t.moves_beside;
  for (; i < t.moves.size(); ++i) move(t.moves[i]);
  begin_slot(end, t, Holds::packed, segments_);
  for (i = 0; i < t.moves_beside; ++i) move(t.moves[i]);
}

void OverLinks::pack_many(Slot& slot, Out& o, const Program::Traffic& t) {
  constexpr std::int64_t kGathered = 8 << 10;  // less is copied line by line, whatever copies it
  if (t.bytes < kGathered) {
    for (const Program::Box& b : t.boxes)
      b.loops.copy(runtime_, stream_, sent_from(pair(b.field)) + b.offset, slot.apart + b.at);
    o.cursor.box = t.boxes.size();
    return;
  }
  Gatherer gatherer(slot.apart);
  o.cursor.slot(*program_, t,
                [&](const Program::Box& b, std::int64_t first, std::int64_t count, std::int64_t) {
                  gatherer.add(b.loops, program_->forms[b.field].element, first, count,
                               sent_from(pair(b.field)) + b.offset);
                });
}

std::pair<const std::byte*, const std::byte*> OverLinks::span_sent(std::size_t f) const {
  const Form& form = program_->forms[f];
  const std::byte* const data = sent_from(pair(f));
  return program_->adjoint ? std::pair(data + form.window_low, data + form.window_high)
                           : std::pair(data + form.part_low, data + form.part_high);
}

// Where the receiver finds the fields; packed: it does not reach them, or not at a profit.
Holds OverLinks::find_places(Links::End& end, const Program::Traffic& t,
                             std::array<Place, kMostPlaces>& places) {
  const std::size_t fields = program_->forms.size();
  if (t.bytes <= kPackedBytes || fields > kMostPlaces ||
      t.boxes.size() * (2 + static_cast<std::size_t>(plan_->global.rank())) > kBoxNumbers)
    return Holds::packed;
  const bool same_process = links_->process(end.rank).is_self();
  const std::uint32_t mapped = end.link->mapped.load(std::memory_order_acquire);
  Arena& arena = plan_->mesh.context().arena();
  Holds holds = Holds::in_place;
  for (std::size_t f = 0; f < fields; ++f) {
    const std::byte* const data = sent_from(pair(f));
    places[f] = {Place::kAddress, reinterpret_cast<std::uint64_t>(data)};
    if (same_process) continue;
    const auto [low, high] = span_sent(f);
    if (low == high) continue;
    const auto place = arena.find(low, static_cast<std::size_t>(high - low));
    if (place && place->segment < mapped) {
      if (holds == Holds::in_place)
        places[f] = {place->segment, place->offset + static_cast<std::uint64_t>(data - low)};
      continue;
    }
    if (place) {
      plan_->mesh.context().host_peers().show_segments();
      segments_ = arena.segment_count();
    }
    holds = Holds::by_kernel;
  }
  if (holds == Holds::in_place) return holds;
  if (t.bytes < kernel_from().bytes || t.bytes < kernel_from().run * t.runs ||
      end.link->kernel.load(std::memory_order_acquire) == 0)
    return Holds::packed;
  for (std::size_t f = 0; f < fields; ++f) {
    const auto [low, high] = span_sent(f);
    if (low != high && !links_->kernel().copyable(low, static_cast<std::size_t>(high - low)))
      return Holds::packed;
    places[f] = {Place::kAddress, reinterpret_cast<std::uint64_t>(sent_from(pair(f)))};
  }
  return holds;
}

// Names the memory of the fields in the next slot. False: the receiver does not reach it.
bool OverLinks::name_places(Links::End& end, const Program::Traffic& t) {
  std::array<Place, kMostPlaces> places;
  const Holds holds = find_places(end, t, places);
  if (holds == Holds::packed) return false;
  const std::size_t fields = program_->forms.size();
  const auto rank = static_cast<std::size_t>(plan_->global.rank());
  Slot& slot = begin_slot(end, t, holds, segments_);
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
  return true;
}

}  // namespace weft::windows
