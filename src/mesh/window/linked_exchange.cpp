// An exchange over links (links.hpp): what goes to a rank is packed into slots, or, where it is much and that rank reaches the memory
// itself, copied by that rank from where it lies to where it belongs.
#include <fmt/format.h>

#include <cstring>

#include "host/arena.hpp"
#include "mesh/window/exchange.hpp"
#include "weft/base/error.hpp"
#include "weft/host/context.hpp"

namespace weft::windows {
namespace {

using Program = Window::Plan::Program;

constexpr std::int64_t kPackedBytes = 1024;  // up to here it is packed, wherever it lies
constexpr std::int64_t kKernelBytes =
    12 << 10;  // from here on the kernel copies what is not shared, where its runs have
constexpr std::int64_t kRunBytes = 2048;  // as many bytes on average
constexpr std::int64_t kHeadBytes =
    64 - static_cast<std::int64_t>(offsetof(Slot, packed));  // in a slot's first line
constexpr std::int64_t kShortBytes =
    1024;  // packed on the stack first, so that the first line, which is polled, is written last

/// Walks through packed bytes, a slot at a time: both sides cut them alike, between elements.
struct Cursor {
  std::size_t box = 0;
  std::int64_t element = 0;

  /// Calls move(box, first element, count, place in the slot) for what the next slot has.
  template <class Move>
  void slot(const Program& program, const Program::Traffic& t, const Move& move) {
    std::int64_t at = 0;
    for (; box < t.boxes.size(); ++box, element = 0) {
      const Program::Box& b = t.boxes[box];
      const std::int64_t size = program.forms[b.field].element;
      const std::int64_t count = std::min(b.elements - element, (kSlotBytes - at) / size);
      if (count > 0) move(b, element, count, at);
      at += count * size;
      element += count;
      if (element < b.elements) return;
    }
  }
  bool at_end(const Program::Traffic& t) const noexcept { return box == t.boxes.size(); }
};

class OverLinks final : public WindowTransfer::Steps, public LinkedSteps, private Exchange {
 public:
  OverLinks(std::shared_ptr<const Plan> plan, const Program& program, Pairs pairs, Stream stream)
      : Exchange(std::move(plan), program, std::move(pairs), stream),
        links_(plan_->links.get()),
        outs_(program_->to.size()),
        ins_(program_->from.size()),
        left_(outs_.size() + ins_.size() + (program_->adjoint ? 1 : 0)) {
    links_->use(*plan_->group);
    if (links_->group().failed())
      links_->group().probe(plan_->me, {.tag = kTokenTag});  // throws the first cause
    for (std::size_t i = 0; i < outs_.size(); ++i) {
      outs_[i].end = &links_->to(program_->to[i].rank);
      outs_[i].ticket = outs_[i].end->tickets++;
    }
    for (std::size_t i = 0; i < ins_.size(); ++i) {
      ins_[i].end = &links_->from(program_->from[i].rank);
      ins_[i].ticket = ins_[i].end->tickets++;
    }
    links_->add(*this);
    try {
      for (std::size_t i = 0; i < outs_.size(); ++i) send(outs_[i], program_->to[i]);
      links_->answer();
      if (program_->adjoint) return;
      copy_own();
      fill();
    } catch (...) {
      give_up();
      throw;
    }
  }
  ~OverLinks() override {
    if (left_ > 0 && !given_up_) {
      links_->group().fail({.code = ErrorCode::aborted,
                            .text = fmt::format("window: rank {} dropped an exchange in flight", plan_->me),
                            .ranks = {plan_->me}});
      give_up();
    }
    if (left_ == 0) links_->remove(*this);
    if (came_) keep(std::move(came_));
  }

  bool done() override {
    guarded([&] { links_->progress(); });
    return left_ == 0;
  }
  void finish() override {
    guarded([&] { links_->finish(*this); });
  }

  // LinkedSteps
  bool complete() const noexcept override { return left_ == 0; }
  bool step() override {
    if (left_ == 0) return false;
    bool moved = false;
    for (std::size_t i = 0; i < outs_.size(); ++i)
      if (outs_[i].phase != Phase::done && send(outs_[i], program_->to[i])) moved = true;
    for (std::size_t i = 0; i < ins_.size(); ++i)
      if (ins_[i].phase < Phase::there && receive(ins_[i], program_->from[i])) moved = true;
    if (program_->adjoint && !added_ && there_ == ins_.size()) {
      add_all();
      moved = true;
    }
    return moved;
  }
  Wish wish() const override {
    for (std::size_t i = 0; i < ins_.size(); ++i)
      if (ins_[i].phase < Phase::there) return {ins_[i].end->rank, true, ins_[i].end->next + 1};
    for (std::size_t i = 0; i < outs_.size(); ++i) {
      const Out& o = outs_[i];
      if (o.phase == Phase::awaiting) return {o.end->rank, false, o.until};
      if (o.phase != Phase::done) return {o.end->rank, false, o.end->next + 1 - kSlots};
    }
    return {plan_->me, true, 1};  // not reached: something is left
  }

