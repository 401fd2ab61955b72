// Which weft a rank runs. Ranks read what the others have written as it lies in memory, and each decides by
// itself which path a call takes, so all need the same layouts and thresholds: each says with its info what
// they are (join.hpp), and a group of two builds is a mismatch that names both.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "weft/backends/backend.hpp"

namespace weft {

/// Raised when what ranks tell each other changes its meaning, and no size or threshold with it.
inline constexpr std::uint32_t kProtocol = 1;

/// Rank `rank` of a group runs this version of the library, whose ranks share the constants of the digest
/// `layout` (digest_of()) in the transport, beside those that all transports share. One word.
std::string build_word(std::uint64_t layout, int rank);
/// "weft 0.1.0 (layout 1234abcd)", of such a word. What is none, as another version of this code may have
/// sent it, is quoted.
std::string describe_build(std::string_view word);

/// For transports from outside, which do not say it themselves: all ranks say it, and read what the others
/// say. Leaves nothing in the store. Throws as join() does.
void compare_builds(const GroupInit& b);

}  // namespace weft
