// What an exchange over links receives, and adds.
#include <fmt/format.h>

#include <cstdint>
#include <cstring>

#include "base/shared_words.hpp"
#include "mesh/window/links/exchange.hpp"
#include "reduce/reduce.hpp"
#include "weft/base/error.hpp"

namespace weft::windows {
namespace {

// Apart, so that the way of each exchange has no texts in it.
[[noreturn, gnu::cold, gnu::noinline]] void raise_boxes_id(int rank) {
  throw Error(damaged(rank, "the number of a slot's boxes", 0, "1 or more"));
}
[[noreturn, gnu::cold, gnu::noinline]] void raise_holds(int rank, Holds holds, bool packed_alone) {
  throw Error(damaged(rank, "what a slot holds", static_cast<int>(holds), packed_alone ? "0" : "0 to 2"));
}

// The number that a slot gives its boxes.
std::uint64_t boxes_id_of(const Slot& slot, const Window::Plan::Program::Traffic& t) {
  const std::uint64_t id = read_once(slot.boxes_id);
  if (id == 0) [[unlikely]]
    raise_boxes_id(t.rank);
  return id;
}

// Reads the boxes of a slot, one after the other: where they lie in the sender's memory.
class Boxes {
 public:
  using Program = Window::Plan::Program;
  struct There {
    std::int64_t offset = 0;
    std::array<std::int64_t, Dims::kMaxDims> steps{};
    Program::Span span{0, 0};  // the bytes of it, from where the field begins
  };
  Boxes(const Slot& slot, const Program::Traffic& t) : slot_(slot), rank_(t.rank) {}

