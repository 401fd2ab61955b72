#include "tokenizer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <queue>
#include <set>
#include <unordered_map>
#include <utility>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "base/files/regular_file.hpp"
#include "base/hash.hpp"
#include "weft/base/error.hpp"

namespace weft::tools {
namespace {

[[noreturn]] void bad_tokenizer(const std::string& where, const std::string& what) {
  throw Error(ErrorCode::bad_argument, fmt::format("{}: {}", where, what));
}

// The number of a token.
std::uint32_t number_of(const nlohmann::json& id, const std::string& token, const std::string& where) {
  constexpr std::uint64_t kMost = std::uint64_t{1} << 24;
  if (!id.is_number_unsigned() || id.get<std::uint64_t>() > kMost)
    bad_tokenizer(where,
                  fmt::format("token \"{}\" has the number {}; expected 0 to {}", token, id.dump(), kMost));
  return id.get<std::uint32_t>();
}

// A regular expression of the tokenizers library, which follows Oniguruma, in the words of PCRE2.
class Pattern {
 public:
  Pattern(const std::string& where, const std::string& expression) {
    int error = 0;
    PCRE2_SIZE at = 0;
    const std::string ours = translated(where, expression);
    code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(ours.data()), ours.size(), PCRE2_UTF | PCRE2_UCP,
                              &error, &at, nullptr));
    if (!code_) {
      std::array<unsigned char, 128> why{};
      pcre2_get_error_message(error, why.data(), why.size());
      bad_tokenizer(where, fmt::format("the pattern \"{}\" is none: {}", expression,
                                       reinterpret_cast<const char*>(why.data())));
    }
    pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE);  // where there is none, it is interpreted
  }
  static Pattern literal(const std::string& where, const std::string& text) {
    std::string quoted;
    for (const char c : text) {
      if (static_cast<unsigned char>(c) < 0x80 && std::isalnum(static_cast<unsigned char>(c)) == 0)
        quoted += '\\';
      quoted += c;
    }
    return {where, quoted};
  }

  // The first match at `from` or behind it. `text` is UTF-8.
  std::optional<std::pair<std::size_t, std::size_t>> find(std::string_view text, std::size_t from) const {
    const Match match(pcre2_match_data_create(1, nullptr));
    const int found = pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from,
                                  PCRE2_NO_UTF_CHECK, match.get(), nullptr);
    if (found == PCRE2_ERROR_NOMATCH) return std::nullopt;
    if (found < 0)
      throw Error(ErrorCode::system, fmt::format("tokenizer: PCRE2 gave up on a text, with {}", found));
    const PCRE2_SIZE* const ends = pcre2_get_ovector_pointer(match.get());
    return std::pair(ends[0], ends[1]);
  }

 private:
  // PCRE2's \s knows neither U+0085 nor what Unicode calls white space by that name; \w and \b mean something
  // else, and so do anchors, posix classes and possessive intervals: those are refused.
  static std::string translated(const std::string& where, const std::string& expression) {
    const auto refuse = [&](std::string_view what) {
      bad_tokenizer(where,
                    fmt::format("the pattern \"{}\" has \"{}\", which weft does not read", expression, what));
    };
    constexpr std::string_view kSpaces = "\\t-\\r\\x{85}\\p{Z}";
    std::string ours;
    bool in_class = false;
    for (std::size_t i = 0; i < expression.size(); ++i) {
      const char c = expression[i];
      const char next = i + 1 < expression.size() ? expression[i + 1] : '\0';
      if (c == '\\') {
        ++i;
        if (next == 's') {
          ours += in_class ? std::string(kSpaces) : fmt::format("[{}]", kSpaces);
        } else if (next == 'S' && !in_class) {
          ours += fmt::format("[^{}]", kSpaces);
        } else if (std::isalnum(static_cast<unsigned char>(next)) != 0 &&
                   std::string_view("pPrntdx").find(next) == std::string_view::npos) {
          refuse(expression.substr(i - 1, 2));
        } else {
          ours += {c, next};
          if (next == 'p' || next == 'P' || next == 'x')  // with its braces
            while (i + 1 < expression.size() && ours.back() != '}') ours += expression[++i];
        }
        continue;
      }
      if (in_class && (c == '[' || (c == '&' && next == '&'))) refuse(expression.substr(i, 2));
      if (!in_class && (c == '^' || c == '$' || (c == '}' && next == '+'))) refuse(expression.substr(i, 1));
      if (!in_class && c == '{' && next == ',') refuse(expression.substr(i, 2));
      if (!in_class && c == '(' && next == '?') {  // of the options, (?i:…) alone means the same
        std::size_t end = i + 2;
        while (end < expression.size() && std::islower(static_cast<unsigned char>(expression[end])) != 0)
          ++end;
        if (end > i + 2 && expression.substr(i + 2, end - i - 2) != "i")
          refuse(expression.substr(i, end - i));
      }
      if (c == '[' && !in_class) {
        in_class = true;
        ours += c;
        if (next == '^') ours += expression[++i];
        if (i + 1 < expression.size() && expression[i + 1] == ']') refuse(expression.substr(i, 2));
        continue;
      }
      if (c == ']') in_class = false;
      ours += c;
    }
    return ours;
  }

  struct Free {
    void operator()(pcre2_code* code) const { pcre2_code_free(code); }
    void operator()(pcre2_match_data* match) const { pcre2_match_data_free(match); }
  };
  using Match = std::unique_ptr<pcre2_match_data, Free>;
  std::unique_ptr<pcre2_code, Free> code_;
};

