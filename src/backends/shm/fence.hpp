// Between what a rank publishes and its look for who sleeps.
#pragma once

#include <atomic>

namespace weft::shm {

/// What was stored before is seen by others before what is loaded after is read. A fence of its own, after
/// plain release stores, and not a sequentially consistent store: the words of a cache line then leave for
/// the cache together. A locked store waits for those before it, and meanwhile the line may be fetched away
/// by whoever polls it, half written, and must be fetched back.
inline void full_fence() noexcept {
#if defined(__x86_64__)
  asm volatile("lock; orl $0, (%%rsp)" : : : "memory", "cc");  // faster than mfence
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

}  // namespace weft::shm
