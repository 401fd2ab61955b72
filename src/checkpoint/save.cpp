// Saves a checkpoint: the folder gets its name when all that belongs into it is on the disk, so that at any
// moment a checkpoint is whole or not there.
#include <fcntl.h>
#include <fmt/format.h>
#include <stdio.h>

#include <cerrno>
#include <charconv>
#include <deque>
#include <exception>

#include "checkpoint/content_hash.hpp"
#include "checkpoint/file_io.hpp"
#include "checkpoint/index.hpp"
#include "checkpoint/safetensors_write.hpp"
#include "mesh/replicas/same_list.hpp"
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
void remove_old(const std::filesystem::path& directory, std::int64_t step, int keep) {
  if (keep == 0) return;
  std::map<std::int64_t, std::filesystem::path> folders;
  for (const auto& entry : std::filesystem::directory_iterator(directory))
    if (const auto of = step_of(entry.path()); of && *of <= step && is_there(entry.path() / kIndexFile))
      folders[*of] = entry.path();
  while (folders.size() > static_cast<std::size_t>(keep)) {
    const std::filesystem::path old = folders.begin()->second;
    const std::filesystem::path unnamed = old.string() + std::string(kUnfinished);
    std::filesystem::rename(old, unnamed);
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
void rename_folder(const std::filesystem::path& from, const std::filesystem::path& to) {
  if (std::filesystem::exists(to)) {
    if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) != 0)
      throw_errno(fmt::format("cannot exchange {} and {}", from.string(), to.string()), errno);
    sync_folder(to.parent_path());
    std::filesystem::remove_all(from);
  } else {
    if (::rename(from.c_str(), to.c_str()) != 0)
      throw_errno(fmt::format("cannot rename {} to {}", from.string(), to.string()), errno);
    sync_folder(to.parent_path());
  }
}

void expect_same_tensors(const DeviceMesh& mesh, std::span<const NamedView> tensors) {
  gather_with_list("save_checkpoint", mesh, digest_of_list(tensors), {},
                   [&] { return entries_of("tensor", tensors); });
}

// What this rank's file holds.
std::vector<SafetensorsEntry> entries_of_rank(std::span<const NamedView> tensors,
                                              const CheckpointIndex& index, int rank,
                                              std::deque<std::vector<std::byte>>& copies) {
  std::vector<SafetensorsEntry> entries;
  const std::string file = part_file(rank);
  for (const NamedView& tensor : tensors)
    for (const CheckpointPart& part : index.tensors.at(std::string(tensor.name)).parts) {
      if (part.file != file) continue;
      for (const HeldBox& held : boxes_of(tensor, rank)) {
        if (!(held.box == part.box)) continue;
        ConstTensorView data = tensor.data;
        if (tensor.layout != nullptr && !tensor.layout->segments.sizes.empty())
          data = {copies.emplace_back(take_box(tensor, held)).data(),
                  tensor.data.dtype,
                  {},
                  held.box.shape,
                  row_major(held.box.shape)};
        entries.push_back({part.name.empty() ? std::string(tensor.name) : part.name, data});
      }
    }
  return entries;
}

// The strings beside the tensors in a rank's file.
std::map<std::string, std::string> metadata_of(std::int64_t step, std::span<const SafetensorsEntry> entries) {
  std::map<std::string, std::string> metadata = {{"weft_step", std::to_string(step)}};
  for (const SafetensorsEntry& entry : entries)
    metadata[hashes_key(entry.name)] =
        chunk_hashes({entry.data.data, static_cast<std::size_t>(entry.data.bytes())});
  return metadata;
}

// Every rank's number, in the order of the ranks, at rank 0.
std::vector<std::uint64_t> gathered(const DeviceMesh& mesh, std::uint64_t mine) {
  std::vector<std::uint64_t> all(mesh ? static_cast<std::size_t>(mesh.size()) : 1, mine);
  if (mesh && mesh.size() > 1) mesh.group().gather(mine, all, 0).wait();
  return all;
}

// To the files that the index names; by rank.
void add_hashes(CheckpointIndex& index, std::span<const std::uint64_t> header_hashes) {
  for (std::size_t rank = 0; rank < header_hashes.size(); ++rank)
    if (const auto file = index.files.find(part_file(static_cast<int>(rank))); file != index.files.end())
      file->second.header_hash = header_hashes[rank];
}

}  // namespace

