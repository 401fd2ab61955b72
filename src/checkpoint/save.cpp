// The first half of a save: what is saved, which all ranks agree on, and which of it this rank writes.
#include <fmt/format.h>

#include <exception>

#include "checkpoint/agreement.hpp"
#include "checkpoint/save_plan.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

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

}  // namespace

void save_checkpoint(const std::filesystem::path& directory, const DeviceMesh& mesh, std::int64_t step,
                     std::span<const NamedView> tensors, const CheckpointExtra& extra,
                     const SaveOptions& options) {
  save_listed(
      directory, mesh, step, [&] { return std::vector<NamedView>(tensors.begin(), tensors.end()); }, extra,
      options);
}

void save_listed(const std::filesystem::path& directory, const DeviceMesh& mesh, std::int64_t step,
                 const std::function<std::vector<NamedView>()>& list, const CheckpointExtra& extra,
                 const SaveOptions& options) {
  SavePlan plan = plan_save(directory, mesh, step, list, extra, options);
  write_save(plan, group_of(mesh));
}

SavePlan plan_save(const std::filesystem::path& directory, const DeviceMesh& mesh, std::int64_t step,
                   const std::function<std::vector<NamedView>()>& list, const CheckpointExtra& extra,
                   const SaveOptions& options, const KeepEntries& keep) {
  if (step < 0)
    throw Error(ErrorCode::bad_argument,
                fmt::format("save_checkpoint: step is {}; expected 0 or more", step));
  if (options.keep < 0)
    throw Error(ErrorCode::bad_argument,
                fmt::format("save_checkpoint: options.keep is {}; expected 0 or more", options.keep));
  if (options.deadline <= Duration::zero())
    throw Error(ErrorCode::bad_argument,
                fmt::format("save_checkpoint: options.deadline is {} ns; expected more than 0",
                            options.deadline.count()));
  const auto all_ranks = [&](const std::function<void()>& action) {
    agree(mesh, "save_checkpoint", unchanged(directory), error_of_save(action));
  };
  std::vector<NamedView> tensors;
  all_ranks([&] {
    tensors = list();
    check_tensors("save_checkpoint", mesh, tensors);
  });
  if (mesh) expect_same_tensors("save_checkpoint", mesh, tensors);
  SavePlan plan;
  plan.directory = directory;
  plan.rank = mesh ? mesh.rank() : 0;
  plan.index = make_index(tensors, mesh ? mesh.size() : 1);
  plan.index.step = step;
  plan.index.mesh = mesh ? to_string(mesh.shape()) : "";
  plan.index.extra = extra;
  plan.options = options;
  all_ranks([&] {
    plan.entries = entries_of_rank(tensors, plan.index, plan.rank, plan.copies);
    if (keep) keep(plan.entries);
    if (plan.rank == 0) plan.turn = SaveTurn(directory);
  });
  return plan;
}

}  // namespace weft
