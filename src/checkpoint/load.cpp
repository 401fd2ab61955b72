#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <exception>
#include <map>
#include <set>
#include <utility>

#include "base/mutant.hpp"
#include "base/text/printable.hpp"
#include "checkpoint/agreement.hpp"
#include "checkpoint/content_hash.hpp"
#include "checkpoint/file_io.hpp"
#include "checkpoint/index/index.hpp"
#include "checkpoint/parts.hpp"
#include "checkpoint/save/replace_folder.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

// The source of the values of a name: the rows from first_row on of the tensor that the checkpoint has under
// this name or another one.
struct Source {
  std::string stored;
  const CheckpointEntry* entry = nullptr;
  Shape shape;  // of these rows
  std::int64_t first_row = 0;
};
using Sources = std::map<std::string, Source, std::less<>>;

// The tensors of the checkpoint, by the names under which they are requested. `remapped`: the tensors as
// which a stored tensor is read.
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
    remapped.push_back(
        fmt::format("{} {} -> {}", printable(*name), to_string(entry.shape), fmt::join(words, ", ")));
  }
  return sources;
}

// Throws one error for all differences between the tensors of the checkpoint and the requested ones.
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
    throw Error(ErrorCode::bad_argument, fmt::format("load_checkpoint: {} does not fit {}{}", folder.string(),
                                                     owner, printable(text)));
}

// The pieces that this rank reads, and their places.
struct Reading {
  FoundCheckpoint found;
  std::vector<MutableNamedView> tensors;
  Sources sources;
  std::vector<int> aliases;  // among the tensors
  std::vector<std::string> remapped;
};

// Returns whether two names stand for the same stored bytes.
bool is_same_source(const Source& a, const Source& b) {
  if (a.first_row != b.first_row || a.shape != b.shape || a.entry->parts.size() != b.entry->parts.size())
    return false;
  const auto is_same_part = [&](const CheckpointPart& x, const CheckpointPart& y) {
    return x.file == y.file && x.box == y.box &&
           (x.name.empty() ? a.stored : x.name) == (y.name.empty() ? b.stored : y.name);
  };
  return std::equal(a.entry->parts.begin(), a.entry->parts.end(), b.entry->parts.begin(), is_same_part);
}

// Tied tensors share one memory. If the checkpoint has two of them, they must have equal values.
void check_tied(PartFiles& files, const Source& source, const MutableNamedView& tensor,
                std::string_view other, int rank) {
  std::vector<std::byte> stored(static_cast<std::size_t>(tensor.data.bytes()));
  MutableNamedView copy = tensor;
  copy.data.data = stored.data();
  for (const HeldBox& held : boxes_of(copy, rank))
    read_rows(files, source.stored, *source.entry, source.first_row, copy.data, held);
  if (!std::equal(stored.begin(), stored.end(), tensor.data.data))
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("load_checkpoint: \"{}\" and \"{}\" are the same memory, but have other values in "
                    "{}; expected tensors that were tied when they were saved",
                    other, tensor.name, files.folder().string()));
}

void read(const Reading& reading, int rank) {
  PartFiles files(reading.found.folder, reading.found.index);
  for (std::size_t i = 0; i < reading.tensors.size(); ++i) {
    const MutableNamedView& tensor = reading.tensors[i];
    const Source& source = reading.sources.find(tensor.name)->second;
    if (reading.aliases[i] < 0) {
      for (const HeldBox& held : boxes_of(tensor, rank))
        read_rows(files, source.stored, *source.entry, source.first_row, tensor.data, held);
      continue;
    }
    const MutableNamedView& first = reading.tensors[static_cast<std::size_t>(reading.aliases[i])];
    if (!is_same_source(source, reading.sources.find(first.name)->second))
      check_tied(files, source, tensor, first.name, rank);
  }
}

// The message of rank 0 about the checkpoint that all ranks are to open. It has its place in the directory
// ("": the directory itself), and an identification of its contents.
struct Chosen {
  std::string name;
  std::int64_t step = 0;
  std::uint64_t hash = 0;
  std::string folder;  // as rank 0 names it, for texts
};

std::string to_text(const std::filesystem::path& directory, const FoundCheckpoint& found) {
  const bool below = found.folder.parent_path() == directory || found.folder.parent_path() / "" == directory;
  return fmt::format("{} {} {}\n{}", found.hash, found.index.step,
                     below ? found.folder.filename().string() : "", found.folder.string());
}

