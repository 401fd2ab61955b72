// Checks of files that only this user may have written, by which processes of one user meet. Callable from
// any thread.
#pragma once

#include <sys/stat.h>

#include <string>

#include "base/memfd.hpp"

namespace weft {

/// Throws system naming `subject` ("store: /tmp/store") unless `status`, of an opened file, is that of a
/// regular file that belongs to this process's user and that nobody else may write.
void check_own_file(const std::string& subject, const struct stat& status);

/// Opens a file of this user, or makes it with O_CREAT among `flags`, and checks it and its folder. The
/// checks look at what was opened, never at the name again. Throws system naming `subject` ("store") and the
/// path: as check_own_file does, for a symbolic link, and for a folder in which others may put and remove
/// files (without the sticky bit). Never waits. The folder itself may be reached by a link.
Descriptor open_own_file(const std::string& subject, const std::string& path, int flags);

}  // namespace weft
