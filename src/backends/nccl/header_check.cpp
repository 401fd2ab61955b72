// Compiled if NCCL's and CUDA's headers are present: checks that the declarations of nccl_api.hpp match them.
#include <cuda_runtime_api.h>

#include <type_traits>

#include "backends/nccl/nccl_api.hpp"

namespace weft::nccl {
namespace {

// Returns whether two types are equal in the binary interface. They are equal if both are pointers, both are
// integers or enums of one size, or both are structures of one size and alignment.
template <class Ours, class Theirs>
constexpr bool same_value() {
  if constexpr (std::is_pointer_v<Ours> || std::is_pointer_v<Theirs>)
    return std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>;
  else if constexpr (std::is_void_v<Ours>)
    return std::is_void_v<Theirs>;
  else
    return sizeof(Ours) == sizeof(Theirs) && alignof(Ours) == alignof(Theirs) &&
           std::is_class_v<Ours> == std::is_class_v<Theirs>;
}
template <class Ours, class Theirs>
struct Same : std::false_type {};
template <class R1, class... A1, class R2, class... A2>
struct Same<R1 (*)(A1...), R2 (*)(A2...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(A1) == sizeof...(A2))
      return same_value<R1, R2>() && (same_value<A1, A2>() && ...);
    else
      return false;
  }();
};
#define WEFT_SAME(name, ...) \
  static_assert(Same<decltype(NcclApi::name), decltype(&::name)>::value, #name " is declared otherwise");
WEFT_CUDA_FUNCTIONS(WEFT_SAME)

}  // namespace
}  // namespace weft::nccl

// Included here, because it includes cuda_runtime.h, which overloads some of the functions above.
#include <nccl.h>

namespace weft::nccl {
namespace {

WEFT_NCCL_FUNCTIONS(WEFT_SAME)
#undef WEFT_SAME

template <class Ours, class Theirs>
constexpr bool equal(Ours ours, Theirs theirs) {
  return static_cast<long long>(ours) == static_cast<long long>(theirs);
}
static_assert(equal(Result::success, ncclSuccess) && equal(Result::in_progress, ncclInProgress) &&
              equal(Result::unhandled_cuda_error, ncclUnhandledCudaError) &&
              equal(Result::system_error, ncclSystemError) &&
              equal(Result::internal_error, ncclInternalError) &&
              equal(Result::invalid_argument, ncclInvalidArgument) &&
              equal(Result::invalid_usage, ncclInvalidUsage) && equal(Result::remote_error, ncclRemoteError));
static_assert(equal(DataType::i8, ncclInt8) && equal(DataType::u8, ncclUint8) &&
              equal(DataType::i32, ncclInt32) && equal(DataType::u32, ncclUint32) &&
              equal(DataType::i64, ncclInt64) && equal(DataType::u64, ncclUint64) &&
              equal(DataType::f16, ncclFloat16) && equal(DataType::f32, ncclFloat32) &&
              equal(DataType::f64, ncclFloat64) && equal(DataType::bf16, ncclBfloat16));
static_assert(equal(RedOp::sum, ncclSum) && equal(RedOp::prod, ncclProd) && equal(RedOp::max, ncclMax) &&
              equal(RedOp::min, ncclMin) && equal(RedOp::avg, ncclAvg));
static_assert(equal(Residence::device, ncclScalarDevice) &&
              equal(Residence::host_immediate, ncclScalarHostImmediate));
static_assert(equal(CudaResult::success, cudaSuccess) && equal(CudaResult::not_ready, cudaErrorNotReady) &&
              equal(CudaResult::insufficient_driver, cudaErrorInsufficientDriver) &&
              equal(CudaResult::no_device, cudaErrorNoDevice) &&
              equal(CudaResult::invalid_resource_handle, cudaErrorInvalidResourceHandle) &&
              equal(CaptureStatus::none, cudaStreamCaptureStatusNone) &&
              equal(CaptureStatus::active, cudaStreamCaptureStatusActive) &&
              equal(CaptureStatus::invalidated, cudaStreamCaptureStatusInvalidated) &&
              equal(CaptureMode::global, cudaStreamCaptureModeGlobal) &&
              equal(CaptureMode::thread_local_, cudaStreamCaptureModeThreadLocal) &&
              equal(CaptureMode::relaxed, cudaStreamCaptureModeRelaxed) &&
              equal(CopyKind::device_to_device, cudaMemcpyDeviceToDevice) &&
              equal(CopyKind::by_address, cudaMemcpyDefault) &&
              equal(kEventDisableTiming, cudaEventDisableTiming) &&
              equal(kStreamNonBlocking, cudaStreamNonBlocking));

// Config has the first fields of the header's struct, with the values of its initializer.
static_assert(sizeof(Config) <= sizeof(ncclConfig_t));
static_assert(offsetof(Config, size) == offsetof(ncclConfig_t, size) &&
              offsetof(Config, magic) == offsetof(ncclConfig_t, magic) &&
              offsetof(Config, version) == offsetof(ncclConfig_t, version) &&
              offsetof(Config, blocking) == offsetof(ncclConfig_t, blocking) &&
              offsetof(Config, cga_cluster_size) == offsetof(ncclConfig_t, cgaClusterSize) &&
              offsetof(Config, min_ctas) == offsetof(ncclConfig_t, minCTAs) &&
              offsetof(Config, max_ctas) == offsetof(ncclConfig_t, maxCTAs) &&
              offsetof(Config, net_name) == offsetof(ncclConfig_t, netName) &&
              offsetof(Config, split_share) == offsetof(ncclConfig_t, splitShare));
constexpr ncclConfig_t kTheirs = NCCL_CONFIG_INITIALIZER;
static_assert(Config{}.magic == kTheirs.magic && Config{}.blocking == kTheirs.blocking &&
              NCCL_VERSION(2, 18, 0) == Config{}.version && sizeof(UniqueId) == NCCL_UNIQUE_ID_BYTES);

}  // namespace
}  // namespace weft::nccl
