// One rank's part in the collectives of a group: arrival, then the inline, direct or staged path.
//
// A call is over on this rank when nothing it lent is in use any more: at once after an inline call, after
// everybody's `finished` on the direct path, at once on the staged one. Used by the owner of the group alone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backends/shm/group.hpp"

namespace weft::shm {

class Collectives {
 public:
  explicit Collectives(const Group& group);
  void post(OpState& s) noexcept;
  Step poll(OpState& s) noexcept;
  /// Ranks this call waits for, and why.
  std::vector<int> missing(const OpState& s, std::string& story) const;
  /// The call that was polled last and is not done.
  const OpState* current() const noexcept { return current_; }

 private:
  enum class Phase : std::uint32_t { unpublished, arriving, direct, leaving, staged };
  // A call's state, in the scratch of its slot.
  struct State {
    Phase phase;
    bool fits;            // its payload travels beside the arrival
    std::int32_t cursor;  // arriving, leaving: ranks below it have been seen
    std::int64_t done;    // direct: elements or bytes of the own part finished
    std::int64_t part;    // staged: elements per owner and round
    std::uint64_t base;   // staged: the group's rounds before this call
    std::uint64_t rounds, staged, reduced, copied;
  };
  static State& state(OpState& s) noexcept { return *reinterpret_cast<State*>(s.scratch.data()); }
  static const State& state(const OpState& s) noexcept {
    return *reinterpret_cast<const State*>(s.scratch.data());
  }

  // arrival.cpp
  bool publish(OpState& s) noexcept;
  Step arrive(OpState& s) noexcept;
  Step catch_up() noexcept;
  bool agree(int peer, std::uint64_t call) noexcept;
  Step choose(OpState& s) noexcept;
  bool must_see(const OpState& s, int peer) const noexcept;
  Step leave(OpState& s) noexcept;
  void finish(const OpState& s) noexcept;
  Step refuse(const OpState& s, std::string why) noexcept;
  const Arrival& arrival(int r, const OpState& s) const noexcept {
    return group_.of(r).arrivals[s.call % kRing];
  }
  // inline_path.cpp
  Step finish_inline(OpState& s) noexcept;
  // direct.cpp
  Step direct(OpState& s) noexcept;
  // staged.cpp
  void plan(OpState& s) noexcept;
  Step staged(OpState& s) noexcept;
  bool stage_round(OpState& s) noexcept;
  bool reduce_round(OpState& s) noexcept;
  bool copy_round(OpState& s) noexcept;
  std::byte* slot(int from, int owner, std::uint64_t round, std::int64_t part_bytes) const noexcept;

  const Group& group_;
  OpState* current_ = nullptr;
  std::uint64_t everybody_consumed_ = 0;  // a lower bound
  std::uint64_t compared_ = 0;            // calls compared with all ranks
  std::uint64_t finished_ = 0;            // calls finished here: ahead of compared_ after broadcasts
  std::uint64_t rounds_ = 0;              // of staging, over the group's life
  std::vector<const std::byte*> ins_;     // one per rank: scratch of the paths
  std::vector<std::byte*> outs_;
};

}  // namespace weft::shm
