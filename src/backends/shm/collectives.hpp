// One rank's part in the collectives of a group: arrival, then the inline, direct, single-copy or staged
// path.
//
// All operations are one of two things. Moving: for each rank this one gets something from, its block of
// that rank's `in` is copied to the block of `out` for that rank. Reducing: a part of all inputs is combined,
// and stored where it is wanted. Which blocks, is said by in_block() and out_block() of op_table.hpp for this
// rank's own buffers, and here by gets() and exposed() for the others'.
//
// A call is over on this rank when nothing it exposed is in use any more: at once after an inline call, after
// everybody's `finished` on the direct path, at once on the staged one. Used by the owner of the group alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backends/shm/paths.hpp"
#include "backends/shm/single_copy.hpp"
#include "weft/backends/hold_up.hpp"
#include "weft/backends/op_table.hpp"

namespace weft::shm {

class Collectives {
 public:
  explicit Collectives(const Group& group);
  void post(OpState& s) noexcept;
  Step poll(OpState& s) noexcept;
  /// Ranks this call waits for.
  std::vector<int> missing(const OpState& s) const;
  /// What these, of the ranks it waits for, have not done.
  std::string story(const OpState& s, std::span<const int> late) const;
  /// Leaving: compares what is not compared yet with those who have called it, without waiting. Of two ranks
  /// one sees the other's call. A mismatch fails the group.
  void compare_the_rest() noexcept;
  /// The call that was polled last and is not done.
  const OpState* current() const noexcept { return current_; }

 private:
  enum class Phase : std::uint32_t { unpublished, arriving, direct, leaving, staged, single };
  // A call's state, in the scratch of its slot.
  struct State {
    Phase phase;
    bool fits;            // its payload travels beside the arrival
    bool small;           // it would, but for ranks that expose their memory instead: see kPlaced
    std::int32_t cursor;  // arriving, leaving: ranks below it have been seen; moving: blocks finished
    std::int64_t done;    // direct: elements of the own part combined, or bytes of the block copied
    std::int64_t part;    // staged: elements per owner and round
    std::uint64_t base;   // staged: the group's rounds before this call
    std::uint64_t rounds, staged, reduced, copied;
  };
  static State& state(OpState& s) noexcept { return *reinterpret_cast<State*>(s.scratch.data()); }
  static const State& state(const OpState& s) noexcept {
    return *reinterpret_cast<const State*>(s.scratch.data());
  }

  // Whether rank `to` works on what rank `from` exposes: takes a block of it, or combines a part of it.
  static bool gets(const OpState& s, int to, int from) noexcept {
    const OpRow r = row(s.op);
    switch (r.rooted) {
      case Rooted::no: break;
      case Rooted::in_at_root: return from == s.root;
      case Rooted::out_at_root: return r.reduces || to == s.root;
    }
    return true;
  }
  // The root alone gives, so it waits for nobody and the others for it alone.
  static bool from_root(const OpState& s) noexcept { return row(s.op).rooted == Rooted::in_at_root; }
  // Each rank combines a slice of the whole, for all or for the root.
  static bool sliced(const OpState& s) noexcept {
    const OpRow r = row(s.op);
    return r.reduces && r.counts == Counts::equal;
  }
  // `in` has a block for each rank.
  static bool parted(const OpState& s) noexcept {
    const Counts c = row(s.op).counts;
    return c == Counts::in_is_n_out || c == Counts::in_blocks || c == Counts::both_blocks ||
           s.op == Op::all_to_all;
  }
  // The part of rank `from`'s `in` that is for this rank, or begins at 0 where `in` is not parted. Ranks'
  // buffers are divided alike, but for in_blocks, which each has published.
  Block exposed_block(const OpState& s, int from) const noexcept {
    if (s.in_blocks) return group_.control.detail(from, s.call).blocks()[group_.rank];
    const std::int64_t count = out_block(s, from, group_.size).count;
    return {parted(s) ? group_.rank * count : 0, count};
  }

  // What it takes of the kernel's single copies.
  static SingleCopy needed(const OpState& s) noexcept {
    return sliced(s) ? SingleCopy::push : SingleCopy::pull;
  }
  // Its result goes around the caches.
  static bool streams(const OpState& s) noexcept {
    return std::max(s.in_count, s.out_count) * size_bytes(s.dtype) >= kStreamFrom;
  }

  // arrival.cpp
  bool publish(OpState& s) noexcept;
  Buffer expose(const OpState& s, std::int64_t count, const std::byte* data, std::int64_t elements) noexcept;
  Step arrive(OpState& s) noexcept;
  Step catch_up() noexcept;
  bool may_place(const OpState& s) const noexcept;
  bool agree(int peer, std::uint64_t call) noexcept;
  bool expected(const OpState& s, int peer) noexcept;
  std::int64_t payload_bytes(const OpState& s) const noexcept;
  Step choose(OpState& s) noexcept;
  bool must_see(const OpState& s, int peer) const noexcept;
  Step leave(OpState& s) noexcept;
  void finish(const OpState& s) noexcept;
  Step refuse(const OpState& s, int because_of, std::string why) noexcept;
  const Arrival& arrival(int r, const OpState& s) const noexcept {
    return group_.of(r).arrivals[s.call % kRing];
  }
  bool has_arrived(int r, const OpState& s) const noexcept {
    return arrival(r, s).sequence.load(std::memory_order_seq_cst) == s.call + 1;
  }
  // inline_path.cpp
  Step finish_inline(OpState& s) noexcept;
  // direct.cpp
  Step touch(OpState& s) noexcept;
  Step combine(OpState& s) noexcept;
  Step pull(OpState& s) noexcept;
  // What this rank combines: an offset from where each rank's block begins, and a count, in elements.
  Block own_part(const OpState& s) const noexcept;
  // single_path.cpp
  bool is_profitable(const OpState& s, std::int64_t count) const noexcept;
  bool have_pieces(const OpState& s) noexcept;
  Step push(OpState& s) noexcept;
  // staged.cpp
  void plan(OpState& s) noexcept;
  Step staged(OpState& s) noexcept;
  bool stage_round(OpState& s) noexcept;
  bool reduce_round(OpState& s) noexcept;
  bool copy_round(OpState& s) noexcept;
  bool holds_up_staging(const OpState& s, int r) const noexcept;
  bool holds_up_reducing(const OpState& s, int r) const noexcept;
  bool holds_up_copying(const OpState& s, int r) const noexcept;
  bool gives(const OpState& s) const noexcept;
  bool takes(const OpState& s) const noexcept;
  Block piece(const OpState& s, Block block, int owner, std::uint64_t round) const noexcept;
  std::byte* slot(const OpState& s, int from, int to, std::uint64_t round) const noexcept;
  std::byte* sum_slot(const OpState& s, int owner, std::uint64_t round) const noexcept;

  const Group& group_;
  OpState* current_ = nullptr;
  std::uint64_t everybody_consumed_ = 0;  // a lower bound
  std::uint64_t published_ = 0;           // calls whose line is written
  std::uint64_t compared_ = 0;            // calls compared with all ranks
  std::uint64_t finished_ = 0;         // calls finished here: ahead of compared_ after broadcast and scatter
  std::uint64_t rounds_ = 0;           // of staging, over the group's life
  std::vector<const std::byte*> ins_;  // one per rank: scratch of the paths
  std::vector<std::byte*> outs_;
  PeerMemory peers_;  // single copies
  OwnMemory own_;
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::unique_ptr<Line[]> pieces_;  // one per rank of what the kernel has read, kChunkBytes in all; made at
                                    // the first push()
};

}  // namespace weft::shm