// Pieces of a text, which the merges do not cross.
using Pieces = std::vector<std::string_view>;

struct Split {
  Pattern pattern;
  bool keeps_rest;  // what lies between two matches is a piece, too

  void cut(std::string_view text, Pieces& to) const {
    std::size_t from = 0;
    for (std::size_t at = 0; at < text.size();) {
      const auto match = pattern.find(text, at);
      if (!match) break;
      const auto [begin, end] = *match;
      if (end == begin) {  // an empty match cuts at its place
        if (keeps_rest && begin > from) {
          to.push_back(text.substr(from, begin - from));
          from = begin;
        }
        at = end + 1;
        while (at < text.size() && (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80) ++at;
        continue;
      }
      if (keeps_rest && begin > from) to.push_back(text.substr(from, begin - from));
      to.push_back(text.substr(begin, end - begin));
      from = at = end;
    }
    if (keeps_rest && from < text.size()) to.push_back(text.substr(from));
  }
};

struct AddedToken {
  std::string content;
  std::uint32_t id;
  bool single_word, takes_left, takes_right;
};

// By their first bytes, the longest first: of several tokens that match at a place the longest counts.
class AddedTokens {
 public:
  void add(AddedToken token) {
    auto& those = by_byte_[static_cast<unsigned char>(token.content[0])];
    those.push_back(std::move(token));
    std::ranges::stable_sort(those, std::greater(), [](const AddedToken& t) { return t.content.size(); });
    some_ = true;
  }
  const AddedToken* at(std::string_view text, std::size_t place) const {
    if (!some_) return nullptr;
    for (const AddedToken& t : by_byte_[static_cast<unsigned char>(text[place])])
      if (text.substr(place).starts_with(t.content)) return &t;
    return nullptr;
  }
  bool empty() const noexcept { return !some_; }