 private:
  enum class Phase : std::uint8_t { queued, moving, awaiting, there, done };
  struct Out {
    Links::End* end = nullptr;
    std::uint64_t ticket = 0, until = 0;
    Cursor cursor{};
    Phase phase = Phase::queued;
  };
  struct In {
    Links::End* end = nullptr;
    std::uint64_t ticket = 0;
    std::int64_t at = 0;  // of the adjoint, in came_
    Cursor cursor{};
    Phase phase = Phase::queued;
    bool held = false;  // of the adjoint: the slot is taken when its bytes are added
  };

  template <class F>
  void guarded(const F& f) {
    try {
      f();
    } catch (...) {
      give_up();
      throw;
    }
  }
  // The group has failed.
  void give_up() noexcept {
    given_up_ = true;
    links_->revoke();
    links_->remove(*this);
  }

  bool send(Out& o, const Program::Traffic& t) {
    Links::End& end = *o.end;
    if (o.phase == Phase::awaiting) {
      if (end.link->taken.load(std::memory_order_acquire) < o.until) return false;
      return finish(o);
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
    bool moved = false;
    while (!o.cursor.at_end(t) && links_->has_room(end)) {
      pack(o, t);
      moved = true;
    }
    if (!o.cursor.at_end(t)) return moved;
    ++end.turn;
    return finish(o);
  }
  template <class Side>
  bool finish(Side& side) {
    side.phase = Phase::done;
    --left_;
    return true;
  }

  // The slot's head but for its sequence, which is published last.
  Slot& begin_slot(Links::End& end, const Program::Traffic& t, Holds holds, std::uint32_t segments) {
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

  void pack(Out& o, const Program::Traffic& t) {
    Links::End& end = *o.end;
    Slot& slot = end.link->slots[end.next % kSlots];
    std::array<std::byte, kShortBytes> small;
    const bool is_small = t.bytes <= kShortBytes;
    std::byte* const to = is_small ? small.data() : slot.packed;
    o.cursor.slot(
        *program_, t, [&](const Program::Box& b, std::int64_t first, std::int64_t count, std::int64_t at) {
          const std::byte* const from = sent_from(pair(b.field)) + b.offset;
          if (count == b.elements)
            b.loops.copy(runtime_, stream_, from, to + at);
          else
            b.loops.copy_some(first, count, from, to + at - first * program_->forms[b.field].element);
        });
    const std::int64_t head = std::min(t.bytes, kHeadBytes);
    if (is_small)
      std::memcpy(slot.packed + head, small.data() + head, static_cast<std::size_t>(t.bytes - head));
    begin_slot(end, t, Holds::packed, segments_);
    if (is_small) std::memcpy(slot.packed, small.data(), static_cast<std::size_t>(head));
    links_->publish(end);
    // The next one is often like this one, and the reader has its lines in its cache.
    auto* const next = reinterpret_cast<const char*>(&end.link->slots[end.next % kSlots]);
    for (std::int64_t line = 0; line < std::min<std::int64_t>(t.bytes + 32, 4096); line += 64)
      __builtin_prefetch(next + line, 1);
  }

  // Where the receiver finds the fields; packed: it does not reach them, or not at a profit.
  Holds find_places(Links::End& end, const Program::Traffic& t, std::array<Place, kMostPlaces>& places) {
    const std::size_t fields = program_->forms.size();
    if (t.bytes <= kPackedBytes || fields > kMostPlaces ||
        t.boxes.size() * (2 + static_cast<std::size_t>(plan_->global.rank())) > sizeof(Slot::boxes) / 8)
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
    if (t.bytes < kKernelBytes || t.bytes < kRunBytes * t.runs ||
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
  std::pair<const std::byte*, const std::byte*> span_sent(std::size_t f) const {
    const Form& form = program_->forms[f];
    const std::byte* const data = sent_from(pair(f));
    return program_->adjoint ? std::pair(data + form.window_low, data + form.window_high)
                             : std::pair(data + form.part_low, data + form.part_high);
  }

  // Names the memory of the fields in the next slot. False: the receiver does not reach it.
  bool name_places(Links::End& end, const Program::Traffic& t) {
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

  bool receive(In& in, const Program::Traffic& t) {
    Links::End& end = *in.end;
    if (in.phase == Phase::queued) {
      if (end.turn != in.ticket) return false;
      in.phase = Phase::moving;
    }
    bool moved = false;
    for (;;) {
      const Slot& slot = end.link->slots[end.next % kSlots];
      if (slot.sequence.load(std::memory_order_acquire) != end.next + 1) return moved;
      if (slot.form != t.form) disagree(slot, t);
      Links::End& back = links_->to(end.rank);
      back.room_to = std::max(back.room_to, slot.taken + kSlots);
      moved = true;
      if (slot.segments > end.mapped) links_->map(end, slot.segments);
      if (program_->adjoint &&
          (slot.holds == Holds::in_place || (slot.holds == Holds::packed && t.bytes <= kPackedBytes))) {
        in.held = true;
        in.phase = Phase::there;
        ++there_;
        return true;
      }
      if (slot.holds == Holds::in_place) {
        for (const Program::Step& step : joint_of(slot, t))
          step.loops.copy(runtime_, stream_, place_of(slot, step) + step.from, pair(step).window + step.to);
        links_->check_revoked(end.rank);
        in.cursor.box = t.boxes.size();
      } else if (slot.holds == Holds::by_kernel) {
        read(in, t, slot);
        in.cursor.box = t.boxes.size();
      } else if (program_->adjoint) {
        keep_packed(in, t, slot);
      } else {
        in.cursor.slot(*program_, t,
                       [&](const Program::Box& b, std::int64_t first, std::int64_t count, std::int64_t at) {
                         std::byte* const to = pair(b.field).window + b.offset;
                         if (count == b.elements)
                           b.loops.copy(runtime_, stream_, slot.packed + at, to);
                         else
                           b.loops.copy_some(first, count,
                                             slot.packed + at - first * program_->forms[b.field].element, to);
                       });
      }
      links_->take(end);
      if (!in.cursor.at_end(t)) continue;
      if (!program_->adjoint) {
        ++end.turn;
        return finish(in);
      }
      ++end.turn;
      in.phase = Phase::there;
      ++there_;
      return true;
    }
  }

  // Memory for what all ranks send, packed.
  void make_room() {
    if (came_) return;
    std::int64_t bytes = 0;
    for (std::size_t i = 0; i < ins_.size(); ++i) {
      ins_[i].at = bytes;
      bytes += (program_->from[i].bytes + 63) / 64 * 64;
    }
    came_ = room_of(bytes);
  }

  // What the kernel copies: in one go for each field, to its place, or to packed bytes where the adjoint keeps them or its runs here are short.
  void read(In& in, const Program::Traffic& t, const Slot& slot) {
    if (t.pieces_id != slot.boxes_id) {
      t.there.clear();
      t.here.clear();
      const std::int64_t* from = slot.boxes;
      for (const Program::Box& b : t.boxes) {
        const std::int64_t element = program_->forms[b.field].element;
        std::array<std::int64_t, Dims::kMaxDims> steps{};
        if (static_cast<std::size_t>(*from++) != b.field) disagree(slot, t);
        const std::int64_t offset = *from++;
        for (int d = 0; d < b.counts.rank(); ++d) steps[static_cast<std::size_t>(d)] = *from++;
        add_pieces(b.counts, steps, element, b.field, offset, t.there);
        add_pieces(b.counts, b.steps, element, b.field, b.offset, t.here);
      }
      t.pieces_id = slot.boxes_id;
    }
    const bool packed = program_->adjoint || t.bytes < kRunBytes * t.runs;
    if (packed) make_room();
    std::array<std::uint64_t, kMostPlaces> fields_there, fields_here;
    for (std::size_t f = 0; f < program_->forms.size(); ++f) {
      fields_there[f] = slot.places[f].offset;
      fields_here[f] = reinterpret_cast<std::uint64_t>(pair(f).window);
    }
    const std::uint64_t room = packed ? reinterpret_cast<std::uint64_t>(came_.data() + in.at) : 0;
    const Pieces there{t.there, fields_there.data()};
    const std::vector<Piece> all{{0, 0, t.bytes}};
    const bool copied = links_->kernel().read(
        links_->process(t.rank), there, packed ? Pieces{all, &room} : Pieces{t.here, fields_here.data()});
    if (!copied) lose(t.rank);
    if (packed && !program_->adjoint)
      for (const Program::Box& b : t.boxes)
        b.loops.copy(runtime_, stream_, came_.data() + in.at + b.at, pair(b.field).window + b.offset);
    links_->check_revoked(t.rank);
  }

  // The memory of that rank could not be read.
  [[noreturn]] void lose(int rank) {
    const bool alive = links_->process(rank).alive();
    Failure why{.code = alive ? ErrorCode::system : ErrorCode::peer_lost,
                .text = alive ? fmt::format("window: the kernel does not copy from rank {}'s memory", rank)
                              : fmt::format("window: rank {} died", rank),
                .ranks = {rank}};
    links_->group().fail(why);
    throw Error(std::move(why));
  }

  // Of the adjoint, what takes several slots: kept until all is there.
  void keep_packed(In& in, const Program::Traffic& t, const Slot& slot) {
    make_room();
    in.cursor.slot(*program_, t,
                   [&](const Program::Box& b, std::int64_t first, std::int64_t count, std::int64_t at) {
                     const std::int64_t size = program_->forms[b.field].element;
                     std::memcpy(came_.data() + in.at + b.at + first * size, slot.packed + at,
                                 static_cast<std::size_t>(count * size));
                   });
  }

  // Where a field of the sender begins here.
  const std::byte* place_of(const Slot& slot, const Program::Step& step) const {
    const Place& place = slot.places[step.field];
    if (place.segment == Place::kAddress) return reinterpret_cast<const std::byte*>(place.offset);
    return sender_->segment(static_cast<std::uint32_t>(place.segment)) + place.offset;
  }

  // The copies from the sender's memory to this rank's: each box with the steps of both.
  const std::vector<Program::Step>& joint_of(const Slot& slot, const Program::Traffic& t) {
    sender_ = &links_->process(t.rank);
    if (t.joint_id == slot.boxes_id) return t.joint;
    t.joint.clear();
    const std::int64_t* from = slot.boxes;
    for (const Program::Box& b : t.boxes) {
      const auto field = static_cast<std::size_t>(*from++);
      const std::int64_t offset = *from++;
      Loops loops(static_cast<std::size_t>(program_->forms[b.field].element));
      for (int d = 0; d < b.counts.rank(); ++d) {
        const std::int64_t step = *from++;
        loops.add(b.counts[d], step, b.steps[static_cast<std::size_t>(d)]);
      }
      if (field != b.field) disagree(slot, t);
      t.joint.push_back({b.field, loops, offset, b.offset});
    }
    t.joint_id = slot.boxes_id;
    return t.joint;
  }

  [[noreturn]] void disagree(const Slot& slot, const Program::Traffic& t) {
    Failure why{.code = ErrorCode::mismatch,
                .text = fmt::format("window: rank {} gave {}, and rank {} {}; expected the same on all ranks",
                                    t.rank, std::string(slot.about), plan_->me, t.about),
                .ranks = {t.rank, plan_->me}};
    links_->group().fail(why);
    throw Error(std::move(why));
  }

  void add_from(In& in, const Program::Traffic& t) {
    if (!in.held) {
      for (const Program::Box& b : t.boxes) add({b.field, b.loops, 0, b.offset}, came_.data() + in.at + b.at);
      return;
    }
    const Slot& slot = in.end->link->slots[in.end->next % kSlots];
    if (slot.holds == Holds::packed) {
      for (const Program::Box& b : t.boxes) add({b.field, b.loops, 0, b.offset}, slot.packed + b.at);
    } else {
      for (const Program::Step& step : joint_of(slot, t)) add(step, place_of(slot, step));
      links_->check_revoked(in.end->rank);
    }
    links_->take(*in.end);
    ++in.end->turn;
  }

  void add_all() {
    clear_sums();
    bool own = false;
    for (std::size_t i = 0; i < ins_.size(); ++i) {
      if (!own && program_->from[i].rank > plan_->me) {
        add_own();
        own = true;
      }
      add_from(ins_[i], program_->from[i]);
      finish(ins_[i]);
    }
    if (!own) add_own();
    round_sums();
    added_ = true;
    --left_;
  }

  Links* const links_;  // the plan's
  Few<Out, 4> outs_;
  Few<In, 4> ins_;
  std::size_t left_, there_ = 0;
  bool added_ = false, given_up_ = false;
  std::uint32_t segments_ = 0;  // told to receivers that could map more of this rank's memory
  const PeerProcess* sender_ = nullptr;
  Tensor came_;
};

}  // namespace

std::unique_ptr<WindowTransfer::Steps> over_links(std::shared_ptr<const Window::Plan> plan,
                                                  const Window::Plan::Program& program, Pairs pairs,
                                                  Stream stream) {
  return std::make_unique<OverLinks>(std::move(plan), program, std::move(pairs), stream);
}

}  // namespace weft::windows
