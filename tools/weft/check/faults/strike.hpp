// The faults that strike a rank of a program, and their times. Which kinds of faults there are is in
// faults/kinds.hpp.
#pragma once

#include <vector>

#include "faults/kinds.hpp"
#include "program.hpp"
#include "shared_report.hpp"
#include "weft/group/process_group.hpp"

namespace weft::check {

/// A group's deadline, which windows have, is so much longer than that of calls that run into theirs.
inline constexpr Duration kGroupsWaitLonger = std::chrono::seconds(2);

/// Whether a deadline passes before survivors can go on, or while all are suspended: calls of such programs
/// get a short one.
bool runs_into_deadline(const Program& p, const FailureGuarantees& guarantees);

/// Whether all buffers of a rank lie in one block, and the ranks that are not struck have a group of their
/// own whose buffers are in it, too: so it is where a rank is stopped inside the others' memory.
bool shares_block(const Program& p);

/// Whether a window is in flight in the same group, too, in which a rank that is not struck takes no part
/// until the others have given their memory other pages.
bool holds_window(const Program& p);
/// That rank.
int holding_rank(const Program& p);

/// The step as the rank takes it: the struck one wrongly, as FaultRow::distort says, but right in itself.
Step as_called(const Program& p, int step, int rank);

/// The order in which `rank` takes the steps.
std::vector<int> order_of(const Program& p, int rank);

/// Does it, now: may not return. `deadline`: of the calls.
void strike(const Program& p, RankReport& report, Duration deadline);
/// The same from a signal, a moment later, in the middle of what the process does then.
void strike_soon(const Program& p, RankReport& report);
/// Waits until that has happened, since the call that it was meant for may have ended before.
void await_strike();
/// For FaultRow::strike: the first leaves no free descriptor, the second little address space.
void take_descriptors(const Program& p, Duration deadline);
void take_memory(const Program& p, Duration deadline);
/// Undoes both.
void lift_limits();

/// Lifts a limit of address space while the checker itself needs memory.
class Unlimited {
 public:
  Unlimited();
  ~Unlimited();
  Unlimited(const Unlimited&) = delete;
  Unlimited& operator=(const Unlimited&) = delete;

 private:
  bool lifted_ = false;
  std::uint64_t soft_ = 0;
};

/// A child that uses the group: it must get an error that says that it cannot.
void fork_and_call(ProcessGroup& group, SharedReport& shared, RankReport& report);

}  // namespace weft::check
