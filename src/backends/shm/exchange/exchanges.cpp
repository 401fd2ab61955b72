#include "backends/shm/exchange/exchanges.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <utility>

#include "backends/shm/fence.hpp"
#include "weft/base/error.hpp"
#include "weft/base/name_ranks.hpp"

namespace weft::shm {
namespace {

constexpr int kLooks = 32;
// After so many polls without progress, parts that wait for other parts are set aside. The number is smaller
// than the number of polls before a rank sleeps. (A part that is added directly from its slot needs one copy
// less.)
constexpr int kHeldPolls = 128;
// After more bytes than this the owner first polls all other calls.
constexpr std::int64_t kFewForALook = 32 << 10;
// bytes of one system call; each call costs 2 us
constexpr std::int64_t kKernelAtOnce = std::int64_t{4} << 20;

}  // namespace

Exchanges::Exchanges(const Group& group, PairMemory& memory)
    : group_(group), memory_(memory), peer_memory_(group, kKernelAtOnce) {
  static_assert(sizeof(std::uintptr_t) <= sizeof(OpState::scratch));
  const auto n = static_cast<std::size_t>(group.size);
  touched_.reserve(2 * n);
  for (auto& ends : ends_) ends.resize(n);
}

std::unique_ptr<PlannedExchange> Exchanges::plan(const ExchangePlan& plan) const {
  return std::make_unique<Planned>(plan, group_.rank);
}

void Exchanges::fail(const OpState& s, const Error& e) noexcept {
  try {
    raise(group_, {.code = e.code(),
                   .text = fmt::format("{}: {}", name(s.op), e.what()),
                   .op = s.op,
                   .call = s.call,
                   .ranks = {e.ranks().begin(), e.ranks().end()}});
  } catch (...) {  // out of memory: there is no text then
    raise(group_, {.code = e.code(), .text = {}, .op = s.op, .call = s.call, .ranks = {}});
  }
}

// Makes a new Flight, with its ends of the rings.
void Exchanges::add_flight(Planned& planned) {
  planned.flights.reserve(planned.flights.size() + 1);
  planned.spare.reserve(planned.flights.size() + 1);
  auto f = std::make_unique<Flight>(planned);
  for (std::size_t i = 0; i < f->outs.size(); ++i) {
    f->outs[i].end = &to(planned.to[i].peer);
    if (f->outs[i].end->ring == nullptr) open(*f->outs[i].end);
  }
  for (std::size_t i = 0; i < f->ins.size(); ++i) f->ins[i].end = &from(planned.from[i].peer);
  planned.spare.push_back(f.get());
  planned.flights.push_back(std::move(f));
}

Flight& Exchanges::begin(OpState& s) {
  auto& planned = static_cast<Planned&>(*s.exchange->planned);
  if (planned.spare.empty()) add_flight(planned);
  active_.push_back(planned.spare.back());
  planned.spare.pop_back();
  Flight& f = *active_.back();
  f.call = &s;
  f.fields = s.exchange->fields;
  f.memory = s.exchange->memory;
  f.there = 0;
  f.looks = kLooks;
  f.added = !planned.program.adds;
  f.left = f.outs.size() + f.ins.size() + (planned.program.adds ? 1 : 0);
  for (Out& o : f.outs) o = Out{.end = o.end, .ticket = o.end->tickets++};
  for (In& in : f.ins) in = In{.end = in.end, .ticket = in.end->tickets++};
  return f;
}

// Runs body(); if it throws, the group fails with that error. Returns false if the group has failed.
template <class Body>
bool Exchanges::guarded(const OpState& s, const Body& body) noexcept {
  try {
    body();
    return true;
  } catch (const GroupFailed&) {
  } catch (const std::bad_alloc&) {
    fail(s, Error(Failure{.code = ErrorCode::system, .text = "out of memory", .ranks = {group_.rank}}));
  } catch (const Error& e) {
    fail(s, e);
  }
  return false;
}

void Exchanges::post(OpState& s) noexcept {
  flight_of(s) = nullptr;
  guarded(s, [&] {
    Flight& f = begin(s);
    flight_of(s) = &f;
    for (std::size_t i = 0; i < f.outs.size(); ++i) send(f, f.outs[i], f.planned.to[i]);
    wake();
    if (!f.planned.program.adds && !f.planned.program.own.empty()) f.planned.program.copy_own(f.fields);
  });
}

// Takes the next steps, without waiting. Returns true if something moved.
bool Exchanges::step(Flight& f) {
  Planned& p = f.planned;
  bool moved = false;
  for (std::size_t i = 0; i < f.outs.size(); ++i)
    if (f.outs[i].phase != Phase::done && send(f, f.outs[i], p.to[i])) moved = true;
  for (std::size_t i = 0; i < f.ins.size(); ++i)
    if (f.ins[i].phase < Phase::there && receive(f, f.ins[i], p.from[i])) moved = true;
  if (!f.added && f.there == f.ins.size()) {
    add_all(f);
    moved = true;
  }
  return moved;
}

Step Exchanges::poll(OpState& s) noexcept {
  Flight* const f = flight_of(s);
  if (f == nullptr) return Step::failed;
  // The first poll() looks several times without a pause, because most exchanges end here. A peer that copies
  // meanwhile may share this core, so each later poll() looks only once.
  if (group_.oversubscribed || active_.size() > 1) f->looks = std::min(f->looks, 0);
  bool moved = false;
  const bool well = guarded(s, [&] {
    while (f->left > 0) {
      if (step(*f)) {
        moved = true;
        wake();
        if (f->planned.came_bytes > kFewForALook) break;  // the owner first polls all other calls
      } else if (f->looks > 0) {
        --f->looks;
      } else {
        f->looks -= f->looks < -kHeldPolls ? 0 : 1;
        break;
      }
    }
    if (!moved && !f->added && f->looks < -kHeldPolls && set_aside(*f)) {
      moved = true;
      wake();
    }
  });
  if (!well) return Step::failed;
  if (f->left > 0) return moved ? Step::advanced : Step::pending;
  end(*f);
  return Step::done;
}

void Exchanges::end(Flight& f) noexcept {
  std::erase(active_, &f);
  f.planned.spare.push_back(&f);  // there is room, see begin()
}

void Exchanges::touch(RingEnd& end) {
  if (!end.touched) touched_.push_back(&end);
  end.touched = true;
}

void Exchanges::publish(RingEnd& to) {
  Slot& slot = to.ring->slots[to.next % kExchangeSlots];
  slot.sequence.store(++to.next, std::memory_order_release);
  touch(to);
}

void Exchanges::take(RingEnd& from) {
  from.ring->taken.store(++from.next, std::memory_order_release);
  touch(from);
}

// Wakes the ranks that sleep and may wait for data that was published since the last call.
void Exchanges::wake() noexcept {
  if (touched_.empty()) return;
  full_fence();
  for (RingEnd* const end : touched_) {
    end->touched = false;
    group_.wake_fenced(end->rank);
  }
  touched_.clear();
}

// Returns whether the next slot may have arrived. It may also lie in memory that is not mapped yet.
bool Exchanges::has_slot(const RingEnd& end) const noexcept {
  return end.ring == nullptr
             ? group_.control.ring(end.rank, group_.rank).load(std::memory_order_seq_cst) != 0
             : end.ring->slots[end.next % kExchangeSlots].sequence.load(std::memory_order_seq_cst) ==
                   end.next + 1;
}

void Exchanges::awaited(const Flight& f, std::vector<int>& ranks) const {
  for (const In& in : f.ins)
    if (in.phase < Phase::there && in.end->turn == in.ticket && !has_slot(*in.end))
      ranks.push_back(in.end->rank);
  for (const Out& o : f.outs) {
    if (o.phase == Phase::done || o.end->turn < o.ticket) continue;
    const std::uint64_t wanted =
        o.phase == Phase::awaiting ? o.until : o.end->next + 1 - std::min(o.end->next + 1, kExchangeSlots);
    if (o.end->ring->taken.load(std::memory_order_seq_cst) < wanted ||
        (o.phase == Phase::awaiting && !is_mapped(*o.end)))
      ranks.push_back(o.end->rank);
  }
}

std::vector<int> Exchanges::each_once(std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

std::vector<int> Exchanges::awaited() const {
  std::vector<int> ranks;
  for (const Flight* const f : active_) awaited(*f, ranks);
  return each_once(std::move(ranks));
}

// An exchange that waits for its turn waits for the ranks for which the exchanges before it wait.
std::vector<int> Exchanges::awaited(const OpState& s) const {
  const Flight* const f = flight_of(s);
  std::vector<int> ranks;
  if (f != nullptr) awaited(*f, ranks);
  return ranks.empty() ? awaited() : each_once(std::move(ranks));
}

std::string Exchanges::story(const OpState& s, std::span<const int> late) const {
  const Flight* const f = flight_of(s);
  if (f == nullptr) return "it was not started";
  if (late.empty()) {
    for (const In& in : f->ins)
      if (in.phase == Phase::queued && in.end->ring == nullptr && has_slot(*in.end))
        return fmt::format("rank {} cannot map the memory of rank {} now", group_.rank, in.end->rank);
    return "every rank has arrived";
  }
  if (late.size() > 1) return fmt::format("{} have not done their part", name_ranks(late));
  for (const In& in : f->ins)
    if (in.end->rank == late[0] && in.phase < Phase::there)
      return fmt::format("rank {} has not sent its part", late[0]);
  return fmt::format("rank {} has not received its part", late[0]);
}

}  // namespace weft::shm
