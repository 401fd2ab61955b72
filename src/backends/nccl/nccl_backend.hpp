// The transport over NCCL: calls on device memory, ordered on streams, without a hidden synchronisation.
#pragma once

#include <memory>

#include "backends/nccl/nccl_api.hpp"
#include "weft/backends/backend.hpp"

namespace weft::nccl {

/// Makes the backend on the calling thread's current device. Collective. Throws unsupported if `api` cannot
/// be used here, and timeout that names the missing ranks. `api` must outlive the backend.
std::unique_ptr<Backend> make_backend(const NcclApi& api, const GroupInit& init);

}  // namespace weft::nccl
