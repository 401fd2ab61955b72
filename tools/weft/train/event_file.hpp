// Scalars as TensorBoard reads them. One thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "base/files/new_file.hpp"

namespace weft::tools {

/// A file of events: records of a length, the length's checksum, an Event in the wire format of protocol
/// buffers, and its checksum (tensorflow/core/lib/io/record_writer.h, core/util/event.proto).
class EventFile {
 public:
  /// Makes the folder, and a file of a name of its own in it. Events of earlier files there of step `first`
  /// or later do not count any more. Throws system.
  EventFile(const std::filesystem::path& folder, std::int64_t first, const std::string& subject);
  using Scalar = std::pair<std::string_view, double>;
  void write(std::int64_t step, std::span<const Scalar> scalars);

 private:
  void record(const std::string& event);
  NewFile file_;
};

/// CRC-32C (G. Castagnoli et al., 1993), turned by 15 bits and moved, as records have it.
std::uint32_t masked_crc(std::string_view bytes) noexcept;

}  // namespace weft::tools
