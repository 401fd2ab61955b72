// Everything in which the kinds of models that `weft train` knows differ: one object for each kind, without
// state. Any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "training_data.hpp"
#include "weft/base/chunk.hpp"
#include "weft/mesh/mesh.hpp"
#include "weft/models/trainer.hpp"

namespace weft::tools {

struct TrainConfig;

/// How a run calls what it computes on, in its output and in its files.
struct KindWords {
  std::string a_step;      ///< "2048 bytes of text"
  std::string source;      ///< "text book.txt"
  std::string rate;        ///< counted in a second: "tokens", as in tokens_per_s
  std::string rate_brief;  ///< "tok"
  std::string counted;     ///< what the loss is a mean of: "tokens", as in eval_tokens
  std::string one;         ///< "byte"
  std::string loss;        ///< "nats per byte"
  bool perplexity;         ///< whether e to the power of the loss means anything
};

/// Rows of a batch in the form that a Trainer takes, as micro-batches. Batches of tokens borrow `sequences`.
struct BatchRows {
  std::variant<std::vector<TokenBatch>, std::vector<Batch>> batches;
  Sequences sequences;
};

/// How the rows of a global batch are divided among data ranks and micro-batches.
struct BatchCut {
  std::int64_t global_rows = 0;
  int data_ranks = 1, micro_batches = 1;
};

/// The samples of a run. One thread.
class Samples {
 public:
  virtual ~Samples() = default;
  /// How many different samples the training part has, and the held-out part.
  virtual std::int64_t population() const = 0;
  virtual std::int64_t held_out() const = 0;
  /// The samples with these numbers, which are this rank's rows of a global batch.
  virtual BatchRows training(std::span<const std::int64_t> numbers, const BatchCut& cut) const = 0;
  /// This rank's rows of the batch that begins with held-out sample `first` and has at most `cut.global_rows`
  /// rows. `part_of` gives a rank's part of a number of rows. Nothing: no row of any rank counts.
  using PartOf = std::function<Chunk(std::int64_t rows)>;
  virtual std::optional<BatchRows> held_out(std::int64_t first, const BatchCut& cut,
                                            const PartOf& part_of) const = 0;
  /// Null: the samples have none.
  virtual const Tokenizer* tokenizer() const noexcept { return nullptr; }
};

class ModelKind {
 public:
  virtual ~ModelKind() = default;
  virtual KindWords words(const TrainConfig& config) const = 0;
  /// TrainConfig::fill_in() of what only this kind has.
  virtual void fill_in(TrainConfig& config) const = 0;
  /// Parts of TrainConfig::check(): whether the kind has what is asked for, and whether sizes that only this
  /// kind has fit each other and a mesh of that shape.
  virtual void check_flags(const TrainConfig& config) const = 0;
  virtual void check_sizes(const TrainConfig& config, const MeshShape& mesh) const = 0;
  virtual Recipe recipe(const TrainConfig& config) const = 0;
  virtual std::unique_ptr<Samples> samples(const TrainConfig& config, Context& context) const = 0;
  /// Model and data, as "name=value" separated by blanks, for identity_of().
  virtual std::string identity(const TrainConfig& config) const = 0;
  /// The table [model] of a configuration file, without the keys that are options.
  virtual std::string table(const TrainConfig& config) const = 0;
  /// The model, as a text in a checkpoint, for `weft sample`; empty: none. A mixture of experts has its
  /// transformer there, and its experts in identity().
  virtual std::string sample_text(const TrainConfig& config) const = 0;
  /// How many things of KindWords::rate a step has, and the floating-point operations for each of them,
  /// forward and backward, of a model with these parameters.
  virtual std::int64_t units_per_step(const TrainConfig& config) const = 0;
  virtual double flops_per_unit(const TrainConfig& config,
                                std::span<const Parameter* const> parameters) const = 0;
};

/// The kind that `config` names; before fill_in() the name may be empty.
const ModelKind& kind_of(const TrainConfig& config);
const ModelKind& token_kind();
const ModelKind& weather_kind();

}  // namespace weft::tools
