#include "checkpoint/parts.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <utility>

#include "base/files/regular_file.hpp"
#include "base/text/printable.hpp"
#include "checkpoint/content_hash.hpp"
#include "checkpoint/file_io.hpp"
#include "checkpoint/new_folder.hpp"
#include "checkpoint/save/replace_folder.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

// Returns the result of `action`; turns an error bad_argument about data that it has read into an error of a
// damaged file.
template <class Action>
decltype(auto) as_damage(const Action& action) {
  try {
    return action();
  } catch (const Error& e) {
    if (e.code() != ErrorCode::bad_argument) throw;
    throw Error(ErrorCode::corrupt, printable(e.what()));
  }
}

std::string name_in_latest(const std::filesystem::path& latest) {
  constexpr std::size_t kMostBytes = 4096;
  refuse_link(latest);
  const std::string text =
      read_regular_file(latest, fmt::format("checkpoint: {}:", latest.string()), kMostBytes);
  return as_damage([&] { return folder_of_latest(latest, text); });
}

// Returns the folder that `latest` names. Reads `latest` again if that folder is gone.
std::filesystem::path latest_folder(const std::filesystem::path& directory) {
  const std::filesystem::path latest = directory / kLatestFile;
  std::string name;
  for (int look = 0; look < kMostLooks; ++look) {
    const std::string now = name_in_latest(latest);
    if (now == name) break;
    name = now;
    refuse_link(directory / name);
    if (const auto folder = standing_folder(directory / name)) return *folder;
  }
  throw Error(ErrorCode::corrupt,
              fmt::format("checkpoint: {} names \"{}\", which is no checkpoint in the same folder",
                          latest.string(), name));
}

std::filesystem::path folder_to_load(const std::filesystem::path& directory) {
  if (const auto itself = standing_folder(directory)) return *itself;
  if (is_there(directory / kLatestFile)) return latest_folder(directory);
  throw Error(ErrorCode::bad_argument, fmt::format("checkpoint: {} holds no checkpoint: neither {} nor {}",
                                                   directory.string(), kLatestFile, kIndexFile));
}

// Reads the index in the folder that `look` gives. Reads it again as long as `look` gives other folders,
// because saves remove older ones.
template <class Look>
FoundCheckpoint find_by(const Look& look) {
  std::filesystem::path folder = look();
  for (int looks = 1;; ++looks) {
    try {
      return open_folder(folder);
    } catch (const Error&) {
      if (looks == kMostLooks) throw;
      std::filesystem::path now = look();
      if (now == folder) throw;
      folder = std::move(now);
    }
  }
}

}  // namespace

FoundCheckpoint open_folder(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / kIndexFile;
  refuse_link(path);
  const std::string text =
      read_regular_file(path, fmt::format("checkpoint: {}:", path.string()), kMaxIndexBytes);
  return {folder, as_damage([&] { return index_from_json(path, text); }),
          content_hash(std::as_bytes(std::span(text)))};
}

FoundCheckpoint find_checkpoint(const std::filesystem::path& directory) {
  return find_by([&] { return folder_to_load(directory); });
}

bool has_moved_on(const std::filesystem::path& directory, const FoundCheckpoint& from) noexcept {
  try {
    return !find_checkpoint(directory).is(from);
  } catch (...) {
    return false;
  }
}

CheckpointInfo info_of(const std::filesystem::path& folder, const CheckpointIndex& index) {
  return {folder, index.step, index.mesh, index.extra};
}

OpenedCheckpoint open_checkpoint(const std::filesystem::path& path) {
  std::error_code none;
  if (!std::filesystem::is_regular_file(path, none)) {
    FoundCheckpoint found = find_checkpoint(path);
    return {found.folder, found.folder, std::move(found.index), found.hash};
  }
  const SafetensorsFile file = SafetensorsFile::open(path);
  const std::filesystem::path place = std::filesystem::canonical(path);  // the caller's path may be a link
  OpenedCheckpoint opened{path, place.parent_path(), {}};
  for (const std::string& name : file.names()) {
    const SafetensorsInfo& info = file.info(name);
    CheckpointEntry& entry = opened.index.tensors[name];
    entry.dtype = info.dtype;
    entry.shape = info.shape;
    if (info.shape.count() > 0) entry.parts.push_back({place.filename().string(), whole_box(info.shape)});
  }
  for (const auto& [key, value] : file.metadata()) {
    const char* const end = value.data() + value.size();
    if (key == kStepKey && std::from_chars(value.data(), end, opened.index.step).ptr == end &&
        opened.index.step >= 0)
      continue;
    if (!key.starts_with(hashes_key(""))) opened.index.extra[key] = value;
  }
  opened.index.step = std::max<std::int64_t>(0, opened.index.step);
  return opened;
}

