#include "base/files/new_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <utility>

#include "base/files/regular_file.hpp"
#include "base/signals.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

std::uint64_t random_bits(const std::filesystem::path& path) {
  std::uint64_t bits = 0;
  if (::getrandom(&bits, sizeof bits, 0) != static_cast<ssize_t>(sizeof bits))
    throw_errno(fmt::format("no random bytes for the name of {}", path.string()), errno);
  return bits;
}

}  // namespace

// Renaming a file over a FIFO, a device or a socket would take it away from the programs that use it.
void NewFile::expect_replaceable() const {
  struct stat status {};
  // nothing has this name, or opening the file will give the reason
  if (::lstat(path_.c_str(), &status) != 0) return;
  if (!S_ISREG(status.st_mode) && !S_ISLNK(status.st_mode))
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}cannot write {}: it is {}; expected a regular file or nothing", subject_,
                            path_.string(), file_kind(status.st_mode)));
}

NewFile::NewFile(std::filesystem::path path, std::string subject)
    : path_(std::move(path)), subject_(std::move(subject)) {
  expect_replaceable();
  temporary_ = fmt::format("{}.tmp.{:016x}", path_.string(), random_bits(path_));
  file_ = Descriptor(
      ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0666));
  if (!file_) throw_errno(fmt::format("{}cannot create {}", subject_, temporary_.string()), errno);
}

NewFile::~NewFile() {
  if (!published_) ::unlink(temporary_.c_str());
}

void NewFile::write(std::span<const std::byte> bytes) {
  const WithoutSizeSignal guard;
  while (!bytes.empty()) {
    const ssize_t n = ::write(file_.get(), bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0)
      throw_errno(fmt::format("{}cannot write {}", subject_, (published_ ? path_ : temporary_).string()),
                  errno);
    bytes = bytes.subspan(static_cast<std::size_t>(n));
  }
}

void NewFile::sync() {
  if (::fsync(file_.get()) != 0)
    throw_errno(fmt::format("{}cannot sync {}", subject_, temporary_.string()), errno);
}

void NewFile::publish() {
  expect_replaceable();
  if (::rename(temporary_.c_str(), path_.c_str()) != 0)
    throw_errno(fmt::format("{}cannot rename {} to {}", subject_, temporary_.string(), path_.string()),
                errno);
  published_ = true;
}

void write_new_file(const std::filesystem::path& path, std::string_view text, std::string subject) {
  NewFile file(path, std::move(subject));
  file.write(text);
  file.publish();
}

}  // namespace weft
