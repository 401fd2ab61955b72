// The CPU as a device: the calling thread does all work at once.
#pragma once

#include "host/local_memory.hpp"
#include "weft/host/device_runtime.hpp"

namespace weft {

class CpuDevice final : public DeviceRuntime {
 public:
  explicit CpuDevice(LocalMemory& memory) : memory_(memory) {}
  Device device() const noexcept override { return {}; }
  void* allocate(std::size_t bytes, Stream stream) override;
  void release(void* memory, std::size_t bytes, Stream stream) noexcept override;
  void copy(const void* from, Device from_device, void* to, Device to_device, const Rows& rows,
            Stream stream) override;
  void fill(void* to, unsigned char value, const Rows& rows, Stream stream) override;
  Stream make_stream() override { return {}; }
  void destroy_stream(Stream) noexcept override {}
  void depend(Stream, Stream) override {}
  void wait(Stream) override {}

 private:
  LocalMemory& memory_;
};

}  // namespace weft
