#include "token_file.hpp"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <string_view>

#include "base/files/regular_file.hpp"
#include "base/hash.hpp"
#include "weft/base/error.hpp"

namespace weft::tools {
namespace {

static_assert(std::endian::native == std::endian::little, "files of tokens have the low byte first");

[[noreturn]] void bad_file(const std::string& where, const std::string& what) {
  throw Error(ErrorCode::bad_argument, fmt::format("{} {}", where, what));
}

constexpr std::array<std::pair<const char*, TokenForm>, 4> kForms{{{"text", TokenForm::text},
                                                                   {"uint16", TokenForm::uint16},
                                                                   {"uint32", TokenForm::uint32},
                                                                   {"npy", TokenForm::npy}}};

// The text between the quotes, or the brackets, behind 'key': in the header of an npy file; empty: none.
std::string_view value_of(std::string_view header, std::string_view key, char open, char close) {
  std::size_t at = header.find(fmt::format("'{}':", key));
  if (at == std::string_view::npos) return {};
  at += key.size() + 3;
  while (at < header.size() && header[at] == ' ') ++at;
  if (at >= header.size() || header[at] != open) return {};
  const std::size_t end = header.find(close, at + 1);
  return end == std::string_view::npos ? std::string_view() : header.substr(at + 1, end - at - 1);
}

}  // namespace

TokenForm token_form(const std::string& name, const std::filesystem::path& file) {
  if (name == "auto")
    return file.extension() == ".npy"   ? TokenForm::npy
           : file.extension() == ".bin" ? TokenForm::uint16
                                        : TokenForm::text;
  for (const auto& [known, form] : kForms)
    if (name == known) return form;
  throw Error(ErrorCode::bad_argument,
              fmt::format("format is \"{}\"; expected auto, text, uint16, uint32 or npy", name));
}

const char* name_of(TokenForm form) {
  for (const auto& [name, of] : kForms)
    if (of == form) return name;
  return "";
}

TokenFile::TokenFile(const std::filesystem::path& file, TokenForm form, const std::string& subject) {
  const std::string where = fmt::format("{} \"{}\":", subject, file.string());
  const RegularFile opened = open_regular_file(file.string());
  if (!opened.fd)
    throw Error(opened.error_number != 0 ? ErrorCode::system : ErrorCode::bad_argument,
                fmt::format("{} {}", where, opened.why));
  const auto bytes = static_cast<std::size_t>(opened.bytes);
  if (bytes == 0) bad_file(where, "is empty");
  void* const mapped = ::mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, opened.fd.get(), 0);
  if (mapped == MAP_FAILED) throw_errno(fmt::format("{} cannot map it", where), errno);
  memory_ = std::shared_ptr<const std::byte>(
      static_cast<const std::byte*>(mapped),
      [bytes](const std::byte* p) { ::munmap(const_cast<std::byte*>(p), bytes); });
  data_ = memory_.get();
  if (form == TokenForm::npy) {
    read_npy(where, bytes);
    return;
  }
  width_ = form == TokenForm::text ? 1 : form == TokenForm::uint16 ? 2 : 4;
  if (bytes % static_cast<std::size_t>(width_) != 0)
    bad_file(where, fmt::format("has {} bytes; expected a multiple of {}, the bytes of a token ({})", bytes,
                                width_, name_of(form)));
  size_ = static_cast<std::int64_t>(bytes) / width_;
}

TokenFile::TokenFile(std::vector<std::uint32_t> tokens) : width_(4) {
  const auto kept = std::make_shared<const std::vector<std::uint32_t>>(std::move(tokens));
  size_ = static_cast<std::int64_t>(kept->size());
  memory_ = std::shared_ptr<const std::byte>(kept, reinterpret_cast<const std::byte*>(kept->data()));
  data_ = memory_.get();
}

// "\x93NUMPY", the version, the length of the header (2 bytes, from version 2 on 4), and the header: a
// dictionary of Python with descr, fortran_order and shape
// (https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html).
void TokenFile::read_npy(const std::string& where, std::size_t bytes) {
  constexpr std::string_view kMagic = "\x93NUMPY";
  const std::string_view all(reinterpret_cast<const char*>(data_), bytes);
  if (!all.starts_with(kMagic) || bytes < 12) bad_file(where, "is no file of numpy.save");
  const bool first = all[6] == 1;
  const std::size_t begin = first ? 10 : 12;
  std::uint32_t length = 0;
  std::memcpy(&length, data_ + 8, first ? 2 : 4);
  if (length > bytes - begin) bad_file(where, "ends within the header of numpy.save");
  const std::string_view header = all.substr(begin, length);
  const std::string_view type = value_of(header, "descr", '\'', '\''),
                         shape = value_of(header, "shape", '(', ')');
  constexpr std::array<std::pair<const char*, int>, 5> kTypes{
      {{"|u1", 1}, {"<u2", 2}, {"<u4", 4}, {"<i4", 4}, {"<i8", 8}}};
  const auto known =
      std::find_if(kTypes.begin(), kTypes.end(), [&](const auto& t) { return type == t.first; });
  if (known == kTypes.end())
    bad_file(where, fmt::format("has elements of type \"{}\"; expected |u1, <u2, <u4, <i4 or <i8", type));
  width_ = known->second;
  signed_ = type[1] == 'i';
  const char* const end = shape.data() + shape.size();
  const auto read = std::from_chars(shape.data(), end, size_);
  if (shape.empty() || read.ec != std::errc() || (read.ptr != end && std::string_view(read.ptr, end) != ","))
    bad_file(where, fmt::format("has the shape ({}); expected one axis", shape));
  const std::size_t expected = (bytes - begin - length) / static_cast<std::size_t>(width_);
  if (size_ < 1 || static_cast<std::size_t>(size_) > expected)
    bad_file(where, fmt::format("says that it has {} tokens; there are {}", size_, expected));
  data_ += begin + length;
}

std::uint64_t TokenFile::fingerprint() const {
  const std::string_view all = text();
  const std::size_t bytes = all.size();
  if (width_ == 1) return hash_of(all);
  constexpr std::size_t kWhole = std::size_t{64} << 20, kParts = 1024, kOfPart = 4096;
  Fnv1a hash;
  hash.add(static_cast<std::uint64_t>(bytes));
  const bool whole = bytes <= kWhole;
  const std::size_t parts = whole ? 1 : kParts, of_part = whole ? bytes : kOfPart;
  for (std::size_t part = 0; part < parts; ++part) {
    const std::size_t from = parts == 1 ? 0 : (bytes - of_part) / (parts - 1) * part;
    hash.add(all.substr(from, of_part));
  }
  return hash.value;
}

}  // namespace weft::tools
