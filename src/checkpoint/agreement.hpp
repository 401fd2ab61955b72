// What the ranks of a save or a load tell each other. Collective over the ranks of a group; no group: one rank.
#pragma once

#include <cstdint>
#include <exception>
#include <string_view>
#include <vector>

#include "weft/mesh/mesh.hpp"

namespace weft {

/// The group of all ranks of the mesh; null: there is one rank. The first call is collective.
ProcessGroup* group_of(const DeviceMesh& mesh);

/// Every rank's number, in the order of the ranks. Waits for the others at most `deadline`; zero: the group's.
std::vector<std::uint64_t> numbers_of_all(ProcessGroup* group, std::uint64_t mine, Duration deadline = {});

/// Tells all ranks whether each of them got this far. Throws `mine` again where there is one; otherwise, where other
/// ranks failed, a system error `<what>: ranks 1, 3 failed, and say why; <consequence>`. Waits as
/// numbers_of_all() does. `all_told`, where given, becomes whether every rank has got here: not where the group failed.
void agree(ProcessGroup* group, std::string_view what, std::string_view consequence, std::exception_ptr mine,
           Duration deadline = {}, bool* all_told = nullptr);
/// The same over the ranks of the mesh, whose group may not be made yet.
void agree(const DeviceMesh& mesh, std::string_view what, std::string_view consequence,
           std::exception_ptr mine);

}  // namespace weft
