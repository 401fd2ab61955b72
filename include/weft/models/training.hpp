// A whole training: the steps of a Trainer, with evaluations, checkpoints, hooks and an early end. Used by
// the rank (thread) that owns the model.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>

#include "weft/base/clock.hpp"
#include "weft/models/trainer.hpp"

namespace weft {

/// When and how a training is saved. The plan must be the same on all ranks.
struct CheckpointPlan {
  std::filesystem::path folder = {};  ///< empty: no checkpoints
  std::int64_t every_steps = 0;       ///< after each step whose number is a multiple; 0: not by steps
  /// If so much time has passed since the last checkpoint, by the clock of rank 0; 0: not by time.
  Duration every{0};
  bool at_end = true;  ///< after the last step, too
  int keep = 0;        ///< as in SaveOptions
  /// Written while the training goes on; see AsyncCheckpoint.
  bool background = true;
  /// Compares the replicas of all parameters before each checkpoint: check_replicas().
  bool check_replicas = true;
  /// Gives the strings that are saved with the checkpoint, the same on all ranks. Empty: none.
  std::function<CheckpointExtra()> extra = {};
};

/// Why a training has ended.
enum class TrainingEnded : unsigned char {
  steps,    ///< the last step was taken
  stop,     ///< TrainingPlan::stop asked for it
  patience  ///< the loss of evaluations did not fall any more
};

struct TrainingEnd {
  TrainingEnded why = TrainingEnded::steps;
  std::int64_t steps = 0;  ///< Trainer::steps()
  int reason = 0;          ///< the largest number that `stop` gave on any rank; 0: none
  /// The lowest loss of all evaluations; nothing if there was none.
  std::optional<double> best_loss = std::nullopt;
};

/// The work of train(). Functions that are empty are not called. All are called on every rank; what one of
/// them throws ends the training on all ranks.
struct TrainingPlan {
  std::int64_t steps = 0;  ///< ends when Trainer::steps() is this
  /// Takes the next step, whose number is given: calls Trainer::step(), or backward() and update(), with the
  /// batches and the learning rate of that number.
  std::function<Trainer::Result(std::int64_t step)> step = {};

  /// Evaluates after each step whose number is a multiple; 0: never.
  std::int64_t evaluate_every = 0;
  std::function<Trainer::Evaluation()> evaluate = {};  ///< calls Trainer::evaluate() once
  /// Ends after so many evaluations in a row whose loss was not at least `least_gain` below the lowest
  /// before; 0: never. Checkpoints hold the count.
  std::int64_t patience = 0;
  double least_gain = 0;
  /// Asked after each step on every rank: a number above 0 on any rank ends the training on all ranks after
  /// this step.
  std::function<int()> stop = {};

  CheckpointPlan checkpoints = {};
  /// CheckpointInfo::extra of the checkpoint from which the training goes on; Trainer::load() gives it.
  CheckpointExtra resumed = {};

  std::function<void()> on_begin = {};  ///< before the first step
  std::function<void(const Trainer::Result& result)> on_step = {};
  std::function<void(const Trainer::Evaluation& evaluation)> on_evaluation = {};
  /// When the checkpoint of this step is written; in the background: when its writing has begun.
  std::function<void(std::int64_t step)> on_checkpoint = {};
  std::function<void(const TrainingEnd& end)> on_end = {};  ///< when all checkpoints are written
};

/// Trains: takes steps until the plan ends them. After each step the ranks exchange a few numbers, so that
/// they end, and save, after the same step, whatever a rank's clock, signals or hooks say. Collective over
/// the model's mesh. Throws bad_argument on all ranks if the plan differs between ranks or cannot be
/// followed, the errors of plan.step() and plan.evaluate(), and those of check_replicas() and of saves. If
/// another function of the plan throws, that rank throws its error, and others throw `train: a hook failed
/// on another rank; its own error says why`. If plan.step() or plan.evaluate() throws on a rank before it has
/// called the Trainer, the others throw the error of Trainer::give_up().
///
///     TrainingPlan plan{.steps = 1000};
///     plan.step = [&](std::int64_t step) { return trainer.step(batches_of(step), schedule.at(step)); };
///     plan.checkpoints = {.folder = "run", .every = 10min, .keep = 3};
///     if (resumes) plan.resumed = trainer.load_newest("run").extra;
///     train(trainer, plan);
TrainingEnd train(Trainer& trainer, const TrainingPlan& plan);

}  // namespace weft
