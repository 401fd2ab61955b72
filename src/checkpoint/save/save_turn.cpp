#include "checkpoint/save/save_turn.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <system_error>
#include <utility>

#include "base/waits/suspension.hpp"
#include "store/duration_text.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

// There is one table for the process, not one per Context. A save of one rank without a mesh has no Context,
// and a directory is the same for all Contexts. The table is never destroyed, since a writer may end after
// main().
struct Table {
  std::mutex mutex;
  std::condition_variable changed;
  std::uint64_t last = 0;
  std::map<std::string, std::set<std::uint64_t>> places;  // of each directory, the first one's turn it is
};

Table& table() {
  static Table& all = *new Table;
  return all;
}

}  // namespace

std::string canonical_name(const std::filesystem::path& directory) {
  std::error_code failed;
  std::filesystem::path absolute = std::filesystem::absolute(directory, failed);
  if (failed) return directory.string();
  if (!absolute.has_filename()) absolute = absolute.parent_path();  // "run/"
  const std::filesystem::path resolved = std::filesystem::weakly_canonical(absolute, failed);
  return (failed ? absolute.lexically_normal() : resolved).string();
}

SaveTurn::SaveTurn(const std::filesystem::path& directory) : directory_(canonical_name(directory)) {
  Table& all = table();
  const std::lock_guard lock(all.mutex);
  all.places[directory_].insert(all.last + 1);
  place_ = ++all.last;
}

SaveTurn::SaveTurn(SaveTurn&& other) noexcept { *this = std::move(other); }

SaveTurn& SaveTurn::operator=(SaveTurn&& other) noexcept {
  std::swap(directory_, other.directory_);
  std::swap(place_, other.place_);
  return *this;
}

SaveTurn::~SaveTurn() {
  if (place_ == 0) return;
  Table& all = table();
  {
    const std::lock_guard lock(all.mutex);
    const auto of_directory = all.places.find(directory_);
    of_directory->second.erase(place_);
    if (of_directory->second.empty()) all.places.erase(of_directory);
  }
  all.changed.notify_all();
}

void SaveTurn::wait(std::string_view what, Duration limit) const {
  if (place_ == 0) return;
  Table& all = table();
  std::unique_lock lock(all.mutex);
  const Deadline deadline = Deadline::after(limit);
  while (*all.places.at(directory_).begin() != place_) {
    if (deadline.passed())
      throw Error(ErrorCode::timeout,
                  fmt::format("{}: another save of this process, begun before, still wrote to {} after {}",
                              what, directory_, shown_seconds(limit)));
    all.changed.wait_for(lock, std::min(deadline.left(), wait_piece()));
  }
}

}  // namespace weft
