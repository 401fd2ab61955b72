// The usual way is renameat2(RENAME_EXCHANGE). NFS, 9p, FUSE and Gluster refuse the flags of renameat2 with
// EINVAL. On these file systems the old folder is renamed to the spare name, and then the new folder to the
// step's name. overlayfs refuses with EXDEV to rename a folder of a lower layer at all. On overlayfs the new
// folder gets the spare name, the old folder is removed, its index first, and then the new folder is renamed
// to the step's name. A load uses the spare folder if the folder with the step's own name has no index.
#include "checkpoint/save/replace_folder.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <stdio.h>

#include <cerrno>
#include <system_error>

#include "checkpoint/file_io.hpp"
#include "checkpoint/index/index.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

std::filesystem::path spare_of(const std::filesystem::path& folder) {
  return folder.string() + std::string(kSpare);
}

// 0, or errno.
int renamed(const std::filesystem::path& from, const std::filesystem::path& to) {
  return ::rename(from.c_str(), to.c_str()) == 0 ? 0 : errno;
}

void rename_or_throw(const std::filesystem::path& from, const std::filesystem::path& to) {
  if (const int error = renamed(from, to); error != 0)
    throw_errno(fmt::format("cannot rename {} to {}", from.string(), to.string()), error);
}

void replace_by_removal(const std::filesystem::path& from, const std::filesystem::path& to, const Warn& warn,
                        const std::function<void(std::string_view)>& reached) {
  const std::filesystem::path spare = spare_of(to);
  rename_or_throw(from, spare);
  sync_folder(to.parent_path());
  std::error_code failed;
  std::filesystem::remove(to / kIndexFile, failed);
  if (failed) {
    static_cast<void>(renamed(spare, from));
    throw_errno(fmt::format("cannot remove {}", (to / kIndexFile).string()), failed.value());
  }
  sync_folder(to);
  reached("exchanged");  // the spare stands for it
  settle_spare(spare, warn);
}

void replace_by_renames(const std::filesystem::path& from, const std::filesystem::path& to, const Warn& warn,
                        const std::function<void(std::string_view)>& reached) {
  const std::filesystem::path spare = spare_of(to);
  if (const int error = renamed(to, spare); error == EXDEV) {
    return replace_by_removal(from, to, warn, reached);
  } else if (error != 0) {
    throw_errno(fmt::format("cannot rename {} to {}", to.string(), spare.string()), error);
  }
  sync_folder(to.parent_path());
  reached("spared");
  if (const int error = renamed(from, to); error != 0) {
    static_cast<void>(renamed(spare, to));  // otherwise the next save does it
    throw_errno(fmt::format("cannot rename {} to {}", from.string(), to.string()), error);
  }
  sync_folder(to.parent_path());
  remove_or_warn("the replaced", spare, warn);
}

}  // namespace

std::optional<std::filesystem::path> standing_folder(const std::filesystem::path& folder) {
  if (is_there(folder / kIndexFile)) return folder;
  std::filesystem::path named = folder;
  if (!named.has_filename()) named = named.parent_path();  // "run/step-00000001/"
  if (const std::filesystem::path spare = spare_of(named); is_there(spare / kIndexFile)) return spare;
  return std::nullopt;
}

void replace_folder(const std::filesystem::path& from, const std::filesystem::path& to, const Warn& warn,
                    const std::function<void(std::string_view)>& reached) {
  if (!is_there(to)) {
    rename_or_throw(from, to);
    return sync_folder(to.parent_path());
  }
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) != 0)
    return replace_by_renames(from, to, warn, reached);
  sync_folder(to.parent_path());
  reached("exchanged");
  remove_or_warn("the replaced", from, warn);
}

void settle_spare(const std::filesystem::path& spare, const Warn& warn) {
  std::filesystem::path folder = spare;
  folder.replace_extension();
  std::error_code failed;
  const bool stands = std::filesystem::exists(folder / kIndexFile, failed);
  const bool spare_stands = !failed && std::filesystem::exists(spare / kIndexFile, failed);
  if (failed) return;  // the next save looks again
  if (stands || !spare_stands) return remove_or_warn("the replaced", spare, warn);
  remove_or_warn("what is left of", folder, warn);
  if (const int error = renamed(spare, folder); error != 0)
    warn(fmt::format("{} is used in place of {}, whose name it cannot get: {}", spare.string(),
                     folder.string(), system_words(error)));
  else
    sync_folder(folder.parent_path());
}

void remove_or_warn(std::string_view what, const std::filesystem::path& path, const Warn& warn) {
  std::error_code failed;
  std::filesystem::remove_all(path, failed);
  if (failed)
    warn(fmt::format("{} {} cannot be removed: {}", what, path.string(), system_words(failed.value())));
}

}  // namespace weft
