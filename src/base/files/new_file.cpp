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

// To rename a file over a FIFO, a device or a socket would take it from those who use it.
void expect_replaceable(const std::filesystem::path& path) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0) return;  // nothing is there, or opening will say why
  if (!S_ISREG(status.st_mode) && !S_ISLNK(status.st_mode))
    throw Error(ErrorCode::bad_argument,
                fmt::format("cannot write {}: it is {}; expected a regular file or nothing", path.string(),
                            file_kind(status.st_mode)));
}

}  // namespace

NewFile::NewFile(std::filesystem::path path) : path_(std::move(path)) {
  expect_replaceable(path_);
  temporary_ = fmt::format("{}.tmp.{:016x}", path_.string(), random_bits(path_));
  file_ = Descriptor(
      ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0666));
  if (!file_) throw_errno(fmt::format("cannot create {}", temporary_.string()), errno);
}

NewFile::~NewFile() {
  if (!published_) ::unlink(temporary_.c_str());
}

void NewFile::write(std::span<const std::byte> bytes) {
  const WithoutSizeSignal guard;
  while (!bytes.empty()) {
    const ssize_t n = ::write(file_.get(), bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw_errno(fmt::format("cannot write {}", (published_ ? path_ : temporary_).string()), errno);
    bytes = bytes.subspan(static_cast<std::size_t>(n));
  }
}

void NewFile::sync() {
  if (::fsync(file_.get()) != 0) throw_errno(fmt::format("cannot sync {}", temporary_.string()), errno);
}

void NewFile::publish() {
  expect_replaceable(path_);
  if (::rename(temporary_.c_str(), path_.c_str()) != 0)
    throw_errno(fmt::format("cannot rename {} to {}", temporary_.string(), path_.string()), errno);
  published_ = true;
}

void write_new_file(const std::filesystem::path& path, std::string_view text) {
  NewFile file(path);
  file.write(text);
  file.publish();
}

}  // namespace weft
