// A table of names: what tensors are called in a converted checkpoint.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace weft::tools {

/// Lines `OLD NEW`; blanks between, # begins a comment. Both may have one *, which stands for any text, the
/// same in both. The first line that fits a name counts; a name that none fits stays.
class NameTable {
 public:
  NameTable() = default;
  /// Throws bad_argument naming file and line, and system if it cannot be read.
  static NameTable read(const std::filesystem::path& path);
  std::string renamed(std::string_view name) const;

 private:
  struct Line {
    std::string from, to;
  };
  std::vector<Line> lines_;
};

}  // namespace weft::tools
