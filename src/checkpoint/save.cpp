// The first half of a save: decides what is saved, lets all ranks agree on it, and chooses what this rank
// writes.
#include <fmt/format.h>

#include <exception>
#include <system_error>

#include "base/mutant.hpp"
#include "checkpoint/agreement.hpp"
#include "checkpoint/new_folder.hpp"
#include "checkpoint/save_plan.hpp"
#include "mesh/same_list.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

constexpr const char* kSave = "save_checkpoint";

// The contents of this rank's file.
std::vector<SafetensorsEntry> entries_of_rank(std::span<const NamedView> tensors,
                                              const CheckpointIndex& index, int rank,
                                              std::span<const int> aliases,
                                              std::deque<std::vector<std::byte>>& copies) {
  std::vector<SafetensorsEntry> entries;
  const std::string file = part_file(rank);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const NamedView& tensor = tensors[i];
    if (aliases[i] >= 0) continue;
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
  }
  return entries;
}

// The path as it is now, whatever the working directory becomes later.
std::filesystem::path resolved(const std::filesystem::path& directory) {
  if (directory.empty())
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: directory is empty; expected the path of a folder", kSave));
  std::error_code failed;
  const std::filesystem::path absolute = std::filesystem::absolute(directory, failed);
  if (failed)
    throw_errno(fmt::format("the working directory, in which {} is to lie", directory.string()),
                failed.value());
  return absolute;
}

void check_arguments(std::int64_t step, const SaveOptions& options) {
  const auto wrong = [](const std::string& text) {
    throw Error(ErrorCode::bad_argument, fmt::format("{}: {}", kSave, text));
  };
  if (step < 0) wrong(fmt::format("step is {}; expected 0 or more", step));
  if (options.keep < 0) wrong(fmt::format("options.keep is {}; expected 0 or more", options.keep));
  if (options.deadline <= Duration::zero())
    wrong(fmt::format("options.deadline is {} ns; expected more than 0", options.deadline.count()));
}

// The arguments, without the tensors, that must be equal on all ranks; as texts.
std::vector<std::string> texts_of(const SavePlan& plan) {
  const CheckpointIndex& index = plan.index;
  std::vector<std::string> texts = {fmt::format("step {}", index.step),
                                    fmt::format("directory \"{}\"", canonical_name(plan.directory)),
                                    fmt::format("options.keep {}", plan.options.keep),
                                    fmt::format("options.deadline {} ns", plan.options.deadline.count())};
  for (const auto& [key, value] : index.extra)
    texts.push_back(fmt::format("extra \"{}\" = \"{}\"", key, value));
  return texts;
}

// A tied tensor is stored once if it is tied on every rank that holds a part of it.
std::vector<int> common_aliases(const DeviceMesh& mesh, std::span<const NamedView> tensors,
                                std::vector<int> aliases) {
  constexpr std::int64_t kEmpty = -2;
  std::vector<std::int64_t> own(tensors.size()), all;
  for (std::size_t i = 0; i < own.size(); ++i) own[i] = tensors[i].data.count() == 0 ? kEmpty : aliases[i];
  all.resize(own.size() * static_cast<std::size_t>(mesh.size()));
  gather_on_host(mesh.group(), view(own), view(all));
  for (std::size_t i = 0; i < own.size(); ++i) {
    std::int64_t common = kEmpty;
    for (std::size_t at = i; at < all.size(); at += own.size()) {
      if (all[at] == kEmpty) continue;
      common = common == kEmpty || common == all[at] ? all[at] : -1;
    }
    aliases[i] = common == kEmpty ? -1 : static_cast<int>(common);
  }
  return aliases;
}

// Compares tensors and arguments between ranks in one exchange. Throws mismatch. Returns which tensors are
// stored under the name of another tensor.
std::vector<int> agree_on(const DeviceMesh& mesh, std::span<const NamedView> tensors, const SavePlan& plan) {
  std::vector<int> aliases = aliases_of(tensors);
  if (!mesh || mesh.size() == 1) return aliases;
  const std::vector<std::string> texts = texts_of(plan);
  const auto digest = [&](std::size_t i) { return hash_of(texts[i]); };
  Fnv1a arguments;
  for (std::size_t i = 0; i < texts.size(); ++i) arguments.add(digest(i));
  std::uint64_t tied = 0;
  for (const int alias : aliases) tied += alias >= 0 ? 1 : 0;
  const std::uint64_t own[] = {arguments.value, tied};
  constexpr std::size_t kWords = std::size(own);
  const std::vector<std::uint64_t> all = expect_same_tensors(kSave, mesh, tensors, own);
  bool differ = false, any_tied = false;
  for (std::size_t at = 0; at < all.size(); at += kWords) {
    differ = differ || (all[at] != arguments.value && !WEFT_MUTANT("save_arguments_unseen"));
    any_tied = any_tied || all[at + 1] != 0;
  }
  if (differ)
    throw_first_difference(kSave, mesh,
                           {"argument", texts.size(), digest, [&](std::size_t i) { return texts[i]; }});
  return any_tied ? common_aliases(mesh, tensors, std::move(aliases)) : aliases;
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
  const auto all_ranks = [&](const std::function<void()>& action) {
    agree(mesh, kSave, unchanged(directory), error_of_save(action));
  };
  SavePlan plan;
  std::vector<NamedView> tensors;
  all_ranks([&] {
    tensors = list();  // first: it may exchange messages, so that all ranks call it or none
    check_arguments(step, options);
    plan.directory = resolved(directory);
    check_tensors(kSave, mesh, tensors);
  });
  plan.rank = mesh ? mesh.rank() : 0;
  plan.index.step = step;
  plan.index.extra = extra;
  plan.options = options;
  plan.warn = warnings_of(kSave, mesh);
  const std::vector<int> aliases = agree_on(mesh, tensors, plan);
  all_ranks([&] {
    CheckpointIndex index = make_index(tensors, mesh ? mesh.size() : 1, aliases);
    plan.index.tensors = std::move(index.tensors);
    plan.index.files = std::move(index.files);
    plan.index.mesh = mesh ? to_string(mesh.shape()) : "";
    plan.entries = entries_of_rank(tensors, plan.index, plan.rank, aliases, plan.copies);
    if (keep) keep(plan.entries);
    if (plan.rank == 0) plan.turn = SaveTurn(plan.directory);
  });
  return plan;
}

}  // namespace weft
