#include "backends/exchange/by_messages.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>

#include "backends/exchange/head.hpp"
#include "weft/backends/matching.hpp"
#include "weft/base/name_ranks.hpp"
#include "weft/host/context.hpp"
#include "weft/host/device_runtime.hpp"

namespace weft {
namespace {

// a box of at least so many bytes is sent as a separate message
constexpr std::int64_t kLarge = std::int64_t{16} << 10;
constexpr auto kHead = static_cast<std::int64_t>(sizeof(ExchangeHead));

// Failed flights to whose memory a peer, or a library, might still write. They are destroyed with the
// Context.
class AbandonedFlights {
 public:
  explicit AbandonedFlights(Context&) {}
  void add(std::shared_ptr<void> flight) {
    const std::lock_guard lock(mutex_);
    all_.push_back(std::move(flight));
  }

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<void>> all_;
};

}  // namespace

// For each rank the messages to it and the messages from it.
struct ExchangeByMessages::Planned final : PlannedExchange {
  Planned(const ExchangePlan& plan, int rank) : program(plan, rank) {
    for (const ExchangeProgram::Side& side : program.sends) sends.push_back(messages_of(side));
    for (const ExchangeProgram::Side& side : program.receives) receives.push_back(messages_of(side));
    sums_at = room;
    room += program.sums_bytes;
    for (const auto* lists : {&sends, &receives})
      for (const auto& list : *lists) messages += list.size();
  }

  // Both ranks divide the boxes in the same way, by their bytes. Sums are made box by box, in order, so all
  // boxes of kind `add` are packed.
  std::vector<Message> messages_of(const ExchangeProgram::Side& side) {
    std::vector<Message> list(1);
    for (std::size_t i = 0; i < side.boxes.size(); ++i) {
      const ExchangeProgram::Box& b = side.boxes[i];
      const std::int64_t bytes = b.elements * b.element;
      if (bytes < kLarge || program.adds) {
        list[0].boxes.push_back(i);
        continue;
      }
      Message m{.dtype = program.fields[b.field], .boxes = {i}};
      m.bytes = bytes;
      m.packed = b.loops.one_piece() == 0;
      m.field = b.field;
      m.offset = b.offset;
      list.push_back(m);
    }
    list[0].small = true;  // the message with the head, even if it has no box
    for (Message& m : list) {
      if (!m.packed) continue;
      const bool first = m.small;
      if (first)
        for (const std::size_t i : m.boxes) m.bytes += side.boxes[i].elements * side.boxes[i].element;
      if (first) m.bytes += kHead;
      m.at = room;
      room += on_lines(m.bytes);
    }
    return list;
  }

