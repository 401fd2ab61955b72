// Words from a file, for a terminal.
#pragma once

#include <string>

namespace weft::tools {

/// `words` with '?' in place of control characters, which could move the cursor or hide what follows.
inline std::string printable(std::string words) {
  for (char& c : words)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  return words;
}

}  // namespace weft::tools
