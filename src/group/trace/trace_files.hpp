// Keeps the recorders of a Context's groups, and writes them to files. WEFT_TRACE names a folder; a thread
// writes there the calls of a group when the group fails first, and the calls of all groups at every SIGUSR2.
#pragma once

#include <memory>
#include <string>

#include "group/trace/recorder.hpp"
#include "weft/host/context.hpp"

namespace weft {

/// Context::attached makes it. Thread-safe. Without WEFT_TRACE there is no thread, no file and no signal
/// handler, and the functions do nothing.
///
/// One Context of the process installs a handler for SIGUSR2, only if WEFT_TRACE is set and nobody else has
/// installed one; it removes the handler at its end.
class TraceFiles {
 public:
  explicit TraceFiles(Context& context);
  /// First writes the requested traces, unless the disk takes more than two seconds.
  ~TraceFiles();
  TraceFiles(const TraceFiles&) = delete;
  TraceFiles& operator=(const TraceFiles&) = delete;

  /// `about`: group, id, rank, size, backend and process rank.
  std::shared_ptr<Recorder> open(Trace about);
  /// To be called when the group has ended: a signal does not write its trace any more.
  void close(const std::shared_ptr<Recorder>& recorder) noexcept;
  /// Asks for a file. Does not wait.
  void write(const std::shared_ptr<Recorder>& recorder) noexcept;
  /// Waits, two seconds at most, until the requested files are written, because the program may end next.
  void written(const std::shared_ptr<Recorder>& recorder) noexcept;

 private:
  struct Writer;
  const std::string host_, boot_;
  std::shared_ptr<Writer> writer_;  // null: WEFT_TRACE is not set
};

}  // namespace weft