 private:
  std::array<std::vector<AddedToken>, 256> by_byte_;
  bool some_ = false;
};

// The character that stands for a byte in the vocabulary: printable ones for themselves, the others from
// U+0100 on.
std::array<std::string, 256> byte_characters() {
  std::array<std::string, 256> all;
  unsigned next = 0x100;
  for (unsigned b = 0; b < 256; ++b) {
    const bool itself = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
    const unsigned c = itself ? b : next++;
    if (c < 0x80)
      all[b] = static_cast<char>(c);
    else
      all[b] = {static_cast<char>(0xc0 | (c >> 6)), static_cast<char>(0x80 | (c & 0x3f))};
  }
  return all;
}

constexpr std::uint32_t kNoToken = std::numeric_limits<std::uint32_t>::max();

// A token, and the one that it makes with the next, in a list of the tokens of a piece.
struct Symbol {
  std::uint32_t token;
  std::int64_t before, after;  // places in the list; -1: none
};
struct Merge {
  std::uint32_t rank, token;
};
struct Candidate {
  std::uint32_t rank;
  std::int64_t place;
  std::uint32_t left, right, token;
  // The lowest rank first, of equal ones the leftmost.
  bool operator<(const Candidate& b) const { return rank != b.rank ? rank > b.rank : place > b.place; }
};

}  // namespace

struct Tokenizer::Parts {
  std::string json;
  std::uint64_t hash = 0;
  std::unordered_map<std::string, std::uint32_t> vocabulary;
  std::vector<std::string> bytes;  // of each token; empty: there is none of this number
  std::array<std::uint32_t, 256> of_byte{};
  std::unordered_map<std::uint64_t, Merge> merges;
  bool whole_words = false;   // a piece that is in the vocabulary is one token, whatever the merges say
  bool space_before = false;  // each piece begins with a space
  int levels = 0;             // ByteLevels that were read
  std::set<std::uint32_t> numbers_added;
  std::vector<Split> splits;
  AddedTokens first, second;  // those looked for in the whole text, and those in what lies between
  std::optional<Pattern> word, space;

  static std::uint64_t pair(std::uint32_t left, std::uint32_t right) {
    return std::uint64_t{left} << 32 | right;
  }
  void keep(std::uint32_t id, const std::string& content, const std::array<std::string, 256>& characters,
            const std::string& where);
  void merge(std::string_view piece, std::vector<std::uint32_t>& to) const;
  void read(const nlohmann::json& j, const std::string& where);
  void read_model(const nlohmann::json& model, const std::string& where);
  void read_pre_tokenizer(const nlohmann::json& p, const std::string& where);
  void read_added(const nlohmann::json& tokens, const std::string& where);
  using Given = std::function<void(std::string_view)>;
  void extract(std::string_view text, const AddedTokens& tokens, const Given& between,
               std::vector<std::uint32_t>& to) const;
};

// A token of characters that stand for bytes is those bytes; any other token is its text.
void Tokenizer::Parts::keep(std::uint32_t id, const std::string& content,
                            const std::array<std::string, 256>& characters, const std::string& where) {
  static const std::unordered_map<std::string, char> kByteOf = [&] {
    std::unordered_map<std::string, char> of;
    for (unsigned b = 0; b < 256; ++b) of.emplace(characters[b], static_cast<char>(b));
    return of;
  }();
  constexpr std::uint32_t kMost = 1U << 22;
  if (id >= kMost)
    bad_tokenizer(where,
                  fmt::format("the token \"{}\" has number {}; expected less than {}", content, id, kMost));
  if (id >= bytes.size()) bytes.resize(id + 1);
  std::string raw;
  for (std::size_t at = 0; at < content.size();) {
    const std::size_t length = static_cast<unsigned char>(content[at]) < 0x80 ? 1 : 2;
    const auto byte = kByteOf.find(content.substr(at, length));
    if (byte == kByteOf.end()) {
      raw = content;
      break;
    }
    raw += byte->second;
    at += length;
  }
  bytes[id] = raw;
}

