// Dynamic loss scaling keeps gradients that are computed in f16 from vanishing. If they overflow in a step,
// all ranks skip the step together. Used by the rank (thread) that owns the model.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "weft/dp/gradient.hpp"
#include "weft/host/compute.hpp"
#include "weft/mesh/mesh.hpp"
#include "weft/nn/parameter.hpp"

namespace weft {

/// P. Micikevicius et al., "Mixed Precision Training", 2018; the rule is that of torch.amp.GradScaler.
///
///   LossScaler scaler;
///   for each step:
///     backward of loss x scaler.scale(), so that all gradients are as much larger; reduce the gradients
///     if (scaler.unscale(gradients, mesh)) { clip_grad_norm(gradients, …);  optimizer.step(rate); }
///     scaler.update();
///
/// The scale falls after a skipped step, and rises after `interval` steps in a row that were not skipped. If
/// growth and backoff are powers of two, scaling does not change gradients that neither overflow nor vanish.
class LossScaler {
 public:
  struct Options {
    double scale = 65536;  ///< the initial scale
    double growth = 2;     ///< 1 or more; the scale never grows beyond what f32 holds
    double backoff = 0.5;  ///< more than 0, and less than 1
    std::int64_t interval = 2000;
    /// If gradients are not finite at this scale or a smaller one, the scale is not the cause, and update()
    /// throws.
    double least = 0x1p-14;
  };

  /// Throws bad_argument, naming the option, if an option is not as described above; scales must be finite
  /// and more than 0.
  explicit LossScaler(const Options& options);
  LossScaler() : LossScaler(Options()) {}

  /// The factor by which the program must multiply the loss, or the gradient of the loss with which it starts
  /// backward.
  double scale() const noexcept { return state_.scale; }

  /// Returns whether every element of all gradients is finite on all ranks of `axes`; the result is the same
  /// on all of them. If it is true, divides the gradients by scale(); otherwise leaves them as they are, and
  /// the program must skip the step. Costs one small collective over `axes`, which must contain all ranks
  /// that step together; different ranks may have different gradients.
  ///
  /// A program may unscale several lists (of two optimizers, for example) one by one before update(): each
  /// result is for that list only, and the scale falls if any list was not finite. Unscale each list only
  /// once before each update(): a second call divides again.
  ///
  /// Throws mismatch on all ranks if scales differ: `loss_scaler: the scale is 65536 after 3 good steps on dp
  /// rank 0, but 32768 after 0 on dp rank 1`; bad_argument for a gradient of f16, because its small elements
  /// would vanish: widen it first; also the errors of check_gradients(). A mistake on one rank is an error of
  /// the same code on all ranks. `compute`: as in grad_norm().
  bool unscale(std::span<const Gradient> gradients, const DeviceMesh& axes, Compute* compute = nullptr);
  /// Like the function above, for gradients_of(parameters). If `compute` is null and the model is on a
  /// device, it uses the Compute of materialise().
  bool unscale(std::span<Parameter* const> parameters, const DeviceMesh& axes, Compute* compute = nullptr);

  /// Adjusts the scale. Call it after each step, whether the step was taken or skipped. Throws bad_argument
  /// if unscale() was not called since the last update(). Throws on all ranks, and leaves the scale as it
  /// was, if gradients are not finite at `least`. No communication.
  void update();
  /// Forgets the result of unscale(); the scale stays. Call it instead of update() if the program discards
  /// the gradients and computes them again.
  void discard() noexcept { found_ = Found::unknown; }

  /// The state of the scaler. A resumed run that restores it continues as if it had not stopped.
  struct State {
    double scale = 0;
    std::int64_t good_steps = 0;  ///< steps in a row that were not skipped
  };
  const State& state() const noexcept { return state_; }
  /// Restores a state. Throws bad_argument if the scale is not finite or not more than 0, or if the count is
  /// below 0.
  void set_state(const State& state);
  /// Convert the state to a text, for a string of a checkpoint, and back, exactly. Throws bad_argument for a
  /// text that is no state.
  std::string to_text() const;
  void set_text(std::string_view text);

 private:
  enum class Found : unsigned char { unknown, finite, not_finite };
  Options options_;
  State state_;
  Found found_ = Found::unknown;
};

}  // namespace weft
