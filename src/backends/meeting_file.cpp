#include "backends/meeting_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <sstream>
#include <thread>
#include <utility>

#include "weft/base/env.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

constexpr std::string_view kFirstLine = "weft meeting 1";

/// The folder's lock, against others who write there at the same moment.
class FolderLock {
 public:
  FolderLock(int fd, const std::string& folder, Deadline deadline) : fd_(fd) {
    while (::flock(fd_, LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK && errno != EINTR)
        throw_errno(fmt::format("rendezvous: cannot lock {}", folder), errno);
      if (deadline.passed())
        throw Error(ErrorCode::timeout,
                    fmt::format("rendezvous: another process holds the lock of {}", folder));
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  ~FolderLock() { ::flock(fd_, LOCK_UN); }
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  const int fd_;
};

/// A folder of this user's, that nobody else may enter: else another user could send our ranks to a store of
/// his. Opened without following a link, then checked on what was opened.
Descriptor open_folder(const std::string& path) {
  if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST)
    throw_errno(fmt::format("rendezvous: cannot make the folder {}", path), errno);
  Descriptor fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!fd && (errno == ELOOP || errno == ENOTDIR))
    throw Error(ErrorCode::system,
                fmt::format("rendezvous: {} is not a folder (links are not followed)", path));
  struct stat status {};
  if (!fd || ::fstat(fd.get(), &status) != 0)
    throw_errno(fmt::format("rendezvous: cannot open the folder {}", path), errno);
  if (status.st_uid != ::geteuid())
    throw Error(ErrorCode::system, fmt::format("rendezvous: the folder {} belongs to user {}; expected {}",
                                               path, status.st_uid, ::geteuid()));
  if ((status.st_mode & 077) != 0)
    throw Error(ErrorCode::system, fmt::format("rendezvous: the folder {} has mode {:04o}; expected 0700",
                                               path, status.st_mode & 07777));
  return fd;
}

std::string folder_path() {
  const auto runtime = env::get("XDG_RUNTIME_DIR");
  struct stat status {};
  if (runtime && runtime->front() == '/' && ::stat(runtime->c_str(), &status) == 0 &&
      S_ISDIR(status.st_mode) && status.st_uid == ::geteuid())
    return *runtime + "/weft";
  return fmt::format("/tmp/weft-{}", ::geteuid());
}

std::uint64_t hash(std::string_view text) {
  std::uint64_t h = 0xcbf29ce484222325;
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return h;
}

}  // namespace

std::optional<std::uint64_t> start_time_of(pid_t process) {
  std::ifstream file(fmt::format("/proc/{}/stat", process));
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  // After the name, which is in parentheses and may hold anything: the state, and the 22nd field in all.
  const std::size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream rest(text.substr(name_end + 1));
  std::string field;
  for (int number = 3; number < 22; ++number) {
    rest >> field;
    if (number == 3 && (field == "Z" || field == "X")) return std::nullopt;  // it has ended
  }
  std::uint64_t started = 0;
  return rest >> started ? std::optional(started) : std::nullopt;
}

MeetingPlace::MeetingPlace(std::string key)
    : key_(std::move(key)),
      folder_(folder_path()),
      name_(fmt::format("meet-{:016x}", hash(key_))),
      fd_(open_folder(folder_)) {
  std::replace(key_.begin(), key_.end(), '\n', ' ');
}

std::optional<MeetingPlace::Told> MeetingPlace::read() const {
  const Descriptor fd(::openat(fd_.get(), name_.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  char bytes[4096];
  const ssize_t got = fd ? ::read(fd.get(), bytes, sizeof bytes) : -1;
  if (got <= 0) return std::nullopt;
  std::istringstream text(std::string(bytes, static_cast<std::size_t>(got)));
  std::string first, key;
  Told told;
  if (!std::getline(text, first) || first != kFirstLine || !std::getline(text, key) || key != key_ ||
      !std::getline(text, told.address) || !(text >> told.process >> told.started))
    return std::nullopt;
  return told;
}

std::optional<std::string> MeetingPlace::find() const {
  auto told = read();
  if (!told || !told->lives()) return std::nullopt;
  return std::move(told->address);
}

void MeetingPlace::publish(const std::string& address, Deadline deadline) const {
  const FolderLock lock(fd_.get(), folder_, deadline);
  if (const auto told = read(); told && told->lives())
    throw Error(
        ErrorCode::system,
        fmt::format("rendezvous: {} was written by process {}, which still runs; expected one process "
                    "of rank 0 in a job",
                    path(), told->process));
  const std::string text = fmt::format("{}\n{}\n{}\n{} {}\n", kFirstLine, key_, address, ::getpid(),
                                       start_time_of(::getpid()).value_or(0));
  // Under another name first: whoever finds the file finds all of it.
  const std::string fresh = name_ + ".new";
  const Descriptor fd(
      ::openat(fd_.get(), fresh.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!fd) throw_errno(fmt::format("rendezvous: cannot write {}.new", path()), errno);
  const ssize_t written = ::write(fd.get(), text.data(), text.size());
  if (written != static_cast<ssize_t>(text.size())) {
    const int error_number = written < 0 ? errno : ENOSPC;
    ::unlinkat(fd_.get(), fresh.c_str(), 0);
    throw_errno(fmt::format("rendezvous: cannot write {}.new", path()), error_number);
  }
  if (::renameat(fd_.get(), fresh.c_str(), fd_.get(), name_.c_str()) != 0)
    throw_errno(fmt::format("rendezvous: cannot write {}", path()), errno);
}

void MeetingPlace::remove(const std::string& address) const noexcept {
  try {
    const FolderLock lock(fd_.get(), folder_, Deadline::after(std::chrono::seconds(1)));
    const auto told = read();
    if (told && told->address == address) ::unlinkat(fd_.get(), name_.c_str(), 0);
  } catch (...) {  // the file stays; its writer will not live, and then it counts for nothing
  }
}

}  // namespace weft
