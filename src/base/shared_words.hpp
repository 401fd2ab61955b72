// Words in memory that other processes may write. A faulty process may write anything there, at any time. So
// each word is read once into a local variable, compared with its permitted values, and then used. Inline,
// because every call reads some of these words. Pure functions. Any thread may call them.
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

/// Returns the present value of the word. (Otherwise the compiler may read a plain word again at each use of
/// its value.)
template <class T>
[[nodiscard]] inline T read_once(const T& word) noexcept {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(std::uint64_t));
  T value;
  __atomic_load(&word, &value, __ATOMIC_RELAXED);
  return value;
}
/// A byte that is neither 0 nor 1 is no valid bool.
[[nodiscard]] inline bool read_once(const bool& word) noexcept {
  return read_once(reinterpret_cast<const unsigned char&>(word)) != 0;
}

/// Reads a word that holds an enum with the values 0 … `last`. Returns `otherwise` if the word is another
/// number.
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

/// Returns the text up to its first zero, or all of it if there is no zero.
template <std::size_t n>
[[nodiscard]] std::string text_in(const char (&text)[n]) {
  std::string copy(text, n);
  copy.resize(std::min(copy.find('\0'), n));
  return copy;
}

/// The failure of a group whose shared memory is damaged: "rank 1's words in shared memory are damaged: the
/// number of its answer is 77; expected 0 to 63". `rank`: the owner of the damaged words. (Another rank may
/// have written the damage.)
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
