#include "backends/messages/peer_messages.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "backends/last_calls.hpp"

namespace weft {

PeerMessages::PeerMessages(MessageMedium& medium, int rank, int size, UnexpectedLimits limits)
    : medium_(medium),
      rank_(rank),
      size_(size),
      matcher_(size, limits),
      left_(static_cast<std::size_t>(size)),
      roll_(rank, size) {
  in_flight_.reserve(kInFlight);
}

void PeerMessages::receive(OpState& s) {
  start(s);
  const int source = matcher_.source_of(s.peer, s.tag);
  if (s.op == Op::wait_message) {
    if (source >= 0) finish(s, *probe(source, s.tag));
    return;
  }
  if (source < 0) return matcher_.post(s.peer, s.tag, s);
  matcher_.take_message(source, s.tag,
                        [&](const Kept& kept) { give(s, source, kept.head, kept.elements()); });
}

void PeerMessages::begin_send(OpState& s) { start(s); }

void PeerMessages::send_to_self(OpState& s) {
  start(s);
  const MessageHead head{.dtype = s.dtype, .tag = s.tag, .count = s.in_count};
  if (auto why = arrived(rank_, head, {s.in, static_cast<std::size_t>(head.bytes())})) {
    ended(s);
    return medium_.refuse(s, *std::move(why));
  }
  sent(s);
}

void PeerMessages::sent(OpState& s) { finish(s, {s.peer, s.tag, s.dtype, s.in_count}); }

void PeerMessages::received(OpState& recv) {
  const InFlight* const e = entry(recv);
  finish(recv, {e != nullptr ? e->peer : recv.peer, recv.tag, recv.dtype, recv.out_count});
}

void PeerMessages::finish(OpState& s, const MessageInfo& found) {
  ended(s);
  medium_.done(s, found);
}

PeerMessages::InFlight* PeerMessages::entry(const OpState& s) noexcept {
  const auto at =
      std::find_if(in_flight_.begin(), in_flight_.end(), [&](const InFlight& e) { return e.call == &s; });
  return at == in_flight_.end() ? nullptr : &*at;
}

void PeerMessages::ended(const OpState& s) noexcept {
  if (waits_in_ == &s) waits_in_ = nullptr;
  if (InFlight* const e = entry(s)) in_flight_.erase(in_flight_.begin() + (e - in_flight_.data()));
}

void PeerMessages::waits_in(const OpState& s) noexcept {
  if (is_users_message(s)) waits_in_ = &s;
}

bool PeerMessages::fits(OpState& recv, int source, const MessageHead& head, const std::byte* elements) {
  if (head.dtype == recv.dtype && head.count == recv.out_count) return true;
  ended(recv);
  medium_.refuse(recv, message_mismatch(recv, source, rank_, head.dtype, head.count, elements));
  return false;
}

void PeerMessages::give(OpState& recv, int source, const MessageHead& head, const std::byte* elements) {
  if (!fits(recv, source, head, head.offered ? nullptr : elements)) return;
  if (InFlight* const e = entry(recv)) e->peer = source;
  if (head.offered) return medium_.fetch(recv, source, head.number);
  if (head.count > 0) std::memcpy(recv.out, elements, static_cast<std::size_t>(head.bytes()));
  received(recv);
}

OpState* PeerMessages::claim(int source, const MessageHead& head) {
  OpState* const recv = matcher_.take_receive(source, head.tag);
  if (recv == nullptr || !fits(*recv, source, head, nullptr)) return nullptr;
  if (InFlight* const e = entry(*recv)) e->peer = source;
  return recv;
}

std::optional<Failure> PeerMessages::no_room(int source, const MessageHead& head) const {
  if (matcher_.has_room(head.bytes())) return std::nullopt;
  return matcher_.refusal(rank_, source, head.tag, head.bytes());
}

std::optional<Failure> PeerMessages::arrived(int source, const MessageHead& head,
                                             std::span<const std::byte> elements) {
  if (OpState* const recv = matcher_.take_receive(source, head.tag)) {
    give(*recv, source, head, elements.data());
    return std::nullopt;
  }
  if (auto why = no_room(source, head)) return why;
  Storage room = elements.empty() ? Storage() : medium_.room_for(elements.size());
  Kept& kept = keep(source, head);
  if (room) {
    kept.own.clear();
    std::memcpy(room.data(), elements.data(), elements.size());
  } else {
    kept.own.assign(elements.begin(), elements.end());
  }
  kept.given = std::move(room);
  find(source, head);
  return std::nullopt;
}

void PeerMessages::completed(int source, const MessageHead& head, Storage elements) {
  if (OpState* const recv = matcher_.take_receive(source, head.tag))
    return give(*recv, source, head, elements.data());
  Kept& kept = keep(source, head);
  kept.own.clear();
  kept.given = std::move(elements);
  find(source, head);
}

PeerMessages::Kept& PeerMessages::keep(int source, const MessageHead& head) {
  Kept& kept = matcher_.keep(source, head.tag, head.bytes());
  kept.head = head;
  return kept;
}

// Completes each wait_message for which this message is enough.
void PeerMessages::find(int source, const MessageHead& head) {
  const auto waits = [&](const InFlight& e) {
    return e.call->op == Op::wait_message && e.call->tag == head.tag &&
           (e.peer == source || e.peer == any_source);
  };
  for (;;) {
    const auto at = std::find_if(in_flight_.begin(), in_flight_.end(), waits);
    if (at == in_flight_.end()) return;
    finish(*at->call, {source, head.tag, head.dtype, head.count});
  }
}

void PeerMessages::received_notice(int source, Notice notice, std::uint32_t number,
                                   std::span<const std::byte> bytes) {
  if (notice == Notice::pong) return roll_.answered(source, number, bytes);
  const OwnCalls own = medium_.own_calls();
  constexpr int kMostRanks = 8 * (kMostPongBytes - static_cast<int>(RollCallMessages::kLastCallBytes));
  medium_.notify(
      source, Notice::pong, number,
      RollCallMessages::encode(awaited_with(own), std::min(size_, kMostRanks), own_last_call(own)));
}

void PeerMessages::called(int r, const CallRecord& record) {
  roll_.called(r, last_call_of(r, LastCall::State::called, record));
}

std::optional<MessageInfo> PeerMessages::probe(int source, std::int32_t tag) const {
  const int from = matcher_.source_of(source, tag);
  if (from < 0) return std::nullopt;
  const MessageHead& head = matcher_.message(from, tag)->head;
  return MessageInfo{from, tag, head.dtype, head.count};
}

std::vector<int> PeerMessages::sources(const OpState& s, int peer) const {
  return peer != any_source ? std::vector<int>{peer} : awaited_sources(s, rank_, size_);
}

std::vector<int> PeerMessages::awaited_by(const OpState& s) const { return sources(s, s.peer); }

std::vector<int> PeerMessages::awaited() const {
  std::vector<bool> waits(static_cast<std::size_t>(size_));
  for (const InFlight& e : in_flight_)
    if (!medium_.over(*e.call))
      for (const int r : sources(*e.call, e.peer)) waits[static_cast<std::size_t>(r)] = true;
  std::vector<int> ranks;
  for (int r = 0; r < size_; ++r)
    if (r != rank_ && waits[static_cast<std::size_t>(r)]) ranks.push_back(r);
  return ranks;
}

std::vector<int> PeerMessages::awaited_with(const OwnCalls& own) const {
  std::vector<int> ranks = own.awaited;
  const std::vector<int> messages = awaited();
  ranks.insert(ranks.end(), messages.begin(), messages.end());
  return ranks;
}

bool PeerMessages::have_left(const OpState& s, int peer) const {
  if (peer != any_source) return has_left(peer);
  const std::vector<int> ranks = sources(s, peer);
  return std::all_of(ranks.begin(), ranks.end(), [&](int r) { return has_left(r); });
}

std::vector<int> PeerMessages::lost(const OpState& s) const {
  if (!have_left(s, s.peer)) return {};
  if (s.op != Op::send && matcher_.source_of(s.peer, s.tag) >= 0) return {};
  return awaited_by(s);
}

std::vector<int> PeerMessages::lost() const {
  std::vector<int> ranks;
  if (std::none_of(left_.begin(), left_.end(), [](bool left) { return left; })) return ranks;
  for (const InFlight& e : in_flight_) {
    if (medium_.over(*e.call) || !have_left(*e.call, e.peer)) continue;
    const std::vector<int> these = sources(*e.call, e.peer);
    ranks.insert(ranks.end(), these.begin(), these.end());
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

LastCall::Message PeerMessages::last_message() const noexcept {
  if (waits_in_ != nullptr) return message_of(*waits_in_);
  for (const InFlight& e : in_flight_)
    if (is_users_message(*e.call)) return message_of(*e.call);
  return {};
}

LastCall PeerMessages::own_last_call(const OwnCalls& own) const {
  LastCall last = own.last;
  if (const LastCall::Message message = last_message(); message.op != Op::none) last.message = message;
  return last;
}

void PeerMessages::ask(const OpState& s) {
  const std::uint32_t number = roll_.begin(s.op, s.call);
  for (int r = 0; r < size_ && number != 0; ++r)
    if (r != rank_ && !has_left(r)) medium_.notify(r, Notice::ping, number, {});
}

std::vector<int> PeerMessages::missing(const OpState& s, std::string& story, bool all_answer) const {
  std::vector<int> ranks = awaited_by(s);
  const auto simple = [&](std::span<const int> who) {
    return s.op == Op::send ? not_received(s) : not_sent(s, who, rank_, size_);
  };
  story = tell(ranks, found(ranks), simple, all_answer);
  if (s.op != Op::send) story += not_received(matcher_.kept(s.peer));
  return ranks;
}

std::vector<LastCall> PeerMessages::last_calls(LastCall::State silent) const {
  return roll_.last_calls(own_last_call(medium_.own_calls()), silent);
}

}  // namespace weft