void Tokenizer::Parts::read_model(const nlohmann::json& model, const std::string& where) {
  const auto has = [&](const char* key) { return model.contains(key) && !model.at(key).is_null(); };
  if (model.value("type", "BPE") != "BPE" || !has("merges"))
    bad_tokenizer(where,
                  fmt::format("the model is {}; expected BPE", model.value("type", "one without merges")));
  if (has("dropout") && model.at("dropout") != 0)
    bad_tokenizer(where, "the model has dropout; expected none");
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
    if (has(key) && model.at(key) != "")
      bad_tokenizer(where, fmt::format("the model has {}; expected none", key));
  if (model.value("byte_fallback", false))
    bad_tokenizer(where, "the model has byte_fallback; expected bytes");
  whole_words = model.value("ignore_merges", false);

  const std::array<std::string, 256> characters = byte_characters();
  for (const auto& [content, id] : model.at("vocab").items()) {
    const std::uint32_t number = number_of(id, content, where);
    vocabulary.emplace(content, number);
    keep(number, content, characters, where);
  }
  const auto token_of = [&](const std::string& content, const std::string& of) {
    const auto found = vocabulary.find(content);
    if (found == vocabulary.end())
      bad_tokenizer(where,
                    fmt::format("{} needs the token \"{}\", which is not in the vocabulary", of, content));
    return found->second;
  };
  for (unsigned b = 0; b < 256; ++b) of_byte[b] = token_of(characters[b], fmt::format("byte {}", b));
  std::uint32_t rank = 0;
  for (const auto& one : model.at("merges")) {
    const std::string name = fmt::format("merge {}", rank);
    std::string left, right;
    if (one.is_string()) {
      const std::string both = one.get<std::string>();
      const std::size_t blank = both.find(' ');
      if (blank == std::string::npos || both.find(' ', blank + 1) != std::string::npos)
        bad_tokenizer(where, fmt::format("{} is \"{}\"; expected two tokens", name, both));
      left = both.substr(0, blank), right = both.substr(blank + 1);
    } else {
      if (one.size() != 2)
        bad_tokenizer(where, fmt::format("{} is {}; expected two tokens", name, one.dump()));
      left = one.at(0).get<std::string>(), right = one.at(1).get<std::string>();
    }
    // A later merge of the same pair takes the place of an earlier one, as in the library.
    merges[pair(token_of(left, name), token_of(right, name))] = {rank, token_of(left + right, name)};
    ++rank;
  }
}

void Tokenizer::Parts::read_pre_tokenizer(const nlohmann::json& p, const std::string& where) {
  const std::string type = p.is_object() ? p.value("type", "") : "none";
  if (type == "Sequence") {
    for (const auto& each : p.at("pretokenizers")) read_pre_tokenizer(each, where);
  } else if (type == "Split") {
    if (levels > 0) bad_tokenizer(where, "a Split behind a ByteLevel; expected the ByteLevel last");
    const nlohmann::json& pattern = p.at("pattern");
    const std::string behavior = p.value("behavior", "");
    const bool inverted = p.value("invert", false);
    if (!((behavior == "Isolated" && !inverted) || (behavior == "Removed" && inverted)))
      bad_tokenizer(where, fmt::format("a Split is {}{}; expected Isolated, or inverted Removed",
                                       inverted ? "inverted " : "", behavior));
    splits.push_back({pattern.contains("Regex")
                          ? Pattern(where, pattern.at("Regex").get<std::string>())
                          : Pattern::literal(where, pattern.at("String").get<std::string>()),
                      !inverted});
  } else if (type == "ByteLevel") {
    if (levels++ > 0) bad_tokenizer(where, "it has two ByteLevels; expected one, the last pre-tokenizer");
    if (p.value("add_prefix_space", true)) {
      if (!splits.empty())
        bad_tokenizer(where, "add_prefix_space of a ByteLevel behind a Split; expected false");
      space_before = true;
    }
    if (p.value("use_regex", true))
      splits.push_back(
          {Pattern(where, R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)"),
           true});
  } else {
    bad_tokenizer(
        where, fmt::format("the pre-tokenizer is {}; expected ByteLevel, Split or a Sequence of them", type));
  }
}

