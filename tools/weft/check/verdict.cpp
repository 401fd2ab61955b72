#include "verdict.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/wait.h>

#include <algorithm>
#include <vector>

#include "faults/strike.hpp"
#include "weft/base/name_ranks.hpp"

namespace weft::check {
namespace {

using std::chrono::seconds;

constexpr double kWithin = 1;  // seconds that a promise about time may be late by
constexpr Duration kLoaded = std::chrono::milliseconds(100);  // of the watcher, too
constexpr int kLateTimes = 4;                                 // the watcher's own lateness counts so often
constexpr std::string_view kCascade = "another group of mine has failed";

double to_seconds(std::int64_t ns) { return static_cast<double>(ns) * 1e-9; }

class Judge {
 public:
  Judge(const Program& p, const Settings& settings, const SharedReport& shared)
      : p_(p),
        settings_(settings),
        shared_(shared),
        guarantees_(settings.traits.guarantees),
        kind_(p.fault.kind),
        row_(row(p)) {}

  Verdict judge() {
    Verdict v;
    v.outcome = outcome();
    if (!shared_.ran) {
      v.complaint = "it was not run: one before it in the same job had failed";
      return v;
    }
    for (int r = 0; r < p_.ranks() && v.complaint.empty(); ++r) {
      const RankReport& rank = shared_.ranks[r];
      if (kind_ != FaultKind::none || !rank.has_error || cascade(rank)) continue;
      v.complaint = fmt::format("rank {}: {}: {}", r, name(rank.code), rank.text.view());
      slow_ = perhaps_late(rank);  // later events matter less
    }
    bool never_late = false;
    for (int r = 0; r < p_.ranks() && (v.complaint.empty() || r > 0); ++r) {
      const RankReport& rank = shared_.ranks[r];
      if (rank.complaint.empty()) continue;
      v.complaint +=
          fmt::format("{}rank {}: {}", v.complaint.empty() ? "" : "\n  ", r, rank.complaint.view());
      never_late = never_late || !rank.perhaps_late;
      slow_ = loaded() && !never_late;
    }
    if (v.complaint.empty() && !shared_.trouble.empty()) v.complaint = shared_.trouble.view();
    for (int r = 0; r < p_.ranks() && v.complaint.empty(); ++r) {
      const std::string wrong = of_rank(r);
      if (wrong.empty()) continue;
      slow_ = slow_ || perhaps_late(shared_.ranks[r]);
      v.complaint = fmt::format("rank {}: {}", r, wrong);
      if (shared_.ranks[r].has_error)
        v.complaint +=
            fmt::format("\n  its error: {}: {}", name(shared_.ranks[r].code), shared_.ranks[r].text.view());
    }
    if (v.complaint.empty()) v.complaint = together();
    if (v.complaint.empty()) v.complaint = left_behind();
    v.slow = slow_;
    return v;
  }

 private:
  bool struck() const { return kind_ != FaultKind::none && shared_.ranks[p_.fault.rank].struck.load(); }
  bool in_victims_process(int r) const {
    return p_.homes[static_cast<std::size_t>(r)] == p_.homes[static_cast<std::size_t>(p_.fault.rank)];
  }
  bool taken(int r) const { return struck() && row_.takes_process && in_victims_process(r); }
  // mpirun ends the other ranks if a rank dies, unless it promises not to.
  bool may_be_ended() const {
    return shared_.job_ended && struck() && row_.takes_process && !guarantees_.survives_death;
  }

  // Ranks that had no processor for so long may run into deadlines, and the others may leave them behind. The
  // watcher sleeps most of the time and gets a processor before busy processes do.
  bool loaded() const {
    const std::int64_t most = std::chrono::nanoseconds(settings_.call_deadline(p_)).count() / 2;
    return shared_.late_ns > std::chrono::nanoseconds(kLoaded).count() ||
           std::any_of(shared_.ranks, shared_.ranks + p_.ranks(),
                       [&](const RankReport& rank) { return rank.starved_ns > most; });
  }

