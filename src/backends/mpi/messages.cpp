#include "backends/mpi/messages.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <new>

namespace weft::mpi {
namespace {

constexpr std::size_t kSpare = 16;  // buffers kept for the next pieces

/// The state of a transfer, in the scratch of its call's slot.
template <class Transfer>
Transfer*& kept_in(OpState& s) noexcept {
  return *reinterpret_cast<Transfer**>(s.scratch.data());
}

}  // namespace

Messages::Messages(ControlChannel& channel, Limits limits, UnexpectedLimits unexpected)
    : channel_(channel),
      limits_(limits),
      next_numbers_(static_cast<std::size_t>(channel.size())),
      matcher_(channel.size(), unexpected) {}

void Messages::post(OpState& s) {
  Transfer& t = transfers_.emplace_back();
  t.call = &s;
  new (s.scratch.data()) Transfer*(&t);
  if (s.op == Op::wait_message) return;  // poll() looks
  if (s.op == Op::recv) {
    t.count = s.out_count;
    const int source = matcher_.source_of(s.peer, s.tag);
    if (source < 0) return matcher_.post(s.peer, s.tag, t);
    s.peer = source;
    matcher_.take_message(source, s.tag,
                          [&](const UnexpectedMessage& k) { match(t, k.envelope, k.payload); });
    return;
  }
  t.count = s.in_count;
  const std::int64_t bytes = t.count * size_bytes(s.dtype);
  Envelope envelope{.kind = Envelope::message, .dtype = s.dtype, .tag = s.tag, .count = t.count};
  envelope.eager = bytes <= kEager && t.count <= limits_.max_count;
  if (envelope.eager) {
    t.envelope = channel_.send(s.peer, envelope, {s.in, static_cast<std::size_t>(bytes)});
    t.phase = Phase::written;
    return;
  }
  t.number = envelope.number = next_numbers_[static_cast<std::size_t>(s.peer)]++ % ControlChannel::kNumbers;
  channel_.send(s.peer, envelope);
  t.phase = Phase::moving;
  advance(t);
}

void Messages::arrived(int from, const Envelope& envelope, std::span<const std::byte> payload) {
  if (Transfer* const t = matcher_.take_receive(from, envelope.tag)) {
    t->call->peer = from;
    return match(*t, envelope, payload);
  }
  const auto bytes = static_cast<std::int64_t>(payload.size());
  // It cannot be left waiting: control messages come in order, and later ones are behind this one.
  if (!matcher_.has_room(bytes)) {
    if (!trouble_) trouble_ = matcher_.refusal(channel_.rank(), from, envelope.tag, bytes);
    return;
  }
  UnexpectedMessage& kept = matcher_.keep(from, envelope.tag, bytes);
  kept.envelope = envelope;
  kept.payload.assign(payload.begin(), payload.end());
}

std::optional<MessageInfo> Messages::probe(int source, std::int32_t tag) const {
  const int from = matcher_.source_of(source, tag);
  if (from < 0) return std::nullopt;
  const Envelope& envelope = matcher_.message(from, tag)->envelope;
  return MessageInfo{from, tag, envelope.dtype, envelope.count};
}

void Messages::match(Transfer& t, const Envelope& envelope, std::span<const std::byte> payload) {
  const OpState& s = *t.call;
  if (envelope.dtype != s.dtype || envelope.count != s.out_count) {
    trouble_ = message_mismatch(s, channel_.rank(), envelope.dtype, envelope.count);
    return;
  }
  if (envelope.eager) {
    if (!payload.empty()) std::memcpy(s.out, payload.data(), payload.size());
    t.phase = Phase::done;
    return;
  }
  t.number = envelope.number;
  t.phase = Phase::moving;
  advance(t);
}

// Removes finished pieces from the front, and adds new ones at the back. Sender and receiver cut a message
// alike.
bool Messages::advance(Transfer& t) {
  const OpState& s = *t.call;
  const bool sends = s.op == Op::send;
  const std::int64_t element = size_bytes(s.dtype);
  const std::int64_t most =
      std::min(limits_.max_count, limits_.safe ? kPieceBytes / element : limits_.max_count);
  bool moved = false;
  while (!t.pieces.empty()) {
    Piece& p = t.pieces.front();
    int done = 0;
    must(MPI_Test(&p.request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    if (!done) break;
    if (!sends && limits_.safe)
      std::memcpy(s.out + p.at * element, p.stage.get(0), static_cast<std::size_t>(p.count * element));
    t.finished += p.count;
    if (limits_.safe && spare_.size() < kSpare) spare_.push_back(std::move(p.stage));
    t.pieces.pop_front();
    moved = true;
  }
  while (t.started < t.count && t.pieces.size() < kWindow) {
    Piece& p = t.pieces.emplace_back();
    p.at = t.started;
    p.count = std::min(most, t.count - t.started);
    std::byte* buffer = sends ? const_cast<std::byte*>(s.in) + p.at * element : s.out + p.at * element;
    if (limits_.safe) {
      if (!spare_.empty()) {
        p.stage = std::move(spare_.back());
        spare_.pop_back();
      }
      std::byte* const ours = p.stage.get(p.count * element);
      if (sends) std::memcpy(ours, buffer, static_cast<std::size_t>(p.count * element));
      buffer = ours;
    }
    const int tag = ControlChannel::kTag + 1 + static_cast<int>(t.number), count = static_cast<int>(p.count);
    const MPI_Datatype type = bytes_type(s.dtype);
    if (sends) {
      must(MPI_Isend(buffer, count, type, s.peer, tag, channel_.comm(), &p.request), "MPI_Isend");
    } else {
      must(MPI_Irecv(buffer, count, type, s.peer, tag, channel_.comm(), &p.request), "MPI_Irecv");
    }
    t.started += p.count;
    moved = true;
  }
  if (t.finished == t.count) t.phase = Phase::done;
  return moved;
}

Step Messages::poll(OpState& s) {
  Transfer* const t = kept_in<Transfer>(s);
  if (s.op == Op::wait_message) {
    if (const auto message = probe(s.peer, s.tag)) {
      s.peer = message->source;
      s.dtype = message->dtype;
      s.out_count = message->count;
      t->phase = Phase::done;
    }
  }
  const bool moved = t->phase == Phase::moving && advance(*t);
  if (t->phase == Phase::written && !channel_.owes(t->envelope)) t->phase = Phase::done;
  if (t->phase != Phase::done) return moved ? Step::advanced : Step::pending;
  transfers_.remove_if([&](const Transfer& other) { return &other == t; });
  return Step::done;
}

std::vector<int> Messages::awaited(bool any) const {
  std::vector<int> ranks;
  for (const Transfer& t : transfers_) {
    if (t.phase == Phase::done || (t.phase == Phase::written && !channel_.owes(t.envelope))) continue;
    if (t.call->peer != any_source) {
      ranks.push_back(t.call->peer);
    } else if (any) {
      const std::vector<int> sources = awaited_sources(*t.call, channel_.rank(), channel_.size());
      ranks.insert(ranks.end(), sources.begin(), sources.end());
    }
  }
  return ranks;
}

bool Messages::awaits_any() const noexcept {
  return std::any_of(transfers_.begin(), transfers_.end(), [](const Transfer& t) {
    return t.phase == Phase::unmatched && t.call->peer == any_source;
  });
}

bool Messages::exposed() noexcept {
  if (limits_.safe) return false;
  for (Transfer& t : transfers_) {
    for (Piece& p : t.pieces) {
      int done = 0;
      if (MPI_Test(&p.request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || !done) return true;
    }
  }
  return false;
}

}  // namespace weft::mpi
