#include "support/golden.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <system_error>

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

void expect_golden(const std::vector<std::string>& prefixes) {
  if (!std::filesystem::is_directory(golden_dir()))
    GTEST_SKIP() << "no folder " << golden_dir() << "; set WEFT_GOLDEN_DIR";
  for (const std::string& prefix : prefixes) {
    const auto files = golden_files(prefix);
    EXPECT_FALSE(files.empty()) << "no " << prefix << "*.safetensors in " << golden_dir();
    // Eight bytes of a length, and the header.
    for (const auto& file : files) EXPECT_GT(std::filesystem::file_size(file), 8U) << file;
  }
}

}  // namespace weft::test
