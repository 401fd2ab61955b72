// Trains a parallel model: complete steps, from batches to new weights. Used by the rank (thread) that owns
// the model; collective functions are collective over all ranks of its mesh.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "weft/base/error.hpp"
#include "weft/checkpoint/async.hpp"
#include "weft/checkpoint/checkpoint.hpp"
#include "weft/dp/grad_norm.hpp"
#include "weft/models/build.hpp"
#include "weft/nn/loss.hpp"
#include "weft/train/ema.hpp"
#include "weft/train/freeze_schedule.hpp"
#include "weft/train/loss_scaler.hpp"
#include "weft/train/make_optimizer.hpp"

namespace weft {

class MicroBatchGradients;

/// This rank's rows of a batch for a model of any recipe: plain tensors (rows, …) on the host, all with the
/// same number of rows. Ranks that differ only in their coordinate on the tensor axis or the domain axes must
/// have the same rows, with whole maps: each rank keeps its part (ParallelModel::place).
struct Batch {
  Tensors inputs;                ///< of the model, in this order; for a transformer see Transformer
  Tensors targets = {};          ///< of the loss, after the outputs of the model
  std::int64_t global_rows = 0;  ///< as in TokenBatch
};

/// This rank's rows of a batch of tokens, on the host: borrowed for the call. Ranks that differ only in their
/// coordinate on the tensor axis must have the same rows.
struct TokenBatch {
  const std::int64_t* tokens = nullptr;  ///< (rows, sequence), each from 0 to vocab - 1
  /// (rows, sequence): the next token for each token, or CrossEntropy::kIgnore.
  const std::int64_t* labels = nullptr;
  std::int64_t rows = 0, sequence = 0;
  /// The number of rows of all data ranks together. If the rows do not divide evenly, the first ranks have
  /// one row more, as with Shard. 0: every rank has as many rows as this one.
  std::int64_t global_rows = 0;
  /// (rows, sequence): successive tokens of a row with the same number are a document, and attention does not
  /// cross its borders (weft/nn/packed_documents.hpp). Null: it sees whole rows. Labels do not depend on it.
  const std::int64_t* documents = nullptr;
};

/// Returns the output of the model for each token of this rank's rows: f32 (rows, sequence, vocab). Keeps
/// nothing for a backward pass; does not read labels. Collective over the tensor axis, with one small
/// all-reduce first. Throws bad_argument on all ranks of this axis before any pass if a token is not in the
/// vocabulary, if there are more positions than max_seq, or if the ranks have different tokens. If the batch
/// of one rank is wrong, that rank throws its own text, and the others throw `compute_logits: another rank of
/// tp=2 was given a batch that does not fit; its own error says why`. `fault`: another error that the caller
/// has found on this rank; this rank throws it, and the other ranks are notified.
Tensor compute_logits(ParallelModel& model, Compute& compute, const TokenBatch& batch,
                      const std::optional<Error>& fault = std::nullopt);

class Trainer {
 public:
  struct Options {
    OptimizerOptions optimizer = AdamW::Options{};
    /// Parameters with a rate or a decay of their own; see ParameterGroup.
    std::vector<ParameterGroup> groups = {};
    double max_norm = 1;  ///< gradients are clipped to this norm; 0: not at all
    NonFinite non_finite = NonFinite::error;
    std::uint64_t seed = 0;  ///< of the random numbers in a pass
    /// Anything else that must be equal on all ranks, such as a hash of the data: each step compares it.
    std::string identity = {};
    /// Dynamic loss scaling, for layers that compute gradients in f16. A step whose gradients are not finite
    /// is skipped by all ranks, whatever non_finite says, and the scale falls (weft/train/loss_scaler.hpp).
    /// With it, or with NonFinite::skip, float8 layers do not throw for gradients that are not finite.
    std::optional<LossScaler::Options> loss_scale = std::nullopt;
    /// The part of each token's weight that is spread evenly over all classes; see CrossEntropy. This and
    /// z_loss replace the recipe's CrossEntropy, if one of them is not 0; another loss has no such options.
    double label_smoothing = 0;
    /// The loss that keeps the softmax's sum near 1; see CrossEntropy. Result::loss includes it.
    double z_loss = 0;
    /// Which parameters are trained at which step. A parameter that is trained for the first time begins then
    /// with the state of a new optimizer and with an average equal to its master; it comes last in
    /// gradients(). While it is frozen it has no gradient: it does not decay, and it counts neither for the
    /// norm of the gradients nor for the averages. A parameter that is frozen again keeps its state. save()
    /// stores the schedule.
    FreezeSchedule freeze = {};
    /// Averages of the masters over the steps that are not skipped, in ema(). save() and load() include them.
    std::optional<Ema::Options> ema = std::nullopt;
  };
  struct Result {
    std::int64_t step = 0;  ///< the number of the step, from 0
    /// The number of elements over which the loss is a mean, over all ranks: tokens with a label, or what
    /// Recipe::count says.
    std::int64_t tokens = 0;
    double loss = 0;       ///< the mean over these elements; of tokens in nats
    double grad_norm = 0;  ///< before clipping; 0 after backward(): not known
    /// True if gradients were not finite and non_finite or loss scaling said to skip the step: the weights
    /// stay as they are.
    bool skipped = false;
    /// The factor by which the gradients of the step were multiplied, and divided after their reduction.
    double loss_scale = 1;
  };

