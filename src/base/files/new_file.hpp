// weft writes every named file through this class. It never follows or writes to a link, a FIFO
// or a file that already has this name, and never waits for one. Each object belongs to one
// thread.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "base/memfd.hpp"

namespace weft {

/// A new file `<path>.tmp.<16 random digits>` (O_EXCL, O_NOFOLLOW, mode 0666 less the umask), which publish()
/// renames to `path`. So the file appears complete or not at all. If the object is destroyed before
/// publish(), it removes the file, and `path` is untouched. An existing `path` must be a regular file or a
/// link (which is replaced, not followed). Otherwise bad_argument is thrown. All other errors are `system`,
/// and name the file.
class NewFile {
 public:
  /// `subject`: the beginning of error texts, as in "check: --json: ".
  explicit NewFile(std::filesystem::path path, std::string subject = {});
  ~NewFile();
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  /// May also be called after publish(): then the bytes are appended to the file, as long as the name still
  /// belongs to this file.
  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  /// Waits until the disk has the bytes.
  void sync();
  void publish();

  const std::filesystem::path& path() const noexcept { return path_; }

 private:
  void expect_replaceable() const;
  std::filesystem::path path_, temporary_;
  std::string subject_;
  Descriptor file_;
  bool published_ = false;
};

/// Writes `text` into a NewFile and publishes it.
void write_new_file(const std::filesystem::path& path, std::string_view text, std::string subject = {});

}  // namespace weft
