#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <map>
#include <set>
#include <utility>

#include "checkpoint/agreement.hpp"
#include "checkpoint/index/index.hpp"
#include "checkpoint/parts.hpp"
#include "mesh/view_memory.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

// Where the values of a name are: the rows from first_row on of what the checkpoint has under another name, or under this one.
struct Source {
  std::string stored;
  const CheckpointEntry* entry = nullptr;
  Shape shape;  // of these rows
  std::int64_t first_row = 0;
};
using Sources = std::map<std::string, Source, std::less<>>;

// What the checkpoint has, by the names that it is asked for under. `remapped`: what it is read as.
Sources sources_of(const std::filesystem::path& folder, const CheckpointIndex& index,
                   std::span<const MutableNamedView> wanted, const Remap& remap,
                   std::vector<std::string>& remapped) {
  std::map<std::string_view, Shape> shapes;
  for (const NamedView tensor : wanted) shapes.emplace(tensor.name, global_shape(tensor));
  Sources sources;
  std::vector<std::pair<const std::string*, std::vector<RemappedTensor>>> old;
  for (const auto& [name, entry] : index.tensors) {
    const auto asked = shapes.find(name);
    std::vector<RemappedTensor> pieces;
    if (remap && (asked == shapes.end() || asked->second != entry.shape)) pieces = remap(name, entry.shape);
    const auto is_asked = [&](const RemappedTensor& piece) { return shapes.contains(piece.name); };
    if (std::any_of(pieces.begin(), pieces.end(), is_asked)) {
      old.emplace_back(&name, std::move(pieces));
    } else {
      sources[name] = {name, &entry, entry.shape, 0};
    }
  }
  for (auto& [name, pieces] : old) {
    const CheckpointEntry& entry = index.tensors.at(*name);
    std::vector<std::string> words;
    for (RemappedTensor& piece : pieces) {
      check_piece(*name, entry.shape, piece);
      words.push_back(fmt::format("{} {}", piece.name, to_string(piece.shape)));
      if (!sources.emplace(piece.name, Source{*name, &entry, piece.shape, piece.first_row}).second)
        throw Error(ErrorCode::bad_argument,
                    fmt::format("load_checkpoint: {} has \"{}\", which is read as \"{}\", and that, too",
                                folder.string(), *name, piece.name));
    }
    remapped.push_back(fmt::format("{} {} -> {}", *name, to_string(entry.shape), fmt::join(words, ", ")));
  }
  return sources;
}

// Every difference between what the checkpoint holds and what is asked for, in one error.
void check_fit(const std::filesystem::path& folder, const Sources& sources,
               std::span<const MutableNamedView> wanted, const LoadOptions& options, std::string_view owner) {
  std::vector<std::string> missing, extra, misshapen;
  std::set<std::string_view> names;
  for (const NamedView tensor : wanted) {
    names.insert(tensor.name);
    const Shape& global = global_shape(tensor);
    const auto found = sources.find(tensor.name);
    if (found == sources.end())
      missing.push_back(fmt::format("{} {} {}", tensor.name, name(tensor.data.dtype), to_string(global)));
    else if (found->second.shape != global || found->second.entry->dtype != tensor.data.dtype)
      misshapen.push_back(fmt::format("{} {} {}, expected {} {}", tensor.name,
                                      name(found->second.entry->dtype), to_string(found->second.shape),
                                      name(tensor.data.dtype), to_string(global)));
  }
  for (const auto& [name, source] : sources)
    if (names.count(name) == 0 && !(options.may_leave && options.may_leave(name))) extra.push_back(name);
  std::string text;
  const auto say = [&](std::string_view what, const std::vector<std::string>& those) {
    if (!those.empty()) text += fmt::format("; {} ({}): {}", what, those.size(), fmt::join(those, ", "));
  };
  say("missing in the checkpoint", missing);
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
    std::vector<std::string> remapped;
    const Sources sources = sources_of(folder, index, tensors, options.remap, remapped);
    check_fit(folder, sources, tensors, options, owner);
    PartFiles files(folder, index);
    const int rank = mesh ? mesh.rank() : 0;
    for (const MutableNamedView& tensor : tensors) {
      const Source& source = sources.find(tensor.name)->second;
      for (const HeldBox& held : boxes_of(tensor, rank))
        read_rows(files, source.stored, *source.entry, source.first_row, tensor.data, held);
    }
    info = info_of(folder, index);
    info.remapped = std::move(remapped);
  } catch (...) {
    failed = std::current_exception();
  }
  agree(mesh, "load_checkpoint", "the values are undefined", failed);
  return info;
}

}  // namespace weft
