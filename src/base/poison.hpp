// Marks memory in weft's caches as free for the address sanitizer, which cannot know that by itself. Does
// nothing in builds without this sanitizer.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#define WEFT_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define WEFT_ADDRESS_SANITIZER 1
#endif
#endif
#ifdef WEFT_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#endif

namespace weft {

inline void poison([[maybe_unused]] const void* data, [[maybe_unused]] std::size_t bytes) noexcept {
#ifdef WEFT_ADDRESS_SANITIZER
  __asan_poison_memory_region(data, bytes);
#endif
}

inline void unpoison([[maybe_unused]] const void* data, [[maybe_unused]] std::size_t bytes) noexcept {
#ifdef WEFT_ADDRESS_SANITIZER
  __asan_unpoison_memory_region(data, bytes);
#endif
}

}  // namespace weft
