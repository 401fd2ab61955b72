// The data of a run, for training and for evaluation: sequences of tokens with their labels, by number. Any
// thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "token_file.hpp"
#include "tokenizer.hpp"
#include "weft/base/chunk.hpp"
#include "weft/dp/sampler.hpp"

namespace weft::tools {

struct DataConfig {
  std::filesystem::path text = "/usr/share/common-licenses/GPL-3";
  std::filesystem::path tokenizer = {};  ///< the tokenizer.json of the text; empty: bytes are tokens
  std::string format = "auto";           ///< the name of a TokenForm, or auto
  double held_out = 0;  ///< the last part of the tokens is held out: this fraction; 0: nothing is
  std::filesystem::path held_out_file = {};  ///< tokens to evaluate on, of the same form; empty: none
  /// Behind it a document ends, whose last label is none: a text, with a tokenizer of one token; in a file of
  /// tokens without a tokenizer its number. Empty: nowhere.
  std::string document_end = {};
  /// With a document_end. inside, or empty: attention stays inside documents. across: it sees the whole
  /// sequence.
  std::string document_attention = {};
  /// offsets: a sequence begins at any token. sequences: the tokens are cut into sequences one after the
  /// other, each of which comes once in an epoch.
  std::string draw = "offsets";

  /// Whether tokens are the bytes of a text.
  bool bytes() const;
  bool holds_out() const noexcept { return held_out > 0 || !held_out_file.empty(); }
  /// Throws bad_argument for values out of range and invalid names.
  void check() const;
  /// The part of it that belongs to a run, as "name=value" separated by blanks; the file's hash first.
  std::string identity() const;
};

/// (rows, sequence), row after row.
struct Sequences {
  std::vector<std::int64_t> tokens, labels;
  /// The number of each token's document in its row; empty if attention crosses the borders.
  std::vector<std::int64_t> documents = {};
};

/// Sequence n of a part consists of tokens; the label of each token is the next token, or
/// CrossEntropy::kIgnore behind the last of a document.
class TrainingData {
 public:
  /// Maps the files; a text of a tokenizer it encodes. `tokenizer`: of config.tokenizer, or null. Throws the
  /// errors of TokenFile, and bad_argument if a part is too short.
  TrainingData(const DataConfig& config, std::int64_t sequence, const Tokenizer* tokenizer = nullptr);

  /// How many different sequences the training part has.
  std::int64_t population() const noexcept { return population_; }
  void add(std::int64_t number, Sequences& to) const;

  /// The held-out tokens that have a next one, and the sequences that hold them, the last of
  /// which may be filled up with tokens that have no label.
  std::int64_t held_out_tokens() const noexcept { return held_out_.size() == 0 ? 0 : held_out_.size() - 1; }
  std::int64_t held_out_sequences() const noexcept { return (held_out_tokens() + sequence_ - 1) / sequence_; }
  /// A number beyond the last gives a sequence without labels.
  void add_held_out(std::int64_t number, Sequences& to) const;

 private:
  struct Part {
    TokenFile file;
    Chunk chunk;
    std::int64_t size() const noexcept { return chunk.size; }
    std::int64_t operator[](std::int64_t i) const noexcept { return file[chunk.offset + i]; }
  };
  bool ends_document(const Part& part, std::int64_t at) const;
  void add(const Part& part, std::int64_t start, std::int64_t count, Sequences& to) const;

  std::int64_t sequence_, population_ = 0;
  bool cut_, inside_;
  std::vector<std::int64_t> end_;  // the tokens that end a document; empty: nothing does
  Part training_, held_out_;
};

/// The order in which sequences are drawn: sample p of a run is number p of the walk of a Sampler, whatever
/// batches and meshes the run has had.
class SampleOrder {
 public:
  SampleOrder(std::int64_t population, std::uint64_t seed)
      : population_(population), sampler_(1, 0, population, 1, seed) {}
  std::int64_t number(std::int64_t sample) const { return sampler_.global_batch(sample)[0]; }
  std::int64_t epoch(std::int64_t sample) const noexcept { return sample / population_; }

 private:
  std::int64_t population_;
  Sampler sampler_;
};

}  // namespace weft::tools
