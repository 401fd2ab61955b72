#include "support/device_staging.hpp"

#include <algorithm>
#include <bit>
#include <chrono>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "backends/nccl/nccl_api.hpp"

namespace weft::test {
namespace {

using namespace nccl;

void check(const NcclApi& api, CudaResult r, const char* what) {
  if (r != CudaResult::success)
    throw std::runtime_error(std::string(what) + ": " + api.cudaGetErrorString(r));
}

// Copies and waits: for tests alone.
void copy(const NcclApi& api, void* to, const void* from, std::size_t bytes) {
  CudaStream stream = nullptr;
  check(api, api.cudaStreamCreateWithFlags(&stream, kStreamNonBlocking), "cudaStreamCreateWithFlags");
  check(api, api.cudaMemcpyAsync(to, from, bytes, CopyKind::by_address, stream), "cudaMemcpyAsync");
  CudaResult state = CudaResult::not_ready;
  while ((state = api.cudaStreamQuery(stream)) == CudaResult::not_ready)
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  check(api, state, "cudaStreamQuery");
  api.cudaStreamDestroy(stream);
}

// Memory of one cudaMalloc, kept until no rank copies any more. Freeing waits for the whole device, on which
// another rank's kernel may be waiting for this one.
class Pool {
 public:
  Pool(const NcclApi& a, std::size_t bytes) : api(a), bytes_(bytes) {
    void* data = nullptr;
    check(api, api.cudaMalloc(&data, bytes), "cudaMalloc");
    memory_ = static_cast<std::byte*>(data);
  }
  ~Pool() { api.cudaFree(memory_); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  // Sizes are rounded up to powers of two, so that pieces fit again.
  std::byte* take(std::size_t bytes) {
    std::vector<std::byte*>& free = free_[std::bit_ceil(bytes)];
    if (!free.empty()) {
      std::byte* const piece = free.back();
      free.pop_back();
      return piece;
    }
    if (std::bit_ceil(bytes) > bytes_ - used_) throw std::runtime_error("staging: the pool is used up");
    used_ += std::bit_ceil(bytes);
    return memory_ + used_ - std::bit_ceil(bytes);
  }
  void give_back(std::byte* piece, std::size_t bytes) { free_[std::bit_ceil(bytes)].push_back(piece); }

  const NcclApi& api;

 private:
  const std::size_t bytes_;
  std::byte* memory_ = nullptr;
  std::size_t used_ = 0;
  std::map<std::size_t, std::vector<std::byte*>> free_;
};

// A range of the host's memory, and its copy on the device.
struct Piece {
  std::shared_ptr<Pool> pool;
  const std::byte* home;
  std::size_t bytes;  // at least 64, so that all are aligned
  std::byte* there;

  Piece(const std::shared_ptr<Pool>& p, const std::byte* h, std::size_t n)
      : pool(p), home(h), bytes(std::max<std::size_t>(n, 64)), there(pool->take(bytes)) {
    if (n > 0) copy(pool->api, there, home, n);
  }
  ~Piece() { pool->give_back(there, bytes); }
  Piece(const Piece&) = delete;
  Piece& operator=(const Piece&) = delete;
};

}  // namespace

DeviceStaging stage_to_device(const NcclApi& api, int device) {
  constexpr std::size_t kPool = std::size_t{1} << 30;
  const auto pool = std::make_shared<Pool>(api, kPool);
  return [&api, pool, device](Call& c) -> std::function<void()> {
    const Device there{DeviceKind::cuda, static_cast<std::int16_t>(device)};
    c.in.device = c.out.device = there;
    const auto bytes = [](const auto& v) { return v.data ? static_cast<std::size_t>(v.bytes()) : 0; };
    const std::byte *const in = c.in.data, *const in_end = in + bytes(c.in);
    std::byte *const out = c.out.data, *const out_end = out + bytes(c.out);
    const bool overlap = in != nullptr && out != nullptr && in < out_end && out < in_end;
    std::shared_ptr<Piece> in_piece, out_piece;
    if (overlap) {  // stays in place
      const std::byte* const begin = std::min<const std::byte*>(in, out);
      const std::byte* const end = std::max<const std::byte*>(in_end, out_end);
      in_piece = out_piece = std::make_shared<Piece>(pool, begin, static_cast<std::size_t>(end - begin));
    } else {
      if (in != nullptr) in_piece = std::make_shared<Piece>(pool, in, bytes(c.in));
      if (out != nullptr) out_piece = std::make_shared<Piece>(pool, out, bytes(c.out));
    }
    if (in_piece) c.in.data = in_piece->there + (in - in_piece->home);
    if (out_piece) c.out.data = out_piece->there + (out - out_piece->home);
    return [&api, in_piece, out_piece, out, from = c.out.data, n = bytes(c.out)] {
      if (n > 0) copy(api, out, from, n);
    };
  };
}

}  // namespace weft::test
