#include "faults/kinds.hpp"

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <iterator>
#include <thread>

#include "faults/strike.hpp"
#include "weft/backends/plugin.hpp"

namespace weft::check {
namespace {

using std::chrono::milliseconds;

constexpr auto kInTime = milliseconds(150);   // delay: far below any deadline
constexpr auto kOverdue = milliseconds(600);  // late: beyond the deadline

// ---- What is done

void kill_self(const Program&, Duration) { ::kill(::getpid(), SIGKILL); }
void stop_self(const Program&, Duration) { ::kill(::getpid(), SIGSTOP); }
void exit_now(const Program&, Duration) { ::_exit(0); }
void come_in_time(const Program&, Duration) { std::this_thread::sleep_for(kInTime); }
void come_late(const Program& p, Duration deadline) {
  const bool call = p.steps[static_cast<std::size_t>(p.fault.step)].does == Does::call;
  std::this_thread::sleep_for(deadline + (call ? Duration() : kGroupsWaitLonger) + kOverdue);
}
// The rank comes in time, since the time of the suspension does not count.
void suspend_self(const Program&, Duration deadline) {
  ::kill(::getpid(), SIGSTOP);
  std::this_thread::sleep_for(deadline / 2);
}

void kill_by_signal(int) { ::kill(::getpid(), SIGKILL); }
void exit_by_signal(int) { ::_exit(0); }

// ---- How a call is made wrong

bool reducible(DType t, ReduceOp::Kind k) { return known_traits("shm")->reduces_itself(k, t); }

void distort_count(Step& w, const Step& s, Dice& d, int me, int n) {
  if (s.does == Does::window) {
    w.count += d.between(1, 24);
    return;
  }
  if (s.op == Op::all_to_all_v) {  // sends more to another than that one expects
    w.counts[static_cast<std::size_t>(me * n + (me + 1) % n)] += d.between(1, 3);
  } else if (!s.counts.empty()) {
    w.counts[static_cast<std::size_t>(d.below(s.counts.size()))] += d.between(1, 3);
  } else {
    w.count = d.one_in(2) || s.count == 0 ? s.count + d.between(1, 24) : s.count / 2;
  }
}

void distort_dtype(Step& w, const Step& s, Dice& d, int, int) {
  for (;;) {
    w.dtype = static_cast<DType>(d.below(kDTypeCount));
    if (s.window.adjoint && !has_adjoint(w.dtype)) continue;
    if (w.dtype == s.dtype || (s.reduces() && !reducible(w.dtype, s.reduce))) continue;
    if (s.reduces() && s.reduce == ReduceOp::Kind::premul_sum && is_floating(w.dtype) != is_floating(s.dtype))
      continue;
    return;
  }
}

void distort_op(Step& w, const Step& s, Dice& d, int, int) {
  if (s.reduces() && d.one_in(2)) {
    do {
      w.reduce = static_cast<ReduceOp::Kind>(d.below(kReduceKindCount));
      w.scale = 3;
    } while (w.reduce == s.reduce || !reducible(s.dtype, w.reduce));
    return;
  }
  do {
    constexpr Op kOthers[] = {Op::barrier, Op::all_gather, Op::all_to_all, Op::broadcast, Op::gather};
    w.op = d.any(kOthers);
  } while (w.op == s.op);
  w.counts.clear();
  if (!s.counts.empty()) w.count = 5;
}

void distort_root(Step& w, const Step& s, Dice& d, int, int n) {
  w.root = (s.root + 1 + d.below(static_cast<std::size_t>(n - 1))) % n;
}

void distort_value(Step& w, const Step&, Dice&, int, int) { w.differs = true; }

// ---- Where it makes sense

// Returns whether other ranks are concerned if rank `me` does this step wrong: not for a message between
// others or to itself.
bool is_heard_of(const Step& s, int me) {
  return s.op != Op::send || (s.root != s.peer && (s.root == me || s.peer == me));
}
bool fits_count(const Step& s, int me) {
  if (s.does != Does::call) return s.reaches_neighbours();
  return s.op != Op::barrier && s.op != Op::recv && is_heard_of(s, me);
}
bool fits_dtype(const Step& s, int me) { return fits_count(s, me) && s.op != Op::all_to_all_v; }
bool fits_everybody(const Step& s, int) { return s.is_for_everybody(); }
bool fits_drop(const Step& s, int) { return s.is_for_everybody() || s.does == Does::window; }
bool fits_root(const Step& s, int) { return s.is_rooted(); }
bool fits_skip(const Step& s, int me) {
  return s.does == Does::call && s.op != Op::recv && is_heard_of(s, me);
}
bool fits_any(const Step& s, int me) { return s.op != Op::send || s.root == me || s.peer == me; }
bool fits_agreement(const Step& s, int) { return s.does == Does::agreement || s.does == Does::gradients; }
bool fits_asking(const Step& s, int me) { return s.does != Does::gradients && fits_any(s, me); }

// ---- Which guarantees define the outcome

const FailureGuarantees& of(const Range& r) { return r.traits.guarantees; }
bool tells_deaths(const Range& r) { return of(r).detects_death || (of(r).deadline && of(r).survives_death); }
bool keeps_deadlines(const Range& r) { return of(r).deadline; }
bool compares_calls(const Range& r) { return of(r).checks_calls; }
// The other ranks call something else, or wait for a message.
bool tells_skips(const Range& r) { return of(r).deadline && of(r).checks_calls; }
// Foreign libraries end the process; sanitizers need descriptors and memory for themselves.
bool survives_limits(const Range& r) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr bool kSanitized = true;
#else
  constexpr bool kSanitized = false;
#endif
  return r.backend == "shm" && !kSanitized;
}
bool never_guaranteed(const Range&) { return false; }

bool always_overdue(const FailureGuarantees&) { return true; }
bool overdue_unless_detected(const FailureGuarantees& g) { return !g.detects_death; }

// ---- Points, and how often each is drawn, in the order in which they are drawn

using enum FaultPoint;
constexpr FaultPoint kDeath[] = {before_post,   after_post, before_quiesce, in_creation,
                                 while_waiting, in_chunk,   in_chunk};
constexpr FaultPoint kStop[] = {before_post, after_post, before_quiesce, while_waiting, in_chunk, in_chunk};
constexpr FaultPoint kPause[] = {before_post, after_post, while_waiting, in_chunk, in_chunk};
constexpr FaultPoint kDelay[] = {before_post, after_post, in_chunk, in_chunk};
constexpr FaultPoint kLimit[] = {before_post, after_post, in_creation};
constexpr FaultPoint kFork[] = {before_post, after_post};
constexpr FaultPoint kDrop[] = {after_post};
constexpr FaultPoint kInterrupt[] = {after_post};
constexpr FaultPoint kBefore[] = {before_post};

constexpr MustFail kNobody{};
constexpr MustFail kAll{.who = MustFail::all};
constexpr MustFail kMembers{.who = MustFail::all, .members = true};
constexpr MustFail kMembersOrReceiver{.who = MustFail::all, .members = true, .one_if_unseen = true};
constexpr MustFail kOthers{.who = MustFail::all, .but_the_struck = true};
constexpr MustFail kOthersOrNobody{.who = MustFail::all_or_nobody, .but_the_struck = true};
constexpr MustFail kAllOrNobody{.who = MustFail::all_or_nobody};
constexpr MustFail kTheChild{.who = MustFail::the_child};

constexpr FaultRow kRows[] = {
    {.kind = FaultKind::none, .name = "none", .guaranteed = never_guaranteed, .points = kBefore},
    {.kind = FaultKind::kill,
     .name = "kill",
     .strike = kill_self,
     .strike_by_signal = kill_by_signal,
     .takes_process = true,
     .of_processes = true,
     .guaranteed = tells_deaths,
     .points = kDeath,
     .fits = fits_any,
     .is_absent = true,
     .overdue = overdue_unless_detected,
     .sees = Sees::death,
     .must_fail = kAll},
    {.kind = FaultKind::stop,
     .name = "stop",
     .strike = stop_self,
     .stopped = Stopped::for_good,
     .takes_process = true,
     .of_processes = true,
     .guaranteed = keeps_deadlines,
     .points = kDeath,
     .fits = fits_any,
     .is_absent = true,
     .overdue = always_overdue,
     .sees = Sees::absence,
     .must_fail = kAll},
    {.kind = FaultKind::stop_resume,
     .name = "stop_resume",
     .strike = stop_self,
     .stopped = Stopped::until_reused,
     .takes_process = true,
     .of_processes = true,
     .guaranteed = keeps_deadlines,
     .points = kStop,
     .fits = fits_any,
     .is_absent = true,
     .overdue = always_overdue,
     .sees = Sees::absence,
     .must_fail = kAll},
    {.kind = FaultKind::pause,
     .name = "pause",
     .strike = stop_self,
     .stopped = Stopped::for_a_moment,
     .of_processes = true,
     .points = kPause,
     .fits = fits_any},
    {.kind = FaultKind::exit,
     .name = "exit",
     .strike = exit_now,
     .strike_by_signal = exit_by_signal,
     .takes_process = true,
     .of_processes = true,
     .guaranteed = tells_deaths,
     .points = kDeath,
     .fits = fits_any,
     .is_absent = true,
     .overdue = overdue_unless_detected,
     .sees = Sees::death,
     .must_fail = kAll},
    {.kind = FaultKind::delay, .name = "delay", .strike = come_in_time, .points = kDelay, .fits = fits_any},
    {.kind = FaultKind::late,
     .name = "late",
     .strike = come_late,
     .guaranteed = keeps_deadlines,
     .points = kDelay,
     .fits = fits_any,
     .is_absent = true,
     .overdue = always_overdue,
     .sees = Sees::absence,
     .must_fail = kOthersOrNobody},  // coming last, it may still finish a call that the others had all begun
    {.kind = FaultKind::wrong_count,
     .name = "wrong_count",
     .act = Act::call_wrongly,
     .distort = distort_count,
     .guaranteed = compares_calls,
     .points = kBefore,
     .fits = fits_count,
     .sees = Sees::mismatch,
     .must_fail = kMembersOrReceiver},
    {.kind = FaultKind::wrong_dtype,
     .name = "wrong_dtype",
     .act = Act::call_wrongly,
     .distort = distort_dtype,
     .guaranteed = compares_calls,
     .points = kBefore,
     .fits = fits_dtype,
     .sees = Sees::mismatch,
     .must_fail = kMembersOrReceiver},
    {.kind = FaultKind::wrong_op,
     .name = "wrong_op",
     .act = Act::call_wrongly,
     .distort = distort_op,
     .guaranteed = compares_calls,
     .points = kBefore,
     .fits = fits_everybody,
     .sees = Sees::mismatch,
     .other_calls = true,
     .must_fail = kMembers},
    {.kind = FaultKind::wrong_root,
     .name = "wrong_root",
     .act = Act::call_wrongly,
     .distort = distort_root,
     .guaranteed = compares_calls,
     .points = kBefore,
     .fits = fits_root,
     .unseen_at_root = true,
     .sees = Sees::mismatch,
     .must_fail = kMembers},
    {.kind = FaultKind::wrong_order,
     .name = "wrong_order",
     .act = Act::call_wrongly,
     .steps = StepsTaken::swapped,
     .guaranteed = compares_calls,
     .points = kBefore,
     .fits = fits_everybody,
     .other_next = true,
     .sees = Sees::mismatch,
     .other_calls = true,
     .must_fail = kMembers},
    {.kind = FaultKind::skip,
     .name = "skip",
     .steps = StepsTaken::left_out,
     .guaranteed = tells_skips,
     .points = kBefore,
     .fits = fits_skip,
     .unseen_at_root = true,
     .other_next = true,
     .overdue = always_overdue,
     .sees = Sees::mismatch_or_absence,
     .other_calls = true,
     .must_fail = kNobody},  // a message is perhaps eager: then nobody needs its receiver
    {.kind = FaultKind::abort,
     .name = "abort",
     .act = Act::abort,
     .points = kBefore,
     .fits = fits_any,
     .sees = Sees::abort,
     .must_fail = kMembers},
    {.kind = FaultKind::leave,
     .name = "leave",
     .act = Act::leave,
     .points = kBefore,
     .fits = fits_any,
     .sees = Sees::leaving,
     .must_fail = kOthers},
    {.kind = FaultKind::drop,
     .name = "drop",
     .act = Act::drop,
     .points = kDrop,
     .fits = fits_drop,
     .sees = Sees::abort,
     .must_fail = kAllOrNobody},
    {.kind = FaultKind::descriptors,
     .name = "descriptors",
     .strike = take_descriptors,
     .limits = true,
     .of_processes = true,
     .guaranteed = survives_limits,
     .points = kLimit,
     .fits = fits_any,
     .sees = Sees::refusal,
     .must_fail = kAllOrNobody},
    {.kind = FaultKind::memory,
     .name = "memory",
     .strike = take_memory,
     .limits = true,
     .of_processes = true,
     .guaranteed = survives_limits,
     .points = kLimit,
     .fits = fits_any,
     .sees = Sees::refusal,
     .must_fail = kAllOrNobody},
    {.kind = FaultKind::fork,
     .name = "fork",
     .act = Act::fork,
     .points = kFork,
     .fits = fits_any,
     .must_fail = kTheChild},
    {.kind = FaultKind::suspend,
     .name = "suspend",
     .strike = suspend_self,
     .stopped = Stopped::with_all,
     .of_processes = true,
     .points = kPause,
     .fits = fits_any,
     .overdue = always_overdue},
    {.kind = FaultKind::disagree,
     .name = "disagree",
     .act = Act::call_wrongly,
     .distort = distort_value,
     .of_more = true,
     .points = kBefore,
     .fits = fits_agreement,
     .sees = Sees::mismatch,
     .must_fail = kMembers},
    {.kind = FaultKind::interrupt,
     .name = "interrupt",
     .act = Act::interrupt,
     .points = kInterrupt,
     .fits = fits_asking},
};
static_assert(std::size(kRows) == kFaultKinds);
static_assert([] {
  for (int k = 0; k < kFaultKinds; ++k)
    if (kRows[k].kind != static_cast<FaultKind>(k)) return false;
  return true;
}());

}  // namespace

const FaultRow& row(FaultKind kind) noexcept { return kRows[static_cast<std::size_t>(kind)]; }

std::string_view name(FaultKind kind) noexcept { return row(kind).name; }

}  // namespace weft::check
