#include "store/rendezvous_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <pwd.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <iterator>
#include <utility>

#include "base/hash.hpp"
#include "base/signals.hpp"
#include "base/text/plain_streams.hpp"
#include "base/waits/suspension.hpp"
#include "store/own_file.hpp"
#include "weft/base/env.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

constexpr std::string_view kFirstLine = "weft rendezvous 1";

/// The lock of the folder, against other processes that write there.
class FolderLock {
 public:
  FolderLock(int fd, const std::string& folder, Deadline deadline) : fd_(fd) {
    while (::flock(fd_, LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK && errno != EINTR)
        throw_errno(fmt::format("rendezvous: cannot lock {}", folder), errno);
      if (deadline.passed())
        throw Error(ErrorCode::timeout,
                    fmt::format("rendezvous: another process holds the lock of {}", folder));
      sleep_noticing(std::chrono::milliseconds(1));
    }
  }
  ~FolderLock() { ::flock(fd_, LOCK_UN); }
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  const int fd_;
};

std::string words(const std::string& what, int error_number) {
  return what + ": " + system_words(error_number);
}

/// Opens a folder of this user that nobody else may enter. Otherwise another user could send this job's ranks
/// to a store of his own. The function does not follow a link, and checks the opened folder. Returns an empty
/// descriptor if the folder cannot be used. `why` gives the reason.
Descriptor open_folder(const std::string& path, bool make, std::string& why) {
  if (make && ::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    why = words(fmt::format("cannot make the folder {}", path), errno);
    return {};
  }
  Descriptor fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat status {};
  if (!fd && (errno == ELOOP || errno == ENOTDIR)) {
    why = fmt::format("{} is not a folder (links are not followed)", path);
  } else if (fd && ::fstat(fd.get(), &status) == 0) {
    if (status.st_uid != ::geteuid()) {
      why = fmt::format("the folder {} belongs to user {}; expected {}", path, status.st_uid, ::geteuid());
    } else if ((status.st_mode & 077) != 0) {
      why = fmt::format("the folder {} has mode {:04o}; expected 0700", path, status.st_mode & 07777);
    } else {
      return fd;
    }
  } else if (errno == EACCES && ::lstat(path.c_str(), &status) == 0 && status.st_uid != ::geteuid()) {
    why = fmt::format("the folder {} belongs to user {}; expected {}", path, status.st_uid, ::geteuid());
  } else {
    why = words(fmt::format("cannot open the folder {}", path), errno);
  }
  return {};
}

/// Returns the folders to try, the best first. In the session's folder no other user can take a name.
std::vector<std::string> candidate_folders() {
  const auto runtime = env::get("XDG_RUNTIME_DIR");
  struct stat status {};
  if (runtime && runtime->front() == '/' && ::stat(runtime->c_str(), &status) == 0 &&
      S_ISDIR(status.st_mode) && status.st_uid == ::geteuid())
    return {*runtime + "/weft"};
  std::vector<std::string> all{fmt::format("/tmp/weft-{}", ::geteuid())};
  for (int i = 1; i <= 9; ++i) all.push_back(fmt::format("{}-{}", all.front(), i));
  passwd entry{};
  passwd* found = nullptr;
  std::vector<char> buffer(16384);
  if (::getpwuid_r(::geteuid(), &entry, buffer.data(), buffer.size(), &found) == 0 && found != nullptr &&
      found->pw_dir != nullptr && found->pw_dir[0] == '/')
    all.push_back(fmt::format("{}/.weft", found->pw_dir));
  return all;
}

}  // namespace

std::optional<std::uint64_t> start_time_of(pid_t process) {
  FileIn file(fmt::format("/proc/{}/stat", process));
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  // The state follows the process's name, which is in parentheses and may contain any characters; the start
  // time is field 22 of the line.
  const std::size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  TextIn rest(text.substr(name_end + 1));
  std::string field;
  for (int number = 3; number < 22; ++number) {
    rest >> field;
    if (number == 3 && (field == "Z" || field == "X")) return std::nullopt;  // it has ended
  }
  std::uint64_t started = 0;
  return rest >> started ? std::optional(started) : std::nullopt;
}

