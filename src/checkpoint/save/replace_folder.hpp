// Replaces the folder of a step by another folder of the same step. At any moment the step's name or its
// spare name has a complete checkpoint of the step. For use by one thread at a time.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace weft {

inline constexpr std::string_view kSpare = ".spare";

/// Called for a step that failed without failing the call.
using Warn = std::function<void(const std::string& line)>;

/// Returns `folder` if it is a checkpoint. Otherwise returns its spare if that is a checkpoint, otherwise
/// nothing. A save that was killed leaves a spare if the file system cannot exchange two folders.
std::optional<std::filesystem::path> standing_folder(const std::filesystem::path& folder);

/// Gives a finished folder its name. If a checkpoint of that name exists, the two folders exchange their
/// names in one step or, if the file system refuses that, in two steps. Then the old folder is removed.
/// Throws `system` if `to` is still what it was. `reached` is called with "exchanged" or "spared", before the
/// old folder is removed.
void replace_folder(const std::filesystem::path& from, const std::filesystem::path& to, const Warn& warn,
                    const std::function<void(std::string_view)>& reached);

/// Removes a spare folder, or gives it the step's name if no checkpoint has that name.
void settle_spare(const std::filesystem::path& spare, const Warn& warn);

/// Removes a folder or a file. A path that cannot be removed stays, and causes a warning: `<what> <path>
/// cannot be removed: <errno's words>`.
void remove_or_warn(std::string_view what, const std::filesystem::path& path, const Warn& warn);

}  // namespace weft
