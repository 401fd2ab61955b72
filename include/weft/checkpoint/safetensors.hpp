// Files of named tensors: the safetensors format (github.com/huggingface/safetensors), read and written.
// Any number of threads may read an open file at once. Two writers of one path must not run at the same
// time.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "weft/base/tensor.hpp"

namespace weft {

/// The description of one tensor in a file.
struct SafetensorsInfo {
  DType dtype = DType::f32;
  Shape shape;
  std::int64_t begin = 0;  ///< bytes from the start of the file
  std::int64_t bytes = 0;
};

/// An open safetensors file. `open` reads and checks the whole header. Elements are read only when they are
/// requested. They are read with read calls, and the file is not mapped. So a file that shrinks later causes
/// an error and not a signal. Cheap to copy. Copies share the descriptor.
class SafetensorsFile {
 public:
  /// Throws `system` if the file cannot be opened, bad_argument if it is no regular file, and `unsupported`
  /// for a dtype or a number of dimensions that this build lacks. Throws `corrupt` if the file is damaged: it
  /// is too short, its header is longer than the file or no JSON object, a name occurs twice, a shape does
  /// not fit its offsets, offsets lie outside of the file, tensors overlap, or bytes belong to no tensor. The
  /// text names the file, the tensor, the value and the expected value.
  static SafetensorsFile open(const std::filesystem::path& path);

  const std::filesystem::path& path() const noexcept;
  /// All tensors, sorted.
  const std::vector<std::string>& names() const noexcept;
  bool contains(std::string_view name) const;
  /// Throws bad_argument if there is no such tensor.
  const SafetensorsInfo& info(std::string_view name) const;
  /// All strings of the file's metadata.
  const std::map<std::string, std::string, std::less<>>& metadata() const noexcept;
  /// The XXH3 hash (64 bits) of the header and its length, that is, of everything except the tensors' bytes.
  std::uint64_t header_hash() const noexcept;
  /// One string of the metadata. Throws bad_argument if there is no such key. The text names the existing
  /// keys.
  const std::string& metadata(std::string_view key) const;

  /// The tensor, in newly allocated memory. Throws the errors of `info`, `system` if reading fails, and
  /// `corrupt` if the file has become shorter.
  Tensor read(Context& context, std::string_view name, Memory memory = Memory::local) const;
  /// The bytes [offset, offset + out.size()) of the tensor's data, row-major. Throws the errors of `read`,
  /// and bad_argument if the range reaches past the end of the data.
  void read_bytes(std::string_view name, std::int64_t offset, std::span<std::byte> out) const;

 private:
  struct Impl;
  explicit SafetensorsFile(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<const Impl> impl_;
};

/// One tensor to be written. `data` must be contiguous.
struct SafetensorsEntry {
  std::string name;
  ConstTensorView data;
};

/// Writes a file that holds `entries` and `metadata`. The file is written under a temporary name in the same
/// folder, synced, and then renamed. So at any moment `path` is the old file or the complete new one. The
/// header lists tensors by name. The data is sorted by falling element size, then by name, and begins at a
/// multiple of 64 bytes. So each tensor is aligned to its element size without gaps. Throws `bad_argument` if
/// a name occurs twice or is the reserved name "__metadata__", or if a view is not contiguous, and `system`
/// if writing fails. After an error `path` is untouched and the temporary file is removed.
void write_safetensors(const std::filesystem::path& path, std::span<const SafetensorsEntry> entries,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace weft
