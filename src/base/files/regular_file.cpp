#include "base/files/regular_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "weft/base/error.hpp"

namespace weft {

std::string_view file_kind(unsigned mode) noexcept {
  switch (mode & S_IFMT) {
    case S_IFREG: return "a regular file";
    case S_IFDIR: return "a folder";
    case S_IFIFO: return "a FIFO";
    case S_IFSOCK: return "a socket";
    case S_IFCHR: return "a character device";
    case S_IFBLK: return "a block device";
    case S_IFLNK: return "a symbolic link";
    default: return "of an unknown kind";
  }
}

RegularFile open_regular_file(const std::string& path) {
  RegularFile file;
  const auto other_kind = [&](unsigned mode) {
    file.fd = Descriptor();
    file.why = fmt::format("is not a regular file (it is {})", file_kind(mode));
    return std::move(file);
  };
  const auto failed = [&](int error_number) {
    file.fd = Descriptor();
    file.error_number = error_number;
    file.why = fmt::format("cannot open it: {}", system_words(error_number));
    return std::move(file);
  };
  if (const std::size_t nul = path.find('\0'); nul != std::string::npos) {
    file.error_number = EINVAL;
    file.why = fmt::format("cannot open it: its name has a NUL after {} characters", nul);
    return file;
  }
  // O_NONBLOCK is needed, because opening a FIFO would wait for a writer. The flag changes nothing for
  // regular files.
  file.fd = Descriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  struct stat status {};
  if (!file.fd) {
    const int error_number = errno;
    if (error_number == ENXIO && ::stat(path.c_str(), &status) == 0) return other_kind(status.st_mode);
    return failed(error_number);
  }
  if (::fstat(file.fd.get(), &status) != 0) return failed(errno);
  if (!S_ISREG(status.st_mode)) return other_kind(status.st_mode);
  file.bytes = status.st_size;
  return file;
}

std::string read_regular_file(const std::string& path, std::string_view subject, std::size_t bytes_max) {
  const RegularFile file = open_regular_file(path);
  if (!file.fd)
    throw Error(file.error_number != 0 ? ErrorCode::system : ErrorCode::bad_argument,
                fmt::format("{} {}", subject, file.why));
  std::string text;
  char part[16 * 1024];
  for (;;) {  // reads up to the end, which may move; files of /proc have size 0
    const ssize_t n = ::read(file.fd.get(), part, sizeof part);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw_errno(fmt::format("{} cannot read it", subject), errno);
    if (n == 0) return text;
    text.append(part, static_cast<std::size_t>(n));
    if (text.size() > bytes_max)
      throw Error(ErrorCode::bad_argument, fmt::format("{} has more than {} bytes", subject, bytes_max));
  }
}

}  // namespace weft
