#include "host/cpu_device.hpp"

#include <cstring>

#include "host/strided/runs.hpp"

namespace weft {

void* CpuDevice::allocate(std::size_t bytes, Stream) { return memory_.allocate("storage", bytes); }

void CpuDevice::release(void* memory, std::size_t bytes, Stream) noexcept { memory_.release(memory, bytes); }

void CpuDevice::copy(const void* from, Device, void* to, Device, const Rows& rows, Stream) {
  if (rows.bytes == 0) return;
  const auto run = static_cast<std::int64_t>(rows.bytes);
  copy_runs_of(run)(static_cast<const std::byte*>(from), static_cast<std::byte*>(to), rows.count,
                    static_cast<std::int64_t>(rows.from_pitch), static_cast<std::int64_t>(rows.to_pitch),
                    run);
}

void CpuDevice::fill(void* to, unsigned char value, const Rows& rows, Stream) {
  if (rows.bytes == 0) return;
  auto* target = static_cast<std::byte*>(to);
  for (std::int64_t i = 0; i < rows.count; ++i, target += rows.to_pitch)
    std::memset(target, value, rows.bytes);
}

}  // namespace weft
