// The build of weft that a rank runs. Ranks read each other's structs in memory, and each rank decides by
// itself which path a call takes. So all ranks need the same layouts and thresholds. join() compares them; if
// a group has two builds, it throws mismatch that names both.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "weft/backends/backend.hpp"

namespace weft {

/// To be increased when the meaning of the ranks' messages changes, but no size or threshold changes.
inline constexpr std::uint32_t kProtocol = 2;

/// The build of rank `rank`, as one word: the version of the library, and a digest of `layout` (the
/// transport's constants) and of the constants that all transports share.
std::string build_word(std::uint64_t layout, int rank);
/// Returns a build word as a text for users: "weft 0.1.0 (layout 1234abcd)". Quotes a word in another form,
/// which another version of this code may send.
std::string describe_build(std::string_view word);

/// Compares the builds of the ranks, for plug-ins that are not weft's own and may not call join().
/// Collective. Leaves no keys in the store. Throws the errors of join().
void compare_builds(const GroupInit& b);

}  // namespace weft
