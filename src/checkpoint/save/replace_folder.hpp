// A step's folder takes the place of another one of the same step. At any moment one whole checkpoint of the
// step stands under the step's name or under its spare name. For one thread at a time.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace weft {

inline constexpr std::string_view kSpare = ".spare";

/// Called for a step that failed though the call goes on.
using Warn = std::function<void(const std::string& line)>;

/// `folder`, if it is a checkpoint; otherwise its spare, if that is one; otherwise nothing. A save that was
/// killed where the file system cannot exchange two folders leaves a spare.
std::optional<std::filesystem::path> standing_folder(const std::filesystem::path& folder);

/// Gives a finished folder its name. If a checkpoint of that name exists the two change places in one step,
/// or, where the file system refuses that, in two; the old one is then removed. Throws `system` where `to` is
/// still what it was. `reached` is called with "exchanged" or "spared", before the old one is removed.
void replace_folder(const std::filesystem::path& from, const std::filesystem::path& to, const Warn& warn,
                    const std::function<void(std::string_view)>& reached);

/// Removes a spare, or gives it the step's name where no checkpoint has that.
void settle_spare(const std::filesystem::path& spare, const Warn& warn);

/// Removes a folder or a file. A path that cannot be removed stays, and is a warning:
/// `<what> <path> cannot be removed: <errno's words>`.
void remove_or_warn(std::string_view what, const std::filesystem::path& path, const Warn& warn);

}  // namespace weft
