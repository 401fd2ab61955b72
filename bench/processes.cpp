#include "processes.hpp"

#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <vector>

#include "weft/base/error.hpp"
#include "weft/base/log.hpp"
#include "weft/store/tcp.hpp"

namespace weft::bench {

void bind_to_cores(int rank, int ranks, Bind bind) {
  cpu_set_t usable, mine;
  CPU_ZERO(&usable);
  CPU_ZERO(&mine);
  if (bind == Bind::none || sched_getaffinity(0, sizeof usable, &usable) != 0 || CPU_COUNT(&usable) < ranks)
    return;
  const int each = bind == Bind::share ? CPU_COUNT(&usable) / ranks : 1;
  for (int core = 0, index = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &usable)) continue;
    if (index++ / each == rank) CPU_SET(core, &mine);
  }
  sched_setaffinity(0, sizeof mine, &mine);
}

// The parent serves the store. It may make threads only after the last fork, so it sends the port to the
// children through a pipe.
int run_processes(int n, const std::function<void(int, std::shared_ptr<Store>)>& body) {
  std::vector<pid_t> children;
  std::vector<int> to_child;
  for (int r = 0; r < n; ++r) {
    int ends[2];
    if (pipe(ends) != 0) throw_errno("bench: pipe", errno);
    const pid_t pid = fork();
    if (pid < 0) throw_errno("bench: fork", errno);
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      int code = 1;
      try {
        std::uint16_t port = 0;
        if (read(ends[0], &port, sizeof port) == sizeof port) {
          body(r, make_tcp_store("127.0.0.1", port, Deadline::after(std::chrono::seconds(10))));
          code = 0;
        }
      } catch (const std::exception& e) {
        std::fprintf(stderr, "rank %d: %s\n", r, e.what());
      }
      std::fflush(nullptr);
      _exit(code);
    }
    close(ends[0]);
    children.push_back(pid);
    to_child.push_back(ends[1]);
  }
  Logger log;
  TcpStoreServer server(log);
  const std::uint16_t port = server.port();
  for (const int fd : to_child) {
    if (write(fd, &port, sizeof port) != sizeof port) std::fprintf(stderr, "bench: a rank ended early\n");
    close(fd);
  }
  int failed = 0;
  for (int left = n; left > 0; --left) {
    int status = 0;
    const pid_t ended = waitpid(-1, &status, 0);
    if (ended < 0) throw_errno("bench: waitpid", errno);
    std::erase(children, ended);
    if (status != 0 && failed++ == 0)
      for (const pid_t other : children) kill(other, SIGKILL);
  }
  return failed == 0 ? 0 : 1;
}

}  // namespace weft::bench
