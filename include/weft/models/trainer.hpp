// Trains a parallel model: the whole of a step, from tokens to new weights. Used by the one rank (thread)
// that owns the model; collective functions are so over all ranks of its mesh.
#pragma once

#include <cstdint>
#include <filesystem>
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
#include "weft/nn/optimizer.hpp"
#include "weft/train/ema.hpp"
#include "weft/train/loss_scaler.hpp"

namespace weft {

/// This rank's rows of a batch, on the host: borrowed for the call. Ranks that differ in their tensor axis
/// alone have the same rows.
struct TokenBatch {
  const std::int64_t* tokens = nullptr;  ///< (rows, sequence), each from 0 to vocab - 1
  /// (rows, sequence): for each token what follows, or CrossEntropy::kIgnore.
  const std::int64_t* labels = nullptr;
  std::int64_t rows = 0, sequence = 0;
  /// The rows of all data ranks; 0: as many as here on each. As Shard cuts them: the first ranks have one
  /// more.
  std::int64_t global_rows = 0;
};

/// The output of the model for each token: f32 (rows, sequence, vocab), of this rank's rows. Keeps nothing
/// for a backward pass; labels are not read. Collective over the tensor axis, on which one small all-reduce
/// comes first: throws bad_argument on all its ranks before any pass for a token that the vocabulary does not
/// have, for more positions than max_seq, and where they have different tokens; where one rank's batch is
/// wrong, with its own text there and `compute_logits: another rank of tp=2 was given a batch that does not
/// fit; its own error says why` on the others. `fault`: any other fault of the call on this rank; it is
/// thrown here, and reported to the others.
Tensor compute_logits(ParallelModel& model, Compute& compute, const TokenBatch& batch,
                      const std::optional<Error>& fault = std::nullopt);

class Trainer {
 public:
  struct Options {
    std::variant<AdamW::Options, SGD::Options> optimizer = AdamW::Options{};
    double max_norm = 1;  ///< gradients are clipped to this norm; 0: not at all
    NonFinite non_finite = NonFinite::error;
    std::uint64_t seed = 0;  ///< of the random numbers in a pass
    /// Dynamic loss scaling, for layers that compute gradients in f16. A step whose gradients are not finite
    /// is skipped by all ranks, whatever non_finite says, and the scale falls (weft/train/loss_scaler.hpp).
    std::optional<LossScaler::Options> loss_scale = std::nullopt;
    /// The part of each token's weight that goes to all classes alike; see CrossEntropy.
    double label_smoothing = 0;
    /// Averages of the masters over the steps that are not skipped, in ema(). They are saved and loaded with
    /// the rest.
    std::optional<Ema::Options> ema = std::nullopt;
  };
  struct Result {
    std::int64_t step = 0;    ///< its number, from 0
    std::int64_t tokens = 0;  ///< with a label, over all ranks
    double loss = 0;          ///< the mean over these, in nats
    double grad_norm = 0;     ///< before clipping; after backward() 0: not known
    /// The norm is not finite and non_finite says skip, or loss scaling does: the weights stay as they are.
    bool skipped = false;
    /// The factor by which the gradients of the step were multiplied, and divided after their reduction.
    double loss_scale = 1;
  };

  /// `model` and `compute`, the one it was built with, outlive it. No communication. Throws bad_argument for
  /// an option that is out of its range.
  Trainer(ParallelModel& model, Compute& compute, const Options& options);

  /// forward, loss, backward, averaging over the data axis, sync over the tensor axis, clip, and one step of
  /// the optimizer with learning rate `lr`. Several batches are micro-batches: their gradients add up to that
  /// of one batch of all their rows. The first allocates buckets, and later ones allocate little.
  ///
  /// Throws bad_argument on all ranks before any pass: where a batch of one rank is wrong, with its own text
  /// there and `trainer: another rank was given a batch that does not fit; its own error says why` on the
  /// others; where ranks of the tensor axis have different batches; where no label counts; where `lr` is no
  /// finite number of 0 or more on a rank, or differs between ranks; where ranks gave different options,
  /// naming the field. The first step throws mismatch if a replica of a parameter began with other values.
  /// Two small collectives exchange this between ranks. After an Error gradients are forgotten; whether
  /// weights changed depends on when it came.
  Result step(std::span<const TokenBatch> batches, double lr);

