// Opens files that other users or programs named or wrote. It opens only regular files, so that weft never
// waits for the writer of a FIFO, and never reads a device without end. Any thread may call it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/memfd.hpp"

namespace weft {

/// Returns the kind of file that a st_mode describes: "a FIFO", "a folder" and so on.
std::string_view file_kind(unsigned mode) noexcept;

/// A regular file open for reading, and its size; or no descriptor, and the reason.
struct RegularFile {
  Descriptor fd{};
  std::int64_t bytes = 0;
  std::string why{};  ///< "cannot open it: No such file or directory", "is not a regular file (it is a FIFO)"
  int error_number = 0;  ///< the errno of open(); 0 if the file is of another kind
};

/// Opens `path` without waiting for any other process. Links are followed. A name with a NUL is refused.
RegularFile open_regular_file(const std::string& path);

/// Reads all of a regular file. Throws `system` "<subject> cannot open it: …" if the file cannot be read, and
/// bad_argument if it is of another kind or larger than `bytes_max`.
std::string read_regular_file(const std::string& path, std::string_view subject, std::size_t bytes_max);

}  // namespace weft