std::optional<CheckpointInfo> latest_checkpoint(const std::filesystem::path& directory) {
  if (!is_there(directory / kLatestFile)) return std::nullopt;
  const FoundCheckpoint found = find_by([&] { return latest_folder(directory); });
  return info_of(found.folder, found.index);
}

SafetensorsFile PartFiles::open(const std::string& name) const {
  refuse_link(folder_ / name);
  if (!is_there(folder_ / name))
    throw Error(ErrorCode::corrupt,
                fmt::format("checkpoint: {}: is missing; the index names it", (folder_ / name).string()));
  SafetensorsFile file = SafetensorsFile::open(folder_ / name);
  const auto known = index_.files.find(name);
  if (known != index_.files.end() && file.header_hash() != known->second.header_hash)
    throw Error(ErrorCode::corrupt,
                fmt::format("checkpoint: {}: its header is not the one that was written: it has the hash {}, "
                            "the index says {}",
                            file.path().string(), hash_text(file.header_hash()),
                            hash_text(known->second.header_hash)));
  return file;
}

const SafetensorsFile& PartFiles::of(const std::string& name) {
  auto found = files_.find(name);
  if (found == files_.end()) found = files_.emplace(name, open(name)).first;
  return found->second;
}

const SafetensorsFile& PartFiles::of(const CheckpointPart& part, const std::string& tensor, DType dtype) {
  const std::string& name = part.name.empty() ? tensor : part.name;
  const SafetensorsFile& file = of(part.file);
  const SafetensorsInfo& info = as_damage([&]() -> const SafetensorsInfo& { return file.info(name); });
  if (info.shape != part.box.shape || info.dtype != dtype)
    throw Error(ErrorCode::corrupt,
                fmt::format("load_checkpoint: {} has {} as {} {}; the index says {} {}",
                            (folder_ / part.file).string(), printable(name), weft::name(info.dtype),
                            to_string(info.shape), weft::name(dtype), to_string(part.box.shape)));
  return file;
}

// Fills one of this rank's boxes of a tensor from every part that overlaps with it. Reads only the needed
// rows (of the first dimension) of a part. If they are complete rows of the box, too, it reads them directly
// into place, otherwise through a buffer.
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
      read_verified(file, name, 0, {tensor.data.data, static_cast<std::size_t>(element)});
      continue;
    }
    const std::int64_t part_row = part.box.shape.count() / part.box.shape[0] * element;
    const std::int64_t mine_row = local.count() / local[0] * element;
    const std::int64_t rows = shared.shape[0];
    const auto bytes = static_cast<std::size_t>(rows * part_row);
    const bool whole_rows = shared.shape.count() == rows * (part_row / element) && part_row == mine_row;
    if (whole_rows) {
      read_verified(file, name, in_part[0] * part_row, {tensor.data.data + in_mine[0] * mine_row, bytes});
      continue;
    }
    buffer.resize(bytes);
    read_verified(file, name, in_part[0] * part_row, buffer);
    Shape read_shape = part.box.shape;
    read_shape[0] = rows;
    in_part[0] = 0;
    const ConstTensorView read{buffer.data(), entry.dtype, {}, read_shape, row_major(read_shape)};
    copy_elements(narrow(read, in_part, shared.shape), narrow(tensor.data, in_mine, shared.shape));
  }
}

void check_piece(const std::string& stored, const Shape& shape, const RemappedTensor& piece) {
  bool fits = piece.shape.rank() <= shape.rank() && piece.shape.rank() > 0 && piece.first_row >= 0 &&
              piece.shape[0] >= 0 && piece.first_row <= shape[0] - piece.shape[0];
  for (int d = 1; fits && d < shape.rank(); ++d)
    fits = d < piece.shape.rank() ? piece.shape[d] == shape[d] : shape[d] == 1;
  if (!fits && !(piece.shape == shape && piece.first_row == 0))
    throw Error(ErrorCode::bad_argument,
                fmt::format("checkpoint: \"{}\" {} cannot be read as \"{}\" {} from row {} on; expected some "
                            "of its rows",
                            stored, to_string(shape), piece.name, to_string(piece.shape), piece.first_row));
}

// Returns this box in the dimensions of the stored tensor.
void read_rows(PartFiles& files, const std::string& stored, const CheckpointEntry& entry,
               std::int64_t first_row, const TensorView& tensor, HeldBox held) {
  Shape local = tensor.shape;
  if (held.box.shape.rank() > 0) held.box.offset[0] += first_row;
  while (local.rank() < entry.shape.rank()) {
    local.push_back(1);
    held.box.shape.push_back(1);
    held.box.offset.push_back(0);
    held.at.push_back(0);
  }
  const TensorView same{tensor.data, tensor.dtype, tensor.device, local, row_major(local)};
  read_tensor(files, entry, {stored, same, nullptr}, held);
}

}  // namespace weft
