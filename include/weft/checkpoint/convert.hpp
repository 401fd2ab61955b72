// A checkpoint written again with other names and shapes, another dtype, another number of files. One
// process, no mesh.
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
  /// The names and shapes by which a tensor is read, before anything else: remap_old_names, for example.
  /// Empty: as it is.
  Remap remap{};
  /// The name it then gets; "" leaves it out. Empty: all, under the names they have.
  std::function<std::string(std::string_view name)> rename{};
  /// The dtype that f32 and bf16 become, rounding to nearest even; f32 or bf16. Others stay. Empty: all stay.
  std::function<DType(std::string_view name, DType stored)> dtype{};
  /// How many files the tensors' rows are cut into, as Shard(0) cuts them over so many ranks. 1 or more.
  int files = 1;
};

/// Reads `from`, a checkpoint (a run's latest, or a folder of its own) or a safetensors file, verifies it,
/// and writes it into `to` as save_checkpoint() writes: `to`/step-N, whole or not there, with hashes, and
/// `to`/latest. Step and strings are those of `from`; a safetensors file has step "weft_step" of its
/// metadata, otherwise 0, and its other strings. A second conversion with the same options gives the same
/// bytes, if `rename` keeps its own names. At most one part of one tensor is in memory. Returns how many
/// tensors were written. Throws bad_argument if two tensors get one name, none is left, `from` lies in `to`,
/// or an option is out of range; and as CheckpointReader::read() and save_checkpoint() do.
std::size_t convert_checkpoint(const std::filesystem::path& from, const std::filesystem::path& to,
                               const ConvertOptions& options = {});

}  // namespace weft
