// One training run over a mesh of data axes, tp and domain: `weft train` drives it, and
// `weft parity` compares several. Each rank has its own object, used by one thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "map_data.hpp"
#include "model_kind.hpp"
#include "training_data.hpp"
#include "weft/base/chunk.hpp"
#include "weft/base/error.hpp"
#include "weft/group/process_group.hpp"
#include "weft/models/moe_transformer.hpp"
#include "weft/models/trainer.hpp"
#include "weft/models/weather.hpp"
#include "weft/nn/schedule.hpp"

namespace weft::tools {

[[noreturn]] inline void bad_training(const std::string& text) {
  throw Error(ErrorCode::bad_argument, "train: " + text);
}

inline constexpr std::int64_t kBytes = 256;  ///< the vocabulary of a model of bytes

struct TrainConfig {
  /// kv_heads, ffn_hidden, vocab, max_seq: 0 until fill_in().
  TransformerConfig model{
      .dim = 128, .layers = 4, .heads = 4, .kv_heads = 0, .ffn_hidden = 0, .vocab = 0, .max_seq = 0};
  /// With experts, the blocks of `model` have mixtures of experts, which this describes; 0 experts: none. Its
  /// transformer is not read.
  MoETransformerConfig moe{.experts = 0, .router = {.aux_loss = 0.01}};
  /// The model of kind weather: its init_std is that of `model`, and its dim the channels of `maps`.
  WeatherStageConfig weather{.depth = 2, .head_dim = 8, .local_window = 4, .global_window = 4};
  MapConfig maps;                        ///< of kind weather
  std::string kind;                      ///< dense, moe or weather; empty until fill_in(): experts say it
  std::string router = "softmax";        ///< softmax or sigmoid
  std::string router_bias = "none";      ///< none, or selects
  double capacity_factor = 0;            ///< of the global batch, by weight; 0: no capacity
  DataConfig source;                     ///< the text, or the tokens
  std::int64_t steps = 300;              ///< the length of the schedule
  std::int64_t global_batch = 16;        ///< sequences per step, over all data ranks
  std::int64_t sequence = 128;           ///< tokens per sequence
  double peak_lr = 2e-3, floor_lr = -1;  ///< floor_lr -1: a tenth of peak_lr
  std::int64_t warmup = -1;              ///< -1: a third of the steps, at most 100; with none: 0
  std::string schedule = "cosine";       ///< the name of a ScheduleForm
  std::int64_t decay_steps = -1;         ///< with wsd; -1: a fifth of the steps
  std::string decay_shape = "linear";    ///< with wsd: the name of a DecayShape
  std::string optimizer = "adamw";       ///< adamw, sgd, lion, schedule-free or muon
  /// Parameters with a rate or a decay of their own; see groups_of().
  std::string groups;
  double weight_decay = 0.1;
  double max_norm = 1.0;
  double loss_scale = 0;        ///< dynamic, beginning with this value; 0: none
  double label_smoothing = 0;   ///< see CrossEntropy
  double z_loss = 0;            ///< see CrossEntropy
  std::int64_t loss_chunk = 0;  ///< see BuildOptions
  std::string freeze;           ///< a FreezeSchedule as text
  double ema = 0;               ///< the decay of averages of the parameters, with warm-up; 0: none. See Ema
  /// A checkpoint of another run whose parameters are the initial values; empty: none. And patterns, by
  /// commas, of parameters that it does not give; see InitOptions::except.
  std::filesystem::path init_from;
  std::string init_except;
  /// By commas, OLD=NEW: what the checkpoint has under the path OLD begins with NEW in the model.
  std::string init_remap;
  std::uint64_t seed = 1;
  int dp = -1;  ///< -1: the ranks divided by tp, pp, ep and domain
  int tp = 1;
  int domain = 1;                 ///< the ranks that share each map, cut along its rows
  int ep = 1;                     ///< the ranks that share the experts; they have different sequences
  int pp = 1;                     ///< the ranks of a pipeline; 1: the model is no pipeline
  std::string pipeline = "1f1b";  ///< the name of a PipelineKind, or the file of a schedule
  int stages_per_rank = 0;        ///< 0: 2 with interleaved, else 1
  int micro_batches = 1;          ///< into which each data rank cuts its sequences of a step
  /// How data ranks hold the parameters: ddp (each has all), fsdp (divided), hsdp (divided, in `replicate`
  /// copies).
  std::string data = "ddp";
  int replicate = 0;                  ///< 0: 2 with hsdp
  bool sequence_parallel = false;     ///< over the tensor axis; see TransformerPlanOptions
  bool exact = false;                 ///< the same bits on every mesh; see docs/exact.md
  std::string vocab = "whole";        ///< how the tensor axis holds it: whole or shard; see VocabSplit
  std::string weights = "f32";        ///< the dtype that layers read: f32 or bf16
  std::string activations = "f32";    ///< f32, or bf16 if the weights are bf16
  std::string float8 = "none";        ///< the name of a Float8Recipe, or none
  std::string float8_scales = "own";  ///< own or whole; see Float8Scales. Exact mode needs whole
  std::string ac = "none";            ///< activation checkpointing: none, full or selective; see AcPolicy
  int ac_every = 1;                   ///< with full: the first of so many blocks
  int threads = 0;  ///< per rank; 0: WEFT_THREADS, or the usable cores shared among the ranks