  /// `model`, and the `compute` with which it was built, must outlive the trainer. No communication. Throws
  /// bad_argument if an option is out of range, if the model has no loss, for label_smoothing or z_loss if
  /// its loss is no CrossEntropy, and if another Trainer of the model exists: two would mix their gradients.
  Trainer(ParallelModel& model, Compute& compute, const Options& options);
  /// Drops the gradients of a backward(), as discard() does.
  ~Trainer() {
    if (pending_ && optimizer_) discard();
  }
  Trainer(Trainer&&) = default;

  /// Performs a whole training step: forward, loss, backward, average over the data axis, sync over the
  /// tensor axis, clip, and a step of the optimizer with learning rate `lr`. Several batches are
  /// micro-batches: their gradients add up to the gradient of one batch with all their rows. The first step
  /// allocates buckets; later steps allocate little.
  ///
  /// Throws bad_argument on all ranks before any pass if ranks of the tensor axis have different batches, no
  /// label counts, `lr` is negative or not finite on a rank or differs between ranks, or ranks gave different
  /// options (the text names the field). If a batch of one rank is wrong, that rank throws its own text, and
  /// the others throw `trainer: another rank was given a batch that does not fit; its own error says why`.
  /// The first step throws mismatch if replicas of a parameter began with different values. These checks cost
  /// two small collectives. After an Error the trainer drops the gradients; the weights may or may not have
  /// changed.
  Result step(std::span<const TokenBatch> batches, double lr) { return take_step(batches, lr); }
  Result step(std::span<const Batch> batches, double lr) { return take_step(batches, lr); }

  /// The first half of step(): everything except clip and update. Until the second half, update() or
  /// discard(), the program may read, clip or overwrite gradients(). Throws the errors of step(), and
  /// bad_argument if the trainer still has the gradients of an earlier backward().
  ///
  ///     trainer.backward(batches);
  ///     for (Gradient& g : trainer.gradients()) …
  ///     trainer.update(lr);
  Result backward(std::span<const TokenBatch> batches) { return take_backward(batches, std::nullopt); }
  Result backward(std::span<const Batch> batches) { return take_backward(batches, std::nullopt); }
  /// Between backward() and update(), returns the gradient of each trained parameter, in the order of the
  /// model's parameters, averaged over the data axis and reduced over the tensor axis. This is the gradient
  /// of the mean over all labels of the step. The gradients are f32, in the optimizer's memory: update() uses
  /// values that the program writes there, so ranks that hold a replica of an element must write the same
  /// value. Layouts are those of the parameters; grad_norm() and clip_grad_norm() (weft/dp/grad_norm.hpp)
  /// accept the list. Views and names are valid until update(). At any other time gradients() throws
  /// bad_argument.
  std::vector<Gradient> gradients() const;
  /// The second half of step(): clips gradients() to max_norm and takes a step of the optimizer. The Result
  /// has the tokens and the loss of backward(). Collective over the mesh. Throws bad_argument if backward()
  /// was not called before, and the errors of step(). The trainer drops the gradients, even after an Error.
  Result update(double lr);
  /// Drops the gradients of a backward(), as if it had not been called: steps() stays. Does nothing if there
  /// are none. No communication, but either all ranks must call it or none.
  void discard() noexcept;

