// The end of functions of the program's, in C.
#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <thread>

#include "capi/call_out.hpp"
#include "capi/handles.hpp"

namespace weft::capi {
namespace {

// How many functions are running, in all threads. kNone once no more may begin. It is one number, so that a
// thread which enters sees the end, or the end sees the thread.
constexpr std::uint64_t kNone = std::uint64_t{1} << 63;
std::atomic<std::uint64_t> running{0};
thread_local std::uint64_t own = 0;  // how many of them this thread is inside of

// A child made by fork() has this thread alone.
const int in_children = pthread_atfork(
    nullptr, nullptr, [] { running.store((running.load() & kNone) + own, std::memory_order_relaxed); });

}  // namespace

CallOut::CallOut() noexcept : entered_((running.fetch_add(1) & kNone) == 0) {
  if (entered_)
    ++own;
  else
    running.fetch_sub(1);
}

CallOut::~CallOut() {
  if (!entered_) return;
  --own;
  running.fetch_sub(1);
}

}  // namespace weft::capi

namespace capi = weft::capi;

weft_status weft_callbacks_end(int64_t limit_ns, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft::Deadline deadline = weft::Deadline::after(capi::limit(function, limit_ns, "limit_ns"));
    capi::running.fetch_or(capi::kNone);
    for (;;) {
      const std::uint64_t others = (capi::running.load() & ~capi::kNone) - capi::own;
      if (others == 0) return;
      if (deadline.left() <= weft::Duration::zero())
        capi::refuse(weft::ErrorCode::timeout, function,
                     fmt::format("{} functions of the program's are still running after {} s", others,
                                 static_cast<double>(limit_ns) / 1e9));
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
}

weft_status weft_callbacks_begin(weft_error* error) {
  return capi::guarded(__func__, error, [] { capi::running.fetch_and(~capi::kNone); });
}
