// A copy past the caches. Part of reduce_kernels.hpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "reduce/kernels/vectors.hpp"

namespace weft {
namespace {

// Non-temporal stores need an aligned target; the unaligned ends are copied through the caches.
void stream_copy(std::byte* to, const std::byte* from, std::int64_t bytes) noexcept {
  std::int64_t head = -reinterpret_cast<std::intptr_t>(to) & (kVectorBytes - 1);
  if (head > bytes) head = bytes;
  __builtin_memcpy(to, from, static_cast<std::size_t>(head));
  std::int64_t i = head;
#if defined(__x86_64__)
  for (; i + kVectorBytes <= bytes; i += kVectorBytes) {
    Vec<long long, kVectorBytes / 8> x;
    __builtin_memcpy(&x, from + i, sizeof x);
    if constexpr (kVectorBytes == 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), bits_as<__m128i>(x));
#if defined(__AVX2__)
    if constexpr (kVectorBytes == 32)
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), bits_as<__m256i>(x));
#endif
#if defined(__AVX512F__)
    if constexpr (kVectorBytes == 64)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), bits_as<__m512i>(x));
#endif
  }
#endif
  __builtin_memcpy(to + i, from + i, static_cast<std::size_t>(bytes - i));
}

}  // namespace
}  // namespace weft
