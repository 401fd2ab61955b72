#include "support/golden.hpp"

#include <algorithm>
#include <cstdlib>

namespace weft::test {

std::filesystem::path source_dir() { return WEFT_SOURCE_DIR; }

std::filesystem::path golden_dir() {
  if (const char* dir = std::getenv("WEFT_GOLDEN_DIR"); dir != nullptr && *dir != '\0') return dir;
  return source_dir() / ".." / "shared" / "golden";
}

std::vector<std::filesystem::path> golden_files(const std::string& prefix) {
  std::vector<std::filesystem::path> found;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(golden_dir(), none))
    if (entry.path().filename().string().starts_with(prefix) && entry.path().extension() == ".safetensors")
      found.push_back(entry.path());
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace weft::test
