// The safetensors writer. It calls a function before each tensor's data; tests that interrupt a save need it.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>

#include "weft/checkpoint/safetensors.hpp"

namespace weft {

void write_safetensors(const std::filesystem::path& path, std::span<const SafetensorsEntry> entries,
                       const std::map<std::string, std::string>& metadata,
                       const std::function<void()>& before_each);

}  // namespace weft
