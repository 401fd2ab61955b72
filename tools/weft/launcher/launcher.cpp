// How a job is started and ended. Three kinds of process:
//
//   guard        the process that called launch(). It forwards signals to the supervisor and waits for it.
//   supervisor   its child: serves the store, starts the ranks, passes on their output, ends the job.
//   ranks        the supervisor's children, each the leader of a process group of its own.
//
// There are two processes, because a single one could be killed with SIGKILL and then end nothing. The
// supervisor notices the guard's death by a pipe that only the guard holds open for writing, and ends the
// job. If the supervisor dies, the kernel kills the ranks (PR_SET_PDEATHSIG). Both processes are sub-reapers:
// processes that the ranks started and left behind become children of the supervisor or, after its death, of
// the guard, and are killed there, even if they left their process group.
#include "launcher.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>

#include "elastic.hpp"
#include "processes.hpp"
#include "supervisor.hpp"
#include "weft/base/error.hpp"

namespace weft::tools {
namespace {

constexpr int kForwarded[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

/// Opens descriptors 0, 1 and 2, so that none of ours gets their numbers.
void open_standard_descriptors() {
  for (int fd = 0; fd <= 2; ++fd) {
    if (::fcntl(fd, F_GETFD) < 0) [[maybe_unused]]
      const int opened = ::open("/dev/null", O_RDWR);
  }
}

/// The signals that guard and supervisor read instead of being killed by them. A signal that our caller
/// ignores (nohup) stays ignored.
sigset_t signals_to_read() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  for (const int number : kForwarded) {
    struct sigaction action {};
    if (::sigaction(number, nullptr, &action) == 0 && action.sa_handler != SIG_IGN) sigaddset(&set, number);
  }
  return set;
}

int supervise(const LaunchOptions& options, const std::vector<std::string>& command,
              const sigset_t& ranks_mask, const sigset_t& to_read, int guard_pipe) {
  try {
    const auto start = [&](const Start& how) {
      return Supervisor(options, how, command, ranks_mask, to_read, guard_pipe).run();
    };
    if (options.elastic) return run_elastic(options, start);
    return start({.ranks = options.ranks, .job_ends = job_end(options)}).status;
  } catch (const std::exception& e) {
    say(e.what());
    return 1;
  }
}

int guard(pid_t supervisor, const sigset_t& to_read) {
  for (;;) {
    siginfo_t info{};
    const int number = ::sigwaitinfo(&to_read, &info);
    if (number > 0 && number != SIGCHLD) ::kill(supervisor, number);
    int status = 0;
    if (number != SIGCHLD || ::waitpid(supervisor, &status, WNOHANG) != supervisor) continue;
    if (WIFSIGNALED(status)) {
      say(fmt::format("the supervisor (pid {}) was {}", supervisor, how_it_ended(status)));
    }
    kill_all_descendants();
    return exit_status(status);
  }
}

}  // namespace

int launch(const LaunchOptions& options, const std::vector<std::string>& command) {
  open_standard_descriptors();
  std::fflush(nullptr);
  ::signal(SIGCHLD, SIG_DFL);  // a caller that ignores it would have the kernel reap for us
  const sigset_t to_read = signals_to_read();
  sigset_t mask_before;
  ::sigprocmask(SIG_BLOCK, &to_read, &mask_before);
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  Pipe guard_alive;
  const pid_t pid = ::fork();
  if (pid < 0) throw_errno("weft run: fork", errno);
  if (pid == 0) {
    Pipe::close(guard_alive.write_end);
    ::setpgid(0, 0);  // a terminal's Ctrl-C goes to the guard alone, which forwards it
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
    const int code = supervise(options, command, mask_before, to_read, guard_alive.read_end);
    std::fflush(nullptr);
    ::_exit(code);
  }
  const int code = guard(pid, to_read);
  ::sigprocmask(SIG_SETMASK, &mask_before, nullptr);
  return code;
}

}  // namespace weft::tools
