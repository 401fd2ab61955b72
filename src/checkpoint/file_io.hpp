// Files that appear whole or not at all. Each object belongs to one thread.
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

/// A NewFile that is durable: commit() also waits for the disk. Every function throws as NewFile's do.
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

/// The bytes [offset, offset + out.size()) of an open file. Throws `system` naming `path` where reading
/// fails, and `corrupt` where the file ends before.
void read_exactly(int fd, const std::filesystem::path& path, std::int64_t offset, std::span<std::byte> out);

/// Whether there is something under that name. Throws `system` naming it if that cannot be found out.
bool is_there(const std::filesystem::path& path);

/// Throws bad_argument if `path` is a symbolic link: what belongs to a checkpoint lies in its folder.
/// Nothing if there is nothing.
void refuse_link(const std::filesystem::path& path);

/// The reason why a text from a file is not the name of a file in a known folder ("empty", "\"../x\", with a
/// '/'"); nothing if it is.
std::optional<std::string> why_no_file_name(std::string_view name);

}  // namespace weft