  bool perhaps_late(const RankReport& rank) const {
    return loaded() && rank.has_error &&
           (rank.code == ErrorCode::timeout || rank.code == ErrorCode::peer_lost ||
            rank.code == ErrorCode::aborted);
  }

  std::string outcome() const {
    if (shared_.job_ended) return "the launcher ended the job";
    for (int r = 0; r < p_.ranks(); ++r)
      if (shared_.ranks[r].has_error && !taken(r) && !cascade(shared_.ranks[r]))
        return std::string(name(shared_.ranks[r].code));
    return "right bits";
  }

  bool blames(const RankReport& rank, int who) const {
    return std::find(rank.blamed, rank.blamed + rank.blamed_count, who) != rank.blamed + rank.blamed_count;
  }
  bool blames_victim(const RankReport& rank) const {
    for (int r = 0; r < p_.ranks(); ++r)
      if ((r == p_.fault.rank || taken(r)) && blames(rank, r)) return true;
    return false;
  }
  static bool cascade(const RankReport& rank) {
    return rank.code == ErrorCode::aborted && rank.text.view().find(kCascade) != std::string_view::npos;
  }

  // The step to which a call of a group belongs, as all ranks except the struck one know it. -1: no step.
  // `in_split`: whether it was the exchange of colors of a split of this group, in which a slower rank may
  // have met the failure first.
  int step_of(const RankReport& rank, bool* in_split = nullptr) const {
    if (p_.has_more_than_calls(rank.group)) return -1;
    std::uint64_t number = 0;
    std::vector<bool> counted(p_.groups.size());
    for (int k = 0; k < static_cast<int>(p_.steps.size()); ++k) {
      for (std::size_t g = 0; g < p_.groups.size(); ++g) {  // a split is a call of its parent
        const GroupPlan& plan = p_.groups[g];
        if (counted[g] || plan.before > k) continue;
        counted[g] = true;
        if (plan.how != GroupPlan::How::split || plan.joined || plan.parent != rank.group) continue;
        if (number++ == rank.call && in_split != nullptr) *in_split = true;
      }
      const Step& s = p_.steps[static_cast<std::size_t>(k)];
      if (s.group != rank.group || s.op == Op::send || s.op == Op::recv) continue;
      if (number++ == rank.call) return k;
    }
    return -1;
  }

  // Returns whether every rank has a part in the call and the struck rank never came to it: then nobody can
  // finish it.
  bool needs_all(const RankReport& rank) const {
    const int k = step_of(rank);
    if (k < 0 || rank.op == Op::send || rank.op == Op::recv) return false;
    if (row_.steps == StepsTaken::left_out) return false;  // it comes to all others
    const bool came = p_.fault.point != FaultPoint::before_post && p_.fault.point != FaultPoint::in_creation;
    if (k < p_.fault.step || (k == p_.fault.step && came)) return false;
    switch (p_.steps[static_cast<std::size_t>(k)].op) {
      case Op::all_reduce:
      case Op::scan:
      case Op::exscan:
      case Op::all_gather:
      case Op::all_gather_v:
      case Op::reduce_scatter:
      case Op::reduce_scatter_v:
      case Op::all_to_all:
      case Op::all_to_all_v:
      case Op::barrier: return p_.rank_in(rank.group, p_.fault.rank) >= 0;
      case Op::none:
      case Op::reduce:
      case Op::broadcast:
      case Op::gather:
      case Op::scatter:
      case Op::send:
      case Op::recv:
      case Op::exchange:
      case Op::wait_message: break;
    }
    return false;
  }

