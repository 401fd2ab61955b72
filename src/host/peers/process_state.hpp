// The state of another process, as the system reports it.
#pragma once

#include <sys/types.h>

namespace weft {

struct ProcessState {
  bool stopped = false;  ///< stopped by a signal, or by a debugger
  bool dumping = false;  ///< the process has died and writes its core dump, which may take seconds
};

/// Reads <proc>/<process>/status, in some 20 µs. All fields are false if that file cannot be read.
ProcessState process_state(pid_t process, const char* proc = "/proc") noexcept;

/// Returns whether the process has ended, or only writes its core dump. Takes some 30 µs. Returns false if
/// the system does not report its state.
bool has_ended(pid_t process) noexcept;

}  // namespace weft
