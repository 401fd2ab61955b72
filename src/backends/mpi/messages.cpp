#include "backends/mpi/messages.hpp"

#include <algorithm>
#include <cstring>
#include <new>

namespace weft::mpi {
namespace {

constexpr std::size_t kSpare = 16;  // buffers kept for the next pieces

}  // namespace

Messages::Messages(ControlChannel& channel, Limits limits)
    : channel_(channel), limits_(limits), next_numbers_(static_cast<std::size_t>(channel.size())) {}

void Messages::begin(OpState& s) {
  Transfer& t = transfers_.emplace_back();
  t.call = &s;
  t.count = s.op == Op::send ? s.in_count : s.out_count;
  new (s.scratch.data()) Transfer*(&t);
}

void Messages::send(OpState& s) {
  Transfer& t = *kept_in(s);
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

void Messages::fetch(OpState& recv, std::uint32_t number) {
  Transfer& t = *kept_in(recv);
  t.number = number;
  t.phase = Phase::moving;
  advance(t);
}

void Messages::finish(OpState& s) noexcept { kept_in(s)->phase = Phase::done; }

bool Messages::over(const OpState& s) const {
  const Transfer& t = kept_in(s);
  return t.phase == Phase::done || (t.phase == Phase::written && !channel_.owes(t.envelope));
}

// Removes finished pieces at the front, and adds new pieces at the back. Sender and receiver divide a message
// in the same way.
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
  Transfer* const t = kept_in(s);
  const bool moved = t->phase == Phase::moving && advance(*t);
  if (!over(s)) return moved ? Step::advanced : Step::pending;
  transfers_.remove_if([&](const Transfer& other) { return &other == t; });
  return Step::done;
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
