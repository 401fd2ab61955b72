// The exchange of addresses when ranks make a group: each rank puts its text into the store and reads the
// texts of the others. The last rank to arrive reads all texts and writes them into one key. The other ranks
// wait for this key. So each rank makes only a few requests. Texts of more than half a MiB in all are written
// into several keys.
//
// A rank that cannot make the group leaves the reason in the store, under the group's token (FirstCause).
// Ranks that wait for others read this reason from time to time. Only the first reason is kept. So a rank
// that failed only because of another rank is not blamed. If a factory throws, the group calls give_up() for
// that factory.
//
// All functions wait for the store, at most until b.deadline. Any thread may call them.
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

/// The indices of the keys that no rank has set, for use after a wait for these keys has timed out. Throws
/// the store's own error if the store does not answer. In that case no rank can know which rank is missing.
std::vector<int> unset(Store& store, const std::vector<std::string>& keys);

/// Throws the first cause if some rank has given up this group.
void throw_first_cause(const GroupInit& b);

/// The Failure that the other ranks report for an error of this rank. Its text is that of the error; if the
/// cause is in this rank (no memory, for example), the text names this rank.
Failure reason_of(const GroupInit& b, const Error& own);

/// Stores the reason why this rank cannot make the group, for the other ranks, unless a reason is stored
/// already. Returns the error that this rank is to throw. It is its own error; or the first cause, if its own
/// error blames other ranks (timeout, peer_lost); or aborted, which names this rank, if an Interrupt has
/// ended its wait.
Error give_up(const GroupInit& b, const Error& error);

/// Waits for a key and returns its value, or nothing if the key is not set by the deadline. Throws the first
/// cause if a rank fails meanwhile, the store's error if the store fails, and bad_argument if there is no
/// store.
std::optional<std::string> await(const GroupInit& b, const std::string& key);

/// Puts this rank's text, `info`, into the store: the first half of join(). With one rank it does nothing,
/// and needs no store. `layout`: a digest of the sizes and constants that the ranks share in this transport.
/// It differs between ranks that would not understand each other. Throws bad_argument if all ranks have
/// already used `what` with this token and have not called withdraw(). Throws mismatch if another rank gave
/// another group size, and the store's error, with the group's name.
void announce(const GroupInit& b, std::string_view what, std::string_view info, std::uint64_t layout);

/// Exchanges the texts of all ranks and returns them, by rank. `info` may hold any bytes. Up to a MiB less
/// 256 bytes always fits into a value of the store. `what`, the transport's name, separates the keys of
/// several uses of one token. Throws timeout naming the ranks that did not join by the deadline. Throws
/// mismatch if the ranks do not run the same build of weft, differ in `layout` or do not agree on the size.
/// Throws the first cause if a rank fails, and the errors of announce().
std::vector<std::string> join(const GroupInit& b, std::string_view what, std::string_view info,
                              std::uint64_t layout);

/// Removes this rank's text from the store, so that a program that makes many groups leaves no texts there.
/// Call it when all ranks have read the text. If the store does not answer, the text stays there.
void withdraw(const GroupInit& b, std::string_view what) noexcept;

/// Throws timeout: `group "g": rank 2 did not join within 3 s [rank 0]`.
[[noreturn]] void throw_absent(const GroupInit& b, std::vector<int> ranks, Duration waited);

}  // namespace weft
