// Removes old files of a save. Nothing here makes the save fail. A file that cannot be removed causes a
// warning. For use by one thread at a time.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "checkpoint/save/replace_folder.hpp"

namespace weft {

inline constexpr std::string_view kUnfinished = ".unfinished";

/// The step of a folder that folder_name() has named. Nothing for any other name.
std::optional<std::int64_t> step_of_folder(const std::filesystem::path& folder);

/// Removes the remains of a save that was killed: folders that never got their name, replaced folders,
/// temporary files of `latest`. If a spare folder is the only checkpoint of its step, it gets the step's
/// name.
void settle_left_overs(const std::filesystem::path& directory, const Warn& warn);

/// Removes the oldest checkpoints up to `step`, so that `keep` of them are left. 0: removes none. Each
/// checkpoint loses its name first. So if the process is killed, the next save removes the remaining files.
/// `reached` is called with "old" before the files of a checkpoint are removed.
void remove_old(const std::filesystem::path& directory, std::int64_t step, int keep, const Warn& warn,
                const std::function<void(std::string_view)>& reached);

/// Warns, once per process, if another user owns the directory: that user may replace saved files there.
void warn_of_other_owner(const std::filesystem::path& directory, const Warn& warn);

}  // namespace weft