  There next(const Program::Box& b) {
    const std::uint64_t field = static_cast<std::uint64_t>(number());
    if (field != b.field)
      throw Error(damaged(rank_, "the field of a box", field, fmt::format("{}", b.field)));
    There there;
    there.offset = there.span.low = number();
    bool bad = __builtin_add_overflow(there.offset, b.element, &there.span.high);
    for (int d = 0; d < b.counts.rank(); ++d) {
      std::int64_t& step = there.steps[static_cast<std::size_t>(d)] = number();
      std::int64_t far = 0;
      bad |= __builtin_mul_overflow(b.counts[d] - 1, step, &far);
      std::int64_t& end = far < 0 ? there.span.low : there.span.high;
      bad |= __builtin_add_overflow(end, far, &end);
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
  const Slot& slot_;
  const int rank_;
  std::size_t next_ = 0;
};

}  // namespace

// What all slots of this exchange must have.
void OverLinks::check_head(const Slot& slot, const Program::Traffic& t, Holds holds) {
  if (read_once(slot.form) != t.form) disagree(slot, t);
  if (holds == Holds::packed) return;
  const bool packed_alone = t.bytes <= kPackedBytes || program_->forms.size() > kMostPlaces;
  if (packed_alone || holds > Holds::by_kernel) [[unlikely]]
    raise_holds(t.rank, holds, packed_alone);
}

bool OverLinks::receive(In& in, const Program::Traffic& t) {
  Links::End& end = *in.end;
  if (in.phase == Phase::queued) {
    if (end.turn != in.ticket) return false;
    in.phase = Phase::moving;
  }
  bool moved = false;
  for (;;) {
    const Slot& slot = end.link->slots[end.next % kSlots];
    if (slot.sequence.load(std::memory_order_acquire) != end.next + 1) return moved;
    if (t.bytes <= kFewBytes)  // one after another they would be waited for one after another
      for (std::int64_t line = 0; line < t.bytes - kBesideBytes; line += 64)
        __builtin_prefetch(slot.apart + line);
    const Holds holds = read_once(slot.holds);
    const std::uint16_t timing = read_once(slot.timing);
    check_head(slot, t, holds);
    if (holds == Holds::by_kernel && !links_->may_read()) return moved;
    Links::End& back = links_->to(end.rank);
    back.room_to = std::max(back.room_to, Links::sound_taken(back, read_once(slot.taken)) + kSlots);
    moved = true;
    if (const std::uint32_t segments = read_once(slot.segments); segments > end.mapped)
      links_->map(end, segments);
    if (program_->adjoint &&
        (holds == Holds::in_place || (holds == Holds::packed && t.bytes <= kPackedBytes))) {
      in.held = true;
      in.holds = holds;
      in.phase = Phase::there;
      ++there_;
      return true;
    }
    if (!t.streamed.empty() && holds == Holds::packed && in.cursor.box == 0 && in.cursor.element == 0)
      choose_unpacking(in, t);
    const bool timed = timing != 0 || in.unpacking_timed;
    const std::uint64_t since = timed ? now_ns() : 0;
    const bool all = copy_slot(in, t, slot, holds);
    if (timed) {
      in.ns += now_ns() - since;
      if (all && in.cursor.at_end(t)) end_timing(in, t, timing);
    }
    if (!all) return true;
    links_->take(end);
    if (!in.cursor.at_end(t)) continue;
    if (!program_->adjoint) {
      ++end.turn;
      return end_of(in);
    }
    ++end.turn;
    in.phase = Phase::there;
    ++there_;
    return true;
  }
}

// Of an exchange that comes packed; not of the first ones, in which the sender tries its ways.
void OverLinks::choose_unpacking(In& in, const Program::Traffic& t) const {
  if (t.came++ < (kWays + 1) * Ways::kTries) return;
  constexpr std::array kBoth{Unpacking::plain, Unpacking::streamed};
  const Unpackings::Next next = t.unpackings.next(kBoth);
  in.unpacking = next.way;
  in.unpacking_timed = next.timed;
  in.trial = next.way != t.unpackings.best(kBoth);
}

// Tells the sender what it has asked for; not of a trial, which says nothing about the sender's way.
void OverLinks::end_timing(const In& in, const Program::Traffic& t, std::uint16_t timing) const {
  if (timing != 0 && !in.trial)
    in.end->link->took[timing % kTimings].store(Took::word(in.end->next + 1, in.ns),
                                                std::memory_order_relaxed);
  if (in.unpacking_timed) t.unpackings.took(in.unpacking, in.ns);
}

// What the slot holds, or names, to its place here. False: there is more of it.
bool OverLinks::copy_slot(In& in, const Program::Traffic& t, const Slot& slot, Holds holds) {
  if (holds == Holds::in_place) {
    const Links::Reading reading(*in.end);
    const std::vector<Program::Step>& steps = joint_of(slot, t);
    std::size_t field = program_->forms.size();
    const std::byte* from = nullptr;
    const auto begin_of = [&](std::size_t f) {
      if (f != field) from = place_of(slot, t, field = f);
      return from;
    };
    if (t.joint_runs.empty())
      for (const Program::Step& step : steps)
        step.loops.copy(begin_of(step.field) + step.from, pair(step).window + step.to);
    for (const Program::Run& r : t.joint_runs)
      r.copy(begin_of(r.field) + r.from, pair(r.field).window + r.to, 1, 0, 0, r.bytes);
    reading.check();
    in.cursor.box = t.boxes.size();
  } else if (holds == Holds::by_kernel) {
    if (!read(in, t, slot)) return false;
    in.cursor.box = t.boxes.size();
  } else if (program_->adjoint) {
    keep_packed(in, t, slot);
  } else if (!t.moves.empty()) {
    each_move(std::span<const Program::Move>(t.moves), t.move_bytes, [&](const Program::Move& m, auto bytes) {
      copy_run(pair(m.field).window + m.offset, slot.beside + m.at, bytes);
    });
    in.cursor.box = t.boxes.size();
  } else {
    in.cursor.slot(t, [&](const Program::Box& b, std::int64_t first, std::int64_t count, std::int64_t at) {
      std::byte* const to = pair(b.field).window + b.offset;
      const Loops& loops = in.unpacking == Unpacking::streamed ? t.streamed[in.cursor.box] : b.loops;
      if (count == b.elements)
        loops.copy(slot.packed(t.bytes) + at, to);
      else
        loops.copy_some(first, count, slot.packed(t.bytes) + at - first * b.element, to);
    });
    if (in.unpacking == Unpacking::streamed) stream_fence();
  }
  return true;
}

// Memory for what all ranks send, packed.
void OverLinks::make_room() {
  if (came_) return;
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < ins_.size(); ++i) {
    ins_[i].at = bytes;
    bytes += (program_->from[i].bytes + 63) / 64 * 64;
  }
  came_ = std::make_unique<Tensor>(room_of(bytes));
}

// What the kernel copies: in one go for each field, to its place, or to packed bytes where the adjoint keeps them or its runs here are short. False:
// there is more of it, and first a look at what else there is.
bool OverLinks::read(In& in, const Program::Traffic& t, const Slot& slot) {
  if (const std::uint64_t id = boxes_id_of(slot, t); t.pieces_id != id) {
    t.there.clear();
    t.here.clear();
    t.pieces_id = 0;
    Boxes boxes(slot, t);
    for (const Program::Box& b : t.boxes) {
      const Boxes::There there = boxes.next(b);
      add_pieces(b.counts, there.steps, b.element, b.field, there.offset, t.there);
      add_pieces(b.counts, b.steps, b.element, b.field, b.offset, t.here);
    }
    t.pieces_id = id;
  }
  const bool packed = program_->adjoint || t.bytes < kLongRun * t.runs;
  if (packed) make_room();
  std::array<std::uint64_t, kMostPlaces> fields_there, fields_here;
  for (std::size_t f = 0; f < program_->forms.size(); ++f) {
    fields_there[f] = read_once(slot.places[f].offset);
    fields_here[f] = reinterpret_cast<std::uint64_t>(pair(f).window);
  }
  const std::uint64_t room = packed ? reinterpret_cast<std::uint64_t>(came_->data() + in.at) : 0;
  const Pieces there{t.there, fields_there.data()};
  const std::vector<Piece> all{{0, 0, t.bytes}};
  {
    if (in.read > 0 && links_->has_failed()) throw Revoked{t.rank};
    const Links::Reading reading(*in.end);
    links_->reads_from(t.rank);
    const KernelReads::Outcome outcome = KernelReads::read(
        links_->process(t.rank), there, packed ? Pieces{all, &room} : Pieces{t.here, fields_here.data()},
        links_->pace(), in.read);
    links_->reads_from(-1);
    reading.check();
    if (outcome == KernelReads::Outcome::more) return false;
    if (outcome != KernelReads::Outcome::copied) lose(t.rank, outcome == KernelReads::Outcome::ended);
  }
  if (packed && !program_->adjoint)
    for (const Program::Box& b : t.boxes)
      b.loops.copy(came_->data() + in.at + b.at, pair(b.field).window + b.offset);
  return true;
}

// The memory of that rank could not be read.
void OverLinks::lose(int rank, bool ended) {
  Failure why{
      .code = ended ? ErrorCode::peer_lost : ErrorCode::system,
      .text = ended ? fmt::format("{}: rank {} died", plan_->name, rank)
                    : fmt::format("{}: the kernel does not copy from rank {}'s memory", plan_->name, rank),
      .ranks = {rank}};
  throw Error(std::move(why));
}

// Of the adjoint, what takes several slots: kept until all is there.
void OverLinks::keep_packed(In& in, const Program::Traffic& t, const Slot& slot) {
  make_room();
  in.cursor.slot(t, [&](const Program::Box& b, std::int64_t first, std::int64_t count, std::int64_t at) {
    const std::int64_t size = b.element;
    std::memcpy(came_->data() + in.at + b.at + first * size, slot.packed(t.bytes) + at,
                static_cast<std::size_t>(count * size));
  });
}

// Where a field of the sender begins here.
const std::byte* OverLinks::place_of(const Slot& slot, const Program::Traffic& t, std::size_t field) {
  const auto [low, high] = t.joint_spans[field];
  const Place place{read_once(slot.places[field].segment), read_once(slot.places[field].offset)};
  const Program::Traffic::Reached& known = t.reached;
  if (place.segment != known.segment ||
      !is_within(place.offset + static_cast<std::uint64_t>(low), high - low, known.bytes))
    return reach(place, t, field);
  return reinterpret_cast<const std::byte*>(known.begin + place.offset);
}

// The same where it lies in other memory than the last time.
[[gnu::cold, gnu::noinline]] const std::byte* OverLinks::reach(const Place& place, const Program::Traffic& t,
                                                               std::size_t field) {
  const auto [low, high] = t.joint_spans[field];
  if (low >= high) return nullptr;  // there is nothing of it
  Program::Traffic::Reached found{.segment = place.segment, .bytes = ~std::uint64_t{0}};
  if (place.segment != Place::kAddress || !links_->one_process()) {
    const auto index =
        static_cast<std::uint32_t>(std::min<std::uint64_t>(place.segment, Arena::kMaxSegments));
    const PeerProcess::MappedSegment there = links_->process(t.rank).mapped(index);
    found.begin = reinterpret_cast<std::uint64_t>(there.begin);
    found.bytes = there.bytes;
  }
  if (!is_within(place.offset + static_cast<std::uint64_t>(low), high - low, found.bytes))
    throw Error(damaged(
        t.rank, fmt::format("the place of field {}", field),
        fmt::format("bytes {} to {} from offset {} of segment {}", low, high, place.offset, place.segment),
        "bytes of a segment that is mapped"));
  t.reached = found;
  return reinterpret_cast<const std::byte*>(found.begin + place.offset);
}

// The copies from the sender's memory to this rank's: each box with the steps of both.
const std::vector<OverLinks::Program::Step>& OverLinks::joint_of(const Slot& slot,
                                                                 const Program::Traffic& t) {
  const std::uint64_t id = boxes_id_of(slot, t);
  if (t.joint_id == id) return t.joint;
  t.joint.clear();
  t.joint_id = 0;
  t.joint_spans.assign(program_->forms.size(), {INT64_MAX, INT64_MIN});
  Boxes boxes(slot, t);
  for (const Program::Box& b : t.boxes) {
    const Boxes::There there = boxes.next(b);
    Loops loops(static_cast<std::size_t>(b.element));
    for (int d = 0; d < b.counts.rank(); ++d)
      loops.add(b.counts[d], there.steps[static_cast<std::size_t>(d)], b.steps[static_cast<std::size_t>(d)]);
    Program::Span& span = t.joint_spans[b.field];
    if (b.elements > 0) span = {std::min(span.low, there.span.low), std::max(span.high, there.span.high)};
    t.joint.push_back({b.field, loops, there.offset, b.offset});
  }
  t.joint_runs.clear();
  for (const Program::Step& step : t.joint)
    if (const std::int64_t bytes = step.loops.one_piece(); bytes > 0)
      t.joint_runs.push_back({step.field, step.from, step.to, bytes, copy_runs_of(bytes)});
  if (t.joint_runs.size() != t.joint.size()) t.joint_runs.clear();
  t.joint_id = id;
  return t.joint;
}

void OverLinks::disagree(const Slot& slot, const Program::Traffic& t) {
  Failure why{.code = ErrorCode::mismatch,
              .text = fmt::format("{}: rank {} gave {}, and rank {} {}; expected the same on all ranks",
                                  plan_->name, t.rank, text_in(slot.about), plan_->me, t.about),
              .ranks = {t.rank, plan_->me}};
  throw Error(std::move(why));
}

void OverLinks::add_from(In& in, const Program::Traffic& t) {
  if (!in.held) {
    for (const Program::Box& b : t.boxes) add({b.field, b.loops, 0, b.offset}, came_->data() + in.at + b.at);
    return;
  }
  const Slot& slot = in.end->link->slots[in.end->next % kSlots];
  if (in.holds == Holds::packed) {
    for (const Program::Box& b : t.boxes) add({b.field, b.loops, 0, b.offset}, slot.packed(t.bytes) + b.at);
  } else {
    const Links::Reading reading(*in.end);
    for (const Program::Step& step : joint_of(slot, t)) add(step, place_of(slot, t, step.field));
    reading.check();
  }
  links_->take(*in.end);
  ++in.end->turn;
}

void OverLinks::add_all() {
  clear_sums();
  bool own = false;
  for (std::size_t i = 0; i < ins_.size(); ++i) {
    if (!own && program_->from[i].rank > plan_->me) {
      add_own();
      own = true;
    }
    add_from(ins_[i], program_->from[i]);
    end_of(ins_[i]);
  }
  if (!own) add_own();
  round_sums();
  added_ = true;
  --left_;
}

}  // namespace weft::windows