  /// The learning rate. Throws bad_argument for an invalid name.
  Schedule rates() const;
  /// How a model with pp above 1 is a pipeline. Throws bad_argument for an invalid name, and the errors
  /// of read_pipeline_schedule().
  PipelineForm pipeline_form() const;
  /// Sets members that have no value yet: kv_heads to heads, ffn_hidden to usual_ffn_hidden(dim), vocab to
  /// the tokens of the tokenizer, or to 256, max_seq to the sequence, floor_lr to a tenth of peak_lr. Reads
  /// the tokenizer, and throws its errors.
  void fill_in();
  std::int64_t tokenizer_size = 0;  ///< by fill_in(); 0: there is no tokenizer
  bool is_of_maps() const noexcept { return kind == "weather"; }
  /// The weather stage, if the model is one.
  WeatherStageConfig weather_model() const;
  bool has_experts() const noexcept { return moe.experts != 0; }
  /// The model, if it has experts.
  MoETransformerConfig moe_model() const;
  /// Call it after fill_in(). Throws bad_argument, with the sizes, if sizes do not fit each other or `ranks`:
  /// before any rank is started or met. Returns the mesh.
  MeshShape check(int ranks) const;
};

/// Reads "embedding,head:rate=0.5:decay=0;layers.0:rate=0": groups between semicolons, each with its patterns
/// between commas, a factor of the learning rate and a decay. Throws bad_argument, naming the part that it
/// cannot read.
std::vector<ParameterGroup> groups_of(const std::string& text);

/// The ranks with different rows, in a mesh of TrainConfig::check().
int data_ranks_of(const MeshShape& mesh);

/// A weft::Trainer on these data, with this schedule.
class Training {
 public:
  /// Collective over `group`. Throws like TrainConfig::check, and throws system if the data cannot be read.
  /// `resumes`: resume() is called next, so TrainConfig::init_from is not read.
  Training(ProcessGroup& group, const TrainConfig& config, bool resumes);

  /// Takes the next step, on the batch that belongs to its number. Collective. `see`, if given, gets the
  /// tensors of the step: each output of a module as the forward pass makes it, each gradient before it is
  /// clipped, the last parameter's first, as a backward pass makes them, then each parameter after the step,
  /// then the optimizer's state, whose paths end in the name of the tensor. `kind`: "activation", "gradient",
  /// "parameter" or "state".
  using See = std::function<void(std::string_view kind, const std::string& path, const Tensor& tensor)>;
  weft::Trainer::Result step(const See& see = nullptr);
  std::int64_t next_step() const noexcept { return trainer_.steps(); }
  /// The mean loss of the held-out part over all ranks, with the optimizer's values for evaluation.
  /// `most_batches`: as many of --batch sequences, from the first on; 0: all. Collective.
  weft::Trainer::Evaluation evaluate(std::int64_t most_batches);
  /// How many samples the steps so far have drawn, and the whole rounds through the training part in them.
  std::int64_t samples() const noexcept { return drawn_; }
  std::int64_t epoch() const noexcept { return order_.epoch(drawn_); }
  double rate_at(std::int64_t step) const { return schedule_.at(step); }

