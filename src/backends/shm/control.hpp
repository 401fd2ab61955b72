// The words that the ranks of a group share: the layout of the group's control region, which every rank maps.
// A new region is filled with zeros.
//
// Every word has one writer, which its comment names. Sequences count from 1, so that zero means "not yet".
// If a sleeping rank may wait for a word, the word is stored before a full fence and read with sequential
// consistency. The publisher checks for sleepers after the fence. A rank that goes to sleep announces this
// and then checks again. So one of the two sees the other.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "weft/backends/backend.hpp"
#include "weft/base/error.hpp"

namespace weft::shm {

inline constexpr std::size_t kLine = 64;           ///< bytes of a cache line
inline constexpr std::uint64_t kRing = 32;         ///< arrival lines per rank
inline constexpr std::size_t kInlineBytes = 8192;  ///< room for the payload of an arrival: see inline_bytes()
inline constexpr std::size_t kStageBytes = 128 << 10;  ///< bytes that one rank stages per round
inline constexpr std::uint64_t kRounds = 4;            ///< rounds in flight, each with its own staging buffer
/// the most bytes that one poll step moves in a peer's memory
inline constexpr std::size_t kChunkBytes = 256 << 10;
/// The most bytes that the kernel reads at once from a peer for a reduction.
inline constexpr std::size_t kPieceBytes = 128 << 10;
inline constexpr std::uint64_t kEnvelopeRing = 16;  ///< envelopes in the ring of a pair of ranks
inline constexpr std::size_t kEagerBytes = 8192;  ///< a message up to this size may travel with its envelope
/// Large messages in flight per pair: as many as a group has slots.
inline constexpr std::size_t kLargeMessages = 64;
/// bytes of a chunk of a large foreign message; there are two chunks per pair
inline constexpr std::size_t kStreamBytes = 64 << 10;

/// The place of a buffer, as its owner publishes it.
struct Buffer {
  enum Kind : std::uint32_t {
    none,     ///< no bytes
    pointer,  ///< an address of this process; all ranks are threads of this process
    shared,   ///< (segment, offset) in the owner's arena, which every rank maps
    foreign,  ///< no other rank can reach it
    remote,   ///< an address of the owner's process, which other ranks reach by the kernel's single copies
  };
  Kind kind;
  std::uint32_t segment;
  std::uint64_t offset;  ///< the offset, or the address
};

/// Added to Arrival::word if a call is small enough to be inline, but exposes its memory instead, because it
/// is shared.
inline constexpr std::uint64_t kExposed = std::uint64_t{1} << 63;

/// A rank's part in call k, in line k mod kRing. The owner writes it, and all ranks read it when `sequence`
/// is k + 1. The owner rewrites the line only when `consumed` of all ranks says that they have read it.
struct alignas(64) Arrival {
  std::atomic<std::uint64_t> sequence;
  std::uint64_t word;  ///< op, dtype, reduction, order, root, forced path: equal on all ranks
  std::int64_t count;  ///< equal on all ranks
  /// a hash of the details that must be equal on all ranks; 0: there are none, and no Detail
  std::uint64_t detail;
  union {
    struct {
      Buffer in, out;
    } places;                         ///< if the call is not inline
    std::byte payload[kInlineBytes];  ///< of one that is
    struct {
      Buffer in, out;
      std::byte payload[kInlineBytes - 2 * sizeof(Buffer)];
    } both;  ///< if the call is inline only if the payloads of all ranks are small
  };
};

/// The bytes of the payload that fit in the arrival's first cache line.
inline constexpr std::int64_t kHeadBytes = kLine - offsetof(Arrival, payload);

/// Arguments that only few calls need, and for which an arrival line has no room. They lie next to the line,
/// and the same rules apply to them.
struct alignas(64) Detail {
  double scale;          ///< premul_sum
  std::int64_t longest;  ///< the count of the longest block
  std::uint32_t small;   ///< in_blocks: `in` travels with the arrival
  char user[40];         ///< the name of the user's reduction, as much of it as fits
  /// v-forms: a block per rank, of `in`, or of `out` if only `out` has blocks.
  BufferBlock* blocks() noexcept { return reinterpret_cast<BufferBlock*>(this + 1); }
  const BufferBlock* blocks() const noexcept { return reinterpret_cast<const BufferBlock*>(this + 1); }
};

/// A message that waits in its pair's ring: envelope k is in slot k mod kEnvelopeRing. The sender writes it,
/// the first cache line last; the receiver reads it when `sequence` is k + 1. The sender rewrites the slot
/// only when `drained` says that the receiver has taken the envelope.
struct alignas(64) Envelope {
  std::atomic<std::uint64_t> sequence;
  std::int64_t count;
  std::int32_t tag;
  std::uint32_t number;  ///< the number of the answer, if the message is large
  DType dtype;
  bool eager;
  union alignas(8) {
    Buffer place;                    ///< of a large message
    std::byte payload[kEagerBytes];  ///< of an eager message
  };
};

/// The messages from one rank to another (perhaps itself), in memory that the sender makes at its first
/// message to that rank (PairMemory).
struct Pair {
  struct Chunk {
    std::uint64_t envelope;  ///< the number of the envelope, from 1
    std::int64_t offset;     ///< the offset of the chunk in the message
  };
  alignas(64) std::atomic<std::uint64_t> sent;  ///< by the sender: the number of stream chunks filled so far
  Chunk chunks[2];                              ///< by the sender: the contents of the chunks
  /// by the receiver: the number of envelopes taken so far, updated from time to time
  alignas(64) std::atomic<std::uint64_t> drained;
  std::atomic<std::uint64_t> received;  ///< by the receiver: the number of stream chunks emptied so far
  /// by the receiver: the envelope whose message both ranks may copy; 0: none
  std::atomic<std::uint64_t> helped;
  /// by the receiver: from this offset on it copies that message itself
  std::atomic<std::int64_t> taken_from;
  /// by the receiver: 1 while envelopes stay in the ring because the unexpected queue is full
  std::atomic<std::uint32_t> held;
  std::atomic<std::uint32_t> found;  ///< by the receiver: 1 if it has mapped this memory
  enum Answer : std::uint32_t { waiting, granted, taken };
  /// by the receiver; the sender sets an answer back to waiting
  std::atomic<std::uint32_t> answers[kLargeMessages];
  Envelope envelopes[kEnvelopeRing];
  alignas(64) std::byte stream[2][kStreamBytes];  ///< by the sender
};

/// Added to RankBlock::active while the kernel copies: other pages for the target memory would not help then.
inline constexpr std::uint64_t kByKernel = std::uint64_t{1} << 63;

/// The values of RankBlock::left if a rank publishes no more calls.
inline constexpr std::uint32_t kLeaving = 1, kLeft = 2;

/// One rank's words. Each cache line has one writer, the owner, except for `inbox`. A processor fetches lines
/// in pairs. So `active`, which its rank writes in each call, has a separate pair of lines, not that of
/// `sleeping`, which other ranks read in each call (this saves 30 ns).
struct RankBlock {
  /// the number of calls whose arrival lines this rank has read: peers may rewrite them
  alignas(64) std::atomic<std::uint64_t> consumed;
  /// the number of calls for which this rank no longer accesses memory that peers have exposed
  std::atomic<std::uint64_t> finished;
  /// the number of staging rounds filled since the group was made
  alignas(64) std::atomic<std::uint64_t> staged;
  std::atomic<std::uint64_t> reduced;  ///< the number of rounds whose own part is summed
  std::atomic<std::uint64_t> copied;   ///< the number of rounds copied out of the peers' slots
  /// call + 1 while this rank accesses peers' memory, otherwise 0; kByKernel
  alignas(128) std::atomic<std::uint64_t> active;
  /// the number of threads of this rank that sleep on its doorbell
  alignas(128) std::atomic<std::uint32_t> sleeping;
  /// kLeaving while this rank compares its last calls; kLeft: the group's handle is destroyed
  std::atomic<std::uint32_t> left;
  /// while the group is made: 1: the rank is present; 2: it has mapped the other ranks' memory
  std::atomic<std::uint32_t> joined;
  std::atomic<std::uint32_t> segments;  ///< the number of segments of its arena, which peers map
  /// while the group is made: the address of its words for the test of single copies
  std::atomic<std::uint64_t> probe;
  /// while the group is made: the result of its check of the other ranks' words
  std::atomic<std::uint32_t> single;
  /// while the group is made: 1: the rank shares memory, and has mapped the memory of all others
  std::atomic<std::uint32_t> mapped_all;
  std::atomic<std::uint32_t> asking;    ///< the rank waits for answers to a roll-call
  std::atomic<std::uint64_t> answered;  ///< the last roll-call that the rank has answered
  /// with `answered`: a CallWord of the oldest message in which the rank waits; 0: none
  std::atomic<std::uint64_t> message;
  std::atomic<std::int64_t> message_count;  ///< the count of that message
  std::atomic<std::int32_t> message_tag;
  /// by peers: counts envelopes, answers and chunks for this rank
  alignas(64) std::atomic<std::uint64_t> inbox;
  Arrival arrivals[kRing];
};

/// Counts arrived ranks while the group is made, so that no rank must poll all others.
struct alignas(64) Assembly {
  /// the numbers of ranks that are present, and that have mapped the others' memory; each rank adds one to
  /// each
  std::atomic<std::uint32_t> came[2];
  std::atomic<std::uint32_t> news;  ///< rung when all ranks have arrived
};

/// The first cause of all ranks. A rank claims the record once, by compare-and-swap, then writes it, and then
/// seals it. The ranks that it names are in a separate RankSet.
struct AbortRecord {
  static constexpr std::uint32_t kSealed = 1u << 31;
  std::atomic<std::uint32_t> state;  ///< 0; then 1 + the claiming rank; then also kSealed
  ErrorCode code;
  Op op;
  std::uint64_t call;
  char text[2048];  ///< a longer text is cut, and ends with dots
  /// by all ranks: the number of roll-calls so far, see roll_call.hpp
  alignas(64) std::atomic<std::uint64_t> asked;
};

/// A set of ranks of the group, one bit for each, in memory that other ranks read. A word that is stored
/// after the set says when the set is complete.
class RankSet {
 public:
  using Word = std::atomic<std::uint64_t>;
  RankSet(Word* words, int size) : words_(words), size_(size) {}
  /// For each 64 ranks, a concurrent reader sees the old or the new bits.
  void store(std::span<const int> ranks) noexcept {
    for (int i = 0; i * 64 < size_; ++i) {
      std::uint64_t word = 0;
      for (const int r : ranks)
        if (r >= 0 && r < size_ && r / 64 == i) word |= std::uint64_t{1} << (r % 64);
      words_[i].store(word, std::memory_order_relaxed);
    }
  }
  bool has(int r) const noexcept {
    return (words_[r / 64].load(std::memory_order_relaxed) >> (r % 64) & 1) != 0;
  }
  std::vector<int> list() const {
    std::vector<int> ranks;
    for (int r = 0; r < size_; ++r)
      if (has(r)) ranks.push_back(r);
    return ranks;
  }

