// Keeps the recorders of a Context's groups, and writes them to files. WEFT_TRACE names a folder. A thread
// writes files there: the calls of a group when that group fails, and the calls of all groups at every
// SIGUSR2.
#pragma once

#include <memory>
#include <string>

#include "group/trace/recorder.hpp"
#include "weft/host/context.hpp"

namespace weft {

/// Context::attached makes it. Thread-safe. Without WEFT_TRACE there is no thread, no file and no signal
/// handler, and the functions do nothing.
///
/// If WEFT_TRACE is set and SIGUSR2 has no other handler, one Context of the process installs a handler for
/// it, and removes the handler at its end.
class TraceFiles {
 public:
  explicit TraceFiles(Context& context);
  /// Writes the requested traces, but waits for the disk at most two seconds.
  ~TraceFiles();
  TraceFiles(const TraceFiles&) = delete;
  TraceFiles& operator=(const TraceFiles&) = delete;

  /// `about`: group, id, rank, size, backend and process rank.
  std::shared_ptr<Recorder> open(Trace about);
  /// Call it when the group has ended. After that a signal does not write its trace any more.
  void close(const std::shared_ptr<Recorder>& recorder) noexcept;
  /// Requests a file with the group's calls. Does not wait.
  void write(const std::shared_ptr<Recorder>& recorder) noexcept;
  /// Waits, two seconds at most, until the requested files are written, because the program may end next.
  void written(const std::shared_ptr<Recorder>& recorder) noexcept;

 private:
  struct Writer;
  const std::string host_, boot_;
  std::shared_ptr<Writer> writer_;  // null: WEFT_TRACE is not set
};

}  // namespace weft
