// The fence between a rank's store of a word and its check for sleepers.
#pragma once

#include <atomic>

namespace weft::shm {

/// Makes this rank's earlier stores visible to others before its later loads. It follows plain release
/// stores, so that the words of a cache line go to the cache together. A sequentially consistent store would
/// be a locked store, which waits for the stores before it; meanwhile a polling rank could fetch the
/// half-written line, and this rank would have to fetch it back.
inline void full_fence() noexcept {
#if defined(__x86_64__)
  asm volatile("lock; orl $0, (%%rsp)" : : : "memory", "cc");  // faster than mfence
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

}  // namespace weft::shm
