// Memory whose pages a driver has pinned.
#pragma once

#include <cstddef>
#include <utility>

#include "weft/host/context.hpp"

namespace weft {

/// States that, while the PinnedPages exists, a driver may itself read or write the pages of [data, data +
/// bytes), which cudaHostRegister, ibv_reg_mr or the like has registered. ProcessGroup::quiesce() may give
/// Memory::shared (no other memory) other pages. The driver would not notice this, so quiesce() leaves pinned
/// memory as it is, and returns false if it would have to move it. If pinned memory is freed, weft does not
/// give it to another owner while the PinnedPages exists. Pages that the kernel counts as pinned (VmPin in
/// /proc/self/status: verbs, io_uring's registered buffers) are protected without this class, but pages of
/// CUDA's driver are not counted there. Locking memory (mlock) does not pin it. Thread-safe.
class PinnedPages {
 public:
  PinnedPages(Context& context, const void* data, std::size_t bytes);
  PinnedPages(PinnedPages&& other) noexcept
      : context_(std::exchange(other.context_, nullptr)), data_(other.data_), bytes_(other.bytes_) {}
  PinnedPages& operator=(PinnedPages&& other) noexcept {
    std::swap(context_, other.context_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~PinnedPages();

 private:
  Context* context_;  // null: nothing is pinned
  const void* data_;
  std::size_t bytes_;
};

}  // namespace weft
