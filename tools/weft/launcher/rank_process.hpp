// One rank of a job: its process, and the pipes of its output.
#pragma once

#include <sched.h>

#include <array>
#include <csignal>
#include <memory>
#include <string>
#include <vector>

#include "output.hpp"
#include "processes.hpp"

namespace weft::tools {

/// One output of a rank on its way to our output.
struct RankStream {
  RankStream(std::string tag, bool shows_bars, Sink& sink) : lines(std::move(tag), shows_bars, sink) {}
  bool open() const { return pipe.read_end >= 0; }
  /// The remaining text is a line, and the pipe is closed.
  void end();

  Pipe pipe;
  LineCutter lines;
};

struct RankProcess {
  int number = 0;
  pid_t pid = -1;
  bool running = false;
  bool blames_others = false;                          // its group failed because of other ranks, it says
  bool in_doubt = false;                               // its results may be wrong, it says
  bool ended_well = false;                             // it has returned 0
  std::array<std::unique_ptr<RankStream>, 2> streams;  // standard output and error
};

/// How a rank's program is started.
struct RankStart {
  std::vector<std::string> command;      // looked up in PATH
  std::vector<std::string> environment;  // all of it: "NAME=value"
  sigset_t mask;                         // of signals
  const cpu_set_t* cores = nullptr;      // null: the cores of this process
  bool reads = false;                    // it gets our standard input; otherwise none
};

/// Starts the process of `rank` as the leader of its own process group; the kernel kills it when this process
/// ends. Its streams must exist already. Returns 0, or the errno of the step that failed. Throws system.
int start(RankProcess& rank, RankStart how);

/// The cores of one rank: an equal share of `usable` if there are enough, otherwise one of them in turn.
cpu_set_t share_of_cores(const cpu_set_t& usable, int rank, int ranks);

}  // namespace weft::tools
