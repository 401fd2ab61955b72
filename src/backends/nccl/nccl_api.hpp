// The functions of NCCL and of the CUDA runtime that weft uses, as a table of pointers. weft finds them at
// run time, so that it builds even if neither library is present. In tests a stand-in provides them.
//
// The declarations are weft's own. They describe the binary interface of NCCL 2.18 and CUDA 11, which later
// versions keep. header_check.cpp compares them with the real headers if these are present.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

namespace weft::nccl {

struct Comm;       // ncclComm
struct UniqueId {  // ncclUniqueId
  char bytes[128];
};
enum class Result : int {  // ncclResult_t
  success = 0,
  unhandled_cuda_error = 1,
  system_error = 2,
  internal_error = 3,
  invalid_argument = 4,
  invalid_usage = 5,
  remote_error = 6,
  in_progress = 7,
};
enum class DataType : int {  // ncclDataType_t
  i8 = 0,
  u8 = 1,
  i32 = 2,
  u32 = 3,
  i64 = 4,
  u64 = 5,
  f16 = 6,
  f32 = 7,
  f64 = 8,
  bf16 = 9,
};
enum class RedOp : int {  // ncclRedOp_t; custom operations have larger numbers
  sum = 0,
  prod = 1,
  max = 2,
  min = 3,
  avg = 4,
};
enum class Residence : int { device = 0, host_immediate = 1 };  // ncclScalarResidence_t

/// ncclConfig_t as of 2.18. Later versions have more fields, and accept this struct because of its `size` and
/// `version`.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21800;
  int blocking = INT_MIN;  // INT_MIN: NCCL's default
  int cga_cluster_size = INT_MIN;
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
};

struct StreamTag;  // CUstream_st
struct EventTag;   // CUevent_st
using CudaStream = StreamTag*;
using Event = EventTag*;
enum class CudaResult : int {  // cudaError_t
  success = 0,
  insufficient_driver = 35,
  no_device = 100,
  invalid_resource_handle = 400,  // not a stream, or a stream of another device
  not_ready = 600,
};
enum class CaptureStatus : int { none = 0, active = 1, invalidated = 2 };     // cudaStreamCaptureStatus
enum class CaptureMode : int { global = 0, thread_local_ = 1, relaxed = 2 };  // cudaStreamCaptureMode
inline constexpr unsigned kEventDisableTiming = 2, kStreamNonBlocking = 1;
enum class CopyKind : int { device_to_device = 3, by_address = 4 };  // cudaMemcpyKind

// The columns are: name, result, arguments. No function of the table waits for a stream or a device. A test
// checks this rule.
#define WEFT_NCCL_FUNCTIONS(X)                                                                              \
  X(ncclGetVersion, Result, int* version)                                                                   \
  X(ncclGetUniqueId, Result, UniqueId* id)                                                                  \
  X(ncclGetErrorString, const char*, Result result)                                                         \
  X(ncclGetLastError, const char*, Comm* comm)                                                              \
  X(ncclCommInitRankConfig, Result, Comm** comm, int size, UniqueId id, int rank, Config* config)           \
  X(ncclCommGetAsyncError, Result, Comm* comm, Result* error)                                               \
  X(ncclCommFinalize, Result, Comm* comm)                                                                   \
  X(ncclCommDestroy, Result, Comm* comm)                                                                    \
  X(ncclCommAbort, Result, Comm* comm)                                                                      \
  X(ncclGroupStart, Result, void)                                                                           \
  X(ncclGroupEnd, Result, void)                                                                             \
  X(ncclAllReduce, Result, const void* in, void* out, std::size_t count, DataType type, RedOp op,           \
    Comm* comm, CudaStream stream)                                                                          \
  X(ncclReduce, Result, const void* in, void* out, std::size_t count, DataType type, RedOp op, int root,    \
    Comm* comm, CudaStream stream)                                                                          \
  X(ncclBroadcast, Result, const void* in, void* out, std::size_t count, DataType type, int root,           \
    Comm* comm, CudaStream stream)                                                                          \
  X(ncclAllGather, Result, const void* in, void* out, std::size_t in_count, DataType type, Comm* comm,      \
    CudaStream stream)                                                                                      \
  X(ncclReduceScatter, Result, const void* in, void* out, std::size_t out_count, DataType type, RedOp op,   \
    Comm* comm, CudaStream stream)                                                                          \
  X(ncclSend, Result, const void* in, std::size_t count, DataType type, int peer, Comm* comm,               \
    CudaStream stream)                                                                                      \
  X(ncclRecv, Result, void* out, std::size_t count, DataType type, int peer, Comm* comm, CudaStream stream) \
  X(ncclRedOpCreatePreMulSum, Result, RedOp* op, void* scalar, DataType type, Residence residence,          \
    Comm* comm)                                                                                             \
  X(ncclRedOpDestroy, Result, RedOp op, Comm* comm)

#define WEFT_CUDA_FUNCTIONS(X)                                                                 \
  X(cudaGetErrorString, const char*, CudaResult result)                                        \
  X(cudaGetDeviceCount, CudaResult, int* count)                                                \
  X(cudaGetDevice, CudaResult, int* device)                                                    \
  X(cudaSetDevice, CudaResult, int device)                                                     \
  X(cudaStreamCreateWithFlags, CudaResult, CudaStream* stream, unsigned flags)                 \
  X(cudaStreamDestroy, CudaResult, CudaStream stream)                                          \
  X(cudaStreamQuery, CudaResult, CudaStream stream)                                            \
  X(cudaStreamWaitEvent, CudaResult, CudaStream stream, Event event, unsigned flags)           \
  X(cudaStreamIsCapturing, CudaResult, CudaStream stream, CaptureStatus* status)               \
  X(cudaThreadExchangeStreamCaptureMode, CudaResult, CaptureMode* mode)                        \
  X(cudaEventCreateWithFlags, CudaResult, Event* event, unsigned flags)                        \
  X(cudaEventRecord, CudaResult, Event event, CudaStream stream)                               \
  X(cudaEventQuery, CudaResult, Event event)                                                   \
  X(cudaEventDestroy, CudaResult, Event event)                                                 \
  X(cudaMemcpyAsync, CudaResult, void* to, const void* from, std::size_t bytes, CopyKind kind, \
    CudaStream stream)                                                                         \
  X(cudaMalloc, CudaResult, void** data, std::size_t bytes)                                    \
  X(cudaFree, CudaResult, void* data)

struct NcclApi {
#define WEFT_MEMBER(name, result, ...) result (*name)(__VA_ARGS__) = nullptr;
  WEFT_NCCL_FUNCTIONS(WEFT_MEMBER)
  WEFT_CUDA_FUNCTIONS(WEFT_MEMBER)
#undef WEFT_MEMBER
};

/// The table of this system's libraries, or the reason why it cannot be filled.
struct LoadedApi {
  NcclApi api;
  std::string problem;  ///< empty: `api` is complete
};
/// Uses from each list the first library that the process has already loaded, or otherwise the first library
/// that can be loaded. The libraries stay loaded.
LoadedApi load_api(std::initializer_list<const char*> nccl = {"libnccl.so.2"},
                   std::initializer_list<const char*> cudart = {"libcudart.so.13", "libcudart.so.12",
                                                                "libcudart.so.11.0"});
/// The table is loaded at the first call and kept.
const LoadedApi& loaded_api();

/// Returns the reason why groups cannot be made with this table: NCCL is too old, or there is no device.
/// Returns "" if groups can be made.
std::string obstacle(const NcclApi& api);
/// "NCCL 2.20.5".
std::string version_text(const NcclApi& api);

}  // namespace weft::nccl
