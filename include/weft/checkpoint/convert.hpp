// Copies a checkpoint with other names and shapes, another dtype, or another number of files. One process, no
// mesh.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

#include "weft/base/dtype.hpp"
#include "weft/checkpoint/remap.hpp"

namespace weft {

struct ConvertOptions {
  /// Gives the names and shapes under which a tensor is read, before anything else. An example is
  /// remap_old_names. Empty: tensors keep their names and shapes.
  Remap remap{};
  /// Gives the name of the tensor in the copy. "" leaves the tensor out. Empty: all tensors keep their names.
  std::function<std::string(std::string_view name)> rename{};
  /// Gives the dtype of an f32 or bf16 tensor in the copy: f32 or bf16, rounded to nearest even. Tensors of
  /// other dtypes keep their dtype. Empty: all tensors keep their dtype.
  std::function<DType(std::string_view name, DType stored)> dtype{};
  /// The number of files over which the tensors' rows are cut, as Shard(0) cuts them over that number of
  /// ranks. 1 or more.
  int files = 1;
};

/// Reads `from`, which is a checkpoint (the latest in a directory, or a checkpoint's folder) or a safetensors
/// file, and verifies it. Writes it into `to` like save_checkpoint(): `to`/step-N, complete or absent, with
/// hashes, and `to`/latest. The copy keeps the step and the strings of `from`. For a safetensors file the
/// step is "weft_step" of its metadata, or 0, and the strings are its other metadata. A second conversion
/// with the same options gives the same bytes, if `rename` keeps its own names. At most one part of one
/// tensor is in memory. Returns how many tensors were written. Throws bad_argument if two tensors get one
/// name, no tensor is left, `from` lies in `to`, or an option is out of range. Throws the errors of
/// CheckpointReader::read() and save_checkpoint(), too.
std::size_t convert_checkpoint(const std::filesystem::path& from, const std::filesystem::path& to,
                               const ConvertOptions& options = {});

}  // namespace weft
