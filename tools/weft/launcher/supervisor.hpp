// The process that runs a job (launcher.cpp): it serves the store, starts the ranks, passes on their output,
// and ends them. For use by one thread.
#pragma once

#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ended_ranks.hpp"
#include "launcher.hpp"
#include "notices.hpp"
#include "output.hpp"
#include "rank_process.hpp"
#include "torch_variables.hpp"
#include "weft/base/log.hpp"
#include "weft/store/tcp.hpp"

namespace weft::tools {

/// The exit statuses of `weft run` that come from no rank.
inline constexpr int kInDoubt = 70;     // EX_SOFTWARE of sysexits.h
inline constexpr int kOutputLost = 74;  // EX_IOERR
inline constexpr int kTimedOut = 124;   // as timeout(1) has it
inline constexpr int kNotExecutable = 126;
inline constexpr int kNotFound = 127;

std::string random_token();

/// One start of the job's ranks. Without LaunchOptions::elastic there is one.
struct Start {
  int ranks = 1;
  int number = 0;  ///< 0 is the first
  Deadline job_ends = Deadline::never();
};

/// When LaunchOptions::timeout has passed from now on.
Deadline job_end(const LaunchOptions& options);

/// A rank that died by itself, not because of others.
struct RankDeath {
  int rank = 0;
  pid_t pid = -1;
  std::string how;                      ///< "killed by signal 9 (SIGKILL)"
  std::vector<std::string> last_lines;  ///< on standard error
};

/// How a start has ended.
struct StartEnd {
  int status = 0;  ///< for exit
  /// The ranks whose failure ended it, first the one that was named; empty if it ended well, by a request, by
  /// its timeout, or did not begin: then it is not to be started again.
  std::vector<RankDeath> deaths{};
  int ranks = 0, number = 0;  ///< as in Start
  std::int64_t step = -1;     ///< the highest that a rank reported; -1: none did
  Duration lasted{};
};

class Supervisor {
 public:
  /// `ranks_mask`: the signal mask for the ranks. `to_read`: the signals that it reads and passes on, which
  /// are blocked. `guard_pipe`: a pipe that ends when the guard has ended. Throws system.
  Supervisor(const LaunchOptions& options, const Start& start, const std::vector<std::string>& command,
             const sigset_t& ranks_mask, const sigset_t& to_read, int guard_pipe);
  ~Supervisor();  ///< whatever happened: nothing is left behind
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  /// Runs the ranks until no process of them is left; the exit status is that of launcher.hpp.
  StartEnd run();

 private:
  struct Failed {
    const RankProcess* rank = nullptr;
    int status = 0;
  };

  /// How far the end of the job has come.
  enum class Stage : std::uint8_t {
    running,
    noticed,     // a rank failed; the others may still report what they saw
    terminated,  // they were sent SIGTERM
    killed,      // and SIGKILL
  };

  // Starting and watching: supervisor.cpp
  std::optional<int> start_ranks();
  std::vector<std::string> environment_of(int number) const;
  std::string tag_of(int number) const;
  std::optional<int> columns_of_a_line(int number) const;
  int start_rank(int number);
  void watch();
  void poll_once(Deadline until);
  void flush(Sink& sink, std::string_view what);
  std::size_t read(RankStream& stream);
  void drain(RankStream& stream);
  void take_signals();
  bool take_notices();
  void take_last_notices();
  void report(std::string_view text) { err_.add_line("weft run: ", text); }
  bool none_runs() const;
  bool all_streams_ended() const;

  // Ranks that end, and the end of the job: supervisor_end.cpp
  void reap();
  void take_end(RankProcess& rank, int status);
  void report_early();
  bool as_requested(const RankProcess& rank, int status) const;
  void judge(bool late);
  void add_death(const Failed& failed);
  std::string told_missing() const;
  void report_doubts();
  void end_orphans();
  void end_requested(int number);
  void advance();
  void expire();
  void terminate();
  void kill_ranks();
  void abandon();
  void signal_groups(int number);
  void forward(int number);
  void ask_for_traces();

  const LaunchOptions& options_;
  const Start start_;
  const std::vector<std::string>& command_;
  const sigset_t ranks_mask_;
  const int guard_pipe_;
  int signals_ = -1;
  cpu_set_t usable_;
  Logger log_;
  TcpStoreServer store_{log_};
  const std::string job_ = random_token();
  LauncherNotices notices_{job_};
  EndedRanks ended_{store_.port(), job_};
  const TorchVariables torch_{start_.ranks};
  Screen screen_;
  Sink out_{STDOUT_FILENO, screen_};
  Sink err_{STDERR_FILENO, screen_};
  std::vector<std::unique_ptr<RankProcess>> ranks_;
  std::vector<char> buffer_ = std::vector<char>(64 * 1024);  // not on the stack, which may be small
  std::size_t turn_ = 0;
  Stage stage_ = Stage::running;
  Deadline next_step_ = Deadline::never();
  Deadline job_ends_ = start_.job_ends;
  Deadline judgement_ = Deadline::never();   // when the first failure is named
  Deadline early_look_ = Deadline::never();  // when to look whether ranks that have ended are missed
  std::vector<Failed> failed_;               // in the order in which they were found, until then
  std::optional<Clock::time_point> first_request_;
  int requested_ = 0;  // SIGINT or SIGTERM, once one was passed on
  bool ended_as_requested_ = false;
  bool guard_gone_ = false;
  bool leaves_ = false;  // SIGHUP or SIGQUIT has come: an elastic job is not started again
  bool abandoned_ = false;
  bool one_ended_well_ = false;
  bool in_doubt_ = false;  // all ended well, as it seems, but some rank says that its results may be wrong
  std::optional<int> first_failure_;  // of the ranks that the others have outlived
  std::optional<int> exit_;           // the first failure's, once there is one
  std::vector<RankDeath> deaths_;     // once exit_ is a rank's
  std::int64_t step_ = -1;            // the highest that a rank has reported
};

}  // namespace weft::tools
