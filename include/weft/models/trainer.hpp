// Trains a parallel model: the whole of a step, from tokens to new weights. Used by the one rank (thread) that owns the
// model; what is collective is so over all ranks of its mesh.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <variant>
#include <vector>

#include "weft/checkpoint/checkpoint.hpp"
#include "weft/dp/grad_norm.hpp"
#include "weft/models/build.hpp"
#include "weft/nn/loss.hpp"
#include "weft/nn/optimizer.hpp"

namespace weft {

/// This rank's rows of a batch, on the host: borrowed for the call. Ranks that differ in their tensor axis alone have
/// the same rows.
struct TokenBatch {
  const std::int64_t* tokens = nullptr;  ///< (rows, sequence), each from 0 to vocab - 1
  const std::int64_t* labels =
      nullptr;  ///< (rows, sequence): for each token what follows, or CrossEntropy::kIgnore
  std::int64_t rows = 0, sequence = 0;
  /// The rows of all data ranks; 0: as many as here on each. As Shard cuts them: the first ranks have one more.
  std::int64_t global_rows = 0;
};

/// What the model gives for each token: f32 (rows, sequence, vocab), of this rank's rows. Keeps nothing for a backward
/// pass; labels are not read. Collective over the tensor axis. Throws bad_argument before anything is sent for a token
/// that the vocabulary does not have, and for more positions than max_seq.
Tensor compute_logits(ParallelModel& model, Compute& compute, const TokenBatch& batch);

class Trainer {
 public:
  struct Options {
    std::variant<AdamW::Options, SGD::Options> optimizer = AdamW::Options{};
    double max_norm = 1;  ///< gradients are clipped to this norm; 0: not at all
    NonFinite non_finite = NonFinite::error;
    std::uint64_t seed = 0;  ///< of what is random in a pass
  };
  struct Result {
    std::int64_t step = 0;    ///< its number, from 0
    std::int64_t tokens = 0;  ///< with a label, over all ranks
    double loss = 0;          ///< the mean over these, in nats
    double grad_norm = 0;     ///< before clipping
    bool skipped = false;  ///< the norm is not finite and non_finite says skip: the weights stay as they are
  };

  /// `model` and `compute`, the one it was built with, outlive it. No communication.
  Trainer(ParallelModel& model, Compute& compute, const Options& options);

  /// forward, loss, backward, averaging over the data axis, sync over the tensor axis, clip, and one step of the
  /// optimizer with learning rate `lr`. Several batches are micro-batches: their gradients add up to that of one batch
  /// of all their rows. The first allocates buckets, and later ones allocate little.
  ///
  /// Throws bad_argument on all ranks before any pass: where a batch of one rank is wrong, with its own text there and
  /// `trainer: another rank was given a batch that does not fit; its own error says why` on the others; where ranks of
  /// the tensor axis have different batches; where no label counts. After an Error gradients are forgotten; whether
  /// weights changed depends on when it came.
  Result step(std::span<const TokenBatch> batches, double lr);
  /// How many steps were taken: the number of the next.
  std::int64_t steps() const noexcept { return steps_; }

  /// save_checkpoint() and load_checkpoint() of the model and the optimizer, with steps() as the step. Collective.
  void save(const std::filesystem::path& directory, const CheckpointExtra& extra = {}) const;
  CheckpointInfo load(const std::filesystem::path& directory);

 private:
  struct Placed {
    Tensor tokens, labels;
  };
  std::vector<Placed> place(std::span<const TokenBatch> batches) const;
  std::int64_t agree_on_valid(std::span<const TokenBatch> batches, std::vector<Placed>& placed) const;
  double passes(const std::vector<Placed>& placed, std::int64_t valid);

  ParallelModel* model_;
  Compute* compute_;
  Options options_;
  std::unique_ptr<Optimizer> optimizer_;
  CrossEntropy loss_;
  std::int64_t steps_ = 0;
};

}  // namespace weft
