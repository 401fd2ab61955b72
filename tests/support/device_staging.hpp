// Buffers of a call on a device: tests compute on the host's memory and have each call carried.
#pragma once

#include <functional>

#include "weft/backends/call.hpp"

namespace weft::nccl {
struct NcclApi;
}

namespace weft::test {

/// Copies a call's buffers to other memory and changes its views. The returned function copies `out` back,
/// once the call is done. The other memory is freed with it.
using DeviceStaging = std::function<std::function<void()>(Call&)>;

/// To memory of cudaMalloc on a device of `api`, which may be a stand-in's. For one rank only: not
/// thread-safe.
DeviceStaging stage_to_device(const nccl::NcclApi& api, int device = 0);

}  // namespace weft::test