  /// Null: bytes, files of tokens alone, or maps.
  const Tokenizer* tokenizer() const noexcept { return samples_->tokenizer(); }
  /// For train(): the trainer, and what its checkpoints say of the run.
  weft::Trainer& trainer() noexcept { return trainer_; }
  CheckpointExtra extra() const;
  /// Loads the newest whole checkpoint of `directory`: parameters, optimizer, step. look_at_save_folder
  /// checks whether it belongs to this run. Gives what the checkpoint says of the run. Collective.
  CheckpointExtra resume(const std::filesystem::path& directory);

  int threads() const noexcept { return compute_.threads(); }
  const DeviceMesh& mesh() const noexcept { return parts_.mesh; }
  std::int64_t parameter_count() const;
  /// The layers that became float8 layers, in words; empty if none was to.
  std::string float8_report() const { return parts_.float8 ? parts_.float8->report().text() : ""; }
  /// The load of the experts in the last step, by layer; empty without experts. All ranks know it.
  const std::vector<LayerBalance>& balance() const noexcept { return balance_; }
  /// Floating-point operations of a step for each of KindWords::rate, forward and backward. Operations that
  /// activation checkpointing repeats do not count.
  double flops_per_unit() const { return kind_.flops_per_unit(config_, parameters()); }
  weft::Trainer::Memory memory() const { return trainer_.memory(); }
  std::int64_t units_per_step() const { return kind_.units_per_step(config_); }

 private:
  BatchCut cut() const { return {config_.global_batch, parts_.data.size(), config_.micro_batches}; }
  std::vector<const Parameter*> parameters() const;
  Tensor on_all_stages(const Tensor& own);
  std::vector<HookHandle> see_activations(const See& see);

  TrainConfig config_;
  const ModelKind& kind_;
  std::unique_ptr<Samples> samples_;
  std::string identity_;
  Compute compute_;
  ParallelModel parts_;
  Trainer trainer_;
  Schedule schedule_;
  SampleOrder order_;
  Chunk part_;              // the rows of a global batch that this rank has
  std::int64_t drawn_ = 0;  // samples
  std::vector<LayerBalance> balance_;
};

/// How many threads compute in each of `ranks` ranks of this host; see TrainConfig::threads.
int threads_per_rank(int asked, int ranks);
/// The identity of a run, as "name=value" separated by blanks: the model, the text, the schedule. Throws the
/// errors of TokenFile.
std::string identity_of(const TrainConfig& config);
/// The names and values of an identity.
std::map<std::string, std::string> parts_of_identity(const std::string& identity);
/// The model of an identity that has experts, in a transformer of this form. Throws bad_argument, with
/// `where` in front, if a number cannot be read.
MoETransformerConfig experts_of_identity(const std::string& identity, const TransformerConfig& transformer,
                                         const std::string& where);
/// The string of a checkpoint with the transformer of a mixture of experts; a dense model has "model".
inline constexpr const char* kExpertsTransformer = "train.transformer_of_experts";
/// The string of a checkpoint that holds Training::samples().
inline constexpr const char* kSamplesDrawn = "train.samples";
/// The string of a checkpoint with the hash of the tokenizer of its model, which lies beside the run, in this
/// file.
inline constexpr const char* kTokenizerHash = "train.tokenizer";
inline constexpr const char* kTokenizerFile = "tokenizer.json";
std::string hash_text(const Tokenizer& tokenizer);

}  // namespace weft::tools
