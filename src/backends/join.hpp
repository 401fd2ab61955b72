// The first thing the ranks of a group do: each puts a card into the store and reads those of the others.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "weft/backends/backend.hpp"
#include "weft/backends/store.hpp"

namespace weft {

/// Which of the keys, by index, nobody has set; asked when a wait for them has timed out. Throws the store's
/// own error where it is the store that does not answer: then nobody can say which rank is missing.
std::vector<int> unset(Store& store, const std::vector<std::string>& keys);

/// This rank's card for the others; join() begins with it. `layout`: digest_of() the constants that the ranks
/// share in this transport. Throws the store's error, with the group's name.
void announce(const Bringup& b, std::string_view what, std::string_view card, std::uint64_t layout);

/// The cards of all ranks, by rank. `what` keeps the keys of several uses of one token apart. Throws timeout
/// naming the ranks that did not join by the deadline, mismatch where they do not run the same build of weft
/// (build.hpp) or do not agree on the size, and what announce() throws.
std::vector<std::string> join(const Bringup& b, std::string_view what, std::string_view card,
                              std::uint64_t layout);

/// Takes this rank's card out of the store, once all have read it, so that a program that makes many groups
/// leaves nothing there. A store that has no answer keeps it.
void withdraw(const Bringup& b, std::string_view what) noexcept;

/// `group "g": rank 2 did not join within 3 s [rank 0]`.
[[noreturn]] void throw_absent(const Bringup& b, std::vector<int> ranks, Duration waited);

}  // namespace weft
