#include "backends/nccl/endings.hpp"

#include <algorithm>
#include <thread>

namespace weft::nccl {

void begin_thread(const Driver& driver) noexcept {
  driver.api.cudaSetDevice(driver.device);
  CaptureMode mode = CaptureMode::relaxed;  // see DeviceScope
  driver.api.cudaThreadExchangeStreamCaptureMode(&mode);
}

bool Parting::until(Deadline limit) noexcept {
  const NcclApi& api = driver.api;
  Clock::time_point looked{};
  bool failed = false;
  for (Duration nap = kNap;; nap = std::min<Duration>(2 * nap, kLookAtStore)) {
    std::erase_if(comms, [&](Comm* comm) {
      Result state = Result::in_progress;
      if (api.ncclCommGetAsyncError(comm, &state) == Result::success && state == Result::in_progress &&
          !failed)
        return false;
      if (state == Result::success) {
        api.ncclCommDestroy(comm);
      } else {
        api.ncclCommAbort(comm);
      }
      return true;
    });
    if (comms.empty()) return true;
    if (limit.passed()) return false;
    if (Clock::now() - looked > kLookAtStore) {
      failed = first_cause.look().has_value();
      looked = Clock::now();
    }
    std::this_thread::sleep_for(nap);
  }
}

void Abortion::run(const std::shared_ptr<Abortion>& a) noexcept {
  const NcclApi& api = a->driver.api;
  begin_thread(a->driver);
  for (Comm* const comm : a->comms) api.ncclCommAbort(comm);
  for (const CudaStream stream : a->streams)
    while (api.cudaStreamQuery(stream) == CudaResult::not_ready) std::this_thread::sleep_for(kNap);
  a->over.store(true, std::memory_order_release);
}

}  // namespace weft::nccl
