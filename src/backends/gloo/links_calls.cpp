// Which collective each rank has announced, and who holds up a call.
#include <fmt/format.h>

#include <algorithm>

#include "backends/gloo/link_parts.hpp"
#include "backends/last_calls.hpp"
#include "base/signals.hpp"
#include "weft/backends/op_table.hpp"
#include "weft/base/name_ranks.hpp"

namespace weft::gloo_backend {

void Links::begin(const OpState& s) {
  const std::lock_guard lock(mutex_);
  last_ = last_call_of(context_->rank, LastCall::State::in_flight, record_of(s, size()));
}

void Links::agree(const OpState& s) {
  const int n = size(), self = context_->rank;
  const Announcement mine = announcement_of(s, n);
  {
    const std::lock_guard lock(mutex_);
    current_ = s.call;
  }
  const auto expected_of = [&](int r) {
    Announcement a = mine;
    announce_to(a, s, r, n);
    return a;
  };
  for (int r = 0; r < n; ++r) {
    if (r == self) continue;
    try {
      write(*peers_[static_cast<std::size_t>(r)],
            ControlMessage{.kind = ControlMessage::Kind::announce, .announcement = expected_of(r)});
    } catch (const std::exception&) {
      if (has_left(r)) throw Error(left(r, &s));
      throw;
    }
  }
  for (int r = 0; r < n; ++r) {
    if (r == self) continue;
    Peer& peer = *peers_[static_cast<std::size_t>(r)];
    Announcement theirs;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return closed_ || peer.leaves || peer.gone || !peer.announced.empty(); });
      if (closed_) throw std::runtime_error("the group has failed");
      if (peer.announced.empty()) {
        if (peer.leaves) throw Error(left(r, &s));
        throw std::runtime_error("the connection broke");
      }
      theirs = peer.announced.front();
      peer.announced.pop_front();
    }
    const Announcement here = expected_of(r);
    if (theirs.record != here.record) throw Error(mismatch(r, theirs.record, self, here.record));
    if (theirs.gives != here.expects || theirs.expects != here.gives)
      throw Error(Failure{
          .code = ErrorCode::mismatch,
          .text = fmt::format("{}: rank {} gives rank {} {} elements, which expects {}; rank {} gives rank "
                              "{} {} elements, which expects {} [call {}]",
                              name(s.op), r, self, theirs.gives, here.expects, self, r, here.gives,
                              theirs.expects, s.call),
          .op = s.op,
          .call = s.call,
          .ranks = {std::min(r, self), std::max(r, self)}});
  }
}

// The connection of a rank that dies breaks as well: the thread of that connection is given time to fail the group.
std::optional<Failure> Links::leaving(const OpState& s) {
  constexpr auto kOthersKnow = std::chrono::milliseconds(200);
  std::unique_lock lock(mutex_);
  if (changed_.wait_for(lock, kOthersKnow, [&] { return closed_; })) return std::nullopt;
  std::vector<int> ranks;
  for (const auto& peer : peers_)
    if (peer->leaves) ranks.push_back(peer->rank);
  if (ranks.empty()) return std::nullopt;
  Failure why = left(ranks.front(), &s);
  why.text = fmt::format("{}: {} left the group", name(s.op), name_ranks(ranks));
  why.ranks = ranks;
  return why;
}

void Links::over() noexcept {
  const std::lock_guard lock(mutex_);
  current_.reset();
  last_.state = LastCall::State::finished;
}

// With mutex_ held.
LastCall Links::own_last_call() const {
  LastCall call = last_;
  const std::lock_guard lock(in_flight_mutex_);
  if (!in_flight_.empty()) call.message = in_flight_.front().second;
  return call;
}

std::vector<LastCall> Links::last_calls(bool announced) const {
  const std::lock_guard lock(mutex_);
  return roll_.last_calls(own_last_call(), announced ? LastCall::State::none : LastCall::State::unknown);
}

std::vector<int> Links::late(std::uint64_t call) const {
  std::vector<int> ranks;
  for (const auto& peer : peers_)
    if (peer->rank != context_->rank && peer->calls <= call) ranks.push_back(peer->rank);
  return ranks;
}

// With mutex_ held. Inside a collective of Gloo, a rank may wait for any other.
std::vector<int> Links::awaited_by(const OpState& s) const {
  if (s.op == Op::send) return {s.peer};
  if (!row(s.op).collective) return awaited_sources(s, context_->rank, size());
  std::vector<int> ranks = late(s.call);
  for (int r = 0; r < size() && ranks.empty(); ++r)
    if (r != context_->rank) ranks.push_back(r);
  return ranks;
}

// The ranks that calls in flight wait for. With mutex_ held.
std::vector<int> Links::awaited() const {
  std::vector<int> ranks = current_ ? late(*current_) : std::vector<int>();
  const auto waits_for = [&](int r) {
    return std::any_of(waits_.begin(), waits_.end(), [&](const OpState* s) { return s->peer == r; });
  };
  const bool inside = current_ && ranks.empty(), any = matcher_.awaits_any() || waits_for(any_source);
  for (const auto& peer : peers_)
    if (peer->rank != context_->rank && (inside || any || peer->fetching || matcher_.awaits(peer->rank) ||
                                         !peer->offers.empty() || waits_for(peer->rank)))
      ranks.push_back(peer->rank);
  return ranks;
}

// Tells the peer whom this rank waits for.
void Links::answer_ping(Peer& peer, std::uint64_t number) {
  std::vector<std::byte> awaits;
  {
    const std::lock_guard lock(mutex_);
    constexpr std::size_t kRanks = 8 * (kEagerBytes - RollCallMessages::kLastCallBytes);
    awaits = RollCallMessages::encode(awaited(), std::min(size(), static_cast<int>(kRanks)), own_last_call());
  }
  write(peer,
        ControlMessage{.kind = ControlMessage::Kind::pong,
                       .count = static_cast<std::int64_t>(awaits.size()),
                       .number = number},
        awaits.data(), awaits.size());
}

bool Links::ask(const OpState& s) {
  const NoSignals guard;
  std::uint32_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return true;
    number = roll_.begin(s.op, s.call);
  }
  for (const auto& peer : peers_) {
    if (number == 0 || peer->rank == context_->rank) continue;
    try {
      write(*peer, ControlMessage{.kind = ControlMessage::Kind::ping, .number = number});
    } catch (const std::exception&) {}  // the connection broke: it will not answer
  }
  const std::lock_guard lock(mutex_);
  return closed_ || roll_.settled(awaited_by(s));
}

std::vector<int> Links::missing(const OpState& s, std::string& story) {
  const std::lock_guard lock(mutex_);
  std::vector<int> ranks = awaited_by(s);
  const HoldUp found = roll_.found(ranks);
  if (row(s.op).collective && late(s.call).empty()) return tell_all_arrived(found, story);
  const auto simple = [&](std::span<const int> these) {
    if (s.op == Op::wait_message || s.peer == any_source) return not_sent(s, these, context_->rank, size());
    if (!row(s.op).collective)
      return fmt::format("rank {} {} with tag {}", s.peer,
                         s.op == Op::send ? "has not received the message" : "has sent no message", s.tag);
    std::string text;
    for (const int r : these) text += fmt::format("{}rank {} had not arrived", text.empty() ? "" : "; ", r);
    return text;
  };
  story = tell(ranks, found, simple, true);
  if (!row(s.op).collective && s.op != Op::send) story += not_received(matcher_.kept(s.peer));
  return ranks;
}

}  // namespace weft::gloo_backend
