// The safetensors writer, for tensors that are not all in memory at once.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include "weft/checkpoint/safetensors.hpp"

namespace weft {

/// A tensor whose bytes are requested when they are written, and no longer used when the next tensor's bytes
/// are.
struct PlannedTensor {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;
  std::function<std::span<const std::byte>()> bytes;
};

/// Like the public function. Returns the value that header_hash() of the file will have. `on_step`: see
/// AtomicFile.
std::uint64_t write_safetensors(const std::filesystem::path& path, std::span<const PlannedTensor> tensors,
                                const std::map<std::string, std::string>& metadata,
                                const std::function<void(std::string_view step)>& on_step = {});

/// The planned tensors of `entries`; throws bad_argument that names `path` if a view is not contiguous.
std::vector<PlannedTensor> planned(const std::filesystem::path& path,
                                   std::span<const SafetensorsEntry> entries);

}  // namespace weft
