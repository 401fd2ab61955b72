#include "group/trace/recorder.hpp"

#include <algorithm>

namespace weft {

Recorder::Recorder(Trace about) : about_(std::move(about)) {
  about_.began_monotonic_ns = scale_.began().time_since_epoch().count();
  about_.began_realtime_ns =
      std::chrono::duration_cast<Duration>(std::chrono::system_clock::now().time_since_epoch()).count();
}

void Recorder::failed(const Failure& why) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = Trace::Failed{why, scale_.nanoseconds(tick())};
  } catch (const std::exception&) {  // out of memory: the trace then contains only the calls
  }
}

Trace Recorder::read() const {
  Trace t = about_;
  {
    const std::lock_guard lock(mutex_);
    t.failure = failure_;
  }
  const std::uint64_t next = next_.load(std::memory_order_acquire), n = std::min(next, kEntries);
  t.forgotten = next - n;
  for (std::uint64_t k = 0; k < n; ++k) {
    const Entry& e = entries_[(next - n + k) % kEntries];
    const CallWord word(e.word.load(std::memory_order_relaxed));
    const std::uint64_t finished = e.finished.load(std::memory_order_relaxed);
    t.calls.push_back({.op = word.op(),
                       .call = e.call.load(std::memory_order_relaxed),
                       .dtype = word.dtype(),
                       .count = e.count.load(std::memory_order_relaxed),
                       .reduce = word.reduce(),
                       .peer = word.rank(),
                       .posted_ns = scale_.nanoseconds(e.posted.load(std::memory_order_relaxed)),
                       .finished_ns = finished ? scale_.nanoseconds(finished) : 0,
                       .state = static_cast<TracedState>(word.note())});
  }
  t.taken_ns = scale_.nanoseconds(tick());
  return t;
}

}  // namespace weft
