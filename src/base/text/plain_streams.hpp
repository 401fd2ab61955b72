// Streams that read and write as the "C" locale does. A stream of the standard library uses the locale of the
// program (std::locale::global), which may write 12345 as "12 345" and read "12 345 6" as one number. Text
// that other processes or the kernel have written, or will read, must go through these streams, and files
// must be written by NewFile (base/files/new_file.hpp); tools/check_layers.py checks both rules.
#pragma once

#include <filesystem>
#include <fstream>
#include <locale>
#include <sstream>
#include <string>
#include <utility>

namespace weft {

class TextIn : public std::istringstream {
 public:
  explicit TextIn(std::string text) {
    imbue(std::locale::classic());
    str(std::move(text));
  }
};

class TextOut : public std::ostringstream {
 public:
  TextOut() { imbue(std::locale::classic()); }
};

class FileIn : public std::ifstream {
 public:
  explicit FileIn(const std::filesystem::path& path, std::ios::openmode mode = std::ios::in) {
    imbue(std::locale::classic());
    open(path, mode);
  }
};

}  // namespace weft
