// A table of names: the names of tensors in a converted checkpoint.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace weft::tools {

/// Its lines are `OLD NEW`, separated by blanks; # begins a comment. Both names may have one *, which stands
/// for any text, equal in both. The first line that matches a name is used. A name that no line matches
/// stays.
class NameTable {
 public:
  NameTable() = default;
  /// Throws bad_argument that names file and line, and system if the file cannot be read.
  static NameTable read(const std::filesystem::path& path);
  std::string renamed(std::string_view name) const;

 private:
  struct Line {
    std::string from, to;
  };
  std::vector<Line> lines_;
};

}  // namespace weft::tools
