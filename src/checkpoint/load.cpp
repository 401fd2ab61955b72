#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <set>

#include "checkpoint/agreement.hpp"
#include "checkpoint/index.hpp"
#include "checkpoint/parts.hpp"
#include "mesh/view_memory.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

// Every difference between what the checkpoint holds and what is asked for, in one error.
void check_fit(const std::filesystem::path& folder, const CheckpointIndex& index,
               std::span<const MutableNamedView> wanted, const LoadOptions& options, std::string_view owner) {
  std::vector<std::string> missing, extra, misshapen;
  std::set<std::string_view> names;
  for (const NamedView tensor : wanted) {
    names.insert(tensor.name);
    const Shape& global = global_shape(tensor);
    const auto found = index.tensors.find(std::string(tensor.name));
    if (found == index.tensors.end())
      missing.push_back(fmt::format("{} {} {}", tensor.name, name(tensor.data.dtype), to_string(global)));
    else if (found->second.shape != global || found->second.dtype != tensor.data.dtype)
      misshapen.push_back(fmt::format("{} {} {}, expected {} {}", tensor.name, name(found->second.dtype),
                                      to_string(found->second.shape), name(tensor.data.dtype),
                                      to_string(global)));
  }
  for (const auto& [name, entry] : index.tensors)
    if (names.count(name) == 0 && !(options.may_leave && options.may_leave(name))) extra.push_back(name);
  std::string text;
  const auto say = [&](std::string_view what, const std::vector<std::string>& those) {
    if (!those.empty()) text += fmt::format("; {} ({}): {}", what, those.size(), fmt::join(those, ", "));
  };
  say("missing in it", missing);
  say(fmt::format("not in {}", owner), extra);
  say("of another shape or dtype", misshapen);
  if (!text.empty())
    throw Error(ErrorCode::bad_argument,
                fmt::format("load_checkpoint: {} does not fit {}{}", folder.string(), owner, text));
}

// What is read into shared memory would be there for the last tensor alone. The views have no memory_fault().
void expect_apart(std::span<const MutableNamedView> tensors) {
  std::vector<const MutableNamedView*> by_place;
  for (const MutableNamedView& t : tensors)
    if (t.data.count() > 0) by_place.push_back(&t);
  const auto before = [](const MutableNamedView* a, const MutableNamedView* b) {
    return a->data.data < b->data.data;
  };
  std::sort(by_place.begin(), by_place.end(), before);
  for (std::size_t i = 1; i < by_place.size(); ++i)
    if (overlap(by_place[i - 1]->data, by_place[i]->data))
      throw Error(ErrorCode::bad_argument,
                  fmt::format("load_checkpoint: the memory of \"{}\" overlaps that of \"{}\"",
                              by_place[i]->name, by_place[i - 1]->name));
}

}  // namespace

CheckpointInfo load_checkpoint(const std::filesystem::path& directory, const DeviceMesh& mesh,
                               std::span<const MutableNamedView> tensors, const LoadOptions& options) {
  return load_listed(
      directory, mesh, [&] { return std::vector<MutableNamedView>(tensors.begin(), tensors.end()); }, options,
      "the list given");
}

CheckpointInfo load_listed(const std::filesystem::path& directory, const DeviceMesh& mesh,
                           const std::function<std::vector<MutableNamedView>()>& list,
                           const LoadOptions& options, std::string_view owner) {
  CheckpointInfo info;
  std::exception_ptr failed;
  try {
    const std::filesystem::path folder = folder_to_load(directory);
    const CheckpointIndex index = read_index(folder);
    const std::vector<MutableNamedView> tensors = list();
    check_tensors("load_checkpoint", mesh, std::vector<NamedView>(tensors.begin(), tensors.end()));
    expect_apart(tensors);
    check_fit(folder, index, tensors, options, owner);
    PartFiles files(folder, index);
    const int rank = mesh ? mesh.rank() : 0;
    for (const MutableNamedView& tensor : tensors)
      for (const HeldBox& held : boxes_of(tensor, rank))
        read_tensor(files, index.tensors.at(std::string(tensor.name)), tensor, held);
    info = info_of(folder, index);
  } catch (...) {
    failed = std::current_exception();
  }
  agree(mesh, "load_checkpoint", "the values are undefined", failed);
  return info;
}

}  // namespace weft
