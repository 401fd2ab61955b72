#include "rank_process.hpp"

#include <fcntl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>

namespace weft::tools {
namespace {

constexpr int kNoExec = 127;  // nobody sees it: the pipe `failure` reports more

}  // namespace

void RankStream::end() {
  if (!open()) return;
  lines.finish();
  Pipe::close(pipe.read_end);
}

// Everything that the child needs is made before fork: the child is a copy of a process with threads.
int start(RankProcess& rank, RankStart how) {
  std::vector<char*> argv;
  std::vector<char*> envp;
  for (auto& word : how.command) argv.push_back(word.data());
  for (auto& variable : how.environment) envp.push_back(variable.data());
  argv.push_back(nullptr);
  envp.push_back(nullptr);
  Pipe failure;  // closed by a good exec, otherwise receives errno
  const pid_t supervisor = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) return errno;
  if (pid == 0) {
    ::setpgid(0, 0);
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != supervisor) ::_exit(1);  // it died before the line above
    if (!how.reads) {
      const int null = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
      if (null >= 0) ::dup2(null, STDIN_FILENO);
    }
    if (::dup2(rank.streams[0]->pipe.write_end, STDOUT_FILENO) >= 0 &&
        ::dup2(rank.streams[1]->pipe.write_end, STDERR_FILENO) >= 0 &&
        (how.cores == nullptr || ::sched_setaffinity(0, sizeof *how.cores, how.cores) == 0)) {
      for (const int number : {SIGPIPE, SIGXFSZ}) ::signal(number, SIG_DFL);
      ::sigprocmask(SIG_SETMASK, &how.mask, nullptr);
      ::execvpe(argv[0], argv.data(), envp.data());
    }
    const int error_number = errno;
    [[maybe_unused]] const auto written = ::write(failure.write_end, &error_number, sizeof error_number);
    ::_exit(kNoExec);
  }
  // the parent or the child, whichever is first; the child may have done so and be beyond exec.
  ::setpgid(pid, pid);
  rank.pid = pid;
  rank.running = true;
  for (auto& stream : rank.streams) Pipe::close(stream->pipe.write_end);
  Pipe::close(failure.write_end);
  int error_number = 0;
  ssize_t got = 0;
  do {
    got = ::read(failure.read_end, &error_number, sizeof error_number);
  } while (got < 0 && errno == EINTR);
  return got == sizeof error_number ? error_number : 0;
}

cpu_set_t share_of_cores(const cpu_set_t& usable, int rank, int ranks) {
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &usable)) cores.push_back(core);
  }
  const int count = static_cast<int>(cores.size());
  const int first = ranks <= count ? rank * count / ranks : rank % count;
  const int last = ranks <= count ? (rank + 1) * count / ranks : first + 1;
  cpu_set_t share;
  CPU_ZERO(&share);
  for (int i = first; i < last; ++i) CPU_SET(cores[i], &share);
  return share;
}

}  // namespace weft::tools
