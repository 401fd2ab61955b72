// The folders of the source tree and of the reference data of other projects, for tests that compare with
// them.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace weft::test {

/// The top folder of the tree that the tests were built from.
std::filesystem::path source_dir();

/// WEFT_GOLDEN_DIR, or ../shared/golden beside the source tree.
std::filesystem::path golden_dir();

/// Every file of that folder whose name begins with `prefix` and ends in .safetensors, sorted. If it is
/// empty, skip the test with that reason.
std::vector<std::filesystem::path> golden_files(const std::string& prefix);

/// For a test: skips it, naming the folder, if the folder does not exist. Otherwise it checks that each of
/// these prefixes has files, and that each file is more than its header. If files were missing, tests made
/// from them would be fewer without notice.
void expect_golden(const std::vector<std::string>& prefixes);

}  // namespace weft::test
