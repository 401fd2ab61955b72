// The tokenizer of weft train beside the tokens that the tokenizers library gives (tokenizers/make.py).
#include "tokenizer.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "weft/base/error.hpp"

namespace weft::test::tokenizer_test {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using tools::Tokenizer;

std::string of_folder(const std::string& name) {
  std::ifstream in(std::string(WEFT_TOKENIZERS) + "/" + name);
  return {std::istreambuf_iterator<char>(in), {}};
}
json cases() { return json::parse(of_folder("cases.json")); }
// With U+FFFD for what is no UTF-8, as the library prints it.
std::string as_json(const std::string& text) {
  return json(text).dump(-1, ' ', false, json::error_handler_t::replace);
}

TEST(TokenizerTest, GivesTheTokensOfTheTokenizersLibrary) {
  const json all = cases();
  ASSERT_EQ(all.size(), 4u);
  for (const auto& [name, of] : all.items()) {
    const Tokenizer tokenizer(of_folder(name + ".json"), name);
    EXPECT_EQ(tokenizer.size(), of.at("size").get<std::int64_t>());
    ASSERT_GT(of.at("encode").size(), 70u);
    for (const auto& one : of.at("encode")) {
      const std::string text = one.at(0);
      const std::vector<std::uint32_t> tokens = tokenizer.encode(text);
      EXPECT_EQ(tokens, one.at(1).get<std::vector<std::uint32_t>>()) << name << ": " << one.at(0);
      if (name != "spaced" && text.find('<') == std::string::npos) {
        EXPECT_EQ(tokenizer.decode(std::vector<std::int64_t>(tokens.begin(), tokens.end())), text);
      }
    }
    for (const auto& one : of.at("decode"))
      EXPECT_EQ(as_json(tokenizer.decode(one.at(0).get<std::vector<std::int64_t>>())), as_json(one.at(1)))
          << name << ": " << one.at(0);
  }
}

TEST(TokenizerTest, DropsTokensThatAreNone) {
  const Tokenizer tokenizer(of_folder("gpt2.json"), "gpt2");
  const std::vector<std::int64_t> tokens{-1, tokenizer.size(), tokenizer.encode("a")[0],
                                         std::int64_t{1} << 40};
  EXPECT_EQ(tokenizer.decode(tokens), "a");
}

TEST(TokenizerTest, EncodesOnlyUtf8) {
  const Tokenizer tokenizer(of_folder("llama3.json"), "llama3");
  for (const std::string& bad :
       {std::string("\xff"), std::string("\xc0\x80"), std::string("\xed\xa0\x80"),
        std::string("\xf4\x90\x80\x80"), std::string("\xe2\x82"), std::string("\xe0\x80\x80"),
        std::string("\xf0\x80\x80\x80"), std::string("\x80")}) {
    EXPECT_EQ(tools::valid_utf8("ab" + bad), 2u);
    try {
      (void)tokenizer.encode("ab" + bad);
      ADD_FAILURE() << as_json(bad);
    } catch (const Error& e) {
      EXPECT_EQ(std::string(e.what()),
                fmt::format("tokenizer: the text is no UTF-8 at byte 2 (0x{:02x})",
                            static_cast<unsigned>(static_cast<unsigned char>(bad[0]))));
    }
  }
  for (const std::string& good : {std::string(), std::string("\0", 1), std::string("\xed\x9f\xbf"),
                                  std::string("\xf4\x8f\xbf\xbf"), std::string("\xc2\x80")})
    EXPECT_EQ(tools::valid_utf8(good), good.size());
}

// A file that would be read in another way than the library reads it is refused, with the part's name.
TEST(TokenizerTest, RefusesWhatItDoesNotRead) {
  const json whole = json::parse(of_folder("llama3.json"));
  const auto says = [&](const std::function<void(json&)>& change, const std::string& text) {
    json changed = whole;
    change(changed);
    try {
      const Tokenizer tokenizer(changed.dump(), "t.json");
      ADD_FAILURE() << "not refused: " << text;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::bad_argument);
      EXPECT_THAT(e.what(), HasSubstr("t.json: " + text));
    }
  };
  const auto set = [](const char* path, const json& value) {
    return [=](json& j) { j[json::json_pointer(path)] = value; };
  };
  says(set("/normalizer", {{"type", "NFC"}}), "it has a normalizer, NFC; expected none");
  says([](json& j) { j.erase("model"); }, "it has no \"model\"; expected a tokenizer.json");
  says(set("/model/type", "WordPiece"), "the model is WordPiece; expected BPE");
  says([](json& j) { j["model"].erase("merges"); }, "the model is BPE; expected BPE");
  says(set("/model/dropout", 0.1), "the model has dropout; expected none");
  says(set("/model/end_of_word_suffix", "</w>"), "the model has end_of_word_suffix; expected none");
  says(set("/model/continuing_subword_prefix", "##"),
       "the model has continuing_subword_prefix; expected none");
  says(set("/model/byte_fallback", true), "the model has byte_fallback; expected bytes");
  says([](json& j) { j["model"]["vocab"].erase("A"); },
       "byte 65 needs the token \"A\", which is not in the vocabulary");
  says(set("/model/merges/0", "a"), "merge 0 is \"a\"; expected two tokens");
  says(set("/model/merges/0", json::array({"a"})), "merge 0 is [\"a\"]; expected two tokens");
  says(set("/model/merges/0", "Q Q"), "merge 0 needs the token \"QQ\", which is not in the vocabulary");
  says(set("/pre_tokenizer", nullptr),
       "the pre-tokenizer is none; expected ByteLevel, Split or a Sequence of them");
  says(set("/pre_tokenizer/pretokenizers/0", {{"type", "Digits"}}),
       "the pre-tokenizer is Digits; expected ByteLevel");
  says([](json& j) { j["pre_tokenizer"]["pretokenizers"].erase(1); },
       "the pre-tokenizer does not end with ByteLevel; expected tokens of bytes");
  says(set("/pre_tokenizer/pretokenizers/1/add_prefix_space", true),
       "add_prefix_space of a ByteLevel behind a Split; expected false");
  says(set("/pre_tokenizer/pretokenizers/0/behavior", "MergedWithNext"),
       "a Split is MergedWithNext; expected Isolated, or inverted Removed");
  const auto pattern = [&](const std::string& expression, const std::string& text) {
    says(set("/pre_tokenizer/pretokenizers/0/pattern/Regex", expression), text);
  };
  pattern("\\w+", "the pattern \"\\w+\" has \"\\w\", which weft does not read");
  pattern("^a", "the pattern \"^a\" has \"^\", which weft does not read");
  pattern("a{2}+", "the pattern \"a{2}+\" has \"}\", which weft does not read");
  pattern("[a[b]]", "the pattern \"[a[b]]\" has \"[b\", which weft does not read");
  pattern("[\\S]", "the pattern \"[\\S]\" has \"\\S\", which weft does not read");
  pattern("(a", "the pattern \"(a\" is none: missing closing parenthesis");
  says(set("/added_tokens/0/id", 5),
       "the added token \"<|endoftext|>\" has number 5, and 0 in the vocabulary");
  says(set("/model/vocab/A", 5000000), "the token \"A\" has number 5000000; expected less than 4194304");
  says(set("/model/vocab/A", "one"), "token \"A\" has the number \"one\"; expected 0 to 16777216");
  says(set("/model/vocab/A", 4294967301), "token \"A\" has the number 4294967301; expected 0 to 16777216");
  // As the tokenizers library reads these, weft does not.
  pattern("(?m:a)", "the pattern \"(?m:a)\" has \"(?m\", which weft does not read");
  pattern("a{,2}", "the pattern \"a{,2}\" has \"{,\", which weft does not read");
  pattern("[]a]", "the pattern \"[]a]\" has \"[]\", which weft does not read");
  says([](json& j) { j["pre_tokenizer"]["pretokenizers"].push_back(j["pre_tokenizer"]["pretokenizers"][1]); },
       "it has two ByteLevels; expected one, the last pre-tokenizer");
  says(
      [](json& j) {
        std::swap(j["pre_tokenizer"]["pretokenizers"][0], j["pre_tokenizer"]["pretokenizers"][1]);
      },
      "a Split behind a ByteLevel; expected the ByteLevel last");
  says(
      [](json& j) {
        j["added_tokens"].push_back({{"id", 4000}, {"content", "<|far|>"}, {"special", true}});
      },
      "the added token \"<|far|>\" has number 4000; expected ");
  says([](json& j) { j["model"]["merges"] = json::parse(std::string(100, '[') + std::string(100, ']')); },
       "it is nested more than 32 deep");
  try {
    const Tokenizer tokenizer("{", "t.json");
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("t.json: is no tokenizer.json: "));
  }
  // An empty match cuts at its place: digits in threes from the right.
  json threes = whole;
  threes["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(?=(\\d{3})+(?!\\d))";
  const Tokenizer grouped(threes.dump(), "t.json"), plain(whole.dump(), "t.json");
  std::vector<std::uint32_t> parts;
  for (const char* part : {"1", "234", "567"})
    for (const std::uint32_t token : grouped.encode(part)) parts.push_back(token);
  EXPECT_EQ(grouped.encode("1234567"), parts);
  try {
    Tokenizer::from_file("/nowhere/tokenizer.json", "train: tokenizer");
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("train: tokenizer \"/nowhere/tokenizer.json\": cannot open it"));
  }
}

}  // namespace
}  // namespace weft::test::tokenizer_test
