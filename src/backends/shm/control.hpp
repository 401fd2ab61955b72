// The words that the ranks of a group share: the layout of its control region, mapped by every rank. The
// region is zero-filled when it is made.
//
// Every word has one writer, named with it. Sequences count from 1, so that zero means "not yet". A word
// that a sleeper may wait for is stored before a full fence and read with sequential consistency: the
// publisher looks for sleepers after the fence, and a rank that goes to sleep announces it and then looks
// again. So one of the two sees the other.
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
inline constexpr std::size_t kInlineBytes = 8192;  ///< room for payload beside an arrival: see inline_bytes()
inline constexpr std::size_t kStageBytes = 128 << 10;  ///< staged by one rank per round
inline constexpr std::uint64_t kRounds = 4;            ///< rounds in flight, each with its own staging buffer
inline constexpr std::size_t kChunkBytes = 256 << 10;  ///< most that one poll step moves in a peer's memory
/// The most that the kernel reads at once from a peer, to be combined.
inline constexpr std::size_t kPieceBytes = 128 << 10;
inline constexpr std::uint64_t kEnvelopeRing = 16;  ///< envelopes in the ring of a pair of ranks
inline constexpr std::size_t kEagerBytes = 8192;  ///< a message up to this size may travel with its envelope
/// Large messages in flight per pair: the slots of a group.
inline constexpr std::size_t kLargeMessages = 64;
inline constexpr std::size_t kStreamBytes = 64 << 10;  ///< a chunk of a large foreign message; two per pair

/// Where a buffer lies, as its owner publishes it.
struct Buffer {
  enum Kind : std::uint32_t {
    none,     ///< no bytes
    pointer,  ///< an address of this process: all ranks are threads of it
    shared,   ///< (segment, offset) of the owner's arena, mapped by every rank
    foreign,  ///< nobody else can reach it
    remote,   ///< an address of the owner's process, which others reach by the kernel's single copies
  };
  Kind kind;
  std::uint32_t segment;
  std::uint64_t offset;  ///< or the address
};

/// Added to Arrival::word if a call is small enough to be inline, but its memory is shared and therefore
/// exposed instead.
inline constexpr std::uint64_t kExposed = std::uint64_t{1} << 63;

/// A rank's part in call k: line k mod kRing. Written by its owner, read by all once `sequence` is k + 1;
/// rewritten only when everybody's `consumed` says that they have read it.
struct alignas(64) Arrival {
  std::atomic<std::uint64_t> sequence;
  std::uint64_t word;    ///< op, dtype, reduction, order, root, forced path: equal on all ranks
  std::int64_t count;    ///< equal on all ranks
  std::uint64_t detail;  ///< a hash of what else is equal on all ranks; 0: nothing else, and no Detail
  union {
    struct {
      Buffer in, out;
    } places;                         ///< of a call that is not inline
    std::byte payload[kInlineBytes];  ///< of one that is
    struct {
      Buffer in, out;
      std::byte payload[kInlineBytes - 2 * sizeof(Buffer)];
    } both;  ///< of one that is inline if everybody's payload is small
  };
};

/// The bytes of the payload that lie in the arrival's first cache line.
inline constexpr std::int64_t kHeadBytes = kLine - offsetof(Arrival, payload);

/// Arguments that only few calls need, and for which an arrival line has no room. They lie next to the
/// line, under the same rules.
struct alignas(64) Detail {
  double scale;          ///< premul_sum
  std::int64_t longest;  ///< of the blocks
  std::uint32_t small;   ///< in_blocks: `in` travels beside the arrival
  char user[40];         ///< name of the user's reduction, as much as fits
  /// v-forms: a block per rank: of `in`, or, where only `out` has blocks, of `out`.
  Block* blocks() noexcept { return reinterpret_cast<Block*>(this + 1); }
  const Block* blocks() const noexcept { return reinterpret_cast<const Block*>(this + 1); }
};

/// A message waiting in its pair's ring: envelope k is in slot k mod kEnvelopeRing. Written by the sender,
/// the first cache line last; read by the receiver once `sequence` is k + 1; rewritten only when `drained`
/// says that the receiver has taken it.
struct alignas(64) Envelope {
  std::atomic<std::uint64_t> sequence;
  std::int64_t count;
  std::int32_t tag;
  std::uint32_t number;  ///< of its answer, where it is large
  DType dtype;
  bool eager;
  union alignas(8) {
    Buffer place;                    ///< of a large one
    std::byte payload[kEagerBytes];  ///< of an eager one
  };
};

/// The messages from one rank to another (perhaps itself), in memory that the sender makes at its first
/// message to that rank (PairMemory).
struct Pair {
  struct Chunk {
    std::uint64_t envelope;  ///< its number from 1
    std::int64_t offset;     ///< in the message
  };
  alignas(64) std::atomic<std::uint64_t> sent;  ///< by the sender: stream chunks filled so far
  Chunk chunks[2];                              ///< by the sender: what they hold
  /// by the receiver: envelopes taken so far; updated now and then
  alignas(64) std::atomic<std::uint64_t> drained;
  std::atomic<std::uint64_t> received;  ///< by the receiver: stream chunks emptied so far
  std::atomic<std::uint64_t> helped;  ///< by the receiver: the envelope whose message both may copy; 0: none
  std::atomic<std::int64_t> taken_from;  ///< by the receiver: it copies that message from here on itself
  /// by the receiver: 1 while envelopes stay in the ring because its unexpected queue is full
  std::atomic<std::uint32_t> held;
  std::atomic<std::uint32_t> found;  ///< by the receiver: 1 once it has mapped this
  enum Answer : std::uint32_t { waiting, granted, taken };
  std::atomic<std::uint32_t> answers[kLargeMessages];  ///< by the receiver; back to waiting by the sender
  Envelope envelopes[kEnvelopeRing];
  alignas(64) std::byte stream[2][kStreamBytes];  ///< by the sender
};

