// Finding a checkpoint and reading parts of its tensors. For one thread at a time.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "checkpoint/index/index.hpp"
#include "weft/checkpoint/safetensors.hpp"

namespace weft {

/// `directory`'s latest checkpoint, or `directory` itself where that is one. Throws bad_argument where there is none.
std::filesystem::path folder_to_load(const std::filesystem::path& directory);
CheckpointIndex read_index(const std::filesystem::path& folder);
CheckpointInfo info_of(const std::filesystem::path& folder, const CheckpointIndex& index);

/// A checkpoint, or a safetensors file by itself, which is one part of each of its tensors.
struct OpenedCheckpoint {
  std::filesystem::path path;    ///< of the file; else the folder
  std::filesystem::path folder;  ///< that the parts' files lie in
  CheckpointIndex index;
};
/// As folder_to_load() finds it; where `path` is a file, that.
OpenedCheckpoint open_checkpoint(const std::filesystem::path& path);

/// The files of one checkpoint, each opened when first asked for. The index must outlive it.
class PartFiles {
 public:
  PartFiles(std::filesystem::path folder, const CheckpointIndex& index)
      : folder_(std::move(folder)), index_(index) {}

  /// The file of that name. Throws bad_argument where its header is not the one that was written.
  const SafetensorsFile& of(const std::string& name);
  /// The file of a part, after a check that it holds what the index says.
  const SafetensorsFile& of(const CheckpointPart& part, const std::string& tensor, DType dtype);

 private:
  SafetensorsFile open(const std::string& name) const;
  std::filesystem::path folder_;
  const CheckpointIndex& index_;
  std::map<std::string, SafetensorsFile> files_;
};

/// Copies a box of a row-major tensor into the same box of another; offsets within each.
void copy_box(const std::byte* from, const Shape& from_shape, const Dims& from_offset, std::byte* to,
              const Shape& to_shape, const Dims& to_offset, const Shape& box, int element_bytes);

/// Throws bad_argument where a piece is not rows of the stored tensor, as RemappedTensor says.
void check_piece(const std::string& stored, const Shape& shape, const RemappedTensor& piece);
/// Fills one of this rank's boxes of a tensor that is the rows of `stored` from `first_row` on.
void read_rows(PartFiles& files, const std::string& stored, const CheckpointEntry& entry,
               std::int64_t first_row, const TensorView& tensor, HeldBox held);

/// Fills one of this rank's boxes of a tensor from every part that overlaps with it.
void read_tensor(PartFiles& files, const CheckpointEntry& entry, const MutableNamedView& tensor,
                 const HeldBox& held);

}  // namespace weft
