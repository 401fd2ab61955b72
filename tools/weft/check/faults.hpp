// The faults that a program's rank is struck by, and how a call is made wrong.
#pragma once

#include <vector>

#include "program.hpp"
#include "shared_report.hpp"
#include "weft/group/process_group.hpp"

namespace weft::check {

/// Whether a deadline passes before survivors can go on, or while all are suspended: calls of such programs
/// get a short one.
bool runs_into_deadline(const Program& p, const FailureGuarantees& promises);
/// Whether the struck rank's process dies or stops for good.
bool takes_process(FaultKind kind);

/// Whether all buffers of a rank lie in one block, and the ranks that are not struck have a group of their
/// own there: where one is stopped inside the others' memory.
bool shares_block(const Program& p);

/// Whether the struck rank makes calls, but not those of the others.
bool calls_wrongly(FaultKind kind);

/// The step as the struck rank calls it: wrong in count, dtype, operation or root, right in itself.
Step distorted(const Step& s, FaultKind kind, int me, int n);

/// The order in which `rank` takes the steps.
std::vector<int> order_of(const Program& p, int rank);

/// Does it, now: may not return. `deadline`: of the calls.
void strike(const Program& p, RankReport& report, Duration deadline);
/// The same from a signal, a moment later, in the middle of what the process does then. For kinds that take
/// the process, and pause.
void strike_soon(const Program& p, RankReport& report);
/// Until that has happened: the call it was meant for may have been quicker.
void await_strike();
/// Gives back what descriptors and memory have taken.
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

/// A child that uses the group: it must be told that it cannot.
void fork_and_call(ProcessGroup& group, SharedReport& shared, RankReport& report);

}  // namespace weft::check