  /// The first half of step(): everything except clip and update. Until the second half, update() or
  /// discard(), the program may read, clip or overwrite gradients(). Throws as step(), and bad_argument if
  /// the gradients of a backward() are still there.
  ///
  ///     trainer.backward(batches);
  ///     for (Gradient& g : trainer.gradients()) …
  ///     trainer.update(lr);
  Result backward(std::span<const TokenBatch> batches);
  /// Between backward() and update(): the gradient of each parameter that is trained, in the order of the
  /// model's, averaged over the data axis and reduced over the tensor axis: the mean over all labels of the
  /// step. f32, in the optimizer's memory: what is written there is what update() uses, so ranks that hold a
  /// replica of an element write the same. Layouts are those of the parameters; grad_norm() and
  /// clip_grad_norm() (weft/dp/grad_norm.hpp) take the list. Views and names are good until update().
  /// Elsewhere bad_argument.
  std::vector<Gradient> gradients() const;
  /// The second half of step(): clips gradients() to max_norm and takes a step of the optimizer. Tokens and
  /// loss of the Result are those of backward(). Collective over the mesh. Throws bad_argument without a
  /// backward(), and as step(). The gradients are forgotten, also after an Error.
  Result update(double lr);
  /// Forgets the gradients of a backward(), as if there had been none: steps() stays. Nothing if there are
  /// none. No communication: all ranks do so, or none.
  void discard() noexcept;

  /// The averages; null: options asked for none. To evaluate or export with them:
  /// `const Ema::Swapped averages(*trainer.ema())`. A step while they are swapped in is bad_argument, on all
  /// ranks.
  Ema* ema() const noexcept { return ema_.get(); }

  /// How many steps were taken: the number of the next.
  std::int64_t steps() const noexcept { return steps_; }

  /// Bytes on this rank. Tensors that a pass keeps for its backward are not counted.
  struct Memory {
    std::int64_t parameters = 0;  ///< masters, and weights in bf16
    std::int64_t gradients = 0;   ///< of the shape of the masters
    std::int64_t states = 0;      ///< of the optimizer, and averages
    /// In a sharded model: the most that whole blocks, weights and gradients, took so far.
    std::int64_t gathered = 0;
  };
  Memory memory() const;

  /// save_checkpoint() and load_checkpoint() of the model, the optimizer and the averages, with steps() as
  /// the step. Collective. The seed of the random numbers in a pass is saved with them, as the string
  /// "trainer.seed" (and the state of loss scaling as "trainer.loss_scale"), and load() takes it from there:
  /// with the step it is all that a run's randomness depends on. load() forgets the gradients of a
  /// backward().
  void save(const std::filesystem::path& directory, const CheckpointExtra& extra = {},
            const SaveOptions& options = {}) const;
  /// The same in the background, as AsyncCheckpoint::save(); `saves` is of the model's mesh.
  bool save(AsyncCheckpoint& saves, const std::filesystem::path& directory, const CheckpointExtra& extra = {},
            const SaveOptions& options = {}) const;
  CheckpointInfo load(const std::filesystem::path& directory);

 private:
  struct Placed {
    Tensor tokens, labels;
  };
  std::vector<Placed> place(std::span<const TokenBatch> batches) const;
  std::int64_t agree(std::span<const TokenBatch> batches, std::optional<double> lr,
                     std::vector<Placed>& placed) const;
  void agree_on_rate(double lr) const;
  Result backward(std::span<const TokenBatch> batches, std::optional<double> lr);
  double passes(const std::vector<Placed>& placed, std::int64_t valid);
  Result apply(double lr);
  CheckpointExtra with_state(CheckpointExtra extra) const;

  ParallelModel* model_;
  Compute* compute_;
  Options options_;
  std::unique_ptr<Optimizer> optimizer_;
  CrossEntropy loss_;
  std::int64_t steps_ = 0;
  std::optional<LossScaler> scaler_;
  std::unique_ptr<Ema> ema_;       // null: none
  bool finite_ = true;             // the gradients of pending_, as scaler_ found them
  std::optional<Result> pending_;  // of a backward() whose gradients are there
};

}  // namespace weft
