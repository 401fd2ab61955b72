// FNV-1a, 64 bit (Fowler, Noll, Vo): for telling things apart that nobody forges.
#pragma once

#include <cstdint>
#include <string_view>
#include <type_traits>

namespace weft {

struct Fnv1a {
  std::uint64_t value = 0xcbf29ce484222325u;
  constexpr void add(std::string_view bytes) noexcept {
    for (const char c : bytes) value = (value ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  }
  /// Its eight bytes, low ones first.
  constexpr void add(std::uint64_t word) noexcept {
    for (int i = 0; i < 8; ++i, word >>= 8) value = (value ^ (word & 0xff)) * 0x100000001b3u;
  }
};

/// A number that is another one where any of these is, or their order.
template <class... Number>
constexpr std::uint64_t digest_of(Number... numbers) noexcept {
  static_assert((std::is_integral_v<Number> && ...));
  Fnv1a hash;
  (hash.add(static_cast<std::uint64_t>(numbers)), ...);
  return hash.value;
}

}  // namespace weft
