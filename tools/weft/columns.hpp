// Text in lines that a terminal of 80 columns shows whole. Any thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>

namespace weft::tools {

inline constexpr std::size_t kColumns = 80;

/// `text` with line feeds in place of blanks, so that no line is longer than kColumns if words are shorter.
/// Later lines begin with `indent` spaces. `used`: columns before the text on its first line.
inline std::string folded(std::string_view text, std::size_t indent = 0, std::size_t used = 0) {
  std::string out;
  std::size_t column = used;
  for (std::size_t from = 0; from <= text.size();) {
    const std::size_t end = std::min(text.find(' ', from), text.size());
    const std::size_t word = end - from;
    if (from > 0 && column + 1 + word > kColumns) {
      out += '\n' + std::string(indent, ' ');
      column = indent;
    } else if (from > 0) {
      out += ' ';
      ++column;
    }
    out += text.substr(from, word);
    column += word;
    from = end + 1;
  }
  return out;
}

}  // namespace weft::tools