void Tokenizer::Parts::read_added(const nlohmann::json& tokens, const std::string& where) {
  const std::array<std::string, 256> characters = byte_characters();
  std::set<std::string> added;  // those that the vocabulary lacks
  for (const auto& t : tokens) {
    const std::string content = t.at("content").get<std::string>();
    if (content.empty()) continue;  // nothing matches it
    AddedToken token{content, number_of(t.at("id"), content, where), t.value("single_word", false),
                     t.value("lstrip", false), t.value("rstrip", false)};
    // The library numbers tokens that the vocabulary lacks in their order, whatever the file says.
    if (vocabulary.find(content) == vocabulary.end() && added.emplace(content).second &&
        token.id != vocabulary.size() + added.size() - 1)
      bad_tokenizer(where,
                    fmt::format("the added token \"{}\" has number {}; expected {}, the next one behind "
                                "the vocabulary",
                                content, token.id, vocabulary.size() + added.size() - 1));
    if (const auto there = vocabulary.find(token.content);
        there != vocabulary.end() && there->second != token.id)
      bad_tokenizer(where, fmt::format("the added token \"{}\" has number {}, and {} in the vocabulary",
                                       token.content, token.id, there->second));
    keep(token.id, token.content, characters, where);
    numbers_added.insert(token.id);
    (t.value("normalized", false) ? second : first).add(std::move(token));
  }
}

void Tokenizer::Parts::read(const nlohmann::json& j, const std::string& where) {
  // It changes the text before it is cut. An empty Sequence does not.
  if (j.contains("normalizer") && !j.at("normalizer").is_null() &&
      !(j.at("normalizer").value("type", "") == "Sequence" && j.at("normalizer").at("normalizers").empty()))
    bad_tokenizer(
        where, fmt::format("it has a normalizer, {}; expected none", j.at("normalizer").value("type", "")));
  if (!j.contains("model")) bad_tokenizer(where, "it has no \"model\"; expected a tokenizer.json");
  read_model(j.at("model"), where);
  const nlohmann::json none;
  const nlohmann::json& pre = j.contains("pre_tokenizer") ? j.at("pre_tokenizer") : none;
  read_pre_tokenizer(pre, where);
  const nlohmann::json& last =
      pre.at("type") == "Sequence" && !pre.at("pretokenizers").empty() ? pre.at("pretokenizers").back() : pre;
  if (last.value("type", "") != "ByteLevel")
    bad_tokenizer(where, "the pre-tokenizer does not end with ByteLevel; expected tokens of bytes");
  if (j.contains("added_tokens")) read_added(j.at("added_tokens"), where);
  // Unicode's characters of words, and its white space.
  word.emplace(where, R"([\p{L}\p{M}\p{Nd}\p{Nl}\p{Pc}\x{200c}\x{200d}\x{24b6}-\x{24e9}\x{1f130}-\x{1f149})"
                      R"(\x{1f150}-\x{1f169}\x{1f170}-\x{1f189}])");
  space.emplace(where, R"(\s+)");
}

// Finds added tokens, from left to right, and gives what lies between them to `between`.
void Tokenizer::Parts::extract(std::string_view text, const AddedTokens& tokens, const Given& between,
                               std::vector<std::uint32_t>& to) const {
  const auto begins_with = [](const Pattern& pattern, std::string_view of) {
    const auto match = of.empty() ? std::nullopt : pattern.find(of, 0);
    return match && match->first == 0 ? match->second : 0;
  };
  const auto last_character = [](std::string_view of) {
    std::size_t at = of.size() - 1;
    while ((static_cast<unsigned char>(of[at]) & 0xc0) == 0x80) --at;
    return at;
  };
  std::size_t from = 0;
  for (std::size_t at = 0; at < text.size() && !tokens.empty();) {
    const AddedToken* const token = tokens.at(text, at);
    if (token == nullptr) {
      ++at;
      continue;
    }
    std::size_t begin = at, end = at + token->content.size();
    at = end;
    const std::string_view left = text.substr(0, begin), right = text.substr(end);
    if (token->single_word && ((!left.empty() && begins_with(*word, left.substr(last_character(left))) > 0) ||
                               begins_with(*word, right) > 0))
      continue;
    if (token->takes_left)
      while (begin > from && begins_with(*space, text.substr(last_character(text.substr(0, begin)))) > 0)
        begin = last_character(text.substr(0, begin));
    if (token->takes_right) end += begins_with(*space, right);
    if (begin > from) between(text.substr(from, begin - from));
    to.push_back(token->id);
    from = end;
  }
  if (from < text.size()) between(text.substr(from));
}