/// Added to RankBlock::active while the kernel copies: the memory it writes to cannot be given other pages.
inline constexpr std::uint64_t kByKernel = std::uint64_t{1} << 63;

/// The values of RankBlock::left if a rank publishes no more calls.
inline constexpr std::uint32_t kLeaving = 1, kLeft = 2;

/// One rank's words. Each line has one writer, the owner, except for `inbox`. A processor fetches lines in
/// pairs: `active`, which its rank writes in each call, has a pair for itself, separate from `sleeping`,
/// which others read in each call (30 ns).
struct RankBlock {
  /// calls whose arrival lines are read: peers may rewrite them
  alignas(64) std::atomic<std::uint64_t> consumed;
  /// calls for which this rank no longer touches memory that peers exposed
  std::atomic<std::uint64_t> finished;
  alignas(64) std::atomic<std::uint64_t> staged;   ///< rounds of staging filled, over the group's life
  std::atomic<std::uint64_t> reduced;              ///< rounds whose own part is summed
  std::atomic<std::uint64_t> copied;               ///< rounds copied out of the peers' slots
  alignas(128) std::atomic<std::uint64_t> active;  ///< call + 1 while inside peers' memory, else 0; kByKernel
  alignas(128) std::atomic<std::uint32_t> sleeping;  ///< threads of this rank asleep on its doorbell
  /// kLeaving while this rank compares its last calls; kLeft: the group's handle is gone
  std::atomic<std::uint32_t> left;
  std::atomic<std::uint32_t> joined;    ///< while the group is made: 1 present, 2 has mapped the others
  std::atomic<std::uint32_t> segments;  ///< segments of its arena, for peers to map
  std::atomic<std::uint64_t> probe;     ///< while the group is made: address of its words for single copies
  std::atomic<std::uint32_t> single;    ///< while the group is made: how its look at the others' words went
  /// while the group is made: 1: it shares memory, and has mapped all others'
  std::atomic<std::uint32_t> mapped_all;
  std::atomic<std::uint32_t> asking;    ///< it waits for answers to a roll-call
  std::atomic<std::uint64_t> answered;  ///< the last roll-call that it has answered
  /// with `answered`: a CallWord of the oldest message that it waits in; 0: none
  std::atomic<std::uint64_t> message;
  std::atomic<std::int64_t> message_count;  ///< of that one
  std::atomic<std::int32_t> message_tag;
  alignas(64) std::atomic<std::uint64_t> inbox;  ///< by peers: envelopes, answers, chunks for this rank
  Arrival arrivals[kRing];
};

/// How many ranks have arrived while the group is made, so that no rank polls all others.
struct alignas(64) Assembly {
  std::atomic<std::uint32_t> came[2];  ///< present; have mapped the others: each rank adds one to each
  std::atomic<std::uint32_t> news;     ///< rung when all have
};

/// The first cause of all ranks. It is claimed once by compare-and-swap, then written, then sealed. The ranks
/// that it names are a RankSet beside it.
struct AbortRecord {
  static constexpr std::uint32_t kSealed = 1u << 31;
  std::atomic<std::uint32_t> state;  ///< 0; 1 + claiming rank; the same with kSealed
  ErrorCode code;
  Op op;
  std::uint64_t call;
  char text[2048];                               ///< a longer text is cut and ends in dots
  alignas(64) std::atomic<std::uint64_t> asked;  ///< by all: roll-calls so far, see roll_call.hpp
};

/// Some of the group's ranks, one bit each, in memory that others read. The set is complete when a word
/// that is stored after it says so.
class RankSet {
 public:
  using Word = std::atomic<std::uint64_t>;
  RankSet(Word* words, int size) : words_(words), size_(size) {}
  /// A concurrent reader sees the old or the new bits of each 64 ranks.
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
  /// by rank r: segments of peer p's arena that r has mapped
  std::atomic<std::uint32_t>& mapped(int r, int p) const {
    return reinterpret_cast<std::atomic<std::uint32_t>*>(
        base_ + mapped_at(size_))[static_cast<std::size_t>(r) * row() + p];
  }
  /// by rank `from`: where the Pair of its messages to rank `to` lies (PairMemory); 0: it has none. The words
  /// of one receiver are side by side.
  std::atomic<std::uint64_t>& pair(int from, int to) const { return place(pairs_at(size_), from, to); }
  /// The same of the Ring of its exchanges with rank `to`.
  std::atomic<std::uint64_t>& ring(int from, int to) const { return place(rings_at(size_), from, to); }
  /// the ranks that the abort record names; by the rank that has claimed it
  RankSet blamed() const { return rank_set(size_); }
  /// by rank r: the ranks it waits for, from its last answer to a roll-call
  RankSet awaited(int r) const { return rank_set(static_cast<std::size_t>(r)); }
  /// rank r's staging buffer of a round
  std::byte* stage(int r, std::uint64_t round) const {
    return base_ + stages_at(size_) + (static_cast<std::size_t>(r) * kRounds + round % kRounds) * kStageBytes;
  }
  /// Writes zeros to rank r's words and to the heads of its arrivals, which others poll before r has written
  /// to them. Called by r before others look, so that the pages lie on r's memory node, and not on that of
  /// the first rank that polls. All other pages are touched by their owner first.
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
  }  // rounded up to a cache line, so that writers do not share lines
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
    return (sizeof(Detail) + n * sizeof(Block) + 63) / 64 * 64;
  }
  static std::size_t stages_at(std::size_t n) { return pages(details_at(n) + n * kRing * detail_bytes(n)); }

  std::byte* base_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace weft::shm