  /// Notifies the ranks that wait in step(), backward(), evaluate() or update() that this rank does not come:
  /// they throw `trainer: another rank has given up; its own error says why`. For a program that has an error
  /// of its own before such a call, for example because it could not read its batch: it calls give_up(), and
  /// then throws. After a backward() the others wait in update(); gradients are dropped, as by discard().
  /// train() does so for the functions of its plan. Does nothing more if ranks cannot communicate.
  void give_up() noexcept;
  /// How many calls of step(), backward(), update() and evaluate() have begun, and how many of them threw. A
  /// give_up() counts as one that threw.
  struct Calls {
    std::int64_t begun = 0, failed = 0;
  };
  Calls calls() const noexcept { return calls_; }

  struct Evaluation {
    std::int64_t tokens = 0;  ///< as in Result
    /// The mean of the recipe's loss over these elements. A CrossEntropy has neither label smoothing nor
    /// z-loss here.
    double loss = 0;
    double perplexity = 0;  ///< e^loss
  };
  /// The loss of held-out batches: forward passes that keep nothing and draw no random numbers, one batch
  /// after the other. Nothing of the training changes: weights, steps, and the gradients of a backward().
  /// With the averages in the place of the masters (Ema::Swapped) it evaluates the averages; with
  /// ScheduleFreeAdamW its values for evaluation. Collective over the mesh. Throws the errors of step() that
  /// concern batches.
  Evaluation evaluate(std::span<const TokenBatch> batches) { return evaluate_any(batches); }
  Evaluation evaluate(std::span<const Batch> batches) { return evaluate_any(batches); }

  /// The averages; null if Options::ema is not set. To evaluate or export with the averages: `const
  /// Ema::Swapped averages(*trainer.ema())`. A step while averages are swapped in throws bad_argument on all
  /// ranks.
  Ema* ema() const noexcept { return ema_.get(); }
  /// The optimizer, of the kind that Options::optimizer says. To read the values for evaluation of
  /// ScheduleFreeAdamW: `const Optimizer::Swapped values(trainer.optimizer())`; evaluate() does so itself.
  Optimizer& optimizer() const noexcept { return *optimizer_; }

  /// The number of steps taken, which is the number of the next step.
  std::int64_t steps() const noexcept { return steps_; }

  /// Numbers of bytes on this rank, without the tensors that a pass keeps for its backward.
  struct Memory {
    std::int64_t parameters = 0;  ///< masters, and weights in bf16
    std::int64_t gradients = 0;   ///< tensors of the shape of the masters
    std::int64_t states = 0;      ///< states of the optimizer, and averages
    /// In a sharded model: the largest number of bytes that whole blocks (weights and gradients) have
    /// occupied so far.
    std::int64_t gathered = 0;
  };
  Memory memory() const;

