// Where the reference data of other projects lies, for tests that compare with it.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace weft::test {

/// WEFT_GOLDEN_DIR, or ../shared/golden beside the source tree.
std::filesystem::path golden_dir();

/// Every file of that folder whose name begins with `prefix` and ends in .safetensors, sorted. Empty: skip,
/// saying so.
std::vector<std::filesystem::path> golden_files(const std::string& prefix);

}  // namespace weft::test
