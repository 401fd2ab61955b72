// Prefetching of cache lines.
#pragma once

#include <cstddef>
#include <cstdint>

namespace weft {

// Prefetches cache lines that this rank writes next and that peers still have in their caches, so that the
// write does not wait. (For baseline x86-64, g++ compiles __builtin_prefetch(…, 1) to a plain prefetch.)
inline void prefetch_to_write(const void* from, std::int64_t bytes) noexcept {
  const auto* const first = static_cast<const std::byte*>(from);
  for (std::int64_t i = 0; i < bytes; i += 64) {
#if defined(__x86_64__)
    asm volatile("prefetchw %0" : : "m"(first[i]));
#else
    __builtin_prefetch(first + i, 1);
#endif
  }
}

// Prefetches cache lines that this rank reads next: a peer's payload, which lies in that peer's cache.
inline void prefetch_to_read(const std::byte* from, std::int64_t bytes) noexcept {
  for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

}  // namespace weft
