// How wide a terminal is. Any thread.
#pragma once

#include <sys/ioctl.h>

#include <optional>

#include "base/parse_number.hpp"
#include "weft/base/env.hpp"

namespace weft::tools {

/// The columns of the terminal behind `fd`; if it reports none or is no terminal, the value of COLUMNS.
/// Returns nothing if that is no number, either.
inline std::optional<int> terminal_columns(int fd) {
  winsize size{};
  if (::ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  const auto told = parse_integer<int>(env::get("COLUMNS").value_or(""));
  return told && *told > 0 ? told : std::nullopt;
}

}  // namespace weft::tools
