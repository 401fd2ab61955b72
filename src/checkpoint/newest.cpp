#include <fmt/format.h>

#include <algorithm>
#include <system_error>

#include "base/text/printable.hpp"
#include "checkpoint/parts.hpp"
#include "checkpoint/save/housekeeping.hpp"
#include "weft/base/error.hpp"
#include "weft/checkpoint/reader.hpp"

namespace weft {
namespace {

// Throws if the files of a checkpoint are not as its index says; reads their bytes if `check` says so.
void expect_whole(const FoundCheckpoint& found, WholeCheck check) {
  PartFiles files(found.folder, found.index);
  for (const auto& [name, entry] : found.index.tensors)
    for (const CheckpointPart& part : entry.parts) files.of(part, name, entry.dtype);
  if (check == WholeCheck::files) return;
  const std::vector<std::string> faults = verify_checkpoint(found.folder);
  if (!faults.empty()) throw Error(ErrorCode::corrupt, faults[0]);
}

// The folders of steps, the newest first.
std::vector<std::filesystem::path> folders_of_steps(const std::filesystem::path& directory) {
  std::vector<std::pair<std::int64_t, std::filesystem::path>> steps;
  std::error_code failed;
  std::filesystem::directory_iterator next(directory, failed);
  for (; !failed && next != std::filesystem::directory_iterator(); next.increment(failed))
    if (const auto step = step_of_folder(next->path())) steps.emplace_back(*step, next->path());
  std::sort(steps.rbegin(), steps.rend());
  std::vector<std::filesystem::path> folders;
  for (auto& [step, folder] : steps) folders.push_back(std::move(folder));
  return folders;
}

}  // namespace

WholeCheckpoint newest_whole_checkpoint(const std::filesystem::path& directory, WholeCheck check) {
  WholeCheckpoint result;
  const auto accept = [&](const auto& find) {
    try {
      const FoundCheckpoint found = find();
      expect_whole(found, check);
      result.found = info_of(found.folder, found.index);
    } catch (const Error& e) {
      result.broken.emplace_back(e.what());
    }
    return result.found.has_value();
  };
  std::error_code none;
  const bool named = std::filesystem::exists(directory / kLatestFile, none) ||
                     std::filesystem::exists(directory / kIndexFile, none);
  if (named && accept([&] { return find_checkpoint(directory); })) return result;
  if (!named)  // the first save ended before it was named, or somebody removed the name
    result.broken.push_back(
        fmt::format("checkpoint: {} is missing", printable((directory / kLatestFile).string())));
  for (const std::filesystem::path& folder : folders_of_steps(directory))
    if (accept([&] { return open_folder(folder); })) return result;
  if (!named) result.broken.clear();  // there has never been a checkpoint
  return result;
}

}  // namespace weft
