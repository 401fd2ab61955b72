// Finds a checkpoint and reads parts of its tensors. For use by one thread at a time.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "checkpoint/index/index.hpp"
#include "weft/checkpoint/safetensors.hpp"

namespace weft {

/// A checkpoint whose index has been read.
struct FoundCheckpoint {
  std::filesystem::path folder;
  CheckpointIndex index;
  std::uint64_t hash = 0;  ///< of the index's text, which has the hashes of all files

  bool is(const FoundCheckpoint& other) const { return folder == other.folder && hash == other.hash; }
};
/// `directory`'s latest checkpoint, or `directory` itself if it is a checkpoint. If a save has meanwhile
/// removed the folder that `latest` named, this function reads `latest` again. Throws bad_argument if there
/// is no checkpoint, and `corrupt` if `latest` or the index is damaged.
FoundCheckpoint find_checkpoint(const std::filesystem::path& directory);
/// The checkpoint in that folder.
FoundCheckpoint open_folder(const std::filesystem::path& folder);
/// Returns whether find_checkpoint() would find another checkpoint by now, because later saves removed the
/// found one. Returns false if there is no checkpoint any more.
bool has_moved_on(const std::filesystem::path& directory, const FoundCheckpoint& from) noexcept;
/// How often a load chooses another checkpoint because the chosen one was removed while it was read.
inline constexpr int kMostLooks = 4;
CheckpointInfo info_of(const std::filesystem::path& folder, const CheckpointIndex& index);

/// A checkpoint, or a single safetensors file, which is then one part of each of its tensors.
struct OpenedCheckpoint {
  std::filesystem::path path;    ///< of the file; otherwise the folder
  std::filesystem::path folder;  ///< that the parts' files lie in
  CheckpointIndex index;
  std::uint64_t hash = 0;  ///< FoundCheckpoint's
};
/// Opens the checkpoint that find_checkpoint() finds. If `path` is a file, opens that file.
OpenedCheckpoint open_checkpoint(const std::filesystem::path& path);

/// The files of one checkpoint. Each is opened at its first use. The index must exist longer than this
/// object.
class PartFiles {
 public:
  PartFiles(std::filesystem::path folder, const CheckpointIndex& index)
      : folder_(std::move(folder)), index_(index) {}

  const std::filesystem::path& folder() const noexcept { return folder_; }
  /// The file with that name. Throws `corrupt` if the file is missing, or if its header is not the header
  /// that was written.
  const SafetensorsFile& of(const std::string& name);
  /// Returns the file of a part, after a check that the file holds what the index says.
  const SafetensorsFile& of(const CheckpointPart& part, const std::string& tensor, DType dtype);

 private:
  SafetensorsFile open(const std::string& name) const;
  std::filesystem::path folder_;
  const CheckpointIndex& index_;
  std::map<std::string, SafetensorsFile> files_;
};

/// Throws bad_argument if a piece does not consist of rows of the stored tensor, as RemappedTensor requires.
void check_piece(const std::string& stored, const Shape& shape, const RemappedTensor& piece);
/// Fills one of this rank's boxes of a tensor that consists of the rows of `stored` from `first_row` on.
void read_rows(PartFiles& files, const std::string& stored, const CheckpointEntry& entry,
               std::int64_t first_row, const TensorView& tensor, HeldBox held);

/// Fills one of this rank's boxes of a tensor from every part that overlaps with it.
void read_tensor(PartFiles& files, const CheckpointEntry& entry, const MutableNamedView& tensor,
                 const HeldBox& held);

}  // namespace weft
