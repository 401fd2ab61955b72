#include "training_data.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/parse_number.hpp"
#include "weft/base/error.hpp"
#include "weft/nn/loss.hpp"

namespace weft::tools {
namespace {

[[noreturn]] void bad_data(const std::string& text) {
  throw Error(ErrorCode::bad_argument, "train: " + text);
}

TokenForm form_of(const DataConfig& config) {
  try {
    return token_form(config.format, config.text);
  } catch (const Error& e) {
    bad_data(e.what());
  }
}

// The tokens that end a document.
std::vector<std::int64_t> end_of_document(const DataConfig& config, const Tokenizer* tokenizer) {
  std::vector<std::int64_t> end;
  if (config.document_end.empty()) return end;
  if (tokenizer != nullptr) {
    for (const std::uint32_t token : tokenizer->encode(config.document_end)) end.push_back(token);
    // Merges may join another token with its neighbours, and then documents would not end.
    if (end.size() == 1 && !tokenizer->is_added(static_cast<std::uint32_t>(end[0])))
      bad_data(fmt::format(
          "document-end is \"{}\", an ordinary token of the tokenizer, which merges may join with "
          "its neighbours; expected an added token, such as <|endoftext|>",
          config.document_end));
    if (end.size() != 1)
      bad_data(fmt::format("document-end is \"{}\", which are {} tokens; expected one", config.document_end,
                           end.size()));
    return end;
  }
  if (form_of(config) == TokenForm::text) {
    for (const char c : config.document_end) end.push_back(static_cast<unsigned char>(c));
    return end;
  }
  const auto number = parse_integer<std::int64_t>(config.document_end);
  if (!number || *number < 0)
    bad_data(fmt::format("document-end is \"{}\"; expected the number of a token, since the data are {}",
                         config.document_end, name_of(form_of(config))));
  end.push_back(*number);
  return end;
}

}  // namespace

void DataConfig::check() const {
  form_of(*this);
  if (!(held_out >= 0 && held_out < 1))
    bad_data(fmt::format("held-out is {}; expected 0 (nothing) or more, and less than 1", held_out));
  if (held_out > 0 && !held_out_file.empty())
    bad_data(fmt::format("held-out is {} and held-out-file \"{}\"; expected one of them", held_out,
                         held_out_file.string()));
  if (draw != "offsets" && draw != "sequences")
    bad_data(fmt::format("draw is \"{}\"; expected offsets or sequences", draw));
  if (!document_attention.empty() && document_attention != "inside" && document_attention != "across")
    bad_data(fmt::format("document-attention is \"{}\"; expected inside or across", document_attention));
  if (!document_attention.empty() && document_end.empty())
    bad_data(fmt::format("document-attention is \"{}\" without document-end; expected document-end, too",
                         document_attention));
  if (tokenizer.empty()) end_of_document(*this, nullptr);
}

bool DataConfig::bytes() const { return form_of(*this) == TokenForm::text && tokenizer.empty(); }

std::string DataConfig::identity() const {
  const TokenForm form = form_of(*this);
  std::string identity = fmt::format("text={:016x}", TokenFile(text, form, "train: text").fingerprint());
  if (form != TokenForm::text) identity += fmt::format(" format={}", name_of(form));
  if (!tokenizer.empty())
    identity += fmt::format(" tokenizer={:016x}",
                            TokenFile(tokenizer, TokenForm::text, "train: tokenizer").fingerprint());
  if (held_out > 0) identity += fmt::format(" held_out={}", held_out);
  if (draw != "offsets") identity += fmt::format(" draw={}", draw);
  if (!document_end.empty()) {
    std::string quoted =
        nlohmann::json(document_end).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
    for (std::size_t at = 0; (at = quoted.find(' ', at)) != std::string::npos;)
      quoted.replace(at, 1, "\\u0020");
    identity += " document_end=" + quoted;
    if (document_attention != "across") identity += " document_attention=inside";
  }
  return identity;
}

namespace {

// Text of a tokenizer is in memory, in its tokens.
TokenFile tokens_of(const std::filesystem::path& path, TokenForm form, const std::string& subject,
                    const Tokenizer* tokenizer) {
  TokenFile file(path, form, subject);
  if (form != TokenForm::text || tokenizer == nullptr) return file;
  try {
    return TokenFile(tokenizer->encode(file.text()));
  } catch (const Error& e) {
    throw Error(e.code(), fmt::format("{} \"{}\": {}", subject, path.string(), e.what()));
  }
}

}  // namespace

TrainingData::TrainingData(const DataConfig& config, std::int64_t sequence, const Tokenizer* tokenizer)
    : sequence_(sequence),
      cut_(config.draw == "sequences"),
      inside_(config.document_attention != "across"),
      end_(end_of_document(config, tokenizer)) {
  config.check();
  const TokenForm form = form_of(config);
  const std::string words = fmt::format("text \"{}\"", config.text.string());
  const char* const unit = config.bytes() ? "bytes" : "tokens";
  training_.file = tokens_of(config.text, form, "train: text", tokenizer);
  training_.chunk.size = training_.file.size();
  if (!config.held_out_file.empty()) {
    held_out_.file = tokens_of(config.held_out_file, form, "train: held-out-file", tokenizer);
    held_out_.chunk.size = held_out_.file.size();
  } else if (config.held_out > 0) {
    const std::int64_t all = training_.size();
    std::int64_t first = all - std::llround(static_cast<double>(all) * config.held_out);
    // The parts meet where a document ends, if one does behind this place.
    for (std::int64_t at = first; at < all && !end_.empty(); ++at)
      if (at > 0 && ends_document(training_, at - 1)) {
        first = at;
        break;
      }
    held_out_ = {training_.file, {first, all - first}};
    training_.chunk.size = first;
  }
  if (config.holds_out() && held_out_.size() < 2)
    bad_data(fmt::format("held-out: {} {} are held out; expected 2 or more", held_out_.size(), unit));
  if (training_.size() < sequence + 2)
    bad_data(fmt::format("{} has {} {}{}; expected at least {} (sequence + 2)", words, training_.size(), unit,
                         config.held_out > 0 ? " that are not held out" : "", sequence + 2));
  population_ = cut_ ? (training_.size() - 1) / sequence : training_.size() - sequence;
}

bool TrainingData::ends_document(const Part& part, std::int64_t at) const {
  const auto length = static_cast<std::int64_t>(end_.size());
  if (length == 0 || at + 1 < length) return false;
  for (std::int64_t i = 0; i < length; ++i)
    if (part[at + 1 - length + i] != end_[static_cast<std::size_t>(i)]) return false;
  return true;
}

// `count` tokens from `start` on, each with a next token, and as many without a label as are missing.
void TrainingData::add(const Part& part, std::int64_t start, std::int64_t count, Sequences& to) const {
  std::int64_t document = 0;
  for (std::int64_t k = 0; k < sequence_; ++k) {
    const bool there = k < count, ends = there && ends_document(part, start + k);
    to.tokens.push_back(there ? part[start + k] : 0);
    to.labels.push_back(there && !ends ? part[start + k + 1] : CrossEntropy::kIgnore);
    if (inside_ && !end_.empty()) to.documents.push_back(document);
    document += ends ? 1 : 0;
  }
}

void TrainingData::add(std::int64_t number, Sequences& to) const {
  add(training_, cut_ ? number * sequence_ : number, sequence_, to);
}

void TrainingData::add_held_out(std::int64_t number, Sequences& to) const {
  const std::int64_t start = number * sequence_;
  add(held_out_, start, std::clamp<std::int64_t>(held_out_tokens() - start, 0, sequence_), to);
}

}  // namespace weft::tools