  /// Save and load the model, the optimizer and the averages, by save_checkpoint() and load_checkpoint(),
  /// with steps() as the step. Collective. The checkpoint also holds the seed of the random numbers in a
  /// pass, as the string "trainer.seed", and the state of loss scaling, as "trainer.loss_scale"; load()
  /// restores both. The randomness of a run depends only on this seed and the step. load() drops the
  /// gradients of a backward(). The checkpoint also holds Options::freeze, as "trainer.freeze": load() throws
  /// bad_argument, before anything changes, if the trainer has another schedule; the text names the rules
  /// that differ. Load a checkpoint of a schedule into a new trainer: parameters that the trainer has
  /// unfrozen after the checkpoint's step have states that the checkpoint has not.
  void save(const std::filesystem::path& directory, const CheckpointExtra& extra = {},
            const SaveOptions& options = {}) const;
  /// Saves in the background by AsyncCheckpoint::save(); `saves` must have been made for the model's mesh.
  bool save(AsyncCheckpoint& saves, const std::filesystem::path& directory, const CheckpointExtra& extra = {},
            const SaveOptions& options = {}) const;
  CheckpointInfo load(const std::filesystem::path& directory);
  /// load() of the newest whole checkpoint in `directory` (newest_whole_checkpoint()): rank 0 finds it and
  /// tells the others. If one of its files turns out to be damaged while it is read, the newest one before it
  /// whose bytes are all whole is loaded. Rank 0 then logs one warning that names the broken one and the one
  /// that is loaded. Collective. Throws bad_argument if there is none.
  CheckpointInfo load_newest(const std::filesystem::path& directory);

  ParallelModel& model() const noexcept { return *model_; }
  Compute& compute() const noexcept { return *compute_; }

 private:
  using Batches = std::variant<std::span<const TokenBatch>, std::span<const Batch>>;
  std::vector<Batch> plain(const Batches& batches) const;
  std::int64_t agree(const Batches& batches, std::optional<double> lr, std::vector<Batch>& placed,
                     bool averages = false, bool gives_up = false) const;
  void agree_on_rate(double lr, bool gives_up = false) const;
  Result take_step(const Batches& batches, double lr);
  Result take_backward(const Batches& batches, std::optional<double> lr);
  Result first_half(const Batches& batches, std::optional<double> lr);
  Evaluation evaluate_any(const Batches& batches);
  Module& loss() const { return own_loss_ ? *own_loss_ : *model_->loss; }
  Module& plain_loss() {
    if (!plain_loss_) plain_loss_ = std::make_unique<CrossEntropy>();
    return *plain_loss_;
  }
  double passes(const std::vector<Batch>& placed, std::int64_t counted);
  Pipeline& pipeline_for(int micro_batches, Module& loss, bool trains);
  std::vector<double> pipeline_losses(const std::vector<Batch>& placed, const Tensor& counted, Module& loss,
                                      const Pass& pass, const Tensors& dloss);
  Result apply(double lr);
  void make_optimizer_of_model();
  double norm_of_stages(std::span<Parameter* const> parameters) const;
  void freeze_at(std::int64_t step);
  CheckpointExtra with_state(CheckpointExtra extra) const;

  ParallelModel* model_;
  Compute* compute_;
  Options options_;
  bool has_batch_norm_ = false;
  std::unique_ptr<Optimizer> optimizer_;
  std::shared_ptr<MicroBatchGradients> apart_;  // of a pipeline in exact mode, in a step
  std::uint64_t digest_of_optimizer_ = 0;       // equal on all stages of a pipeline
  std::unique_ptr<CrossEntropy> own_loss_;      // null: the loss of the model
  std::unique_ptr<CrossEntropy> plain_loss_;    // of evaluate(); made when it is needed
  // In a pipeline: by the number of micro-batches, negative for forward passes alone, and the loss.
  std::map<std::pair<int, const Module*>, std::unique_ptr<Pipeline>> pipelines_;
  std::int64_t steps_ = 0;
  Calls calls_;
  std::optional<LossScaler> scaler_;
  std::unique_ptr<Ema> ema_;           // null: none
  bool finite_ = true;                 // whether scaler_ found the gradients of pending_ finite
  std::shared_ptr<const void> claim_;  // on the model, as long as this exists
  std::optional<Result> pending_;      // the step of a backward() whose gradients the trainer still has
};

}  // namespace weft
