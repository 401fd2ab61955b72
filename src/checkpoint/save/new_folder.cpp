#include "checkpoint/new_folder.hpp"

#include <fmt/format.h>
#include <stdio.h>
#include <sys/stat.h>

#include <cerrno>
#include <memory>
#include <optional>
#include <system_error>
#include <utility>

#include "base/files/regular_file.hpp"
#include "checkpoint/file_io.hpp"
#include "checkpoint/save/housekeeping.hpp"
#include "weft/base/env.hpp"
#include "weft/base/error.hpp"
#include "weft/base/log.hpp"
#include "weft/host/context.hpp"

namespace weft {
namespace {

// Makes the folder and its missing parents, and makes their names durable.
void make_folders(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> made;
  for (std::filesystem::path at = folder; !at.empty() && !std::filesystem::exists(at); at = at.parent_path())
    made.push_back(at);
  std::filesystem::create_directories(folder);
  for (const std::filesystem::path& each : made) sync_folder(each.parent_path());
}

// Makes a new folder. If a folder of that name (perhaps a left-over) is in the way and cannot be removed,
// that folder gets another name.
void make_new(const std::filesystem::path& folder) {
  constexpr mode_t kAll = 0777;  // less the umask
  constexpr int kMostNames = 100;
  int error = ::mkdir(folder.c_str(), kAll) == 0 ? 0 : errno;
  for (int n = 0; error == EEXIST && n < kMostNames; ++n) {
    std::filesystem::path aside = folder;
    aside.replace_extension(fmt::format(".{}{}", n, kUnfinished));
    struct stat status {};
    if (::lstat(aside.c_str(), &status) == 0) continue;
    if (::rename(folder.c_str(), aside.c_str()) != 0) break;
    error = ::mkdir(folder.c_str(), kAll) == 0 ? 0 : errno;
  }
  if (error != 0) throw_errno(fmt::format("cannot make the folder {}", folder.string()), error);
}

bool is_named_by(const std::filesystem::path& latest, const std::filesystem::path& folder) noexcept {
  constexpr std::size_t kMostBytes = 4096;
  try {
    return folder_of_latest(latest, read_regular_file(latest, "", kMostBytes)) == folder.filename().string();
  } catch (...) {
    return false;
  }
}

}  // namespace

std::string unchanged(const std::filesystem::path& directory) {
  return fmt::format("{} is as it was", directory.string());
}

Warn warnings_of(std::string what, const DeviceMesh& mesh) {
  return [what = std::move(what), mesh](const std::string& line) {
    const std::string text = fmt::format("{}: {}", what, line);
    if (mesh) return mesh.context().log().write(LogLayer::program, LogLevel::warning, text);
    LogLevels levels;
    try {
      if (const auto wanted = env::get("WEFT_LOG")) levels = levels.changed_by(*wanted, "WEFT_LOG");
    } catch (const Error&) {  // the first Context says so
    }
    Logger(levels).write(LogLayer::program, LogLevel::warning, text);
  };
}

NewFolder::NewFolder(std::filesystem::path directory, std::int64_t step,
                     std::function<void(std::string_view stage)> on_stage, Warn warn)
    : directory_(std::move(directory)),
      folder_(directory_ / folder_name(step)),
      unfinished_(folder_.string() + std::string(kUnfinished)),
      step_(step),
      on_stage_(std::move(on_stage)),
      warn_(std::move(warn)) {}

void NewFolder::reached(std::string_view stage) const {
  if (on_stage_) on_stage_(stage);
}

std::function<void(std::string_view)> NewFolder::steps_of(std::string what) const {
  return [this, what = std::move(what)](std::string_view done) { reached(fmt::format("{} {}", what, done)); };
}

void NewFolder::make() const {
  make_folders(directory_);
  warn_of_other_owner(directory_, warn_);
  settle_left_overs(directory_, warn_);
  make_new(unfinished_);
  reached("folder");
}

std::uint64_t NewFolder::write(const std::string& name, std::vector<PlannedTensor> tensors,
                               std::map<std::string, std::string> metadata) const {
  for (PlannedTensor& tensor : tensors)
    tensor.bytes = [this, bytes = tensor.bytes] {
      reached("data");
      return bytes();
    };
  metadata[kStepKey] = std::to_string(step_);
  const std::uint64_t header_hash =
      write_safetensors(unfinished_ / name, tensors, metadata, steps_of("file"));
  reached("file");
  return header_hash;
}

void NewFolder::finish(const CheckpointIndex& index, int keep) {
  const std::string text = to_json(index);
  index_from_json(unfinished_ / kIndexFile, text);  // an index that cannot be read is not written
  AtomicFile file(unfinished_ / kIndexFile, steps_of("index"));
  file.write(text);
  file.commit();
  reached("index");
  replace_folder(unfinished_, folder_, warn_, [this](std::string_view stage) {
    has_its_name_ = has_its_name_ || stage == "exchanged";
    reached(stage);
  });
  has_its_name_ = true;
  reached("renamed");
  AtomicFile latest(directory_ / kLatestFile, steps_of("latest"));
  latest.write(latest_text(folder_.filename().string()));
  latest.commit();
  reached("latest");
  remove_old(directory_, step_, keep, warn_, [this](std::string_view stage) { reached(stage); });
}

void NewFolder::remove() const noexcept {
  std::error_code ignored;  // the first error is reported
  std::filesystem::remove_all(unfinished_, ignored);
}

std::string NewFolder::state() const {
  if (!has_its_name_) return unchanged(directory_);
  const std::filesystem::path latest = directory_ / kLatestFile;
  return is_named_by(latest, folder_)
             ? fmt::format("{} is whole, and {} names it", folder_.string(), latest.string())
             : fmt::format("{} is whole, but {} does not name it", folder_.string(), latest.string());
}

}  // namespace weft
