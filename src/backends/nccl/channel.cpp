#include "backends/nccl/channel.hpp"

#include <fmt/format.h>

#include "weft/base/error.hpp"

namespace weft::nccl {

void Driver::check(const char* what, Result r, Comm* comm) const {
  if (r == Result::success || r == Result::in_progress) return;
  const char* const last = api.ncclGetLastError(comm);
  // If NCCL reports a remote error, a peer's process or its network is gone; NCCL does not report which peer.
  throw Error(r == Result::remote_error ? ErrorCode::peer_lost : ErrorCode::system,
              fmt::format("{}: {}{}", what, api.ncclGetErrorString(r),
                          last != nullptr && *last ? fmt::format(" ({})", last) : ""));
}

void Driver::check(const char* what, CudaResult r) const {
  if (r != CudaResult::success)
    throw Error(ErrorCode::system, fmt::format("{}: {}", what, api.cudaGetErrorString(r)));
}

DeviceScope::DeviceScope(const Driver& driver) : driver_(driver) {
  driver.check("cudaGetDevice", driver.api.cudaGetDevice(&before_));
  if (before_ != driver.device) driver.check("cudaSetDevice", driver.api.cudaSetDevice(driver.device));
  driver.check("cudaThreadExchangeStreamCaptureMode", driver.api.cudaThreadExchangeStreamCaptureMode(&mode_));
}

DeviceScope::~DeviceScope() {
  driver_.api.cudaThreadExchangeStreamCaptureMode(&mode_);
  if (before_ != driver_.device) driver_.api.cudaSetDevice(before_);
}

EventPool::~EventPool() {
  for (const Event e : all_) driver_.api.cudaEventDestroy(e);
}

Event EventPool::take() {
  if (!free_.empty()) {
    const Event e = free_.back();
    free_.pop_back();
    return e;
  }
  Event e = nullptr;
  driver_.check("cudaEventCreateWithFlags", driver_.api.cudaEventCreateWithFlags(&e, kEventDisableTiming));
  all_.push_back(e);
  free_.reserve(all_.size());  // so that give_back() does not allocate
  return e;
}

void EventPool::give_back(Event& event) noexcept {
  if (event != nullptr) free_.push_back(event);
  event = nullptr;
}

Channel::Channel(const Driver& driver, EventPool& events, int rank, int size, std::byte* word)
    : driver_(driver), events_(events), rank_(rank), size_(size), word_(word) {
  driver_.check("cudaStreamCreateWithFlags",
                driver_.api.cudaStreamCreateWithFlags(&stream_, kStreamNonBlocking));
}

Channel::~Channel() {
  if (comm_ != nullptr) driver_.api.ncclCommAbort(comm_);
  driver_.api.cudaStreamDestroy(stream_);
}

void Channel::connect(const UniqueId& id) {
  Config config;
  config.blocking = 0;
  driver_.check("ncclCommInitRankConfig",
                driver_.api.ncclCommInitRankConfig(&comm_, size_, id, rank_, &config));
  busy_ = true;
}

void Channel::check_health() const {
  Result found = Result::success;
  driver_.check("ncclCommGetAsyncError", driver_.api.ncclCommGetAsyncError(comm_, &found), comm_);
  driver_.check("NCCL", found, comm_);
}

bool Channel::advance(std::uint64_t open_batch) {
  if (comm_ == nullptr) return false;
  bool moved = false;
  for (;;) {
    if (busy_) {
      Result found = Result::success;
      driver_.check("ncclCommGetAsyncError", driver_.api.ncclCommGetAsyncError(comm_, &found), comm_);
      driver_.check(launching_.empty() ? "ncclCommInitRankConfig" : "ncclGroupEnd", found, comm_);
      if (found == Result::in_progress) return moved;
      busy_ = false;
      moved = true;
      for (OpState* const s : launching_) {
        Ticket& t = ticket(*s);
        t.done = events_.take();
        driver_.check("cudaEventRecord", driver_.api.cudaEventRecord(t.done, stream_));
        t.stage = Stage::running;
      }
      launching_.clear();
    }
    if (queue_.empty()) return moved;
    if (open_batch != 0 && ticket(*queue_.front()).batch == open_batch) return moved;
    start();
    moved = true;
  }
}

// Starts the next call, or the next batch of calls.
void Channel::start() {
  const std::uint64_t batch = ticket(*queue_.front()).batch;
  do {
    OpState& s = *queue_.front();
    Ticket& t = ticket(s);
    driver_.check("cudaStreamWaitEvent", driver_.api.cudaStreamWaitEvent(stream_, t.ready, 0));
    t.stage = Stage::launching;
    launching_.push_back(&s);
    queue_.pop_front();
  } while (batch != 0 && !queue_.empty() && ticket(*queue_.front()).batch == batch);
  busy_ = true;
  driver_.check("ncclGroupStart", driver_.api.ncclGroupStart());
  try {
    for (const OpState* const s : launching_) enqueue(*s);
  } catch (...) {
    driver_.api.ncclGroupEnd();  // its result is ignored, because the first error counts
    throw;
  }
  driver_.check("ncclGroupEnd", driver_.api.ncclGroupEnd(), comm_);
}

}  // namespace weft::nccl