  // The ranks that an error names as absent must be the struck rank, or ranks that it held up.
  std::string blame_of_absence(const RankReport& rank) const {
    // If the transport itself moves the data, a rank that has arrived and then does nothing looks like the
    // others.
    const bool arrived = p_.fault.point != FaultPoint::before_post && !settings_.mpirun.empty();
    if (rank.blamed_count == 0 && arrived) return {};
    // Under mpirun the first rank serves the store: a rank that makes a group without that rank sees only
    // errors of the store.
    if (rank.blamed_count == 0 && rank.in_creation && !settings_.mpirun.empty() && p_.fault.rank == 0 &&
        rank.text.view().find("store: ") != std::string_view::npos)
      return {};
    if (rank.blamed_count == 0) return "the error names no rank";
    if (blames_victim(rank)) return {};
    if (holds_window(p_) && blames(rank, holding_rank(p_))) return {};  // it takes no steps meanwhile
    // A rank that leaves a message out goes on. In the end it waits for ranks that wait for the message's
    // receiver: a circle.
    const bool in_circle = row_.steps == StepsTaken::left_out;
    if (needs_all(rank) && !rank.in_creation)
      return fmt::format("the error does not name rank {}", p_.fault.rank);
    for (int i = 0; i < rank.blamed_count; ++i) {
      const RankReport& other = shared_.ranks[rank.blamed[i]];
      if (!other.has_error)
        return fmt::format("the error names rank {}, which was not held up by anybody", rank.blamed[i]);
      // A rank that waits in the same group can report it. If it waits in another group, nobody here knows
      // for which rank. Over MPI such a rank answers only while it polls.
      if (settings_.mpirun.empty() && !in_circle && !rank.in_creation && !other.in_creation &&
          other.group == rank.group && !cascade(other) && p_.rank_in(rank.group, p_.fault.rank) >= 0)
        return fmt::format("the error names rank {}, which waited itself, and not rank {}", rank.blamed[i],
                           p_.fault.rank);
    }
    return {};
  }

  // The error names the operation and the call, and the two must belong together.
  std::string names_call(const RankReport& rank) const {
    if (rank.in_creation || rank.code == ErrorCode::aborted || rank.op == Op::none) return {};
    if (rank.call == kNoCall) return {};  // the group had failed before the call got a number
    if (rank.op == Op::send || rank.op == Op::recv) return {};
    if (row_.other_calls || p_.has_more_than_calls(rank.group)) return {};
    bool in_split = false;
    const int k = step_of(rank, &in_split);
    if (in_split && rank.op == Op::all_gather) return {};
    if (k < 0)
      return fmt::format("the error names call {} of group {}, which is none of the program", rank.call,
                         rank.group);
    if (p_.steps[static_cast<std::size_t>(k)].op != rank.op)
      return fmt::format("the error names {} as call {} of group {}; that was {}", name(rank.op), rank.call,
                         rank.group, name(p_.steps[static_cast<std::size_t>(k)].op));
    return {};
  }

  // For the error of a rank that was making a group while another rank was struck in making that group.
  std::string of_creation(const RankReport& rank) const {
    const RankReport& struck_rank = shared_.ranks[p_.fault.rank];
    if (!blames_victim(rank)) return fmt::format("the error does not name rank {}", p_.fault.rank);
    if (rank.code == ErrorCode::system || rank.code == ErrorCode::unsupported)
      return row_.limits ? std::string()
                         : fmt::format("{} where nobody was refused anything", name(rank.code));
    if (rank.code != ErrorCode::timeout && rank.code != ErrorCode::peer_lost)
      return fmt::format("{} where timeout or peer_lost was to be expected", name(rank.code));
    if (struck_rank.has_error && struck_rank.in_creation && struck_rank.group == rank.group &&
        rank.code == ErrorCode::timeout && to_seconds(rank.thrown_at - struck_rank.thrown_at) > kWithin)
      return fmt::format("the error does not tell why rank {} could not make the group", p_.fault.rank);
    return {};
  }

  static std::string unexpected(const RankReport& rank, const char* expected) {
    return fmt::format("{} where {} was to be expected", name(rank.code), expected);
  }
  static bool is_refusal(const RankReport& rank) {
    return rank.code == ErrorCode::system || rank.code == ErrorCode::unsupported;
  }
  static bool is_absence(const RankReport& rank) {
    return rank.code == ErrorCode::timeout || rank.code == ErrorCode::peer_lost;
  }
  std::string not_named() const { return fmt::format("the error does not name rank {}", p_.fault.rank); }

