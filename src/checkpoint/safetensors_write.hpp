// The safetensors writer, for tensors that are not in memory together.
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

/// A tensor whose bytes are asked for when they are written, and not used after the next one's are.
struct PlannedTensor {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;
  std::function<std::span<const std::byte>()> bytes;
};

/// As the public function does. Returns what header_hash() of the file will be. `on_step`: see AtomicFile.
std::uint64_t write_safetensors(const std::filesystem::path& path, std::span<const PlannedTensor> tensors,
                                const std::map<std::string, std::string>& metadata,
                                const std::function<void(std::string_view step)>& on_step = {});

/// The planned tensors of `entries`; throws bad_argument naming `path` for a view that is not contiguous.
std::vector<PlannedTensor> planned(const std::filesystem::path& path,
                                   std::span<const SafetensorsEntry> entries);

}  // namespace weft
