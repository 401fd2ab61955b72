// Words in memory that other processes may write. A process with a fault may write anything there, at any
// time. So a word is read once into a local, compared with what it may be, and then used. Inline: some of
// these words are on the way of every call. Pure functions; any thread.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "weft/base/error.hpp"

namespace weft {

/// The word as it is now. (The compiler may read a plain word again wherever its value is used.)
template <class T>
[[nodiscard]] inline T read_once(const T& word) noexcept {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(std::uint64_t));
  T value;
  __atomic_load(&word, &value, __ATOMIC_RELAXED);
  return value;
}
/// A byte that is neither 0 nor 1 is no bool.
[[nodiscard]] inline bool read_once(const bool& word) noexcept {
  return read_once(reinterpret_cast<const unsigned char&>(word)) != 0;
}

/// The number of an enum whose values are 0 … last; `otherwise` where it is another one.
template <class E>
[[nodiscard]] constexpr E known_or(E value, E last, E otherwise) noexcept {
  using Number = std::make_unsigned_t<std::underlying_type_t<E>>;
  return static_cast<Number>(value) <= static_cast<Number>(last) ? value : otherwise;
}

/// Whether [offset, offset + bytes) lies in [0, size).
[[nodiscard]] constexpr bool is_within(std::uint64_t offset, std::int64_t bytes,
                                       std::uint64_t size) noexcept {
  return bytes >= 0 && static_cast<std::uint64_t>(bytes) <= size &&
         offset <= size - static_cast<std::uint64_t>(bytes);
}

/// Text up to its first zero, or all of it.
template <std::size_t n>
[[nodiscard]] std::string text_in(const char (&text)[n]) {
  std::string copy(text, n);
  copy.resize(std::min(copy.find('\0'), n));
  return copy;
}

/// The failure of a group in whose memory there is nonsense: "rank 1's words in shared memory are damaged:
/// the number of its answer is 77; expected 0 to 63". `rank`: whose words they are. (Another rank may have
/// written the nonsense.)
template <class Value>
[[gnu::cold]] [[nodiscard]] Failure damaged(int rank, std::string_view word, const Value& found,
                                            std::string_view expected, Op op = Op::none,
                                            std::uint64_t call = kNoCall) {
  return {.code = ErrorCode::corrupt,
          .text = fmt::format("rank {}'s words in shared memory are damaged: {} is {}; expected {}", rank,
                              word, found, expected),
          .op = op,
          .call = call,
          .ranks = {rank}};
}

}  // namespace weft
