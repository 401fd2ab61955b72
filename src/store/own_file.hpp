// Checks the files through which processes of one user find each other. Only this user may have written them.
// Any thread may call it.
#pragma once

#include <sys/stat.h>

#include <string>

#include "base/memfd.hpp"

namespace weft {

/// `status` is that of an opened file. Throws system, with `subject` ("store: /tmp/store"), unless it is a
/// regular file that belongs to this process's user and that nobody else may write.
void check_own_file(const std::string& subject, const struct stat& status);

/// Opens a file of this user, or makes it if `flags` has O_CREAT, and checks the file and its folder. The
/// checks examine the opened file and folder, and not their names again. Throws system, with `subject`
/// ("store") and the path, in the cases of check_own_file, for a symbolic link, and for a folder without the
/// sticky bit in which others may make and remove files. Never waits. The path to the folder may contain
/// links.
Descriptor open_own_file(const std::string& subject, const std::string& path, int flags);

}  // namespace weft
