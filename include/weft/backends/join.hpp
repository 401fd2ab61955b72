// The first thing the ranks of a group do: each puts a rank's info into the store and reads those of the
// others. Who comes last reads all infos and writes them into one key, which the others wait for: a few
// requests per rank.
//
// And what holds for all that comes after it, until the group is made: a rank that gives up leaves the reason
// in the store, under the group's token (FirstCause), and who waits for others looks there now and then. The
// first reason counts: nobody blames a rank that only gave up because of another.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "weft/backends/backend.hpp"
#include "weft/base/error.hpp"
#include "weft/store/store.hpp"

namespace weft {

/// Which of the keys, by index, nobody has set; asked when a wait for them has timed out. Throws the store's
/// own error where it is the store that does not answer: then nobody can say which rank is missing.
std::vector<int> unset(Store& store, const std::vector<std::string>& keys);

/// Throws the first cause, if some rank has given up this group. Asks the store.
void throw_first_cause(const GroupInit& b);

/// What the others are to be told of an Error of this rank's: the same; but where the reason is its own (no
/// memory, say), under its name.
Failure reason_of(const GroupInit& b, const Error& own);

/// Leaves the reason why this rank gives up the group for the others, unless one is there already. Returns
/// what this rank is to throw: its own error; but where that blames others (timeout, peer_lost), the first
/// cause.
Error give_up(const GroupInit& b, const Error& own);

/// Waits for a key; nothing where it is not set by the deadline. Throws the first cause where a rank gives up
/// meanwhile, and the store's error.
std::optional<std::string> await(const GroupInit& b, const std::string& key);

/// This rank's info for the others; join() begins with it. `layout`: digest_of() the constants that the ranks
/// share in this transport. Throws mismatch where another rank gave another size, and the store's error, with
/// the group's name.
void announce(const GroupInit& b, std::string_view what, std::string_view info, std::uint64_t layout);

/// The infos of all ranks, by rank. `what` keeps the keys of several uses of one token apart. Throws timeout
/// naming the ranks that did not join by the deadline, mismatch where they do not run the same build of weft
/// (build.hpp) or do not agree on the size, the first cause where a rank gives up meanwhile, and what
/// announce() throws.
std::vector<std::string> join(const GroupInit& b, std::string_view what, std::string_view info,
                              std::uint64_t layout);

/// Takes this rank's info out of the store, once all have read it, so that a program that makes many groups
/// leaves nothing there. A store that has no answer keeps it.
void withdraw(const GroupInit& b, std::string_view what) noexcept;

/// `group "g": rank 2 did not join within 3 s [rank 0]`.
[[noreturn]] void throw_absent(const GroupInit& b, std::vector<int> ranks, Duration waited);

}  // namespace weft