  const ExchangeProgram program;
  std::vector<std::vector<Message>> sends, receives;  // for each side
  std::size_t messages = 0;
  std::int64_t room = 0, sums_at = 0;
  std::vector<Tensor> spare;  // rooms (memory for messages) that no exchange uses
};

struct ExchangeByMessages::Flight {
  struct Part {
    bool receives;
    std::size_t side, message;
    bool done;
  };
  Planned* planned = nullptr;
  const ExchangeField* fields = nullptr;
  OpState* user = nullptr;
  Tensor room;
  std::vector<OpState> inner;  // never moves while the exchange is in flight
  std::vector<Part> parts;
  std::size_t open = 0;
  bool refused = false;
};

ExchangeByMessages::ExchangeByMessages(Context& context, Backend& transport, int rank)
    : context_(context), transport_(transport), rank_(rank) {}

ExchangeByMessages::~ExchangeByMessages() = default;

void ExchangeByMessages::abandon() noexcept {
  if (spare_.size() == flights_.size()) return;
  try {
    auto& abandoned = context_.attached<AbandonedFlights>();
    for (auto& f : flights_) abandoned.add(std::shared_ptr<Flight>(std::move(f)));
  } catch (...) {  // out of memory: the flight is never destroyed
    for (auto& f : flights_) (void)f.release();
  }
  flights_.clear();
}

std::unique_ptr<PlannedExchange> ExchangeByMessages::plan(const ExchangePlan& plan) {
  return std::make_unique<Planned>(plan, rank_);
}

void ExchangeByMessages::refuse(const OpState& s, ErrorCode code, std::string text,
                                std::vector<int> ranks) noexcept {
  transport_.fail(
      {.code = code, .text = std::move(text), .op = s.op, .call = s.call, .ranks = std::move(ranks)});
}

void ExchangeByMessages::post(OpState& s, bool batched) noexcept {
  Flight*& slot = *reinterpret_cast<Flight**>(s.scratch.data());
  slot = nullptr;
  try {
    if (spare_.empty()) {
      spare_.reserve(flights_.size() + 1);
      flights_.push_back(std::make_unique<Flight>());
      spare_.push_back(flights_.back().get());
    }
    Flight& f = *spare_.back();
    begin(s, f, batched);
    slot = &f;
  } catch (const std::bad_alloc&) {
    refuse(s, ErrorCode::system, fmt::format("{}: out of memory", name(s.op)), {rank_});
  } catch (const Error& e) {
    refuse(s, e.code(), fmt::format("{}: {}", name(s.op), e.what()), {rank_});
  }
}

void ExchangeByMessages::begin(OpState& s, Flight& f, bool batched) {
  auto& planned = static_cast<Planned&>(*s.exchange->planned);
  const ExchangeProgram& program = planned.program;
  f.planned = &planned;
  f.fields = s.exchange->fields;
  f.user = &s;
  f.refused = false;
  f.inner.resize(planned.messages);
  f.parts.resize(planned.messages);
  f.room = {};
  if (planned.room > 0) {
    const auto fits = std::find_if(planned.spare.begin(), planned.spare.end(),
                                   [&](const Tensor& t) { return t.stream() == s.stream; });
    if (fits != planned.spare.end()) {
      f.room = std::move(*fits);
      planned.spare.erase(fits);
    } else {
      f.room = Tensor(context_, Dims::line(planned.room), DType::u8, Memory::shared, s.stream);
    }
  }
  DeviceRuntime& runtime = context_.device(s.stream.device);
  const bool host = s.stream.device == Device{};
  for (std::size_t i = 0; i < planned.sends.size(); ++i)
    for (const Message& m : planned.sends[i]) {
      if (!m.packed) continue;
      const bool first = m.small;
      std::byte* const to = f.room.data() + m.at + (first ? kHead : 0);
      if (first && host) ExchangeHead::write(program.sends[i], f.room.data() + m.at);
      std::int64_t at = 0;
      for (const std::size_t b : m.boxes) {
        const ExchangeProgram::Box& box = program.sends[i].boxes[b];
        box.loops.copy(runtime, s.stream, static_cast<const std::byte*>(f.fields[box.field].in) + box.offset,
                       to + at);
        at += box.elements * box.element;
      }
    }
  // for the room: the description that this rank expects
  for (std::size_t i = 0; i < planned.receives.size() && host; ++i)
    ExchangeHead::write(program.receives[i], f.room.data() + planned.receives[i][0].at);
  spare_.pop_back();  // nothing after this throws
  std::size_t n = 0;
  if (!batched) transport_.batch(true);
  const auto post = [&](bool receives, std::size_t side, int peer, const std::vector<Message>& list) {
    for (std::size_t i = 0; i < list.size(); ++i, ++n) {
      const Message& m = list[i];
      OpState& inner = f.inner[n];
      f.parts[n] = {receives, side, i, false};
      inner.op = receives ? Op::recv : Op::send;
      inner.dtype = m.small ? DType::u8 : m.dtype;
      inner.reduce = {};
      inner.order = Order::native;
      inner.call = s.call;
      inner.in = nullptr;
      inner.out = nullptr;
      inner.in_count = inner.out_count = 0;
      inner.root = -1;
      inner.peer = peer;
      inner.tag = kExchangeTag;
      inner.stream = s.stream;
      inner.in_blocks = inner.out_blocks = nullptr;
      inner.user = nullptr;
      const ExchangeField& field = f.fields[m.field];
      const std::int64_t count = m.bytes / size_bytes(inner.dtype);
      if (receives) {
        inner.out = m.packed ? f.room.data() + m.at : static_cast<std::byte*>(field.out) + m.offset;
        inner.out_count = count;
      } else {
        inner.in = m.packed ? f.room.data() + m.at : static_cast<const std::byte*>(field.in) + m.offset;
        inner.in_count = count;
      }
      transport_.post(inner);
    }
  };
  for (std::size_t i = 0; i < planned.receives.size(); ++i)
    post(true, i, program.receives[i].peer, planned.receives[i]);
  for (std::size_t i = 0; i < planned.sends.size(); ++i)
    post(false, i, program.sends[i].peer, planned.sends[i]);
  if (!batched) transport_.batch(false);
  f.open = n;
  if (program.adds) return;
  // copies this rank's own elements while those of other ranks are in flight
  for (const ExchangeProgram::Own& o : program.own) {
    const std::byte* const from = static_cast<const std::byte*>(f.fields[o.field].in) + o.from;
    std::byte* const to = static_cast<std::byte*>(f.fields[o.field].out) + o.to;
    if (from != to || !o.loops.same_steps()) o.loops.copy(runtime, s.stream, from, to);
  }
}

// Moves a message that has arrived to its place. Returns false if the ranks describe different exchanges;
// then the group fails.
bool ExchangeByMessages::take(Flight& f, std::size_t receive, std::size_t message) {
  const Planned& planned = *f.planned;
  const Message& m = planned.receives[receive][message];
  if (!m.packed) return true;
  const ExchangeProgram::Side& side = planned.program.receives[receive];
  const Stream stream = f.user->stream;
  const std::byte* from = f.room.data() + m.at;
  if (m.small) {
    std::uint64_t form = side.form;
    if (stream.device == Device{}) std::memcpy(&form, from + offsetof(ExchangeHead, form), sizeof(form));
    if (form != side.form) {
      refuse(*f.user, ErrorCode::mismatch,
             fmt::format(
                 "{}: {}", name(f.user->op),
                 exchange_difference(side.peer, words_of_part(from, DType::u8, m.bytes), rank_, side.about)),
             {std::min(rank_, side.peer), std::max(rank_, side.peer)});
      return false;
    }
    from += kHead;
  }
  if (planned.program.adds) return true;
  DeviceRuntime& runtime = context_.device(stream.device);
  for (const std::size_t b : m.boxes) {
    const ExchangeProgram::Box& box = side.boxes[b];
    box.loops.copy(runtime, stream, from, static_cast<std::byte*>(f.fields[box.field].out) + box.offset);
    from += box.elements * box.element;
  }
  return true;
}

Step ExchangeByMessages::poll(OpState& s) noexcept {
  Flight* const f = of(s);
  if (f == nullptr) return Step::failed;
  Step all = Step::pending;
  for (std::size_t i = 0; f->open > 0 && i < f->parts.size(); ++i) {
    Flight::Part& part = f->parts[i];
    if (part.done) continue;
    const Step step = transport_.poll(f->inner[i]);
    if (step == Step::failed) return step;
    if (step == Step::pending) continue;
    all = Step::advanced;
    if (step != Step::done) continue;
    part.done = true;
    --f->open;
    try {
      if (part.receives && !take(*f, part.side, part.message)) return Step::failed;
    } catch (const Error& e) {
      refuse(s, e.code(), fmt::format("{}: {}", name(s.op), e.what()), {rank_});
      return Step::failed;
    }
  }
  if (f->open > 0) return all;
  const ExchangeProgram& program = f->planned->program;
  if (program.adds) {
    std::byte* const sums = f->room ? f->room.data() + f->planned->sums_at : nullptr;
    program.add_all(f->fields, sums, [&](std::size_t i) {
      program.add_packed(i, f->room.data() + f->planned->receives[i][0].at + kHead, f->fields, sums);
    });
  }
  end(*f);
  return Step::done;
}

// Keeps as many rooms as there were ever exchanges in flight at once. They are not freed here, because shared
// memory that is freed in the middle of a step is not reused: the arena asks the group whether a call uses
// the memory, and the group cannot answer then.
void ExchangeByMessages::end(Flight& f) noexcept {
  std::vector<Tensor>& spare = f.planned->spare;
  try {
    if (f.room) spare.push_back(std::move(f.room));
    // the room of a stream that is not used any more
    if (spare.size() > flights_.size()) spare.erase(spare.begin());
  } catch (const std::bad_alloc&) {  // the next exchange gets a new room
  }
  f.room = {};
  spare_.push_back(&f);  // has room: see post()
}

bool ExchangeByMessages::ask(const OpState& s) noexcept {
  const Flight* const f = of(s);
  bool known = true;
  for (std::size_t i = 0; f != nullptr && i < f->parts.size(); ++i)
    if (!f->parts[i].done && !transport_.ask(f->inner[i])) known = false;
  return known;
}

std::vector<int> ExchangeByMessages::missing(const OpState& s, std::string& story) noexcept {
  const Flight* const f = of(s);
  if (f == nullptr) {
    story = "it was not started";
    return {};
  }
  std::vector<int> ranks;
  std::string first;
  for (std::size_t i = 0; i < f->parts.size(); ++i) {
    if (f->parts[i].done) continue;
    const std::vector<int> these = transport_.missing(f->inner[i], story);
    if (first.empty()) first = story;
    ranks.insert(ranks.end(), these.begin(), these.end());
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  story = ranks.size() == 1 ? std::move(first)
          : ranks.empty()   ? "every rank has arrived"
                            : fmt::format("{} have not done their part", name_ranks(ranks));
  return ranks;
}

}  // namespace weft
