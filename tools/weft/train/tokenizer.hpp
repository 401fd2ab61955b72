// A byte-pair tokenizer, read from the file tokenizer.json of the tokenizers library by Hugging Face. Any
// thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace weft::tools {

/// Byte-pair encoding of bytes (R. Sennrich et al., "Neural Machine Translation of Rare Words with Subword
/// Units", 2016; on bytes: A. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019).
/// It gives the tokens that the tokenizers library gives without special tokens around a text
/// (`add_special_tokens=False`).
///
/// The file has a model BPE on bytes with any merges, added tokens, and a pre-tokenizer ByteLevel, alone or
/// behind Splits by regular expressions, as GPT-2, Llama 3 and Qwen have. Parts that would change a text in
/// another way (a normaliser, dropout, other pre-tokenizers) are refused by their names. PCRE2 finds the
/// matches; a character that is newer than its Unicode tables counts as no letter.
class Tokenizer {
 public:
  /// Throws bad_argument, beginning with `where`, if the text is no such file.
  Tokenizer(std::string_view json, const std::string& where);
  /// Reads a file. Throws system, too.
  static Tokenizer from_file(const std::filesystem::path& file, const std::string& subject);
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;

  /// The tokens of a text in UTF-8. Throws bad_argument, with the place, if it is none.
  std::vector<std::uint32_t> encode(std::string_view text) const;
  /// The bytes of tokens: a text in UTF-8 if they came from one and none is missing. A token that is not in
  /// the vocabulary has none.
  std::string decode(std::span<const std::int64_t> tokens) const;
  /// One more than the highest token.
  /// Whether the token is one of added_tokens, which no merge makes or joins.
  bool is_added(std::uint32_t token) const noexcept;
  std::int64_t size() const noexcept;
  /// By which a run notices another tokenizer.
  std::uint64_t fingerprint() const noexcept;
  /// The file as it was read, to be kept beside a run.
  const std::string& json() const noexcept;

 private:
  struct Parts;
  std::unique_ptr<const Parts> parts_;
};

/// Where `text` is no UTF-8, as the offset of the first byte; its size if it is.
std::size_t valid_utf8(std::string_view text) noexcept;

}  // namespace weft::tools
