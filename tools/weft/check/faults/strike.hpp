// The faults that strike a rank of a program, and their times. faults/kinds.hpp lists the kinds of faults.
#pragma once

#include <vector>

#include "faults/kinds.hpp"
#include "program.hpp"
#include "shared_report.hpp"
#include "weft/group/process_group.hpp"

namespace weft::check {

/// A group's deadline, which windows use, is longer by this much than the deadline of calls that run into
/// theirs.
inline constexpr Duration kGroupsWaitLonger = std::chrono::seconds(2);

/// Returns whether a deadline passes before survivors can continue, or while all ranks are suspended. Calls
/// of such programs get a short deadline.
bool runs_into_deadline(const Program& p, const FailureGuarantees& guarantees);

/// Returns whether all buffers of a rank lie in one block, and the other ranks have a separate group whose
/// buffers are in it, too. This is so if a rank is stopped inside the others' memory.
bool shares_block(const Program& p);

/// Returns whether a window is in flight in the same group, too. In it, one rank that is not struck takes no
/// part until the others have given their memory other pages.
bool holds_window(const Program& p);
/// That rank.
int holding_rank(const Program& p);

/// The step as the rank performs it: for the struck rank wrong, as FaultRow::distort defines, but right in
/// itself.
Step as_called(const Program& p, int step, int rank);

/// The order in which `rank` performs the steps.
std::vector<int> order_of(const Program& p, int rank);

/// Strikes now; may not return. `deadline`: the deadline of the calls.
void strike(const Program& p, RankReport& report, Duration deadline);
/// Like strike(), but from a signal, a moment later, in the middle of whatever the process does then.
void strike_soon(const Program& p, RankReport& report);
/// Waits until the fault has struck, because the call for which it was meant may have ended before.
void await_strike();
/// For FaultRow::strike: the first function leaves no free descriptor, the second little address space.
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

/// Forks a child that uses the group: it must get an error that says that it cannot.
void fork_and_call(ProcessGroup& group, SharedReport& shared, RankReport& report);

}  // namespace weft::check