  std::string of_error(int r, const RankReport& rank) const {
    const bool victim = r == p_.fault.rank;
    if (cascade(rank)) {
      const bool known = rank.blamed_count == 1 && (shared_.ranks[rank.blamed[0]].has_error ||
                                                    !shared_.ranks[rank.blamed[0]].untyped.empty());
      return known ? std::string() : "aborted because of a rank that has not failed";
    }
    // A rank that was struck while it made this group is the first cause, even if others gave up because of
    // it.
    const bool of_struck_group = rank.in_creation && rank.group == p_.struck_group();
    if (of_struck_group && !victim && struck()) return of_creation(rank);
    // A rank that has already failed does not come to a group that is being made, or closes its connections
    // there.
    if (kind_ != FaultKind::none && rank.in_creation && rank.blamed_count > 0 && is_absence(rank) &&
        std::all_of(rank.blamed, rank.blamed + rank.blamed_count,
                    [&](int other) { return shared_.ranks[other].has_error || other == p_.fault.rank; }))
      return {};
    switch (row_.sees) {
      case Sees::nothing: return "it failed though nothing was wrong";
      case Sees::death: return of_death(rank);
      case Sees::absence: return of_absence(rank);
      case Sees::mismatch: return of_mismatch(rank, victim);
      case Sees::mismatch_or_absence: return of_skip(rank);
      case Sees::abort: return of_abort(rank);
      case Sees::leaving: return of_leaving(rank);
      case Sees::refusal: return of_refusal(rank, victim);
    }
    return {};
  }

  bool aborted_by_victim(const RankReport& rank) const {
    return rank.code == ErrorCode::aborted && blames(rank, p_.fault.rank);
  }
  std::string of_death(const RankReport& rank) const {
    if (p_.fault.point == FaultPoint::before_quiesce && aborted_by_victim(rank)) return {};
    if (guarantees_.detects_death) {
      if (rank.code != ErrorCode::peer_lost) return unexpected(rank, "peer_lost");
      return blames_victim(rank) ? names_call(rank) : not_named();
    }
    return is_absence(rank) ? blame_of_absence(rank) : unexpected(rank, "timeout");
  }
  std::string of_absence(const RankReport& rank) const {
    if (p_.fault.point == FaultPoint::before_quiesce && aborted_by_victim(rank)) return {};
    if (rank.code != ErrorCode::timeout) return unexpected(rank, "timeout");
    if (rank.text.view().find("within 0.00") != std::string_view::npos)
      return "the error says less than it waited";
    if (const std::string wrong = blame_of_absence(rank); !wrong.empty()) return wrong;
    return names_call(rank);
  }
  std::string of_mismatch(const RankReport& rank, bool victim) const {
    if (rank.code != ErrorCode::mismatch) return unexpected(rank, "mismatch");
    // Each rank that cannot open the checkpoint that rank 0 has found reports it. No rank knows which rank
    // got another directory.
    const Step& struck = p_.steps[static_cast<std::size_t>(p_.fault.step)];
    const bool loads = struck.value == Value::loaded;
    const bool alike = struck.does == Does::agreement || struck.does == Does::gradients;
    if (alike && (loads || (victim && rank.blamed_count > 0))) return {};
    return blames(rank, p_.fault.rank) ? names_call(rank) : not_named();
  }
  std::string of_skip(const RankReport& rank) const {
    const bool message = p_.steps[static_cast<std::size_t>(p_.fault.step)].op == Op::send;
    // The root of a large broadcast waits for its readers; if nothing follows, the rank that left it out
    // never reports it.
    const bool awaited = message || p_.ending == Ending::destroy;
    if (awaited && rank.code == ErrorCode::timeout) return blame_of_absence(rank);
    if (message || rank.code != ErrorCode::mismatch)
      return unexpected(rank, message ? "timeout" : "mismatch");
    return blames(rank, p_.fault.rank) ? std::string() : not_named();
  }
  std::string of_abort(const RankReport& rank) const {
    if (rank.in_creation && rank.code == ErrorCode::peer_lost && blames(rank, p_.fault.rank)) return {};
    return aborted_by_victim(rank) ? std::string() : unexpected(rank, "aborted, naming the rank");
  }
  std::string of_leaving(const RankReport& rank) const {
    if (rank.code != ErrorCode::peer_lost) return unexpected(rank, "peer_lost");
    return blames(rank, p_.fault.rank) ? names_call(rank) : not_named();
  }
  std::string of_refusal(const RankReport& rank, bool victim) const {
    if (victim && is_refusal(rank)) return {};
    if (is_absence(rank) || rank.code == ErrorCode::aborted)
      return victim || blames_victim(rank) ? std::string() : not_named();
    if (is_refusal(rank))
      return blames_victim(rank) ? std::string() : not_named();  // it could not give its part
    return unexpected(rank, "system, or timeout, peer_lost or aborted naming the rank,");
  }

