#include "checkpoint/file_io.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "base/memfd.hpp"
#include "weft/base/error.hpp"

namespace weft {

void AtomicFile::commit() {
  const auto reached = [&](std::string_view step) {
    if (on_step_) on_step_(step);
  };
  reached("written");
  file_.sync();
  reached("synced");
  file_.publish();
  reached("named");
  sync_folder(file_.path().parent_path());
}

void sync_folder(const std::filesystem::path& folder) {
  const char* name = folder.empty() ? "." : folder.c_str();
  const Descriptor handle(::open(name, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!handle) throw_errno(fmt::format("cannot open the folder {}", name), errno);
  // Some file systems cannot sync a folder and report EINVAL; no better request exists.
  if (::fsync(handle.get()) != 0 && errno != EINVAL)
    throw_errno(fmt::format("cannot sync the folder {}", name), errno);
}

void read_exactly(int fd, const std::filesystem::path& path, std::int64_t offset, std::span<std::byte> out) {
  while (!out.empty()) {
    const ssize_t n = ::pread(fd, out.data(), out.size(), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw_errno(fmt::format("cannot read {}", path.string()), errno);
    if (n == 0)
      throw Error(ErrorCode::corrupt,
                  fmt::format("cannot read {}: it ends at byte {}; expected {} bytes more", path.string(),
                              offset, out.size()));
    offset += n;
    out = out.subspan(static_cast<std::size_t>(n));
  }
}

bool is_there(const std::filesystem::path& path) {
  std::error_code error;
  const bool there = std::filesystem::exists(path, error);
  if (error) throw_errno(fmt::format("cannot look for {}", path.string()), error.value());
  return there;
}

void refuse_link(const std::filesystem::path& path) {
  std::error_code error;  // if it cannot be examined, it cannot be opened, and opening reports why
  if (std::filesystem::symlink_status(path, error).type() != std::filesystem::file_type::symlink) return;
  const std::filesystem::path target = std::filesystem::read_symlink(path, error);
  throw Error(ErrorCode::bad_argument,
              fmt::format("checkpoint: {} is a symbolic link to {}; expected that file or folder itself",
                          path.string(), target.string()));
}

std::optional<std::string> why_no_file_name(std::string_view name) {
  constexpr std::size_t kLongest = 255;
  if (name.empty()) return "empty";
  if (name.size() > kLongest)
    return fmt::format("a text of {} characters, more than the {} of a name", name.size(), kLongest);
  if (std::any_of(name.begin(), name.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }))
    return "a text with control characters";
  if (name.find('/') != std::string_view::npos || name == "." || name == "..")
    return fmt::format("\"{}\", in another folder", name);
  return std::nullopt;
}

}  // namespace weft
