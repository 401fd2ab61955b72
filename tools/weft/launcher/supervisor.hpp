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

class Supervisor {
 public:
  /// `ranks_mask`: the signal mask for the ranks. `to_read`: the signals that it reads and passes on, which
  /// are blocked. `guard_pipe`: a pipe that ends when the guard has ended. Throws system.
  Supervisor(const LaunchOptions& options, const std::vector<std::string>& command,
             const sigset_t& ranks_mask, const sigset_t& to_read, int guard_pipe);
  ~Supervisor();  ///< whatever happened: nothing is left behind
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  /// Runs the job until no process of it is left; returns its exit status (launcher.hpp).
  int run();

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
  const TorchVariables torch_{options_.ranks};
  Screen screen_;
  Sink out_{STDOUT_FILENO, screen_};
  Sink err_{STDERR_FILENO, screen_};
  std::vector<std::unique_ptr<RankProcess>> ranks_;
  std::vector<char> buffer_ = std::vector<char>(64 * 1024);  // not on the stack, which may be small
  std::size_t turn_ = 0;
  Stage stage_ = Stage::running;
  Deadline next_step_ = Deadline::never();
  Deadline job_ends_ = Deadline::never();
  Deadline judgement_ = Deadline::never();   // when the first failure is named
  Deadline early_look_ = Deadline::never();  // when to look whether ranks that have ended are missed
  std::vector<Failed> failed_;               // in the order in which they were found, until then
  std::optional<Clock::time_point> first_request_;
  int requested_ = 0;  // SIGINT or SIGTERM, once one was passed on
  bool ended_as_requested_ = false;
  bool guard_gone_ = false;
  bool abandoned_ = false;
  bool one_ended_well_ = false;
  bool in_doubt_ = false;  // all ended well, as it seems, but some rank says that its results may be wrong
  std::optional<int> first_failure_;  // of the ranks that the others have outlived
  std::optional<int> exit_;           // the first failure's, once there is one
};

}  // namespace weft::tools
