// The result of a parser that reads the front of some bytes.
#pragma once

#include <cstdint>

namespace weft {

/// `more`: the item is incomplete so far. `whole`: it is complete. `bad`: it is not valid, whatever bytes
/// follow.
enum class ParseState : std::uint8_t { more, whole, bad };

}  // namespace weft
