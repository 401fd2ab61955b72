// Child processes for tests: ranks as processes, processes to kill or to stop. Fork before any Context is
// made in the parent, or while its threads have nothing to do; the child makes its own. Call from one thread
// of the test.
#pragma once

#include <sys/types.h>

#include <functional>
#include <optional>
#include <string>

#include "weft/base/clock.hpp"

namespace weft::test {

/// How a child ended.
struct ExitStatus {
  int code = -1;   ///< exit code; -1 where a signal ended it
  int signal = 0;  ///< the signal that ended it, or 0
  friend bool operator==(const ExitStatus&, const ExitStatus&) = default;
};
/// "exit code 1" or "signal 9 (Killed)".
std::string to_string(const ExitStatus& status);

/// A forked process. Destroying it kills (SIGKILL) and reaps what still runs.
class ChildProcess {
 public:
  /// Runs `body` in a child, which ends by _exit with what `body` returns: nothing of the parent's test
  /// framework runs there. The child exits with 1 if a gtest check failed in it or an exception left `body`
  /// (its text goes to stderr), and dies with the parent.
  static ChildProcess fork(const std::function<int()>& body);
  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&& other) noexcept;
  ~ChildProcess();

  pid_t pid() const noexcept { return pid_; }
  void kill(int signal);
  void stop();    ///< SIGSTOP; returns once it is stopped
  void resume();  ///< SIGCONT
  /// How it ended, or nothing if it still runs after `limit`. May be called again.
  std::optional<ExitStatus> wait(Duration limit);

 private:
  explicit ChildProcess(pid_t pid) : pid_(pid) {}
  pid_t pid_ = -1;
  std::optional<ExitStatus> ended_;
};

struct ProcessResult {
  ExitStatus status;
  bool timed_out = false;  ///< it was killed because the time was over
  bool ok() const noexcept { return !timed_out && status == ExitStatus{0, 0}; }
};
/// "exit code 1", or "killed after the time limit".
std::string to_string(const ProcessResult& result);

/// Runs `body` in a child and waits; kills it after `limit`.
ProcessResult run_in_child(const std::function<int()>& body, Duration limit = std::chrono::seconds(30));

/// Runs body(0) … body(count - 1) in a child each, at once; after `limit` kills those that still run. A gtest
/// failure, which names rank and end, for each child that did not end with 0. The bodies return nothing;
/// checks and exceptions report failures.
void run_in_children(int count, const std::function<void(int)>& body,
                     Duration limit = std::chrono::seconds(60));

/// A pipe of text lines between processes: made before fork, used on both sides.
class Pipe {
 public:
  Pipe();
  ~Pipe();
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  void write_line(const std::string& line);
  /// The next line; throws std::runtime_error after `limit`.
  std::string read_line(Duration limit = std::chrono::seconds(30));

 private:
  int ends_[2];
  std::string rest_;
};

/// Open descriptors of this process.
int count_descriptors();

}  // namespace weft::test