 private:
  Word* words_;
  int size_;
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free &&
              std::atomic<std::uint32_t>::is_always_lock_free);

/// Finds the parts of a control region of n ranks.
class Control {
 public:
  Control() = default;
  Control(std::byte* base, int size) : base_(base), size_(static_cast<std::size_t>(size)) {}

  AbortRecord& abort() const { return *reinterpret_cast<AbortRecord*>(base_); }
  Assembly& assembly() const { return *reinterpret_cast<Assembly*>(base_ + kAbort); }
  RankBlock& rank(int r) const { return reinterpret_cast<RankBlock*>(base_ + kHead)[r]; }
  Detail& detail(int r, std::uint64_t call) const {
    return *reinterpret_cast<Detail*>(base_ + details_at(size_) +
                                      (static_cast<std::size_t>(r) * kRing + call % kRing) *
                                          detail_bytes(size_));
  }
  /// by rank r: the number of segments of peer p's arena that r has mapped
  std::atomic<std::uint32_t>& mapped(int r, int p) const {
    return reinterpret_cast<std::atomic<std::uint32_t>*>(
        base_ + mapped_at(size_))[static_cast<std::size_t>(r) * row() + p];
  }
  /// by rank `from`: the place of the Pair for its messages to rank `to` (PairMemory). 0: there is none. The
  /// words of one receiver are adjacent.
  std::atomic<std::uint64_t>& pair(int from, int to) const { return place(pairs_at(size_), from, to); }
  /// by rank `from`: the place of the Ring for its exchanges with rank `to`. 0: there is none.
  std::atomic<std::uint64_t>& ring(int from, int to) const { return place(rings_at(size_), from, to); }
  /// the ranks that the abort record names; by the rank that has claimed it
  RankSet blamed() const { return rank_set(size_); }
  /// by rank r: the ranks for which it waits, from its last answer to a roll-call
  RankSet awaited(int r) const { return rank_set(static_cast<std::size_t>(r)); }
  /// rank r's staging buffer of a round
  std::byte* stage(int r, std::uint64_t round) const {
    return base_ + stages_at(size_) + (static_cast<std::size_t>(r) * kRounds + round % kRounds) * kStageBytes;
  }
  /// Writes zeros to rank r's words and to the heads of its arrivals. Other ranks poll these before r has
  /// written to them. Rank r must call it before the others poll, so that the pages lie on r's memory node,
  /// and not on that of the first rank that polls. All other pages are first accessed by their owner.
  void touch(int r) const noexcept;
  static std::size_t bytes(int size) {
    const auto n = static_cast<std::size_t>(size);
    return stages_at(n) + n * kRounds * kStageBytes;
  }

