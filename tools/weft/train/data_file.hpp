// A file of data, mapped into memory, and the header of an array of NumPy in it. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace weft::tools {

/// The bytes of a file. A page is read when a byte of it is; the file must not become shorter meanwhile.
/// Copies share the memory.
class MappedFile {
 public:
  MappedFile() = default;
  /// Throws system if the file cannot be read, and bad_argument if it is empty or is no regular file.
  /// `where`: the beginning of error texts.
  MappedFile(const std::filesystem::path& file, const std::string& where);
  std::string_view bytes() const noexcept { return {reinterpret_cast<const char*>(data_.get()), size_}; }
  const std::shared_ptr<const std::byte>& data() const noexcept { return data_; }

 private:
  std::shared_ptr<const std::byte> data_;
  std::size_t size_ = 0;
};

/// The header that numpy.save writes before the elements of an array.
struct NpyHeader {
  std::string type, shape;  ///< "<f4", "3, 5"
  bool fortran_order = false;
  std::size_t bytes = 0;  ///< of the header: the elements begin behind it
  /// The extents of `shape`; empty if it has none, or one that is no number.
  std::vector<std::int64_t> extents() const;
};
/// Throws bad_argument that begins with `where` if `file` is no file of numpy.save.
NpyHeader read_npy_header(std::string_view file, const std::string& where);

/// A hash by which a run notices another file: of the number of bytes and of all of them, or of 1024 parts of
/// them if there are more than 64 MiB.
std::uint64_t hash_of_parts(std::string_view bytes);

}  // namespace weft::tools
