// The result of a parser that reads the front of some bytes.
#pragma once

#include <cstdint>

namespace weft {

/// `more`: the end is not there yet; `whole`; `bad`: it will never be one of ours.
enum class ParseState : std::uint8_t { more, whole, bad };

}  // namespace weft