 private:
  static constexpr std::size_t kPage = 4096;
  static constexpr std::size_t pages(std::size_t b) { return (b + kPage - 1) / kPage * kPage; }
  static constexpr std::size_t kAbort = (sizeof(AbortRecord) + 63) / 64 * 64;
  static constexpr std::size_t kHead =
      (kAbort + sizeof(Assembly) + alignof(RankBlock) - 1) / alignof(RankBlock) * alignof(RankBlock);
  std::size_t row() const {
    return (size_ + 15) / 16 * 16;
  }  // rounds up to a cache line, so that writers do not share lines
  static std::size_t mapped_at(std::size_t n) { return pages(kHead + n * sizeof(RankBlock)); }
  static constexpr std::size_t set_bytes(std::size_t n) { return (n + 511) / 512 * kLine; }
  RankSet rank_set(std::size_t which) const {
    return {reinterpret_cast<RankSet::Word*>(base_ + sets_at(size_) + which * set_bytes(size_)),
            static_cast<int>(size_)};
  }
  static constexpr std::size_t places_row(std::size_t n) { return (n + 7) / 8 * 8; }
  std::atomic<std::uint64_t>& place(std::size_t at, int from, int to) const {
    return reinterpret_cast<std::atomic<std::uint64_t>*>(
        base_ + at)[static_cast<std::size_t>(to) * places_row(size_) + static_cast<std::size_t>(from)];
  }
  static std::size_t pairs_at(std::size_t n) { return mapped_at(n) + n * ((n + 15) / 16 * 16) * 4; }
  static std::size_t rings_at(std::size_t n) { return pairs_at(n) + n * places_row(n) * 8; }
  static std::size_t sets_at(std::size_t n) { return rings_at(n) + n * places_row(n) * 8; }
  static std::size_t details_at(std::size_t n) { return pages(sets_at(n) + (n + 1) * set_bytes(n)); }
  static constexpr std::size_t detail_bytes(std::size_t n) {
    return (sizeof(Detail) + n * sizeof(BufferBlock) + 63) / 64 * 64;
  }
  static std::size_t stages_at(std::size_t n) { return pages(details_at(n) + n * kRing * detail_bytes(n)); }

  std::byte* base_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace weft::shm
