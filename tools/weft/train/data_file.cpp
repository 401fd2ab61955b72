#include "data_file.hpp"

#include <fmt/format.h>
#include <sys/mman.h>

#include <bit>
#include <cerrno>
#include <charconv>
#include <cstring>

#include "base/files/regular_file.hpp"
#include "base/hash.hpp"
#include "weft/base/error.hpp"

namespace weft::tools {
namespace {

static_assert(std::endian::native == std::endian::little, "files of data have the low byte first");

[[noreturn]] void bad_data_file(const std::string& where, const std::string& what) {
  throw Error(ErrorCode::bad_argument, fmt::format("{} {}", where, what));
}

// The text behind 'key': in the header of an npy file; empty: none.
std::string_view behind_key(std::string_view header, std::string_view key) {
  std::size_t at = header.find(fmt::format("'{}':", key));
  if (at == std::string_view::npos) return {};
  at += key.size() + 3;
  while (at < header.size() && header[at] == ' ') ++at;
  return header.substr(at);
}

// The text between the quotes, or the brackets, with which `text` begins; empty: none.
std::string_view between(std::string_view text, char open, char close) {
  if (text.empty() || text[0] != open) return {};
  const std::size_t end = text.find(close, 1);
  return end == std::string_view::npos ? std::string_view() : text.substr(1, end - 1);
}

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& file, const std::string& where) {
  const RegularFile opened = open_regular_file(file.string());
  if (!opened.fd)
    throw Error(opened.error_number != 0 ? ErrorCode::system : ErrorCode::bad_argument,
                fmt::format("{} {}", where, opened.why));
  size_ = static_cast<std::size_t>(opened.bytes);
  if (size_ == 0) bad_data_file(where, "is empty");
  void* const mapped = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, opened.fd.get(), 0);
  if (mapped == MAP_FAILED) throw_errno(fmt::format("{} cannot map it", where), errno);
  data_ = std::shared_ptr<const std::byte>(
      static_cast<const std::byte*>(mapped),
      [size = size_](const std::byte* p) { ::munmap(const_cast<std::byte*>(p), size); });
}

// "\x93NUMPY", the version, the length of the header (2 bytes, from version 2 on 4), and the header: a
// dictionary of Python with descr, fortran_order and shape
// (https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html).
NpyHeader read_npy_header(std::string_view file, const std::string& where) {
  constexpr std::string_view kMagic = "\x93NUMPY";
  if (!file.starts_with(kMagic) || file.size() < 12) bad_data_file(where, "is no file of numpy.save");
  const bool first = file[6] == 1;
  const std::size_t begin = first ? 10 : 12;
  std::uint32_t length = 0;
  std::memcpy(&length, file.data() + 8, first ? 2 : 4);
  if (length > file.size() - begin) bad_data_file(where, "ends within the header of numpy.save");
  const std::string_view header = file.substr(begin, length);
  return {.type = std::string(between(behind_key(header, "descr"), '\'', '\'')),
          .shape = std::string(between(behind_key(header, "shape"), '(', ')')),
          .fortran_order = behind_key(header, "fortran_order").starts_with("True"),
          .bytes = begin + length};
}

std::vector<std::int64_t> NpyHeader::extents() const {
  std::vector<std::int64_t> found;
  const char* at = shape.data();
  const char* const end = at + shape.size();
  while (at != end) {
    std::int64_t extent = 0;
    const auto read = std::from_chars(at, end, extent);
    if (read.ec != std::errc()) return {};
    found.push_back(extent);
    at = read.ptr;
    if (at != end && *at != ',') return {};
    while (at != end && (*at == ',' || *at == ' ')) ++at;
  }
  return found;
}

std::uint64_t hash_of_parts(std::string_view bytes) {
  constexpr std::size_t kWhole = std::size_t{64} << 20, kParts = 1024, kOfPart = 4096;
  const std::size_t size = bytes.size();
  Fnv1a hash;
  hash.add(static_cast<std::uint64_t>(size));
  const bool whole = size <= kWhole;
  const std::size_t parts = whole ? 1 : kParts, of_part = whole ? size : kOfPart;
  for (std::size_t part = 0; part < parts; ++part) {
    const std::size_t from = parts == 1 ? 0 : (size - of_part) / (parts - 1) * part;
    hash.add(bytes.substr(from, of_part));
  }
  return hash.value;
}

}  // namespace weft::tools
