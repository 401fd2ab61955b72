// Ranks that end, and how the job then ends.
#include <fmt/format.h>
#include <sys/wait.h>

#include <algorithm>
#include <utility>

#include "base/parse_number.hpp"
#include "supervisor.hpp"
#include "weft/base/env.hpp"

namespace weft::tools {
namespace {

using std::chrono::milliseconds;

// The time after the first failure in which the process that caused it may be found dead, too. If all failed
// ranks report that others caused their failure, the supervisor waits for those others during the whole
// `notice` (LaunchOptions).
constexpr Duration kJudgement = milliseconds(200);
constexpr Duration kSameRequest = milliseconds(500);  // `timeout` and the like send their signal twice
constexpr Duration kEarlyLook = milliseconds(200);    // while no rank has come to the store

}  // namespace

// Looks at each ended child before it reaps it: until then its process group cannot be another's, and the
// rest of the group is killed.
void Supervisor::reap() {
  std::vector<std::pair<RankProcess*, int>> ended;
  for (;;) {
    siginfo_t info{};
    if (::waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) break;
    const auto at =
        std::find_if(ranks_.begin(), ranks_.end(), [&](const auto& r) { return r->pid == info.si_pid; });
    if (at != ranks_.end()) ::kill(-info.si_pid, SIGKILL);
    int status = 0;
    if (::waitpid(info.si_pid, &status, 0) != info.si_pid) break;
    if (at == ranks_.end()) continue;  // an orphan of a rank
    (*at)->running = false;
    ended.emplace_back(at->get(), status);
  }
  end_orphans();
  for (const auto& [rank, status] : ended)  // several may die at once, of which one has been named
    if (!deaths_.empty() && stage_ == Stage::noticed && cannot_be_a_consequence(status))
      add_death({rank, status});
  if (exit_) return;
  if (!ended.empty()) take_last_notices();
  for (const auto& [rank, status] : ended) take_end(*rank, status);
  report_early();
  if (!failed_.empty()) judge(false);
}

/// Returns whether the process was asked to end by a signal and did so: by the signal or by its status,
/// because others did, or because of a signal that we have sent since.
bool Supervisor::as_requested(const RankProcess& rank, int status) const {
  if (requested_ == 0 || status == 0) return false;
  if (exit_status(status) == 128 + requested_ || rank.blames_others) return true;
  return failed_.empty() && WIFSIGNALED(status) && stage_ >= Stage::terminated;
}

void Supervisor::take_end(RankProcess& rank, int status) {
  if (as_requested(rank, status)) {  // the others may take their time
    ended_as_requested_ = true;
    return;
  }
  rank.ended_well = status == 0;
  one_ended_well_ |= status == 0;
  if (stage_ == Stage::running && (status == 0 || options_.keep_going) && !none_runs())
    ended_.tell(rank.number, how_it_ended(status));
  if (status == 0) return;
  if (options_.keep_going && stage_ == Stage::running) {
    report(fmt::format("rank {} (pid {}) failed: {}; the others go on", rank.number, rank.pid,
                       how_it_ended(status)));
    if (!first_failure_) first_failure_ = exit_status(status);
    return;
  }
  if (failed_.empty()) judgement_ = Deadline::after(std::min(kJudgement, options_.notice));
  failed_.push_back({&rank, status});
  if (stage_ == Stage::running) {
    stage_ = Stage::noticed;
    next_step_ = Deadline::after(options_.notice);
    if (env::get("WEFT_TRACE")) ask_for_traces();
  }
}

/// Names the ranks that have ended without having come to the store, once another rank has come there, which
/// misses them.
void Supervisor::report_early() {
  early_look_ = Deadline::never();
  if (!ended_.pending()) return;
  for (const EndedRank& early : ended_.take_missed(start_.ranks))
    report(fmt::format(
        "rank {} (pid {}) ended before it joined the others: {}; those that wait for it are told so",
        early.rank, ranks_[static_cast<std::size_t>(early.rank)]->pid, early.how));
  if (ended_.pending() && !none_runs()) early_look_ = Deadline::after(kEarlyLook);
}

/// Names the rank that failed first, as soon as it is known, at the latest when `late`. The kernel does not
/// report in which order processes ended, and a survivor may well be gone before the rank because of which it
/// fails. So it names a rank that was killed by a signal that cannot be a consequence; otherwise a rank that
/// does not blame others; among equals, the rank that was found first.
void Supervisor::judge(bool late) {
  take_last_notices();
  const auto by_itself = [](const Failed& f) {
    return cannot_be_a_consequence(f.status) ? 2 : f.rank->blames_others ? 0 : 1;
  };
  const auto first = std::max_element(failed_.begin(), failed_.end(), [&](const Failed& a, const Failed& b) {
    return by_itself(a) < by_itself(b);
  });
  if (by_itself(*first) < 2 && !late && !none_runs()) return;
  if (by_itself(*first) == 0 && stage_ == Stage::noticed && !next_step_.passed() && !none_runs()) {
    judgement_ = next_step_;
    return;
  }
  judgement_ = Deadline::never();
  const auto& [rank, status] = *first;
  const std::string missing = by_itself(*first) == 0 ? told_missing() : "";
  report(fmt::format("rank {} (pid {}) {}: {}{}", rank->number, rank->pid,
                     missing.empty() ? "was first to fail" : "failed because of others", how_it_ended(status),
                     missing));
  RankStream& errors = *rank->streams[1];
  drain(errors);
  constexpr std::size_t kMostWords = 4096;
  const std::string words = errors.lines.last().substr(0, kMostWords);
  if (!words.empty()) report(fmt::format("rank {} said last: {}", rank->number, words));
  exit_ = exit_status(status);
  add_death(*first);
  for (const Failed& other : failed_)
    if (&other != &*first && by_itself(other) == 2) add_death(other);
}

void Supervisor::add_death(const Failed& failed) {
  RankStream& errors = *failed.rank->streams[1];
  drain(errors);
  deaths_.push_back(
      {failed.rank->number, failed.rank->pid, how_it_ended(failed.status), errors.lines.last_lines()});
}

/// If all failed ranks blame others: names the ranks that have ended, apparently well, and the stopped ranks.
std::string Supervisor::told_missing() const {
  constexpr int kMostNamed = 8;
  std::string text;
  int named = 0;
  for (const auto& rank : ranks_) {
    const bool stopped = rank->running && is_stopped(rank->pid);
    if (!rank->ended_well && !stopped) continue;
    if (named++ == kMostNamed) return text + ", and others";
    text += fmt::format("{} rank {} (pid {}) {}", named == 1 ? ";" : ",", rank->number, rank->pid,
                        stopped ? "is stopped" : "has returned 0");
  }
  return text;
}

/// All ranks have ended. A rank that returned 0 although it has logged that something went wrong is no
/// success.
void Supervisor::report_doubts() {
  take_last_notices();
  bool well = false;
  std::vector<const RankProcess*> doubtful;
  for (const auto& rank : ranks_) {
    if (rank->in_doubt) doubtful.push_back(rank.get());
    well |= rank->ended_well && !rank->in_doubt;
  }
  if (exit_ || doubtful.empty() || !one_ended_well_ || (options_.keep_going && well)) return;
  in_doubt_ = true;
  for (const RankProcess* rank : doubtful)
    report(fmt::format("rank {} (pid {}) {}, but has logged a warning that its results may be wrong",
                       rank->number, rank->pid, rank->ended_well ? "returned 0" : "ended"));
}

/// Ends processes that an ended rank left outside of its process group: they are our children then, and have
/// the rank's variables. Each process that ends gives us its own children, and SIGCHLD, by which this
/// function is called again.
void Supervisor::end_orphans() {
  if (none_runs()) return;  // all go then
  for (const pid_t pid : own_children()) {
    if (std::any_of(ranks_.begin(), ranks_.end(), [&](const auto& r) { return r->running && r->pid == pid; }))
      continue;
    if (variable_of(pid, "WEFT_JOB") != job_) continue;
    const auto number = parse_integer<std::size_t>(variable_of(pid, "WEFT_RANK").value_or(""));
    if (number && *number < ranks_.size() && !ranks_[*number]->running) ::kill(pid, SIGKILL);
  }
}

/// The ranks may take their time after a first SIGINT or SIGTERM; a user who sends a second one does not want
/// to wait.
void Supervisor::end_requested(int number) {
  const auto now = Clock::now();
  if (!first_request_) {
    first_request_ = now;
    requested_ = number;
  } else if (now - *first_request_ > kSameRequest) {
    if (none_runs()) abandoned_ = true;  // only output that nobody reads is left
    if (stage_ == Stage::running || stage_ == Stage::noticed) terminate();
  }
}

void Supervisor::advance() {
  if (job_ends_.passed()) expire();
  if (early_look_.passed()) report_early();
  if (judgement_.passed()) {
    judgement_ = Deadline::never();
    if (!exit_) judge(true);
  }
  if (!next_step_.passed()) return;
  switch (stage_) {
    case Stage::noticed: return terminate();
    case Stage::terminated:
      for (const auto& rank : ranks_) {
        if (!rank->running) continue;
        report(fmt::format("rank {} (pid {}) did not end within {:.1f} s of SIGTERM: killed", rank->number,
                           rank->pid, std::chrono::duration<double>(options_.grace).count()));
      }
      return kill_ranks();
    case Stage::running:
    case Stage::killed: next_step_ = Deadline::never(); return;
  }
}

/// The job's time is over.
void Supervisor::expire() {
  job_ends_ = Deadline::never();
  if (stage_ != Stage::running) return;  // it is ending already
  std::string still;
  for (const auto& rank : ranks_)
    if (rank->running)
      still += fmt::format("{}rank {} (pid {}{})", still.empty() ? "" : ", ", rank->number, rank->pid,
                           is_stopped(rank->pid) ? ", stopped" : "");
  if (still.empty()) return;
  report(fmt::format("the job did not end within {:g} s: {} still ran",
                     std::chrono::duration<double>(options_.timeout).count(), still));
  exit_ = kTimedOut;
  stage_ = Stage::noticed;
  next_step_ = Deadline::after(options_.notice);
  if (env::get("WEFT_TRACE")) ask_for_traces();
}

void Supervisor::terminate() {
  signal_groups(SIGTERM);
  signal_groups(SIGCONT);  // a stopped rank takes SIGTERM only once it goes on
  stage_ = Stage::terminated;
  next_step_ = Deadline::after(options_.grace);
}

void Supervisor::kill_ranks() {
  signal_groups(SIGKILL);
  stage_ = Stage::killed;
  next_step_ = Deadline::never();
}

/// The guard was killed: nobody waits for the job any more.
void Supervisor::abandon() {
  abandoned_ = true;
  exit_ = 128 + SIGKILL;
  kill_ranks();
}

void Supervisor::signal_groups(int number) {
  for (const auto& rank : ranks_) {
    if (rank->running) ::kill(-rank->pid, number);
  }
}

/// Handles a signal that was sent to us. A signal that asks to end goes to all processes that a rank has
/// started, as from a terminal. SIGUSR1 and SIGUSR2 go to the rank itself: they would kill helpers that do
/// not handle them.
void Supervisor::forward(int number) {
  const bool for_all = number != SIGUSR1 && number != SIGUSR2;
  for (const auto& rank : ranks_) {
    if (rank->running) ::kill(for_all ? -rank->pid : rank->pid, number);
  }
}

// Ranks that are about to be ended may not have noticed the failure, and the trace of the late rank is the
// important one.
void Supervisor::ask_for_traces() {
  for (const auto& rank : ranks_)
    if (rank->running && catches(rank->pid, SIGUSR2)) ::kill(rank->pid, SIGUSR2);
}

}  // namespace weft::tools
