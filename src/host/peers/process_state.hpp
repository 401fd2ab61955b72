// The system's information about another process.
#pragma once

#include <sys/types.h>

namespace weft {

struct ProcessState {
  bool stopped = false;  ///< by a signal, or by a debugger
  bool dumping = false;  ///< it has died and writes its core, which may take seconds
};

/// Reads <proc>/<process>/status, in some 20 µs. All fields are false if that file cannot be read.
ProcessState process_state(pid_t process, const char* proc = "/proc") noexcept;

/// Returns whether the process has ended, or only writes its core. Takes some 30 µs. Returns false if the
/// system does not report it.
bool has_ended(pid_t process) noexcept;

}  // namespace weft
