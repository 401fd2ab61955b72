#include "checkpoint/agreement.hpp"

#include <fmt/format.h>

#include <cstddef>
#include <utility>

#include "mesh/replicas/same_list.hpp"
#include "weft/base/error.hpp"
#include "weft/base/name_ranks.hpp"

namespace weft {

ProcessGroup* group_of(const DeviceMesh& mesh) { return mesh && mesh.size() > 1 ? &mesh.group() : nullptr; }

std::vector<std::uint64_t> numbers_of_all(ProcessGroup* group, std::uint64_t mine, Duration deadline) {
  if (group == nullptr) return {mine};
  std::vector<std::uint64_t> all(static_cast<std::size_t>(group->size()));
  gather_on_host(*group, view(&mine, 1), view(all), deadline);
  return all;
}

void agree(ProcessGroup* group, std::string_view what, std::string_view consequence, std::exception_ptr mine,
           Duration deadline, bool* all_told) {
  if (all_told != nullptr) *all_told = group == nullptr;
  if (group == nullptr) {
    if (mine) std::rethrow_exception(mine);
    return;
  }
  std::vector<std::uint64_t> failed;
  try {
    failed = numbers_of_all(group, mine ? 1 : 0, deadline);
    if (all_told != nullptr) *all_told = true;
  } catch (...) {  // what happened first is the one to tell
    if (!mine) throw;
  }
  if (mine) std::rethrow_exception(mine);
  std::vector<int> ranks;
  for (std::size_t rank = 0; rank < failed.size(); ++rank)
    if (failed[rank] != 0) ranks.push_back(static_cast<int>(rank));
  if (ranks.empty()) return;
  Failure failure;
  failure.code = ErrorCode::system;
  failure.text = fmt::format("{}: {} failed, and {} why; {}", what, name_ranks(ranks),
                             ranks.size() == 1 ? "says" : "say", consequence);
  failure.ranks = std::move(ranks);
  throw Error(std::move(failure));
}

void agree(const DeviceMesh& mesh, std::string_view what, std::string_view consequence,
           std::exception_ptr mine) {
  ProcessGroup* group = nullptr;
  try {
    group = group_of(mesh);
  } catch (...) {  // what happened first is the one to tell
    if (!mine) throw;
  }
  agree(group, what, consequence, std::move(mine));
}

}  // namespace weft
