// One rank's part in the collectives of a group. A call begins with the arrivals. When the other ranks have
// arrived and have made the same call, Collectives chooses a path, and the path does the remaining work.
//
// A call has ended on this rank when no other rank accesses memory that this rank has exposed. After an
// inline or a staged call this is so at once. On the direct path and on the path of single copies it is so
// after the `finished` of all ranks. Only the owner of the group uses it.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "backends/shm/collectives/arrivals.hpp"
#include "backends/shm/collectives/call.hpp"
#include "backends/shm/collectives/direct_path.hpp"
#include "backends/shm/collectives/inline_path.hpp"
#include "backends/shm/collectives/single_path.hpp"
#include "backends/shm/collectives/staged_path.hpp"
#include "weft/backends/hold_up.hpp"

namespace weft::shm {

class Collectives {
 public:
  explicit Collectives(const Group& group)
      : group_(group),
        operands_(group.size),
        arrivals_(group),
        inline_(group, arrivals_, operands_),
        direct_(group, arrivals_, operands_),
        single_(group, arrivals_, operands_),
        staged_(group, arrivals_, operands_) {}
  Collectives(const Collectives&) = delete;
  Collectives& operator=(const Collectives&) = delete;

  void post(OpState& s) noexcept { arrivals_.plan(s); }
  Step poll(OpState& s) noexcept;
  /// Returns the ranks for which this call waits.
  std::vector<int> missing(const OpState& s) const;
  /// Returns a text that says which step the ranks `late` have not done. They must be among the ranks for
  /// which the call waits.
  std::string story(const OpState& s, std::span<const int> late) const;
  /// See Arrivals.
  void compare_the_rest() noexcept { arrivals_.compare_the_rest(); }
  std::string left_out() const { return arrivals_.left_out(); }
  /// Returns the call that was polled last and is not done.
  const OpState* current() const noexcept { return current_; }

 private:
  struct Reach {
    // the first rank whose memory not all ranks can access themselves; -1: there is none
    int obstacle = -1;
    bool foreign = false;  // there is memory that the kernel cannot reach, either
  };
  Step begin_path(OpState& s) noexcept;
  Step step_path(OpState& s) noexcept;
  bool is_missing(const OpState& s, int r) const noexcept;
  Reach find_reach(const OpState& s) const noexcept;
  Step choose_path(OpState& s) noexcept;
  Step refuse(const OpState& s, int because_of, std::string why) noexcept;

  const Group& group_;
  OpState* current_ = nullptr;
  Operands operands_;
  Arrivals arrivals_;
  InlinePath inline_;
  DirectPath direct_;
  SinglePath single_;
  StagedPath staged_;
};

}  // namespace weft::shm
