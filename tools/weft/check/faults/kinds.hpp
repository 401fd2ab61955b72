// The kinds of faults, one row for each: the action of the struck rank, when a program may be drawn with it,
// and what the ranks must see of it. No other code distinguishes kinds of faults. To add one, add an
// enumerator of FaultKind and a row, plus a function if the kind does something new. Plain values; any
// thread.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "program.hpp"

namespace weft::check {

/// The action of the struck rank at the point of its fault.
enum class Act : std::uint8_t {
  strike,        ///< FaultRow::strike
  call_wrongly,  ///< calls other than the others do: see FaultRow::distort and FaultRow::steps
  abort,         ///< calls abort()
  leave,         ///< destroys its groups
  drop,          ///< drops the Work of the call, which is in flight
  fork,          ///< has a child that uses the group
  interrupt,     ///< asks done() of all that is in flight while an Interrupt is raised
};

/// The steps that the struck rank takes.
enum class StepsTaken : std::uint8_t { as_planned, swapped, left_out };

/// How long the struck process is stopped by SIGSTOP.
enum class Stopped : std::uint8_t {
  no,
  for_good,
  until_reused,  ///< until the others have failed and used their memory for something else
  for_a_moment,
  with_all,  ///< and all others with it, for longer than the deadline
};

/// The error that ranks may get.
enum class Sees : std::uint8_t {
  nothing,              ///< none
  death,                ///< peer_lost if the backend detects deaths, otherwise as absence
  absence,              ///< timeout that names the rank or the ranks that it held up
  mismatch,             ///< mismatch, naming the rank
  mismatch_or_absence,  ///< collective: mismatch; a message, which then never arrives: timeout
  abort,                ///< aborted, naming the rank
  leaving,              ///< peer_lost, naming the rank
  refusal,              ///< on the rank: system or unsupported; on others: any error that names it
};

/// Which ranks must get an error.
struct MustFail {
  enum Who : std::uint8_t {
    nobody,
    all_or_nobody,  ///< a fault that no rank notices is no failure
    all,
    the_child,  ///< no rank; but the forked child must get an error
  } who = nobody;
  bool but_the_struck = false;  ///< not the struck rank, which may be done with everything
  bool members = false;         ///< only members of the step's group: others may have sent all they had
  bool one_if_unseen = false;   ///< one is enough if only the receiver of a message knows of the fault
};

struct FaultRow {
  FaultKind kind = FaultKind::none;
  std::string_view name;

  // The effect of the fault.
  Act act = Act::strike;
  void (*strike)(const Program&, Duration deadline) = nullptr;  ///< may not return; null: nothing
  void (*strike_by_signal)(int) = nullptr;  ///< like `strike`, from a handler; null: the process is stopped
  /// Makes `w`, a copy of `s`, wrong for rank `me` of n, but right in itself. Null: `w` stays unchanged.
  void (*distort)(Step& w, const Step& s, Dice& d, int me, int n) = nullptr;
  StepsTaken steps = StepsTaken::as_planned;
  Stopped stopped = Stopped::no;
  bool takes_process = false;  ///< the process dies, or is stopped until the others have failed
  bool of_more = false;        ///< only at steps that are no calls
  bool limits = false;         ///< takes descriptors or memory: before a group is made

  // When it is drawn.
  bool of_processes = false;  ///< it strikes a process: every rank has one of its own
  /// Returns whether the backend guarantees an outcome; null: always.
  bool (*guaranteed)(const Range&) = nullptr;
  std::span<const FaultPoint> points;
  bool (*fits)(const Step&, int me) = nullptr;  ///< it makes sense in such a step of rank `me`
  bool unseen_at_root = false;  ///< in a call whose root waits for no rank, it shows only in later calls
  bool other_next = false;      ///< the step after it is another operation of the same group

  // The results that the ranks see.
  /// other ranks wait for this rank, which is gone or late
  bool is_absent = false;
  bool (*overdue)(const FailureGuarantees&) = nullptr;  ///< a deadline passes in the meantime; null: never
  Sees sees = Sees::nothing;
  bool other_calls = false;  ///< the error may name a call that does not belong to the program
  MustFail must_fail{};
};

const FaultRow& row(FaultKind kind) noexcept;
inline const FaultRow& row(const Program& p) noexcept { return row(p.fault.kind); }

}  // namespace weft::check
