// A digest of the layouts and constants that must be equal on all ranks of a group: see build.hpp.
// tests/backends/build_test.cpp fails if a constant or a field of control.hpp or paths.hpp is missing here.
#pragma once

#include <cstddef>

#include "backends/shm/control.hpp"
#include "backends/shm/exchange/ring.hpp"
#include "backends/shm/paths.hpp"
#include "base/hash.hpp"
#include "host/arena.hpp"
#include "host/peers.hpp"
#include "host/peers/descriptor_socket.hpp"

namespace weft::shm {

/// A digest of the constants that decide which path a call takes.
constexpr std::uint64_t digest_of_paths() noexcept {
  Fnv1a hash;
  for (const std::int64_t bytes :
       {kAskedAhead, kExposedFrom, kHelpFrom, kStreamFrom, kNoLimit, kFewBytes, kPackedBytes,
        kPackedOnSharedCores, kMeasuredBytes, kKernelBytes, kLongRun, kScatteredRun, kStreamedBytes,
        kStreamedRun, static_cast<std::int64_t>(kListNumbers), kListed})
    hash.add(static_cast<std::uint64_t>(bytes));
  const auto add = [&](SizeRange range) { hash.add(digest_of(range.from, range.to)); };
  for (const SingleCopyRow& r : kSingleCopy) {
    hash.add(digest_of(r.ranks));
    for (const SizeRange& range : {r.pushed, r.combined, r.moved, r.given}) add(range);
  }
  for (const InPlaceRow& r : kInPlace) hash.add(digest_of(r.ranks, r.from));
  for (int op = 0; op < kOpCount; ++op) {
    hash.add(digest_of(inline_bytes(static_cast<Op>(op))));
    add(profitable_single_copy(static_cast<Op>(op), 3));
  }
  hash.add(digest_of(in_place_from(3)));
  return hash.value;
}

/// A digest of the layout of a control region.
constexpr std::uint64_t digest_of_control() noexcept {
  Fnv1a hash;
  hash.add(digest_of(kLine, kRing, kInlineBytes, kStageBytes, kRounds, kChunkBytes, kPieceBytes,
                     kEnvelopeRing, kEagerBytes, kLargeMessages, kStreamBytes, kExposed, kHeadBytes,
                     kByKernel, kLeaving, kLeft));
  hash.add(digest_of(sizeof(Buffer), offsetof(Buffer, kind), offsetof(Buffer, segment),
                     offsetof(Buffer, offset), static_cast<int>(Buffer::remote)));
  hash.add(digest_of(sizeof(Arrival), offsetof(Arrival, sequence), offsetof(Arrival, word),
                     offsetof(Arrival, count), offsetof(Arrival, detail), offsetof(Arrival, places),
                     offsetof(Arrival, payload), offsetof(Arrival, both.payload)));
  hash.add(digest_of(sizeof(Detail), offsetof(Detail, scale), offsetof(Detail, longest),
                     offsetof(Detail, small), offsetof(Detail, user), sizeof(BufferBlock),
                     offsetof(BufferBlock, offset), offsetof(BufferBlock, count)));
  hash.add(digest_of(sizeof(Envelope), offsetof(Envelope, sequence), offsetof(Envelope, count),
                     offsetof(Envelope, tag), offsetof(Envelope, number), offsetof(Envelope, dtype),
                     offsetof(Envelope, eager), offsetof(Envelope, place), offsetof(Envelope, payload)));
  hash.add(digest_of(sizeof(Pair), offsetof(Pair, sent), offsetof(Pair, chunks), offsetof(Pair, drained),
                     offsetof(Pair, received), offsetof(Pair, helped), offsetof(Pair, taken_from),
                     offsetof(Pair, held), offsetof(Pair, found), offsetof(Pair, answers),
                     offsetof(Pair, envelopes), offsetof(Pair, stream), static_cast<int>(Pair::taken)));
  hash.add(digest_of(sizeof(RankBlock), offsetof(RankBlock, consumed), offsetof(RankBlock, finished),
                     offsetof(RankBlock, staged), offsetof(RankBlock, reduced), offsetof(RankBlock, copied),
                     offsetof(RankBlock, active), offsetof(RankBlock, sleeping), offsetof(RankBlock, left),
                     offsetof(RankBlock, joined), offsetof(RankBlock, segments), offsetof(RankBlock, probe),
                     offsetof(RankBlock, single), offsetof(RankBlock, mapped_all),
                     offsetof(RankBlock, asking), offsetof(RankBlock, answered), offsetof(RankBlock, message),
                     offsetof(RankBlock, message_count), offsetof(RankBlock, message_tag),
                     offsetof(RankBlock, inbox), offsetof(RankBlock, arrivals)));
  hash.add(
      digest_of(kExchangeSlots, kSlotBytes, kBesideBytes, kBoxNumbers, kAboutBytes, kTimings, kMostPlaces));
  hash.add(digest_of(sizeof(Slot), offsetof(Slot, sequence), offsetof(Slot, form), offsetof(Slot, taken),
                     offsetof(Slot, holds), offsetof(Slot, timing), offsetof(Slot, beside),
                     offsetof(Slot, apart), offsetof(Slot, boxes_id), offsetof(Slot, places),
                     offsetof(Slot, about), offsetof(Slot, boxes), static_cast<int>(Holds::by_kernel),
                     Took::kShift));
  hash.add(digest_of(sizeof(Ring), offsetof(Ring, slots), offsetof(Ring, taken), offsetof(Ring, took)));
  hash.add(digest_of(sizeof(AbortRecord), offsetof(AbortRecord, state), offsetof(AbortRecord, code),
                     offsetof(AbortRecord, op), offsetof(AbortRecord, call), offsetof(AbortRecord, text),
                     offsetof(AbortRecord, asked), AbortRecord::kSealed));
  hash.add(digest_of(sizeof(Assembly), offsetof(Assembly, came), offsetof(Assembly, news)));
  return hash.value;
}

/// A digest of the requests that processes send each other through their sockets.
constexpr std::uint64_t digest_of_sockets() noexcept {
  return digest_of(
      SocketRequest::kMagic, SocketRequest::kNameBytes, sizeof(SocketRequest), offsetof(SocketRequest, kind),
      offsetof(SocketRequest, number), offsetof(SocketRequest, segment), offsetof(SocketRequest, name_bytes),
      offsetof(SocketRequest, name), static_cast<int>(SocketRequest::Kind::region), sizeof(SocketReply),
      offsetof(SocketReply, status), offsetof(SocketReply, number), offsetof(SocketReply, bytes),
      offsetof(SocketReply, id), static_cast<int>(SocketReply::Status::other_user), HostPeers::kMaxDoorbells,
      Arena::kMaxSegments);
}

inline std::uint64_t layout() noexcept {
  constexpr std::uint64_t kAll = digest_of(digest_of_paths(), digest_of_control(), digest_of_sockets());
  return digest_of(kAll, Control::bytes(2), Control::bytes(3), Control::bytes(7), Control::bytes(64),
                   HostPeers::process_block_layout());
}

}  // namespace weft::shm