void save_checkpoint(const std::filesystem::path& directory, const DeviceMesh& mesh, std::int64_t step,
                     std::span<const NamedView> tensors, const CheckpointExtra& extra,
                     const SaveOptions& options) {
  save_listed(
      directory, mesh, step, [&] { return std::vector<NamedView>(tensors.begin(), tensors.end()); }, extra,
      options);
}

// Rank 0 makes a folder under a temporary name; every rank writes its file there; rank 0 adds the index,
// gives the folder its name and lets `latest` name it. After each of these three all ranks agree that all
// came through, so that a rank that cannot write stops the others, too, before anything that was there has
// changed.
void save_listed(const std::filesystem::path& directory, const DeviceMesh& mesh, std::int64_t step,
                 const std::function<std::vector<NamedView>()>& list, const CheckpointExtra& extra,
                 const SaveOptions& options) {
  if (step < 0)
    throw Error(ErrorCode::bad_argument,
                fmt::format("save_checkpoint: step is {}; expected 0 or more", step));
  if (options.keep < 0)
    throw Error(ErrorCode::bad_argument,
                fmt::format("save_checkpoint: options.keep is {}; expected 0 or more", options.keep));
  const int rank = mesh ? mesh.rank() : 0, ranks = mesh ? mesh.size() : 1;
  const std::filesystem::path folder = directory / folder_name(step);
  const std::filesystem::path unfinished = folder.string() + std::string(kUnfinished);
  const auto reached = [&](std::string_view stage) {
    if (options.on_stage) options.on_stage(stage);
  };
  const auto all_ranks = [&](auto&& action) {
    std::exception_ptr failed;
    try {
      with_our_errors(action);
    } catch (...) {
      failed = std::current_exception();
    }
    agree(mesh, "save_checkpoint", fmt::format("{} is as it was", directory.string()), failed);
  };

  std::vector<NamedView> tensors;
  all_ranks([&] {
    tensors = list();
    check_tensors("save_checkpoint", mesh, tensors);
  });
  if (mesh) expect_same_tensors(mesh, tensors);
  CheckpointIndex index = make_index(tensors, ranks);
  index.step = step;
  index.mesh = mesh ? to_string(mesh.shape()) : "";
  index.extra = extra;

  all_ranks([&] {
    if (rank != 0) return;
    std::filesystem::create_directories(directory);
    remove_unfinished(directory);
    std::filesystem::create_directory(unfinished);
    reached("folder");
  });

  const std::string my_file = part_file(rank);
  std::uint64_t header_hash = 0;
  try {
    all_ranks([&] {
      std::deque<std::vector<std::byte>> copies;  // of boxes that are not contiguous in the tensor
      const std::vector<SafetensorsEntry> entries = entries_of_rank(tensors, index, rank, copies);
      if (entries.empty()) return;
      std::vector<PlannedTensor> file = planned(unfinished / my_file, entries);
      for (PlannedTensor& tensor : file)
        tensor.bytes = [&, bytes = tensor.bytes] {
          reached("data");
          return bytes();
        };
      header_hash = write_safetensors(unfinished / my_file, file, metadata_of(step, entries));
      reached("file");
    });
    all_ranks([&] {
      const std::vector<std::uint64_t> header_hashes = gathered(mesh, header_hash);
      if (rank != 0) return;
      add_hashes(index, header_hashes);
      const std::string text = to_json(index);
      index_from_json(unfinished / kIndexFile, text);  // what cannot be read is not written
      AtomicFile file(unfinished / kIndexFile);
      file.write(text);
      file.commit();
      reached("index");
      rename_folder(unfinished, folder);
      reached("renamed");
      AtomicFile latest(directory / kLatestFile);
      latest.write(latest_text(folder.filename().string()));
      latest.commit();
      reached("latest");
      remove_old(directory, step, options.keep);
    });
  } catch (...) {
    std::error_code ignored;  // the first error is the one to tell
    if (rank == 0) std::filesystem::remove_all(unfinished, ignored);
    throw;
  }
}

}  // namespace weft
