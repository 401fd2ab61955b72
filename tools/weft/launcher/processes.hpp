// Queries of the launcher to the system about processes, and how it ends them.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace weft::tools {

/// A line of the launcher's own, on standard error, at once.
void say(std::string_view text);

/// "exited with code 3" or "killed by signal 9 (SIGKILL)".
std::string how_it_ended(int status);
/// Whether a rank that ended so failed by itself. SIGABRT, SIGPIPE and what asks a process to end may be the
/// consequence of another's failure, and so may any exit code.
bool cannot_be_a_consequence(int status);
/// As a shell has it: 128 + the signal that ended it.
int exit_status(int status);

/// The children of this process, of all its threads. If the kernel has no file `children`, all processes
/// are looked through.
std::vector<pid_t> own_children();
/// The value of a variable as a process was started with it.
std::optional<std::string> variable_of(pid_t process, std::string_view name);
/// Whether a process has a handler for that signal. False, too, for a program that does not use weft: the
/// signal would end it.
bool catches(pid_t process, int number);
/// Whether a signal or a debugger has stopped the process. False if the system does not tell.
bool is_stopped(pid_t process);

/// Kills all children, and as a sub-reaper thereby gets their children, until there are none.
void kill_all_descendants();

/// Two ends of a pipe, closed by exec and by the destructor.
struct Pipe {
  int read_end = -1;
  int write_end = -1;

  /// Throws system.
  Pipe();
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  ~Pipe();
  static void close(int& end);
};

}  // namespace weft::tools
