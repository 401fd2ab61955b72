// The beginning of the first message of an exchange that is made of messages, which must be equal on both
// ranks. Also the error text for an exchange that ranks describe differently, for every transport. Pure
// functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "backends/exchange/program.hpp"
#include "weft/base/dtype.hpp"

namespace weft {

/// Its size is a multiple of a cache line, so that the packed bytes behind it begin on a new line.
struct ExchangeHead {
  /// other messages are unlikely to begin with this number
  static constexpr std::uint64_t kMark = 0x3170616566743158;
  std::uint64_t mark = kMark;
  std::uint64_t form = 0;  ///< the value of ExchangeProgram::Side::form
  char about[240] = {};    ///< Side::about, as much of it as fits

  static void write(const ExchangeProgram::Side& side, std::byte* to) noexcept;
};
static_assert(sizeof(ExchangeHead) % 64 == 0);

/// Describes a message of an exchange, or the room of an awaited message, in the words of its head. Without a
/// head: "a message of f32 x5000". `data` may be null.
std::string words_of_part(const std::byte* data, DType dtype, std::int64_t count);

/// The error text if rank `peer` describes an exchange by other words than rank `rank`: "rank 1 gave 1 field:
/// f32, 40 bytes of boxes (10), and rank 0 1 field: f32, 44 bytes of boxes (11); expected the same on all
/// ranks".
std::string exchange_difference(int peer, std::string_view theirs, int rank, std::string_view own);

}  // namespace weft
