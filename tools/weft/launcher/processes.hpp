// Queries of the launcher to the system about processes, and how it ends them.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace weft::tools {

/// Writes a line of the launcher's own to standard error, at once.
void say(std::string_view text);

/// "exited with code 3" or "killed by signal 9 (SIGKILL)".
std::string how_it_ended(int status);
/// Returns whether a rank that ended with this status failed by itself. SIGABRT, SIGPIPE and the signals that
/// ask a process to end may be the consequence of another rank's failure, and so may any exit code.
bool cannot_be_a_consequence(int status);
/// The status in the form of a shell: 128 + the signal that ended it.
int exit_status(int status);

/// The children of this process, of all its threads. If the kernel has no file `children`, it searches all
/// processes.
std::vector<pid_t> own_children();
/// The value that a variable had when a process was started.
std::optional<std::string> variable_of(pid_t process, std::string_view name);
/// Returns whether a process has a handler for that signal. Returns false, too, for a program that does not
/// use weft: the signal would end it.
bool catches(pid_t process, int number);
/// Returns whether a signal or a debugger has stopped the process. Returns false if the system does not
/// report it.
bool is_stopped(pid_t process);

/// Kills all children until there are none; as a sub-reaper this process thereby gets their children, too.
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