  std::string in_time(int r, const RankReport& rank) const {
    if (r == p_.fault.rank && kind_ != FaultKind::none) return {};
    const double slack = kWithin + kLateTimes * to_seconds(shared_.late_ns);
    const std::int64_t since = rank.waiting_since.load();
    const Duration deadline =
        rank.in_creation || rank.own_deadline ? settings_.group_deadline(p_) : settings_.call_deadline(p_);
    const double waited = to_seconds(rank.thrown_at - since);
    const double most = std::chrono::duration<double>(deadline).count() + slack;
    if (waited > most) return fmt::format("it waited {:.2f} s; at most {:.2f} s were promised", waited, most);
    // Once one rank knows of the failure, all ranks learn of it: waiting ranks, and ranks that arrive later.
    std::int64_t first = rank.thrown_at;
    // A rank that is stopped with its own error notifies nobody.
    for (int other = 0; other < p_.ranks(); ++other)
      if (shared_.ranks[other].has_error && !taken(other))
        first = std::min(first, shared_.ranks[other].thrown_at);
    const double behind = to_seconds(rank.thrown_at - std::max(first, since));
    if (!rank.in_creation && behind > slack)
      return fmt::format("it heard of the failure {:.2f} s after the first rank; {:.2f} s were promised",
                         behind, slack);
    const bool death = row_.sees == Sees::death && guarantees_.detects_death;
    if (!death || rank.code != ErrorCode::peer_lost || shared_.died_at == 0) return {};
    const double after = to_seconds(rank.thrown_at - std::max(shared_.died_at, since));
    if (after > slack)
      return fmt::format("it heard of the death after {:.2f} s; {:.2f} s were promised", after, slack);
    return {};
  }

  std::string of_rank(int r) const {
    const RankReport& rank = shared_.ranks[r];
    if (taken(r)) return {};  // it may die at any point, or come back to any remaining state
    if (!rank.untyped.empty())
      return fmt::format("an exception that is no weft::Error: {}", rank.untyped.view());
    if (shared_.job_ended && !may_be_ended())
      return fmt::format("the launcher ended the job (status {})", shared_.job_status);
    if (rank.phase.load() != Phase::done && !may_be_ended())
      return fmt::format("it ended at step {} ({})", rank.step.load(), name(rank.phase.load()));
    if (!rank.has_error) return {};
    if (const std::string wrong = of_error(r, rank); !wrong.empty()) return wrong;
    if (const std::string wrong = in_time(r, rank); !wrong.empty()) {
      slow_ = true;
      return wrong;
    }
    const bool ended = p_.ends && shares_block(p_);  // then no rank asks
    if (guarantees_.quiesces && !ended && !rank.quiesced && rank.phase.load() >= Phase::settled)
      return fmt::format("quiesce() was not true after {:.2f} s", to_seconds(rank.quiesce_ns));
    return {};
  }