// Merges neighbours, the pair of the lowest rank first, until no merge is left.
void Tokenizer::Parts::merge(std::string_view piece, std::vector<std::uint32_t>& to) const {
  std::vector<Symbol> symbols;
  const auto count = static_cast<std::int64_t>(piece.size());
  for (std::int64_t i = 0; i < count; ++i)
    symbols.push_back({of_byte[static_cast<unsigned char>(piece[static_cast<std::size_t>(i)])], i - 1,
                       i + 1 < count ? i + 1 : -1});
  std::priority_queue<Candidate> queue;
  const auto at = [&](std::int64_t place) -> Symbol& { return symbols[static_cast<std::size_t>(place)]; };
  const auto offer = [&](std::int64_t place) {
    if (place < 0 || at(place).after < 0) return;
    const std::uint32_t left = at(place).token, right = at(at(place).after).token;
    if (const auto found = merges.find(pair(left, right)); found != merges.end())
      queue.push({found->second.rank, place, left, right, found->second.token});
  };
  for (std::int64_t i = 0; i < count; ++i) offer(i);
  while (!queue.empty()) {
    const Candidate c = queue.top();
    queue.pop();
    Symbol& s = at(c.place);
    if (s.token != c.left || s.after < 0 || at(s.after).token != c.right) continue;  // another merge took one
    Symbol& gone = at(s.after);
    s.token = c.token;
    gone.token = kNoToken;
    s.after = gone.after;
    if (s.after >= 0) at(s.after).before = c.place;
    offer(s.before);
    offer(c.place);
  }
  for (std::int64_t i = 0; i >= 0 && count > 0; i = at(i).after) to.push_back(at(i).token);
}

namespace {

// Throws if arrays and objects are nested deeply: readers of them call themselves.
void expect_shallow(std::string_view json, const std::string& where) {
  constexpr int kDepth = 32;
  int depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < json.size(); ++i) {
    const char c = json[i];
    if (in_string && c == '\\')
      ++i;
    else if (c == '"')
      in_string = !in_string;
    else if (!in_string && (c == '[' || c == '{') && ++depth > kDepth)
      bad_tokenizer(where, fmt::format("it is nested more than {} deep", kDepth));
    else if (!in_string && (c == ']' || c == '}'))
      --depth;
  }
}

}  // namespace

Tokenizer::Tokenizer(std::string_view json, const std::string& where) {
  auto parts = std::make_unique<Parts>();
  try {
    expect_shallow(json, where);
    parts->read(nlohmann::json::parse(json), where);
  } catch (const nlohmann::json::exception& e) {
    bad_tokenizer(where, fmt::format("is no tokenizer.json: {}", e.what()));
  }
  parts->json = json;
  parts->hash = hash_of(json);
  parts_ = std::move(parts);
}
bool Tokenizer::is_added(std::uint32_t token) const noexcept { return parts_->numbers_added.contains(token); }
Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;

Tokenizer Tokenizer::from_file(const std::filesystem::path& file, const std::string& subject) {
  constexpr std::size_t kMostBytes = std::size_t{1} << 28;
  const std::string where = fmt::format("{} \"{}\"", subject, file.string());
  return {read_regular_file(file.string(), where + ":", kMostBytes), where};
}

