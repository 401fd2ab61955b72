// Reads a checkpoint in one process without a mesh: its description, its tensors as wholes, one at a time;
// verifies that all of it is as it was written; writes it as one file.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "weft/base/tensor.hpp"
#include "weft/checkpoint/checkpoint.hpp"

namespace weft {

/// The description of one tensor in a checkpoint.
struct CheckpointTensor {
  DType dtype = DType::f32;
  Shape shape;  ///< of the whole
  std::vector<std::string>
      layout;  ///< its placement on each axis of CheckpointInfo::mesh, when it was written
  int parts = 0;
  std::vector<std::string> files;  ///< those that hold its parts, sorted
};

/// A checkpoint, opened. Files of parts are opened when a tensor is read. Cheap to copy. For one thread at a
/// time.
class CheckpointReader {
 public:
  /// As load_checkpoint() finds it: `directory`'s latest, or `directory` itself; or one safetensors file.
  /// Throws bad_argument if there is none, and `corrupt` where its index is not sound. A relative directory
  /// is relative to the working directory at the moment of the call.
  static CheckpointReader open(const std::filesystem::path& directory);

  const CheckpointInfo& info() const noexcept;
  /// False: it was written before checkpoints had hashes, so changed bytes cannot be detected.
  bool hashed() const noexcept;
  const std::vector<std::string>& names() const noexcept;  ///< sorted
  bool contains(std::string_view name) const;
  /// Throws bad_argument if there is no such tensor.
  const CheckpointTensor& tensor(std::string_view name) const;
  /// The whole tensor, verified. Throws as tensor() does, and as load_checkpoint() does for unsound files.
  Tensor read(Context& context, std::string_view name, Memory memory = Memory::local) const;
  /// The same into memory of the caller's: contiguous, on the host, of the whole's shape and dtype, else
  /// bad_argument.
  void read_into(std::string_view name, const TensorView& out) const;

 private:
  struct Impl;
  explicit CheckpointReader(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<Impl> impl_;
};

/// Reads all of a checkpoint and returns everything that is wrong with it, a line each, with file and bytes:
/// files that are missing or not sound, tensors that a file does not have as the index says, bytes that are
/// not those that were written. Empty: it is whole. An index that cannot be read is one fault. `progress`,
/// where given, is called with bytes read and bytes in all.
std::vector<std::string> verify_checkpoint(
    const std::filesystem::path& directory,
    const std::function<void(std::int64_t, std::int64_t)>& progress = {});

struct ExportOptions {
  /// The name a tensor gets in the file; "" leaves it out. Empty: all, under their own names.
  std::function<std::string(std::string_view name)> rename;
};

/// Writes the tensors of a checkpoint, whole, into one safetensors file, which is there whole or not at all.
/// Its metadata are the checkpoint's `extra`, and "weft_step". Never more than one tensor is in memory.
/// Returns how many were written. Throws bad_argument if two get one name or none is left, and as
/// write_safetensors() and CheckpointReader::read() do.
std::size_t export_checkpoint(const std::filesystem::path& directory, const std::filesystem::path& file,
                              const ExportOptions& options = {});

}  // namespace weft
