#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <set>
#include <utility>

#include "base/regular_file.hpp"
#include "checkpoint/file_io.hpp"
#include "checkpoint/index.hpp"
#include "mesh/view_memory.hpp"
#include "weft/base/error.hpp"
#include "weft/checkpoint/safetensors.hpp"

namespace weft {
namespace {

CheckpointIndex read_index(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / kIndexFile;
  return index_from_json(
      path, read_regular_file(path, fmt::format("checkpoint: {}:", path.string()), kMaxIndexBytes));
}

CheckpointInfo info_of(const std::filesystem::path& folder, const CheckpointIndex& index) {
  return {folder, index.step, index.mesh, index.extra};
}

// The folder that `latest` names, or nothing.
std::optional<std::filesystem::path> latest_folder(const std::filesystem::path& directory) {
  constexpr std::size_t kMostBytes = 4096;
  const std::filesystem::path latest = directory / kLatestFile;
  if (!is_there(latest)) return std::nullopt;
  std::string name = read_regular_file(latest, fmt::format("checkpoint: {}:", latest.string()), kMostBytes);
  while (!name.empty() && (name.back() == '\n' || name.back() == ' ')) name.pop_back();
  if (const auto why = why_no_file_name(name))
    throw Error(ErrorCode::bad_argument,
                fmt::format("checkpoint: {} names what is {}; expected the name of a folder beside it",
                            latest.string(), *why));
  if (!is_there(directory / name / kIndexFile))
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("checkpoint: {} names \"{}\", which is no checkpoint beside it", latest.string(), name));
  return directory / name;
}

std::filesystem::path folder_to_load(const std::filesystem::path& directory) {
  if (is_there(directory / kIndexFile)) return directory;
  if (const auto folder = latest_folder(directory)) return *folder;
  throw Error(ErrorCode::bad_argument,
              fmt::format("load_checkpoint: {} holds no checkpoint: neither {} nor {}", directory.string(),
                          kLatestFile, kIndexFile));
}

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

// Copies a box of a row-major tensor into the same box of another; offsets within each.
void copy_box(const std::byte* from, const Shape& from_shape, const Dims& from_offset, std::byte* to,
              const Shape& to_shape, const Dims& to_offset, const Shape& box, int element_bytes) {
  const Strides from_strides = row_major(from_shape), to_strides = row_major(to_shape);
  const int last = box.rank() - 1;
  std::int64_t from_at = 0, to_at = 0;
  for (int d = 0; d <= last; ++d) {
    from_at += from_offset[d] * from_strides[d];
    to_at += to_offset[d] * to_strides[d];
  }
  const std::int64_t run = last < 0 ? 1 : box[last];
  Dims at = box;  // counts through all dimensions but the last
  for (int d = 0; d <= last; ++d) at[d] = 0;
  while (true) {
    std::memcpy(to + to_at * element_bytes, from + from_at * element_bytes,
                static_cast<std::size_t>(run * element_bytes));
    int d = last - 1;
    for (; d >= 0; --d) {
      from_at += from_strides[d];
      to_at += to_strides[d];
      if (++at[d] < box[d]) break;
      from_at -= box[d] * from_strides[d];
      to_at -= box[d] * to_strides[d];
      at[d] = 0;
    }
    if (d < 0) return;
  }
}

// The files of one checkpoint, each opened when first asked for.
class PartFiles {
 public:
  explicit PartFiles(std::filesystem::path folder) : folder_(std::move(folder)) {}

  // The file of a part, after a check that it holds what the index says.
  const SafetensorsFile& of(const CheckpointPart& part, const std::string& tensor, DType dtype) {
    const std::string& name = part.name.empty() ? tensor : part.name;
    auto found = files_.find(part.file);
    if (found == files_.end())
      found = files_.emplace(part.file, SafetensorsFile::open(folder_ / part.file)).first;
    const SafetensorsInfo& info = found->second.info(name);
    if (info.shape != part.box.shape || info.dtype != dtype)
      throw Error(ErrorCode::bad_argument,
                  fmt::format("load_checkpoint: {} has {} as {} {}; the index says {} {}",
                              (folder_ / part.file).string(), name, weft::name(info.dtype),
                              to_string(info.shape), weft::name(dtype), to_string(part.box.shape)));
    return found->second;
  }

 private:
  std::filesystem::path folder_;
  std::map<std::string, SafetensorsFile> files_;
};

// Fills one of this rank's boxes of a tensor from every part that overlaps with it. Of a part only the rows (of the
// first dimension) that are needed are read: straight into place where they are whole rows of ours, too, else
// through a buffer.
void read_tensor(PartFiles& files, const CheckpointEntry& entry, const MutableNamedView& tensor,
                 const HeldBox& held) {
  const Box& mine = held.box;
  const Shape& local = tensor.data.shape;
  const std::string whole_name(tensor.name);
  const int element = size_bytes(entry.dtype);
  std::vector<std::byte> buffer;
  for (const CheckpointPart& part : entry.parts) {
    const Box shared = intersection(part.box, mine);
    if (shared.shape.count() == 0) continue;
    const SafetensorsFile& file = files.of(part, whole_name, entry.dtype);
    const std::string& name = part.name.empty() ? whole_name : part.name;
    Dims in_part = shared.offset, in_mine = shared.offset;
    for (int d = 0; d < shared.offset.rank(); ++d) {
      in_part[d] -= part.box.offset[d];
      in_mine[d] += held.at[d] - mine.offset[d];
    }
    if (shared.shape.rank() == 0) {
      file.read_bytes(name, 0, {tensor.data.data, static_cast<std::size_t>(element)});
      continue;
    }
    const std::int64_t part_row = part.box.shape.count() / part.box.shape[0] * element;
    const std::int64_t mine_row = local.count() / local[0] * element;
    const std::int64_t rows = shared.shape[0];
    const auto bytes = static_cast<std::size_t>(rows * part_row);
    const bool whole_rows = shared.shape.count() == rows * (part_row / element) && part_row == mine_row;
    if (whole_rows) {
      file.read_bytes(name, in_part[0] * part_row, {tensor.data.data + in_mine[0] * mine_row, bytes});
      continue;
    }
    buffer.resize(bytes);
    file.read_bytes(name, in_part[0] * part_row, buffer);
    Shape read_shape = part.box.shape;
    read_shape[0] = rows;
    in_part[0] = 0;
    copy_box(buffer.data(), read_shape, in_part, tensor.data.data, local, in_mine, shared.shape, element);
  }
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
    PartFiles files(folder);
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

std::optional<CheckpointInfo> latest_checkpoint(const std::filesystem::path& directory) {
  const auto folder = latest_folder(directory);
  if (!folder) return std::nullopt;
  return info_of(*folder, read_index(*folder));
}

}  // namespace weft
