#include "checkpoint/save/housekeeping.hpp"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <system_error>
#include <vector>

#include "checkpoint/index/index.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

constexpr std::string_view kStep = "step-";

// The contents of the directory when it was opened; logs a warning if it cannot be read.
std::vector<std::filesystem::path> entries_of(const std::filesystem::path& directory, const Warn& warn) {
  std::vector<std::filesystem::path> entries;
  std::error_code failed;
  std::filesystem::directory_iterator next(directory, failed);
  for (; !failed && next != std::filesystem::directory_iterator(); next.increment(failed))
    entries.push_back(next->path());
  if (failed)
    warn(fmt::format("{} cannot be searched for what may be removed: {}", directory.string(),
                     system_words(failed.value())));
  std::sort(entries.begin(), entries.end());
  return entries;
}

}  // namespace

std::optional<std::int64_t> step_of_folder(const std::filesystem::path& folder) {
  const std::string name = folder.filename().string();
  std::int64_t step = 0;
  const char* const begin = name.data() + std::min(kStep.size(), name.size());
  const auto [end, error] = std::from_chars(begin, name.data() + name.size(), step);
  if (!name.starts_with(kStep) || error != std::errc() || folder_name(step) != name) return std::nullopt;
  return step;
}

void settle_left_overs(const std::filesystem::path& directory, const Warn& warn) {
  for (const std::filesystem::path& entry : entries_of(directory, warn)) {
    const std::string name = entry.filename().string();
    if (entry.extension() == kSpare && step_of_folder(entry.stem())) {
      settle_spare(entry, warn);
    } else if ((name.starts_with(kStep) && name.ends_with(kUnfinished)) ||
               name.starts_with(fmt::format("{}.tmp.", kLatestFile))) {
      remove_or_warn("the left-over", entry, warn);
    }
  }
}

void remove_old(const std::filesystem::path& directory, std::int64_t step, int keep, const Warn& warn,
                const std::function<void(std::string_view)>& reached) {
  if (keep == 0) return;
  std::map<std::int64_t, std::filesystem::path> folders;
  std::error_code none;  // a path that cannot be examined is no checkpoint to remove
  for (const std::filesystem::path& entry : entries_of(directory, warn))
    if (const auto of = step_of_folder(entry);
        of && *of <= step && std::filesystem::exists(entry / kIndexFile, none))
      folders[*of] = entry;
  const auto surplus = static_cast<std::ptrdiff_t>(folders.size()) - keep;
  for (auto old = folders.begin(); std::distance(folders.begin(), old) < surplus; ++old) {
    std::filesystem::path unnamed = old->second.string() + std::string(kUnfinished);
    std::error_code failed;
    std::filesystem::rename(old->second, unnamed, failed);
    if (failed == std::errc::cross_device_link) {  // of a lower layer of overlayfs
      unnamed = old->second;
      std::filesystem::remove(unnamed / kIndexFile, failed);
    }
    if (failed) {
      warn(fmt::format("the older step {} cannot be removed: {}", old->second.string(),
                       system_words(failed.value())));
      continue;
    }
    reached("old");
    remove_or_warn("the older step", unnamed, warn);
  }
}

void warn_of_other_owner(const std::filesystem::path& directory, const Warn& warn) {
  struct stat status {};
  if (::stat(directory.c_str(), &status) != 0 || status.st_uid == ::geteuid()) return;
  static std::mutex mutex;
  static std::set<std::string>& warned = *new std::set<std::string>;  // a writer may end after main()
  {
    const std::lock_guard lock(mutex);
    if (!warned.insert(directory.string()).second) return;
  }
  warn(fmt::format("{} belongs to user {}, who may replace what is saved there", directory.string(),
                   status.st_uid));
}

}  // namespace weft