  std::string unwarned(std::atomic<bool> ProcessReport::*line) const {
    if (!settings_.mpirun.empty()) return {};
    for (int h = 0; h < p_.processes(); ++h)
      if ((shared_.processes[h].*line).load()) return {};
    return fmt::format("no rank's log has a warning of {}", describe(p_.fault));
  }

  // Checks the events that the ranks together must have seen.
  std::string together() const {
    if (kind_ == FaultKind::none || shared_.job_ended) return {};
    if (!struck() && row_.steps != StepsTaken::left_out) return {};  // its point was never reached
    const Step& step = p_.steps[static_cast<std::size_t>(p_.fault.step)];
    std::vector<int> calm, failed;
    for (int r = 0; r < p_.ranks(); ++r)
      if (!taken(r)) (shared_.ranks[r].has_error ? failed : calm).push_back(r);
    if (p_.ending == Ending::destroy && failed.empty()) return unwarned(&ProcessReport::warned_of_difference);
    if (row_.act == Act::drop && step.does == Does::call && !failed.empty())
      if (const std::string wrong = unwarned(&ProcessReport::warned_of_drop); !wrong.empty()) return wrong;
    const MustFail must =
        p_.ending == Ending::leave ? MustFail{.who = MustFail::all, .members = true} : row_.must_fail;
    if (must.but_the_struck) std::erase(calm, p_.fault.rank);
    if (must.members) std::erase_if(calm, [&](int r) { return p_.rank_in(step.group, r) < 0; });
    switch (must.who) {
      case MustFail::nobody: return {};
      case MustFail::the_child:
        return shared_.child.load() == 1 ? std::string()
                                         : "the forked child was not told that it cannot use the group";
      case MustFail::all_or_nobody:
        if (failed.empty()) return {};
        break;
      case MustFail::all: break;
    }
    // Only the receiver knows how much it expects in an all_to_all_v. Only the neighbouring ranks of a window
    // know it, and perhaps only when they are in the barrier already.
    const bool unseen = step.op == Op::send || step.op == Op::all_to_all_v || step.does == Does::window;
    if (calm.empty() || (must.one_if_unseen && unseen && !failed.empty())) return {};
    // All ranks may have loaded the checkpoint that rank 0 found.
    if (step.does == Does::agreement && step.value == Value::loaded && failed.empty()) return {};
    return fmt::format("{} saw no error, though a barrier of all ranks comes after {}", name_ranks(calm),
                       describe(p_.fault));
  }

  // Processes, descriptors, memory.
  std::string left_behind() const {
    if (settings_.mpirun.empty()) {
      for (int h = 0; h < p_.processes(); ++h) {
        const ProcessReport& process = shared_.processes[h];
        bool gone = false, loud = false;
        for (int r = 0; r < p_.ranks(); ++r) {
          if (p_.homes[static_cast<std::size_t>(r)] != h) continue;
          gone = gone || taken(r);
          loud = loud ||
                 (shared_.ranks[r].has_error && !shared_.ranks[r].quiesced);  // then it is kept on purpose
        }
        if (gone || loud) continue;
        if (shared_.statuses[h] != 0)
          return fmt::format("process {} ended with status {} ({})", h, shared_.statuses[h],
                             WIFSIGNALED(shared_.statuses[h]) ? "signal" : "exit code");
        if (process.descriptors_after > process.descriptors_before)
          return fmt::format("process {} has {} descriptors open after its Context is gone; {} before", h,
                             process.descriptors_after, process.descriptors_before);
        if (process.segments_after > 0)
          return fmt::format("process {} still maps {} segments after its Context is gone", h,
                             process.segments_after);
      }
    }
    return {};
  }

  const Program& p_;
  const Settings& settings_;
  const SharedReport& shared_;
  const FailureGuarantees guarantees_;
  const FaultKind kind_;
  const FaultRow& row_;
  mutable bool slow_ = false;
};

}  // namespace

Verdict judge(const Program& p, const Settings& settings, const SharedReport& shared) {
  return Judge(p, settings, shared).judge();
}

}  // namespace weft::check
