// The second half of a save: the folder gets its name when all that belongs into it is on the disk, so that at any
// moment a checkpoint is whole or not there.
#include <fcntl.h>
#include <fmt/format.h>
#include <stdio.h>

#include <cerrno>
#include <charconv>
#include <exception>

#include "checkpoint/agreement.hpp"
#include "checkpoint/content_hash.hpp"
#include "checkpoint/file_io.hpp"
#include "checkpoint/new_folder.hpp"
#include "checkpoint/save/save_turn.hpp"
#include "checkpoint/save_plan.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

constexpr std::string_view kUnfinished = ".unfinished";
constexpr std::string_view kStep = "step-";

std::string folder_name(std::int64_t step) { return fmt::format("{}{:08}", kStep, step); }

// Removes what a save that was killed has left: folders that never got their name, and replaced ones.
void remove_unfinished(const std::filesystem::path& directory) {
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    const std::string name = entry.path().filename().string();
    if ((name.starts_with("step-") && name.ends_with(kUnfinished)) ||
        name.starts_with(fmt::format("{}.tmp.", kLatestFile)))
      std::filesystem::remove_all(entry.path());
  }
}

// Makes the folder and those above it that are not there, and their names durable.
void make_folders(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> made;
  for (std::filesystem::path at = folder; !at.empty() && !std::filesystem::exists(at); at = at.parent_path())
    made.push_back(at);
  std::filesystem::create_directories(folder);
  for (const std::filesystem::path& each : made) sync_folder(each.parent_path());
}

// The step of a folder that save_checkpoint() has named, or nothing.
std::optional<std::int64_t> step_of(const std::filesystem::path& folder) {
  const std::string name = folder.filename().string();
  std::int64_t step = 0;
  const char* const begin = name.data() + std::min(kStep.size(), name.size());
  const auto [end, error] = std::from_chars(begin, name.data() + name.size(), step);
  if (!name.starts_with(kStep) || error != std::errc() || folder_name(step) != name) return std::nullopt;
  return step;
}

// Removes the oldest checkpoints up to `step`, so that `keep` of them are left; 0: none. Each loses its name first: the next
// save removes what a kill leaves of it.
void remove_old(const std::filesystem::path& directory, std::int64_t step, int keep,
                const std::function<void(std::string_view)>& reached) {
  if (keep == 0) return;
  std::map<std::int64_t, std::filesystem::path> folders;
  for (const auto& entry : std::filesystem::directory_iterator(directory))
    if (const auto of = step_of(entry.path()); of && *of <= step && is_there(entry.path() / kIndexFile))
      folders[*of] = entry.path();
  while (folders.size() > static_cast<std::size_t>(keep)) {
    const std::filesystem::path old = folders.begin()->second;
    const std::filesystem::path unnamed = old.string() + std::string(kUnfinished);
    std::filesystem::rename(old, unnamed);
    reached("old");
    std::filesystem::remove_all(unnamed);
    folders.erase(folders.begin());
  }
}

// The system's errors say what failed and in which file; this adds that it was in save_checkpoint.
template <class Action>
void with_our_errors(Action&& action) {
  try {
    action();
  } catch (const std::filesystem::filesystem_error& e) {
    throw_errno(fmt::format("save_checkpoint: {}", e.path1().string()), e.code().value());
  } catch (const Error& e) {
    if (e.code() != ErrorCode::system) throw;
    throw Error(ErrorCode::system, fmt::format("save_checkpoint: {}", e.what()));
  }
}

// Gives a finished folder its name. Where a checkpoint of that name exists the two change places in one step,
// so that the name stands for a whole one at any moment; the old one is then removed.
void rename_folder(const std::filesystem::path& from, const std::filesystem::path& to,
                   const std::function<void(std::string_view)>& reached) {
  if (std::filesystem::exists(to)) {
    if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) != 0)
      throw_errno(fmt::format("cannot exchange {} and {}", from.string(), to.string()), errno);
    sync_folder(to.parent_path());
    reached("exchanged");
    std::filesystem::remove_all(from);
  } else {
    if (::rename(from.c_str(), to.c_str()) != 0)
      throw_errno(fmt::format("cannot rename {} to {}", from.string(), to.string()), errno);
    sync_folder(to.parent_path());
  }
}

// The hashes of what a rank's file holds.
std::map<std::string, std::string> hashes_of(std::span<const SafetensorsEntry> entries) {
  std::map<std::string, std::string> hashes;
  for (const SafetensorsEntry& entry : entries)
    hashes[hashes_key(entry.name)] =
        chunk_hashes({entry.data.data, static_cast<std::size_t>(entry.data.bytes())});
  return hashes;
}

