// The second half of a save. The folder gets its name when all its files are on the disk, so that at any
// moment a checkpoint is complete or absent.
#include <fmt/format.h>

#include <exception>
#include <system_error>

#include "checkpoint/agreement.hpp"
#include "checkpoint/content_hash.hpp"
#include "checkpoint/new_folder.hpp"
#include "checkpoint/save/save_turn.hpp"
#include "checkpoint/save_plan.hpp"
#include "weft/base/clock.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

// The system's errors say what failed and in which file. This function adds that it happened in
// save_checkpoint.
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

// The hashes of the data that a rank's file holds.
std::map<std::string, std::string> hashes_of(std::span<const SafetensorsEntry> entries) {
  std::map<std::string, std::string> hashes;
  for (const SafetensorsEntry& entry : entries)
    hashes[hashes_key(entry.name)] =
        chunk_hashes({entry.data.data, static_cast<std::size_t>(entry.data.bytes())});
  return hashes;
}

// Adds the ranks' hashes to the files that the index names.
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

// Rank 0 makes a folder under a temporary name. Every rank writes its file there. Rank 0 then adds the index,
// gives the folder its name and writes `latest`. After each of these three steps all ranks agree that all of
// them succeeded. So a rank that cannot write stops the others, too, before any existing file has changed.
void write_save(SavePlan& plan, ProcessGroup* group) {
  NewFolder folder(plan.directory, plan.index.step, plan.options.on_stage, plan.warn);
  const Duration deadline = plan.options.deadline;
  const SaveTurn turn = std::move(plan.turn);  // until this save has ended
  bool none_writes = true;
  const Deadline unless_interrupted = Deadline::after(std::chrono::hours(24 * 365));
  const auto all_ranks = [&](Duration limit, const std::function<void()>& action) {
    const std::exception_ptr failed = error_of_save(action);
    const std::string state = folder.state();
    // The group may have failed while this rank wrote: the thread that waited for this call may be in another
    // call by now.
    if (unless_interrupted.passed()) fail_interrupted(group, "save_checkpoint", state);
    agree(group, "save_checkpoint", state, with_consequence(failed, state), limit, &none_writes);
  };
  // If rank 0 waits too long for its turn, it reports that itself. So the other ranks wait longer.
  all_ranks(deadline < Duration::max() / 2 ? 2 * deadline : Duration::max(), [&] {
    if (plan.rank != 0) return;
    turn.wait("save_checkpoint", deadline);
    folder.make();
  });
  std::uint64_t header_hash = 0;
  try {
    all_ranks(deadline, [&] {
      if (plan.entries.empty()) return;
      const std::string name = part_file(plan.rank);
      header_hash = folder.write(name, planned(plan.directory / name, plan.entries), hashes_of(plan.entries));
    });
  } catch (...) {
    // If the group has failed, a late rank may still write there; the next save removes the folder.
    if (plan.rank == 0 && none_writes) folder.remove();
    throw;
  }
  const std::vector<std::uint64_t> header_hashes = [&] {
    try {
      return numbers_of_all(group, header_hash, deadline);
    } catch (...) {
      if (plan.rank == 0) folder.remove();
      throw;
    }
  }();
  try {
    all_ranks(deadline, [&] {
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
