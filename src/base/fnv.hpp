// FNV-1a, 64 bit (Fowler, Noll, Vo): for telling things apart that nobody forges.
#pragma once

#include <cstdint>
#include <string_view>

namespace weft {

struct Fnv1a {
  std::uint64_t value = 0xcbf29ce484222325u;
  void add(std::string_view bytes) noexcept {
    for (const char c : bytes) value = (value ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  }
  /// Its eight bytes, low ones first.
  void add(std::uint64_t word) noexcept {
    for (int i = 0; i < 8; ++i, word >>= 8) value = (value ^ (word & 0xff)) * 0x100000001b3u;
  }
};

}  // namespace weft
