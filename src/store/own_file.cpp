#include "store/own_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "weft/base/error.hpp"

namespace weft {
namespace {

constexpr unsigned kWrittenByOthers = S_IWGRP | S_IWOTH;

// Any user who may write to the folder could put a file there. Members of the folder's group could also put a
// file there, but their file would not belong to this user, and the file's owner is checked.
void check_folder(const std::string& subject, const std::string& path, int fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) throw_errno(fmt::format("{}: {}", subject, path), errno);
  if ((status.st_mode & S_IWOTH) != 0 && (status.st_mode & S_ISVTX) == 0)
    throw Error(
        ErrorCode::system,
        fmt::format("{}: the folder {} has mode {:04o}; expected one that others may not write to, or one "
                    "with the sticky bit, such as 0755 or 1777",
                    subject, path, status.st_mode & 07777));
}

}  // namespace

void check_own_file(const std::string& subject, const struct stat& status) {
  if (!S_ISREG(status.st_mode))
    throw Error(ErrorCode::system, fmt::format("{} is not a regular file", subject));
  if (status.st_uid != ::geteuid())
    throw Error(ErrorCode::system, fmt::format("{} belongs to user {}; expected a file of this user's, {}",
                                               subject, status.st_uid, ::geteuid()));
  if ((status.st_mode & kWrittenByOthers) != 0)
    throw Error(ErrorCode::system,
                fmt::format("{} has mode {:04o}; expected one that only its owner may write, such as 0600",
                            subject, status.st_mode & 07777));
}

Descriptor open_own_file(const std::string& subject, const std::string& path, int flags) {
  const auto failed = [&](int error_number) {
    throw_errno(fmt::format("{}: cannot open {}", subject, path), error_number);
  };
  if (path.find('\0') != std::string::npos) failed(EINVAL);
  const std::filesystem::path whole(path);
  const std::string folder = whole.has_parent_path() ? whole.parent_path().string() : ".";
  if (!whole.has_filename()) failed(EISDIR);
  const Descriptor parent(::open(folder.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!parent) failed(errno);
  check_folder(subject, folder, parent.get());
  Descriptor fd(::openat(parent.get(), whole.filename().c_str(),
                         flags | O_CLOEXEC | O_NOCTTY | O_NONBLOCK | O_NOFOLLOW, 0600));
  if (!fd && errno == ELOOP)
    throw Error(ErrorCode::system,
                fmt::format("{}: {} is a symbolic link; expected the file itself", subject, path));
  struct stat status {};
  if (!fd || ::fstat(fd.get(), &status) != 0) failed(errno);
  check_own_file(fmt::format("{}: {}", subject, path), status);
  return fd;
}

}  // namespace weft
