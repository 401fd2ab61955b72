#include "token_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "base/hash.hpp"
#include "data_file.hpp"
#include "weft/base/error.hpp"

namespace weft::tools {
namespace {

[[noreturn]] void bad_file(const std::string& where, const std::string& what) {
  throw Error(ErrorCode::bad_argument, fmt::format("{} {}", where, what));
}

constexpr std::array<std::pair<const char*, TokenForm>, 4> kForms{{{"text", TokenForm::text},
                                                                   {"uint16", TokenForm::uint16},
                                                                   {"uint32", TokenForm::uint32},
                                                                   {"npy", TokenForm::npy}}};

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
  const MappedFile mapped(file, where);
  const std::size_t bytes = mapped.bytes().size();
  memory_ = mapped.data();
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

void TokenFile::read_npy(const std::string& where, std::size_t bytes) {
  const NpyHeader header = read_npy_header({reinterpret_cast<const char*>(data_), bytes}, where);
  const std::string &type = header.type, &shape = header.shape;
  constexpr std::array<std::pair<const char*, int>, 5> kTypes{
      {{"|u1", 1}, {"<u2", 2}, {"<u4", 4}, {"<i4", 4}, {"<i8", 8}}};
  const auto known =
      std::find_if(kTypes.begin(), kTypes.end(), [&](const auto& t) { return type == t.first; });
  if (known == kTypes.end())
    bad_file(where, fmt::format("has elements of type \"{}\"; expected |u1, <u2, <u4, <i4 or <i8", type));
  width_ = known->second;
  signed_ = type[1] == 'i';
  const std::vector<std::int64_t> extents = header.extents();
  if (extents.size() != 1) bad_file(where, fmt::format("has the shape ({}); expected one axis", shape));
  size_ = extents[0];
  const std::size_t expected = (bytes - header.bytes) / static_cast<std::size_t>(width_);
  if (size_ < 1 || static_cast<std::size_t>(size_) > expected)
    bad_file(where, fmt::format("says that it has {} tokens; there are {}", size_, expected));
  data_ += header.bytes;
}

std::uint64_t TokenFile::fingerprint() const {
  const std::string_view all = text();
  return width_ == 1 ? hash_of(all) : hash_of_parts(all);
}

}  // namespace weft::tools
