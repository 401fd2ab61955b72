// Reads a checkpoint in one process without a mesh: its description, and its global tensors, one at a time.
// Also verifies a checkpoint, and exports it as one file.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "weft/base/tensor.hpp"
#include "weft/checkpoint/checkpoint.hpp"

namespace weft {

/// The description of one tensor in a checkpoint.
struct CheckpointTensor {
  DType dtype = DType::f32;
  Shape shape;  ///< of the global tensor
  std::vector<std::string>
      layout;  ///< the tensor's placement on each axis of CheckpointInfo::mesh when it was saved
  int parts = 0;
  std::vector<std::string> files;  ///< the files that hold the tensor's parts, sorted
};

/// An open checkpoint. It opens the files with parts only when a tensor is read. Cheap to copy. One thread at
/// a time may use it.
class CheckpointReader {
 public:
  /// Opens a checkpoint like load_checkpoint(): the latest in `directory`, or `directory` itself. Also opens
  /// a single safetensors file. Throws bad_argument if there is none, and `corrupt` if its index is damaged.
  /// A relative directory is relative to the working directory at the moment of the call.
  static CheckpointReader open(const std::filesystem::path& directory);

  const CheckpointInfo& info() const noexcept;
  /// Returns false if an older version of weft wrote the checkpoint without hashes. Changed bytes cannot be
  /// detected then.
  bool hashed() const noexcept;
  const std::vector<std::string>& names() const noexcept;  ///< sorted
  bool contains(std::string_view name) const;
  /// Throws bad_argument if there is no such tensor.
  const CheckpointTensor& tensor(std::string_view name) const;
  /// The global tensor, verified. Throws the errors of tensor(), and those of load_checkpoint() for damaged
  /// files.
  Tensor read(Context& context, std::string_view name, Memory memory = Memory::local) const;
  /// Like read(), but into the caller's memory. Throws bad_argument if `out` is not contiguous, not on the
  /// host, or does not have the global shape and the dtype.
  void read_into(std::string_view name, const TensorView& out) const;

 private:
  struct Impl;
  explicit CheckpointReader(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<Impl> impl_;
};

/// Reads all of a checkpoint and returns its faults, one line each, with file and bytes. Faults are missing
/// or damaged files, tensors that a file does not have as the index says, and bytes that differ from the
/// written bytes. Empty if the checkpoint is sound. An index that cannot be read counts as one fault. If
/// `progress` is given, it is called with the number of bytes read so far and the total number.
std::vector<std::string> verify_checkpoint(
    const std::filesystem::path& directory,
    const std::function<void(std::int64_t, std::int64_t)>& progress = {});

/// How much of a checkpoint newest_whole_checkpoint() reads.
enum class WholeCheck : unsigned char {
  files,  ///< the index, and the header and the length of each file
  bytes   ///< all bytes, too, and compares their hashes
};
struct WholeCheckpoint {
  std::optional<CheckpointInfo> found;  ///< nothing if there is no whole checkpoint
  std::vector<std::string> broken;      ///< why newer ones were not chosen, the newest first; mostly empty
};
/// Finds the checkpoint from which a run can continue. This is the one that `directory`/latest names, or, if
/// that is broken or missing, the newest folder step-N that is whole. `directory` may itself be a checkpoint.
/// One process.
WholeCheckpoint newest_whole_checkpoint(const std::filesystem::path& directory,
                                        WholeCheck check = WholeCheck::files);

struct ExportOptions {
  /// Gives the name of a tensor in the file. "" leaves the tensor out. Empty: all tensors, under their own
  /// names.
  std::function<std::string(std::string_view name)> rename;
  /// Gives the values to write for a tensor: on the host, with its dtype and shape; an empty Tensor, or no
  /// function: the stored values.
  std::function<Tensor(const CheckpointReader& reader, std::string_view name)> value = {};
};

/// Writes the global tensors of a checkpoint into one safetensors file, which appears complete or not at all.
/// Its metadata are the checkpoint's `extra`, and "weft_step". At most one tensor is in memory. Returns the
/// number of tensors written. Throws bad_argument if two tensors get one name or no tensor is left, and the
/// errors of write_safetensors() and CheckpointReader::read().
std::size_t export_checkpoint(const std::filesystem::path& directory, const std::filesystem::path& file,
                              const ExportOptions& options = {});

}  // namespace weft
