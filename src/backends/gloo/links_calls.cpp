// Records which collective each rank has announced, and finds which ranks hold up a call.
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
  Announcement mine = announcement_of(s, n);
  std::uint64_t sequence = 0;
  {
    const std::lock_guard lock(mutex_);
    sequence = calls_.announce(mine, s);
    current_ = sequence;
  }
  for (int r = 0; r < n; ++r) {
    if (r == self) continue;
    announce_to(mine, s, r, n);
    try {
      write(*peers_[static_cast<std::size_t>(r)],
            ControlMessage{.kind = ControlMessage::Kind::announce, .announcement = mine});
    } catch (const std::exception&) {
      if (has_left(r)) throw Error(left({r}, &s));
      throw;
    }
  }
  for (int r = 0; r < n; ++r) {
    if (r == self) continue;
    const Peer& peer = *peers_[static_cast<std::size_t>(r)];
    const auto has_come = [&] { return calls_.announced_by(r) > sequence; };
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return closed_ || peer.leaves || peer.gone || has_come(); });
    if (closed_) throw std::runtime_error("the group has failed");
    if (!has_come()) {
      if (peer.leaves) throw Error(left({r}, &s));
      throw std::runtime_error("the connection broke");
    }
    if (const auto differs = calls_.compare(r)) throw Error(*differs);
  }
}

// If a rank dies, its connection breaks as well. The thread of that connection gets time to fail the
// group.
std::optional<Failure> Links::leaving(const OpState& s) {
  constexpr auto kOthersKnow = std::chrono::milliseconds(200);
  std::unique_lock lock(mutex_);
  if (changed_.wait_for(lock, kOthersKnow, [&] { return closed_; })) return std::nullopt;
  std::vector<int> ranks;
  for (const auto& peer : peers_)
    if (peer->leaves) ranks.push_back(peer->rank);
  if (ranks.empty()) return std::nullopt;
  return left(ranks, &s);
}

void Links::over() noexcept {
  const std::lock_guard lock(mutex_);
  if (current_) calls_.finish(*current_);
  current_.reset();
  last_.state = LastCall::State::finished;
}

std::vector<LastCall> Links::last_calls(bool announced) const {
  const std::lock_guard lock(mutex_);
  return messages_.last_calls(announced ? LastCall::State::none : LastCall::State::unknown);
}

// Called with mutex_ held. Inside a collective of Gloo, a rank may wait for any other rank.
std::vector<int> Links::awaited_in(std::uint64_t sequence) const {
  std::vector<int> ranks = calls_.late(sequence);
  if (!ranks.empty()) return ranks;
  for (int r = 0; r < size(); ++r)
    if (r != context_->rank) ranks.push_back(r);
  return ranks;
}

// Called with mutex_ held. If calls are compared, all calls are announced, so the number of a call is its
// sequence number.
std::vector<int> Links::awaited_by(const OpState& s) const {
  return row(s.op).collective ? awaited_in(s.call) : messages_.awaited_by(s);
}

OwnCalls Links::own_calls() const {
  return {.awaited = current_ ? awaited_in(*current_) : std::vector<int>(), .last = last_};
}

// If the connection has broken, the notice is lost, and that rank does not answer.
void Links::notify(int to, Notice notice, std::uint32_t number, std::span<const std::byte> bytes) {
  try {
    write(*peers_[static_cast<std::size_t>(to)],
          ControlMessage{
              .kind = notice == Notice::ping ? ControlMessage::Kind::ping : ControlMessage::Kind::pong,
              .count = static_cast<std::int64_t>(bytes.size()),
              .number = number},
          bytes.data(), bytes.size());
  } catch (const std::exception&) {}
}

bool Links::ask(const OpState& s) {
  const NoSignals guard;
  const std::lock_guard lock(mutex_);
  if (closed_) return true;
  messages_.ask(s);
  return messages_.settled(awaited_by(s));
}

std::vector<int> Links::missing(const OpState& s, std::string& story) {
  const std::lock_guard lock(mutex_);
  if (!row(s.op).collective) return messages_.missing(s, story, true);
  std::vector<int> ranks = awaited_by(s);
  const HoldUp found = messages_.found(ranks);
  if (calls_.late(s.call).empty()) return tell_all_arrived(found, story);
  const auto simple = [&](std::span<const int> these) {
    std::string text;
    for (const int r : these) text += fmt::format("{}rank {} had not arrived", text.empty() ? "" : "; ", r);
    return text;
  };
  story = tell(ranks, found, simple, true);
  return ranks;
}

}  // namespace weft::gloo_backend
