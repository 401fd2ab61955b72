// Files that appear complete or not at all. Each object belongs to one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "base/files/new_file.hpp"

namespace weft {

/// A NewFile that is durable: commit() also waits for the disk. Every function throws like NewFile's
/// functions.
class AtomicFile {
 public:
  /// Called after each step of commit(): "written", "synced", "named".
  using OnStep = std::function<void(std::string_view step)>;
  explicit AtomicFile(std::filesystem::path path, OnStep on_step = {})
      : file_(std::move(path)), on_step_(std::move(on_step)) {}

  void write(std::span<const std::byte> bytes) { file_.write(bytes); }
  void write(std::string_view text) { file_.write(text); }
  /// Syncs the file, renames it, syncs the folder.
  void commit();

 private:
  NewFile file_;
  OnStep on_step_;
};

/// Makes the names in `folder` durable. Throws `system` naming it.
void sync_folder(const std::filesystem::path& folder);

/// Reads the bytes [offset, offset + out.size()) of an open file. Throws `system` that names `path` if
/// reading fails, and `corrupt` if the file ends before.
void read_exactly(int fd, const std::filesystem::path& path, std::int64_t offset, std::span<std::byte> out);

/// Returns whether a file with that name exists. Throws `system` that names the file if that cannot be found
/// out.
bool is_there(const std::filesystem::path& path);

/// Throws bad_argument if `path` is a symbolic link, because the files of a checkpoint lie in its folder.
/// Does nothing if nothing has that name.
void refuse_link(const std::filesystem::path& path);

/// Returns why a text from a file is not the name of a file in a known folder ("empty", "\"../x\", with a
/// '/'"). Nothing if it is such a name.
std::optional<std::string> why_no_file_name(std::string_view name);

}  // namespace weft
