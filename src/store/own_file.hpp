// Checks of files that only this user may have written, by which processes of one user meet. Callable from
// any thread.
#pragma once

#include <sys/stat.h>

#include <string>

#include "base/memfd.hpp"

namespace weft {

/// Throws system that names `subject` ("store: /tmp/store") unless `status`, of an opened file, shows a
/// regular file that belongs to this process's user and that nobody else may write.
void check_own_file(const std::string& subject, const struct stat& status);

/// Opens a file of this user, or makes it if `flags` has O_CREAT, and checks the file and its folder. The
/// checks examine the opened file and folder, never their names again. Throws system that names `subject`
/// ("store") and the path: in the cases of check_own_file, for a symbolic link, and for a folder in which
/// others may put and remove files (without the sticky bit). Never waits. The path to the folder may contain
/// links.
Descriptor open_own_file(const std::string& subject, const std::string& path, int flags);

}  // namespace weft
