// FNV-1a, 64 bit (Fowler, Noll, Vo). It is for values that no attacker chooses, because an attacker can make
// two values with equal hashes. Any thread may call it.
#pragma once

#include <cstdint>
#include <string_view>
#include <type_traits>

namespace weft {

struct Fnv1a {
  std::uint64_t value = 0xcbf29ce484222325u;
  constexpr void add(std::string_view bytes) noexcept {
    for (const char c : bytes) step(static_cast<unsigned char>(c));
  }
  /// Adds the eight bytes of `word`, the low bytes first.
  constexpr void add(std::uint64_t word) noexcept {
    for (int i = 0; i < 8; ++i, word >>= 8) step(word & 0xff);
  }
  /// Adds all of `word` in one step, eight times as fast as add(). This spreads the upper bits of the word
  /// less well.
  constexpr void add_at_once(std::uint64_t word) noexcept {
    step(word);
    value ^= value >> 29;
  }

 private:
  constexpr void step(std::uint64_t x) noexcept { value = (value ^ x) * 0x100000001b3u; }
};

/// The FNV-1a hash of some bytes.
constexpr std::uint64_t hash_of(std::string_view bytes) noexcept {
  Fnv1a hash;
  hash.add(bytes);
  return hash.value;
}

/// Returns a number that differs if any of the given numbers, or their order, differs.
template <class... Number>
constexpr std::uint64_t digest_of(Number... numbers) noexcept {
  static_assert((std::is_integral_v<Number> && ...));
  Fnv1a hash;
  (hash.add(static_cast<std::uint64_t>(numbers)), ...);
  return hash.value;
}

}  // namespace weft
