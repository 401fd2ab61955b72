// A file of tokens, or of text whose bytes are tokens, mapped into memory. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace weft::tools {

/// How a file holds tokens: `text`, each byte is one; `uint16` and `uint32`, numbers in the order of bytes of
/// this machine, as nanoGPT's .bin files; `npy`, an array of NumPy with one axis, of u1, u2, u4, i4 or i8.
enum class TokenForm : unsigned char { text, uint16, uint32, npy };

/// "auto" says npy for a name that ends in .npy, uint16 for .bin, and otherwise text. Throws bad_argument for
/// an invalid name.
TokenForm token_form(const std::string& name, const std::filesystem::path& file);
const char* name_of(TokenForm form);

/// The tokens of a file. The pages of a file are read when a token of them is; the file must not become
/// shorter meanwhile. Copies share the memory.
class TokenFile {
 public:
  TokenFile() = default;
  /// Throws system if the file cannot be read, and bad_argument, with the file's name, if it has another
  /// form. `subject`: the beginning of error texts.
  TokenFile(const std::filesystem::path& file, TokenForm form, const std::string& subject);
  /// Tokens in memory.
  explicit TokenFile(std::vector<std::uint32_t> tokens);

  std::int64_t size() const noexcept { return size_; }
  std::int64_t operator[](std::int64_t i) const noexcept {
    const std::byte* const at = data_ + i * width_;
    switch (width_) {
      case 1: return static_cast<std::int64_t>(*at);
      case 2: return number_at<std::uint16_t>(at);
      case 4: return signed_ ? number_at<std::int32_t>(at) : number_at<std::uint32_t>(at);
      default: return number_at<std::int64_t>(at);
    }
  }
  /// The bytes of a text.
  std::string_view text() const noexcept {
    return {reinterpret_cast<const char*>(data_), static_cast<std::size_t>(size_ * width_)};
  }
  /// A hash by which a run notices another file: of all bytes of a text; of tokens, of their number and of
  /// all bytes, or of 1024 parts of them if they have more than 64 MiB.
  std::uint64_t fingerprint() const;

 private:
  template <class Number>
  static std::int64_t number_at(const std::byte* at) noexcept {
    Number number;
    __builtin_memcpy(&number, at, sizeof number);
    return static_cast<std::int64_t>(number);
  }
  void read_npy(const std::string& where, std::size_t bytes);

  std::shared_ptr<const std::byte> memory_;  // the whole file
  const std::byte* data_ = nullptr;
  int width_ = 1;
  bool signed_ = false;
  std::int64_t size_ = 0;
};

}  // namespace weft::tools