std::vector<std::uint32_t> Tokenizer::encode(std::string_view text) const {
  if (const std::size_t valid = valid_utf8(text); valid != text.size())
    throw Error(ErrorCode::bad_argument,
                fmt::format("tokenizer: the text is no UTF-8 at byte {} (0x{:02x})", valid,
                            static_cast<unsigned>(static_cast<unsigned char>(text[valid]))));
  const Parts& p = *parts_;
  std::vector<std::uint32_t> tokens;
  constexpr std::size_t kMostKept = 1 << 18;
  std::unordered_map<std::string_view, std::pair<std::size_t, std::size_t>>
      made;  // where a piece's tokens are
  const auto encode_piece = [&](std::string_view piece, bool lasts) {
    if (const auto there = made.find(piece); there != made.end()) {
      const auto [from, to] = there->second;
      for (std::size_t i = from; i < to; ++i) tokens.push_back(tokens[i]);
      return;
    }
    const std::size_t from = tokens.size();
    bool whole = false;
    if (p.whole_words) {
      static const std::array<std::string, 256> kCharacters = byte_characters();
      std::string word;
      for (const char c : piece) word += kCharacters[static_cast<unsigned char>(c)];
      if (const auto found = p.vocabulary.find(word); found != p.vocabulary.end()) {
        tokens.push_back(found->second);
        whole = true;
      }
    }
    if (!whole) p.merge(piece, tokens);
    if (lasts && made.size() < kMostKept) made.emplace(piece, std::pair(from, tokens.size()));
  };
  const auto encode_part = [&](std::string_view part) {
    std::string with_space;
    bool lasts = true;  // the characters, as long as encode() does
    if (p.space_before && !part.starts_with(' ')) {
      with_space = fmt::format(" {}", part);
      part = with_space;
      lasts = false;
    }
    Pieces pieces{part};
    for (const Split& split : p.splits) {
      Pieces cut;
      for (const std::string_view piece : pieces) split.cut(piece, cut);
      pieces = std::move(cut);
    }
    for (const std::string_view piece : pieces) encode_piece(piece, lasts);
  };
  p.extract(
      text, p.first, [&](std::string_view part) { p.extract(part, p.second, encode_part, tokens); }, tokens);
  return tokens;
}

std::string Tokenizer::decode(std::span<const std::int64_t> tokens) const {
  std::string text;
  for (const std::int64_t token : tokens) {
    const auto id = static_cast<std::size_t>(token);
    if (token >= 0 && id < parts_->bytes.size()) text += parts_->bytes[id];
  }
  return text;
}

std::int64_t Tokenizer::size() const noexcept { return static_cast<std::int64_t>(parts_->bytes.size()); }
std::uint64_t Tokenizer::fingerprint() const noexcept { return parts_->hash; }
const std::string& Tokenizer::json() const noexcept { return parts_->json; }

// The well-formed sequences of table 3-7 of the Unicode Standard.
std::size_t valid_utf8(std::string_view text) noexcept {
  for (std::size_t at = 0; at < text.size();) {
    const auto byte = [&](std::size_t i) {
      return static_cast<unsigned>(static_cast<unsigned char>(text[at + i]));
    };
    const unsigned first = byte(0);
    const std::size_t length = first < 0x80                    ? 1
                               : first >= 0xc2 && first < 0xe0 ? 2
                               : first >= 0xe0 && first < 0xf0 ? 3
                               : first >= 0xf0 && first < 0xf5 ? 4
                                                               : 0;
    if (length == 0 || at + length > text.size()) return at;
    for (std::size_t i = 1; i < length; ++i)
      if ((byte(i) & 0xc0) != 0x80) return at;
    if ((first == 0xe0 && byte(1) < 0xa0) || (first == 0xed && byte(1) > 0x9f) ||
        (first == 0xf0 && byte(1) < 0x90) || (first == 0xf4 && byte(1) > 0x8f))
      return at;
    at += length;
  }
  return text.size();
}

}  // namespace weft::tools
