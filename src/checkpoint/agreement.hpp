// The messages that the ranks of a save or a load exchange. Collective over the ranks of a group; no group:
// one rank.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "weft/mesh/mesh.hpp"

namespace weft {

/// The group of all ranks of the mesh; null: there is one rank. The first call is collective.
ProcessGroup* group_of(const DeviceMesh& mesh);

/// Every rank's number, in the order of the ranks. Waits for the others at most `deadline`; zero: the
/// group's.
std::vector<std::uint64_t> numbers_of_all(ProcessGroup* group, std::uint64_t mine, Duration deadline = {});

/// Every rank's text, in the order of the ranks; one that is longer than kMostTextBytes is cut. Waits as
/// numbers_of_all() does.
std::vector<std::string> texts_of_all(ProcessGroup* group, std::string_view mine, Duration deadline = {});
inline constexpr std::size_t kMostTextBytes = 64 << 10;

/// Notifies all ranks of whether each of them got this far. If one did not, all throw the code of the
/// first rank that failed: that rank throws `mine` again, the others `<what>: rank 1 failed: <its text>;
/// <consequence>`, with the consequence as that rank gives it. `mine` stays as it is where it is no Error.
/// Waits as numbers_of_all() does. `all_told`, where given, becomes whether every rank has got here: not
/// if the group failed.
void agree(ProcessGroup* group, std::string_view what, std::string_view consequence, std::exception_ptr mine,
           Duration deadline = {}, bool* all_told = nullptr);
/// Fails `group`, if there is one, on all ranks: `<what>: rank 1 was interrupted while it saved;
/// <consequence>`.
void fail_interrupted(ProcessGroup* group, std::string_view what, std::string_view consequence);
/// The same over the ranks of the mesh, whose group may not be made yet.
void agree(const DeviceMesh& mesh, std::string_view what, std::string_view consequence,
           std::exception_ptr mine);

/// `error` with `; <consequence>` behind its text, where it is an Error.
std::exception_ptr with_consequence(std::exception_ptr error, std::string_view consequence);

/// The exception of `action`; null: none.
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
