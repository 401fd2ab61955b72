// The system's information about another process.
#pragma once

#include <sys/types.h>

namespace weft {

struct ProcessState {
  bool stopped = false;  ///< by a signal, or by a debugger
  bool dumping = false;  ///< it has died and writes its core, which may take seconds
};

/// Reads <proc>/<process>/status, in some 20 µs. All false if that cannot be read.
ProcessState process_state(pid_t process, const char* proc = "/proc") noexcept;

/// Whether the process has ended, or does nothing any more but write its core. Some 30 µs. False if the
/// system does not tell.
bool has_ended(pid_t process) noexcept;

}  // namespace weft