RendezvousFile::RendezvousFile(std::string key)
    : key_(std::move(key)),
      name_(fmt::format("meet-{:016x}", hash_of(key_))),
      candidates_(candidate_folders()) {
  std::replace(key_.begin(), key_.end(), '\n', ' ');
  std::string all;
  for (const std::string& path : candidates_) {
    std::string why;
    folder_ = {path, open_folder(path, true, why)};
    if (folder_.fd) return;
    all += (all.empty() ? "" : "; ") + why;
  }
  throw Error(ErrorCode::system,
              fmt::format("rendezvous: {}{}", all,
                          candidates_.size() == 1
                              ? ""
                              : "; expected XDG_RUNTIME_DIR to be a folder of this user's, or WEFT_STORE"));
}

/// Looks into all folders, because the folder that rank 0 used may have been made or removed after this
/// process chose its own folder.
std::optional<RendezvousFile::Published> RendezvousFile::read_any() const {
  if (auto published = read(folder_)) return published;
  for (const std::string& path : candidates_) {
    if (path == folder_.path) continue;
    std::string why;
    const Folder other{path, open_folder(path, false, why)};
    if (!other.fd) continue;
    if (auto published = read(other); published && published->lives()) return published;
  }
  return std::nullopt;
}

std::optional<RendezvousFile::Published> RendezvousFile::read(const Folder& folder) const {
  const Descriptor fd(
      ::openat(folder.fd.get(), name_.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  if (fd && ::fstat(fd.get(), &status) == 0)
    check_own_file(fmt::format("rendezvous: {}", path_in(folder)), status);
  char bytes[4096];
  const ssize_t got = fd ? ::read(fd.get(), bytes, sizeof bytes) : -1;
  if (got <= 0) return std::nullopt;
  TextIn text(std::string(bytes, static_cast<std::size_t>(got)));
  std::string first, key;
  Published published;
  if (!std::getline(text, first) || first != kFirstLine || !std::getline(text, key) || key != key_ ||
      !std::getline(text, published.address) || !(text >> published.process >> published.started))
    return std::nullopt;
  return published;
}

std::optional<std::string> RendezvousFile::find() const {
  auto published = read_any();
  if (!published || !published->lives()) return std::nullopt;
  return std::move(published->address);
}

void RendezvousFile::publish(const std::string& address, Deadline deadline) const {
  const FolderLock lock(folder_.fd.get(), folder_.path, deadline);
  if (const auto published = read_any(); published && published->lives())
    throw Error(
        ErrorCode::system,
        fmt::format("rendezvous: {} was written by process {}, which still runs; expected one process "
                    "of rank 0 in a job",
                    path(), published->process));
  const std::string text = fmt::format("{}\n{}\n{}\n{} {}\n", kFirstLine, key_, address, ::getpid(),
                                       start_time_of(::getpid()).value_or(0));
  // The file is first written under another name, so that readers never find half a file.
  const std::string fresh = name_ + ".new";
  const Descriptor fd(::openat(folder_.fd.get(), fresh.c_str(),
                               O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0600));
  if (!fd) throw_errno(fmt::format("rendezvous: cannot write {}.new", path()), errno);
  const WithoutSizeSignal guard;
  const ssize_t written = ::write(fd.get(), text.data(), text.size());
  if (written != static_cast<ssize_t>(text.size())) {
    const int error_number = written < 0 ? errno : ENOSPC;  // ENOSPC if only a part was written
    ::unlinkat(folder_.fd.get(), fresh.c_str(), 0);
    throw_errno(fmt::format("rendezvous: cannot write {}.new", path()), error_number);
  }
  if (::renameat(folder_.fd.get(), fresh.c_str(), folder_.fd.get(), name_.c_str()) != 0)
    throw_errno(fmt::format("rendezvous: cannot write {}", path()), errno);
}

void RendezvousFile::remove(const std::string& address) const noexcept {
  for (const std::string& path : candidates_) try {
      std::string why;
      const Folder folder{path, open_folder(path, false, why)};
      if (!folder.fd) continue;
      const FolderLock lock(folder.fd.get(), path, Deadline::after(std::chrono::seconds(1)));
      const auto published = read(folder);
      if (published && published->address == address) ::unlinkat(folder.fd.get(), name_.c_str(), 0);
    } catch (...) {  // the file stays; it has no effect after this process has ended
    }
}

}  // namespace weft
