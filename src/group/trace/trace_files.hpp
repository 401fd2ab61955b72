// Keeps the recorders of a Context's groups, and writes them to files: WEFT_TRACE names a folder, and a
// thread writes there the calls of a group when it fails first, and those of all groups at every SIGUSR2.
#pragma once

#include <memory>
#include <string>

#include "group/trace/recorder.hpp"
#include "weft/host/context.hpp"

namespace weft {

/// Made by Context::attached. Thread-safe. Without WEFT_TRACE there is no thread, no file and no signal, and
/// the functions do nothing.
///
/// SIGUSR2 is taken only where WEFT_TRACE is set and nobody else has taken it, by one Context of the process,
/// and given back when that one goes.
class TraceFiles {
 public:
  explicit TraceFiles(Context& context);
  /// First writes the traces that were asked for, unless the disk takes more than two seconds.
  ~TraceFiles();
  TraceFiles(const TraceFiles&) = delete;
  TraceFiles& operator=(const TraceFiles&) = delete;

  /// `about`: group, id, rank, size, backend and process rank.
  std::shared_ptr<Recorder> open(Trace about);
  /// The group has ended: a signal writes it no more.
  void close(const std::shared_ptr<Recorder>& recorder) noexcept;
  /// Asks for a file. Does not wait.
  void write(const std::shared_ptr<Recorder>& recorder) noexcept;
  /// Waits, two seconds at most, until the files that were asked for are written: the program may end next.
  void written(const std::shared_ptr<Recorder>& recorder) noexcept;

 private:
  struct Writer;
  const std::string host_, boot_;
  std::shared_ptr<Writer> writer_;  // null: WEFT_TRACE is not set
};

}  // namespace weft
