#include "weft/checkpoint/convert.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "base/floating.hpp"
#include "checkpoint/content_hash.hpp"
#include "checkpoint/new_folder.hpp"
#include "checkpoint/parts.hpp"
#include "checkpoint/save/save_turn.hpp"
#include "weft/base/dtype.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

[[noreturn]] void wrong(const std::string& text) {
  throw Error(ErrorCode::bad_argument, "convert_checkpoint: " + text);
}

// A tensor of the result: rows of a stored tensor.
struct Result {
  std::string stored;
  const CheckpointEntry* entry = nullptr;
  std::int64_t first_row = 0;
  Shape shape;
  DType dtype = DType::f32;
};
using Results = std::map<std::string, Result>;

DType converted(const ConvertOptions& options, const std::string& name, DType stored) {
  if (!options.dtype || !is_weight_dtype(stored)) return stored;
  const DType to = options.dtype(name, stored);
  if (!is_weight_dtype(to))
    wrong(fmt::format("options.dtype of \"{}\" is {}; expected {}", name, weft::name(to), kWeightDTypeNames));
  return to;
}

Results results_of(const CheckpointIndex& index, const ConvertOptions& options) {
  Results results;
  for (const auto& [stored, entry] : index.tensors) {
    std::vector<RemappedTensor> pieces;
    if (options.remap) pieces = options.remap(stored, entry.shape);
    for (const RemappedTensor& piece : pieces) check_piece(stored, entry.shape, piece);
    if (pieces.empty()) pieces.push_back({stored, entry.shape, 0});
    for (const RemappedTensor& piece : pieces) {
      const std::string name = options.rename ? options.rename(piece.name) : piece.name;
      if (name.empty()) continue;
      const Result result{stored, &entry, piece.first_row, piece.shape,
                          converted(options, name, entry.dtype)};
      if (const auto [known, added] = results.emplace(name, result); !added)
        wrong(
            fmt::format("\"{}\" and \"{}\" would both be called \"{}\"", known->second.stored, stored, name));
    }
  }
  if (results.empty()) wrong(fmt::format("of the {} tensors none is left", index.tensors.size()));
  return results;
}

// Returns the rows that file `number` of `files` holds. Nothing if it holds none.
std::optional<Box> part_of(const Shape& shape, int number, int files) {
  Box box = whole_box(shape);
  if (shape.rank() == 0) return number == 0 ? std::optional(box) : std::nullopt;
  const Chunk rows = chunk_of(shape[0], files, number);
  box.offset[0] = rows.offset;
  box.shape[0] = rows.size;
  return box.shape.count() > 0 ? std::optional(box) : std::nullopt;
}

// Converts from f32 to bf16 or from bf16 to f32. Copies if both dtypes are equal.
void convert(DType from, const std::vector<std::byte>& in, DType to, std::vector<std::byte>& out) {
  const auto count = in.size() / static_cast<std::size_t>(size_bytes(from));
  out.resize(count * static_cast<std::size_t>(size_bytes(to)));
  const auto each = [&](auto source, auto target) {
    for (std::size_t i = 0; i < count; ++i) {
      std::memcpy(&source, in.data() + i * sizeof source, sizeof source);
      target = decltype(target)(static_cast<float>(source));
      std::memcpy(out.data() + i * sizeof target, &target, sizeof target);
    }
  };
  if (from == to) {
    out = in;
  } else if (to == DType::bf16) {
    each(float{}, bf16{});
  } else {
    each(bf16{}, float{});
  }
}

// The contents of one of the files. Only the bytes of one part are in memory at a time.
class FileOfParts {
 public:
  FileOfParts(PartFiles& files, const Results& results, int number, int count) : files_(files) {
    for (const auto& [name, result] : results)
      if (const auto box = part_of(result.shape, number, count))
        tensors_.push_back(
            {name, result.dtype, box->shape, [this, &r = result, b = *box] { return read(r, b); }});
  }
  bool empty() const { return tensors_.empty(); }
  std::vector<PlannedTensor> tensors() const { return tensors_; }
  std::map<std::string, std::string> hashes() const {
    std::map<std::string, std::string> all;
    for (const PlannedTensor& tensor : tensors_) all[hashes_key(tensor.name)] = chunk_hashes(tensor.bytes());
    return all;
  }

 private:
  std::span<const std::byte> read(const Result& result, const Box& box) {
    stored_.resize(static_cast<std::size_t>(box.shape.count() * size_bytes(result.entry->dtype)));
    const TensorView to{stored_.data(), result.entry->dtype, {}, box.shape, row_major(box.shape)};
    read_rows(files_, result.stored, *result.entry, result.first_row, to, {box, zeros(box.shape.rank())});
    if (result.dtype == result.entry->dtype) return stored_;
    convert(result.entry->dtype, stored_, result.dtype, converted_);
    return converted_;
  }
  PartFiles& files_;
  std::vector<PlannedTensor> tensors_;
  std::vector<std::byte> stored_, converted_;
};

CheckpointIndex index_of(const CheckpointIndex& from, const Results& results, int files) {
  CheckpointIndex index;
  index.step = from.step;
  index.mesh = files == 1 ? "" : fmt::format("files={}", files);
  index.extra = from.extra;
  for (const auto& [name, result] : results) {
    CheckpointEntry& entry = index.tensors[name];
    entry.dtype = result.dtype;
    entry.shape = result.shape;
    if (files > 1) entry.layout = {result.shape.rank() > 0 ? "Shard(0)" : "Replicate"};
    for (int number = 0; number < files; ++number)
      if (const auto box = part_of(result.shape, number, files))
        entry.parts.push_back({part_file(number), *box});
  }
  return index;
}

}  // namespace

std::size_t convert_checkpoint(const std::filesystem::path& from, const std::filesystem::path& to,
                               const ConvertOptions& options) {
  constexpr int kFilesMost = 99999;
  if (options.files < 1 || options.files > kFilesMost)
    wrong(fmt::format("options.files is {}; expected 1 to {}", options.files, kFilesMost));
  const OpenedCheckpoint opened = open_checkpoint(from);
  std::error_code none;  // files that do not exist are not equal
  const auto is_target = [&](const std::filesystem::path& path) {
    return std::filesystem::equivalent(std::filesystem::absolute(path), std::filesystem::absolute(to), none);
  };
  if (opened.path == opened.folder && (is_target(opened.folder) || is_target(opened.folder / "..")))
    wrong(fmt::format("{} lies in {}; expected another folder to write to", from.string(), to.string()));
  const Results results = results_of(opened.index, options);
  CheckpointIndex index = index_of(opened.index, results, options.files);
  PartFiles files(opened.folder, opened.index);
  const SaveTurn turn(to);
  turn.wait("convert_checkpoint", SaveOptions().deadline);
  NewFolder folder(to, index.step, {}, warnings_of("convert_checkpoint", {}));
  folder.make();
  try {
    for (int number = 0; number < options.files; ++number) {
      const FileOfParts file(files, results, number, options.files);
      if (!file.empty())
        index.files[part_file(number)].header_hash =
            folder.write(part_file(number), file.tensors(), file.hashes());
    }
    folder.finish(index, 0);
  } catch (...) {
    folder.remove();
    throw;
  }
  return results.size();
}

}  // namespace weft
