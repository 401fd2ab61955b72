// The messages that the ranks of a save or a load exchange. Collective over the ranks of a group. No group
// means one rank.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "weft/mesh/mesh.hpp"

namespace weft {

/// The group of all ranks of the mesh. Null: there is only one rank. The first call is collective.
ProcessGroup* group_of(const DeviceMesh& mesh);

/// Returns every rank's number, in the order of the ranks. Waits for the other ranks at most `deadline`.
/// Zero: the group's deadline.
std::vector<std::uint64_t> numbers_of_all(ProcessGroup* group, std::uint64_t mine, Duration deadline = {});

/// Returns every rank's text, in the order of the ranks; a text longer than kMostTextBytes is cut. Waits like
/// numbers_of_all().
std::vector<std::string> texts_of_all(ProcessGroup* group, std::string_view mine, Duration deadline = {});
inline constexpr std::size_t kMostTextBytes = 64 << 10;

/// Notifies all ranks whether each of them got this far. If a rank did not, all ranks throw the code of the
/// first rank that failed. That rank throws `mine` again, the others `<what>: rank 1 failed: <its text>;
/// <consequence>`, with the consequence that the failed rank gives. `mine` is thrown unchanged if it is no
/// Error. Waits like numbers_of_all(). If `all_told` is given, it receives whether every rank has arrived
/// here. It is false if the group failed.
void agree(ProcessGroup* group, std::string_view what, std::string_view consequence, std::exception_ptr mine,
           Duration deadline = {}, bool* all_told = nullptr);
/// Fails `group`, if there is one, on all ranks: `<what>: rank 1 was interrupted while it saved;
/// <consequence>`.
void fail_interrupted(ProcessGroup* group, std::string_view what, std::string_view consequence);
/// Like the first agree(), over the ranks of the mesh, whose group may not be made yet.
void agree(const DeviceMesh& mesh, std::string_view what, std::string_view consequence,
           std::exception_ptr mine);

/// Returns `error` with `; <consequence>` appended to its text, if it is an Error.
std::exception_ptr with_consequence(std::exception_ptr error, std::string_view consequence);

/// Returns the exception of `action`. Null if it throws none.
template <class Action>
std::exception_ptr error_thrown_by(const Action& action) {
  try {
    action();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

}  // namespace weft
