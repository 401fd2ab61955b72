// One encoding of a rank's call: the fields that must be equal on all ranks, packed into a word, a count and
// a hash. The arrival line of shared memory holds the word, the count and the hash. A CallRecord
// (weft/backends/call_record.hpp) holds the same fields separately, for messages and texts. An entry of the
// flight recorder holds the word. The functions are inline, because every call runs them. Pure functions. Any
// thread may call them.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>

#include "base/hash.hpp"
#include "weft/backends/call_record.hpp"
#include "weft/backends/op_table.hpp"

namespace weft {

/// The small fields of a call:
///
///   bits   0 … 7   8 … 15   16 … 23     24 … 31   32 … 62    63
///   what   op      dtype    reduction   note      rank + 1   free
///
/// `note` and the free bit belong to the code that keeps the word. shm stores the order and the forced path
/// in the note, and the flight recorder stores the state of the call. `rank` is the root, or the peer of a
/// message; -1: none.
class CallWord {
 public:
  constexpr explicit CallWord(std::uint64_t bits = 0) noexcept : bits_(bits) {}
  constexpr CallWord(Op op, DType dtype, ReduceOp::Kind reduce, unsigned note, int rank) noexcept
      : bits_(static_cast<std::uint64_t>(op) | static_cast<std::uint64_t>(dtype) << kDType |
              static_cast<std::uint64_t>(reduce) << kReduce | static_cast<std::uint64_t>(note) << kNote |
              static_cast<std::uint64_t>(static_cast<std::uint32_t>(rank + 1)) << kRank) {}

  constexpr std::uint64_t bits() const noexcept { return bits_; }
  constexpr Op op() const noexcept { return static_cast<Op>(byte(0)); }
  constexpr DType dtype() const noexcept { return static_cast<DType>(byte(kDType)); }
  constexpr ReduceOp::Kind reduce() const noexcept { return static_cast<ReduceOp::Kind>(byte(kReduce)); }
  constexpr unsigned note() const noexcept { return byte(kNote); }
  constexpr int rank() const noexcept { return static_cast<int>(bits_ >> kRank & 0x7fffffff) - 1; }
  /// Returns this call with another note.
  constexpr CallWord noted(unsigned note) const noexcept {
    return CallWord((bits_ & ~(std::uint64_t{0xff} << kNote)) | static_cast<std::uint64_t>(note) << kNote);
  }

 private:
  static constexpr int kDType = 8, kReduce = 16, kNote = 24, kRank = 32;
  constexpr unsigned byte(int at) const noexcept { return static_cast<unsigned>(bits_ >> at) & 0xff; }
  std::uint64_t bits_;
};

/// Returns the count vector, which must be equal on all ranks. Null if the operation has none.
inline const BufferBlock* agreed_blocks(const OpState& s) noexcept {
  switch (row(s.op).counts) {
    case Counts::out_blocks: return s.out_blocks;
    case Counts::in_blocks: return s.in_blocks;
    case Counts::both_blocks:  // each pair of ranks has its own counts
    case Counts::none:
    case Counts::equal:
    case Counts::out_is_n_in:
    case Counts::in_is_n_out:
    case Counts::in_only:
    case Counts::out_only: break;
  }
  return nullptr;
}

/// Returns the count, which must be equal on all ranks and is at least as large as any block.
inline std::int64_t agreed_count(const OpState& s, int size) noexcept {
  switch (row(s.op).counts) {
    case Counts::equal: return std::max(s.in_count, s.out_count);  // only the root may have one of the two
    case Counts::out_is_n_in: return s.in_count;
    case Counts::in_is_n_out: return s.out_count;
    case Counts::out_blocks:
    case Counts::in_blocks: {
      const BufferBlock* const blocks = s.in_blocks ? s.in_blocks : s.out_blocks;
      return std::accumulate(blocks, blocks + size, std::int64_t{0},
                             [](std::int64_t sum, const BufferBlock& b) { return sum + b.count; });
    }
    case Counts::none:
    case Counts::both_blocks:
    case Counts::in_only:
    case Counts::out_only: break;
  }
  return 0;
}

/// Whether a call has details beyond word and count. Then the caller must compare detail_hash(), too.
inline bool has_detail(const OpState& s) noexcept {
  return s.in_blocks != nullptr || s.out_blocks != nullptr || s.reduce.kind == ReduceOp::Kind::premul_sum ||
         s.reduce.kind == ReduceOp::Kind::user;
}

/// Returns a hash of the details that must be equal on all ranks: a scale, the name of a user's reduction, a
/// count vector. Returns 0 if the call has no details.
inline std::uint64_t detail_hash(const OpState& s, int size) noexcept {
  const bool reduces = row(s.op).reduces;
  const bool scaled = reduces && s.reduce.kind == ReduceOp::Kind::premul_sum,
             users = reduces && s.reduce.kind == ReduceOp::Kind::user && s.reduce.user != nullptr;
  const BufferBlock* const blocks = agreed_blocks(s);
  if (!scaled && !users && blocks == nullptr) return 0;
  Fnv1a hash;
  if (scaled) hash.add_at_once(std::bit_cast<std::uint64_t>(s.reduce.scale));
  if (users) hash.add(s.reduce.user->name);
  if (blocks != nullptr)
    for (int r = 0; r < size; ++r) hash.add_at_once(static_cast<std::uint64_t>(blocks[r].count));
  return hash.value;
}

/// The details of a call that a text can state in addition to its record, if the transport has them.
struct CallDetail {
  int block = -1;                        ///< the first block of the count vector that differs
  std::int64_t block_count = 0;          ///< the count of this block
  std::optional<double> scale;           ///< the scale of premul_sum
  std::optional<std::string_view> user;  ///< the name of a user's reduction
  std::string_view path;                 ///< the path that a test forces
};

/// Like what() of call_record.hpp, for a collective, from its record.
std::string what(const CallRecord& record);
/// Like describe() of call_record.hpp, with details.
std::string describe(int rank, const CallRecord& record, const CallDetail& detail);
/// Like mismatch() of call_record.hpp, with two texts that describe() has returned.
Failure mismatch_of(int peer, const CallRecord& theirs, const std::string& they_called, int rank,
                    const CallRecord& own, std::string called);

}  // namespace weft
