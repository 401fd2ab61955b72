// Makes words from a file or from another process safe to print on a terminal or in an error's text. Pure
// function. Any thread may call it.
#pragma once

#include <cstddef>
#include <string>

namespace weft {

/// Returns `words` with '?' in place of control characters, which could move the cursor or hide the text that
/// follows. These are the control characters of ASCII, and those that UTF-8 writes as 0xc2 and a byte from
/// 0x80 to 0x9f.
inline std::string printable(std::string words) {
  const auto at = [&](std::size_t i) { return static_cast<unsigned char>(words[i]); };
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (at(i) < 0x20 || at(i) == 0x7f) words[i] = '?';
    if (at(i) == 0xc2 && i + 1 < words.size() && at(i + 1) >= 0x80 && at(i + 1) <= 0x9f)
      words.replace(i, 2, "?");
  }
  return words;
}

}  // namespace weft