// To the files that the index names; by rank.
void add_hashes(CheckpointIndex& index, std::span<const std::uint64_t> header_hashes) {
  for (std::size_t rank = 0; rank < header_hashes.size(); ++rank)
    if (const auto file = index.files.find(part_file(static_cast<int>(rank))); file != index.files.end())
      file->second.header_hash = header_hashes[rank];
}

}  // namespace

std::exception_ptr error_of_save(const std::function<void()>& action) {
  try {
    with_our_errors(action);
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

std::string unchanged(const std::filesystem::path& directory) {
  return fmt::format("{} is as it was", directory.string());
}

NewFolder::NewFolder(std::filesystem::path directory, std::int64_t step,
                     std::function<void(std::string_view stage)> on_stage)
    : directory_(std::move(directory)),
      folder_(directory_ / folder_name(step)),
      unfinished_(folder_.string() + std::string(kUnfinished)),
      step_(step),
      on_stage_(std::move(on_stage)) {}

void NewFolder::reached(std::string_view stage) const {
  if (on_stage_) on_stage_(stage);
}

std::function<void(std::string_view)> NewFolder::steps_of(std::string what) const {
  return [this, what = std::move(what)](std::string_view done) { reached(fmt::format("{} {}", what, done)); };
}

void NewFolder::make() const {
  make_folders(directory_);
  remove_unfinished(directory_);
  std::filesystem::create_directory(unfinished_);
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

void NewFolder::finish(const CheckpointIndex& index, int keep) const {
  const std::string text = to_json(index);
  index_from_json(unfinished_ / kIndexFile, text);  // what cannot be read is not written
  AtomicFile file(unfinished_ / kIndexFile, steps_of("index"));
  file.write(text);
  file.commit();
  reached("index");
  const auto told = [this](std::string_view stage) { reached(stage); };
  rename_folder(unfinished_, folder_, told);
  reached("renamed");
  AtomicFile latest(directory_ / kLatestFile, steps_of("latest"));
  latest.write(latest_text(folder_.filename().string()));
  latest.commit();
  reached("latest");
  remove_old(directory_, step_, keep, told);
}

void NewFolder::remove() const noexcept {
  std::error_code ignored;  // the first error is the one to tell
  std::filesystem::remove_all(unfinished_, ignored);
}

// Rank 0 makes a folder under a temporary name; every rank writes its file there; rank 0 adds the index,
// gives the folder its name and lets `latest` name it. After each of these three all ranks agree that all
// came through, so that a rank that cannot write stops the others, too, before anything that was there has
// changed.
void write_save(SavePlan& plan, ProcessGroup* group) {
  const NewFolder folder(plan.directory, plan.index.step, plan.options.on_stage);
  const Duration deadline = plan.options.deadline;
  const SaveTurn turn = std::move(plan.turn);  // until this save has ended
  bool none_writes = true;
  const auto agree_within = [&](Duration limit, const std::function<void()>& action) {
    agree(group, "save_checkpoint", unchanged(plan.directory), error_of_save(action), limit, &none_writes);
  };
  const auto all_ranks = [&](const std::function<void()>& action) { agree_within(deadline, action); };
  // Where rank 0 waits too long for its turn it says so itself: the others wait longer.
  agree_within(deadline < Duration::max() / 2 ? 2 * deadline : Duration::max(), [&] {
    if (plan.rank != 0) return;
    turn.wait("save_checkpoint", deadline);
    folder.make();
  });
  std::uint64_t header_hash = 0;
  try {
    all_ranks([&] {
      if (plan.entries.empty()) return;
      const std::string name = part_file(plan.rank);
      header_hash = folder.write(name, planned(plan.directory / name, plan.entries), hashes_of(plan.entries));
    });
  } catch (...) {
    // Where the group has failed, a rank that is late still writes there: the next save removes it.
    if (plan.rank == 0 && none_writes) folder.remove();
    throw;
  }
  try {
    all_ranks([&] {
      const std::vector<std::uint64_t> header_hashes = numbers_of_all(group, header_hash, deadline);
      if (plan.rank != 0) return;
      add_hashes(plan.index, header_hashes);
      folder.finish(plan.index, plan.options.keep);
    });
  } catch (...) {
    if (plan.rank == 0) folder.remove();
    throw;
  }
}

}  // namespace weft
