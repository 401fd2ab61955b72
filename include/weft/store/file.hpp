// A store in a file, for ranks that share nothing except a file system.
#pragma once

#include <memory>
#include <string>

#include "weft/base/clock.hpp"
#include "weft/store/store.hpp"

namespace weft {

/// A store in the file at `path`, which is created if it does not exist. All processes and threads that open
/// the same file share one table. The file only grows. So use it to start a job, and not to exchange data. If
/// a process is killed while it writes, the store stays valid. If a process is stopped while it writes, the
/// others wait, and throw `timeout` after `patience`. The program must remove the file. A store whose file
/// was removed throws peer_lost. On network file systems, flock(2) must work across hosts.
///
/// Throws system if the file cannot be opened, is not a store's file, belongs to another user, may be written
/// by others, is a symbolic link, or lies in a folder to which others may write (without the sticky bit).
/// Throws timeout if another process holds the file's lock for `patience`, or until `deadline`.
std::shared_ptr<Store> make_file_store(const std::string& path, Duration patience = std::chrono::seconds(30),
                                       Deadline deadline = Deadline::never());

}  // namespace weft
