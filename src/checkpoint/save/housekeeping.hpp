// Removes old files of a save. Nothing of it stands in the way of the save: what cannot be removed is a
// warning. For one thread at a time.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

#include "checkpoint/save/replace_folder.hpp"

namespace weft {

inline constexpr std::string_view kUnfinished = ".unfinished";

/// "step-00000200"
std::string folder_name(std::int64_t step);

/// Removes what a save that was killed has left: folders that never got their name, replaced ones, temporary
/// files of `latest`. A spare that alone is a checkpoint of its step gets the step's name.
void settle_left_overs(const std::filesystem::path& directory, const Warn& warn);

/// Removes the oldest checkpoints up to `step`, so that `keep` of them are left; 0: none. Each loses its name
/// first: the next save removes what a kill leaves of it. `reached` is called with "old" before the files of
/// one go.
void remove_old(const std::filesystem::path& directory, std::int64_t step, int keep, const Warn& warn,
                const std::function<void(std::string_view)>& reached);

/// Warns, once in a process, if another user owns the directory: he may exchange what is saved there.
void warn_of_other_owner(const std::filesystem::path& directory, const Warn& warn);

}  // namespace weft