Chosen to_chosen(const std::string& text) {
  Chosen chosen;
  const std::size_t line = text.find('\n');
  const char* const end = text.data() + line;
  const char* at = std::from_chars(text.data(), end, chosen.hash).ptr;
  at = std::from_chars(at + 1, end, chosen.step).ptr;
  chosen.name.assign(at + 1, end);
  chosen.folder = text.substr(line + 1);
  return chosen;
}

// Opens the checkpoint that rank 0 has chosen, as this rank sees it.
FoundCheckpoint open_chosen(const std::filesystem::path& directory, const Chosen& chosen) {
  const std::filesystem::path folder =
      chosen.name.empty() ? standing_folder(directory).value_or(directory) : directory / chosen.name;
  const auto differs = [&](const std::string& text) {
    throw Error(ErrorCode::mismatch, fmt::format("load_checkpoint: rank 0 loads step {} of {}; {}",
                                                 chosen.step, chosen.folder, text));
  };
  refuse_link(folder);
  if (!is_there(folder / kIndexFile))
    differs(fmt::format("{} is no checkpoint on this rank", folder.string()));
  FoundCheckpoint found = open_folder(folder);
  if (found.hash != chosen.hash)
    differs(
        fmt::format("{} is another checkpoint on this rank, of step {} (the hash of its index is {}; "
                    "expected {})",
                    folder.string(), found.index.step, hash_text(found.hash), hash_text(chosen.hash)));
  return found;
}

constexpr const char* kLoad = "load_checkpoint";
constexpr const char* kNothingRead = "no value has changed";

// The work of all ranks after a choice of rank 0. Collective.
struct Load {
  const std::filesystem::path& directory;
  const DeviceMesh& mesh;
  const std::function<std::vector<MutableNamedView>()>& list;
  const LoadOptions& options;
  std::string_view owner;
  ProcessGroup* group = nullptr;
  int rank = 0;

  // The checkpoint to load, as a text: rank 0's choice, equal on all ranks.
  std::string choose(FoundCheckpoint& found) const {
    const std::exception_ptr failed = error_thrown_by([&] {
      if (rank == 0 || WEFT_MUTANT("latest_of_each_rank")) found = find_checkpoint(directory);
    });
    agree(group, kLoad, kNothingRead, failed);
    const std::string own = rank == 0 ? to_text(directory, found) : "";
    return texts_of_all(group, own)[0];
  }

  CheckpointInfo run(const std::string& chosen, FoundCheckpoint found) const {
    Reading reading;
    agree(group, kLoad, kNothingRead, error_thrown_by([&] {
            reading.tensors = list();  // first: it may exchange messages, so that all ranks call it or none
            if (rank != 0 && !WEFT_MUTANT("latest_of_each_rank"))
              found = open_chosen(directory, to_chosen(chosen));
            reading.found = std::move(found);
            prepare(reading);
          }));
    agree(group, kLoad, "the values are undefined", error_thrown_by([&] { read(reading, rank); }));
    CheckpointInfo info = info_of(reading.found.folder, reading.found.index);
    info.remapped = std::move(reading.remapped);
    return info;
  }

  void prepare(Reading& reading) const {
    const std::vector<NamedView> views(reading.tensors.begin(), reading.tensors.end());
    check_tensors(kLoad, mesh, views);
    reading.aliases = aliases_of(views);
    const FoundCheckpoint& found = reading.found;
    reading.sources = sources_of(found.folder, found.index, reading.tensors, options.remap, reading.remapped);
    check_fit(found.folder, reading.sources, reading.tensors, options, owner);
  }
};

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
  const Load load{directory, mesh, list, options, owner, group_of(mesh), mesh ? mesh.rank() : 0};
  FoundCheckpoint found;
  std::string chosen = load.choose(found);
  for (int look = 1;; ++look) {
    std::exception_ptr failed;
    try {
      return load.run(chosen, std::move(found));
    } catch (...) {
      failed = std::current_exception();
    }
    // A save that runs at the same time may have removed the chosen checkpoint: then rank 0 chooses again.
    std::string again;
    try {
      if (look < kMostLooks) again = load.choose(found);
    } catch (...) {  // the first failure is reported
    }
    if (again.empty() || again == chosen) std::rethrow_exception(failed);
    chosen = std::move(again);
  }
}

}  // namespace weft
