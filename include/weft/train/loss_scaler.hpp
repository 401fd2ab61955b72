// Dynamic loss scaling: gradients that are computed in f16 are kept from vanishing, and steps in which they
// overflow are skipped by all ranks together. Used by the rank (thread) that owns the model.
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
/// The scale falls after a step that was skipped, and rises after `interval` steps in a row that were not. A
/// growth and a backoff that are powers of two change no bit of a gradient that neither overflows nor
/// vanishes.
class LossScaler {
 public:
  struct Options {
    double scale = 65536;  ///< at first
    double growth = 2;     ///< 1 or more; the scale never grows beyond what f32 holds
    double backoff = 0.5;  ///< more than 0, and less than 1
    std::int64_t interval = 2000;
    /// If gradients are not finite at this scale or below it, something else than the scale is at fault:
    /// update() throws.
    double least = 0x1p-14;
  };

  /// Throws bad_argument naming an option that is not as above; scales are finite and more than 0.
  explicit LossScaler(const Options& options);
  LossScaler() : LossScaler(Options()) {}

  /// The factor of the loss, or of its gradient.
  double scale() const noexcept { return state_.scale; }

  /// Whether every element of all gradients is finite on all ranks of `axes`: the same answer on all of them.
  /// If it is, divides the gradients by scale(); otherwise leaves them, and the step is to be skipped. One
  /// small collective over `axes`, the mesh of all ranks that step together; their gradients may be different
  /// ones.
  ///
  /// Several lists, as of two optimizers, may be unscaled one by one before update(): the answer is for each
  /// list alone, and the scale falls if any of them was not finite. A list comes once before each
  /// update(): a second call divides again.
  ///
  /// Throws mismatch on all ranks where scales differ: `loss_scaler: the scale is 65536 after 3 good steps on
  /// dp rank 0, but 32768 after 0 on dp rank 1`; bad_argument for a gradient of f16, whose small elements
  /// would vanish after all: widen it first; see check_gradients(). A mistake on one rank is an error of the
  /// same code on all ranks. `compute`: as in grad_norm().
  bool unscale(std::span<const Gradient> gradients, const DeviceMesh& axes, Compute* compute = nullptr);
  /// The same for gradients_of(parameters); `compute` null: for a model on a device the one that it was
  /// materialised with.
  bool unscale(std::span<Parameter* const> parameters, const DeviceMesh& axes, Compute* compute = nullptr);

  /// After each step, taken or skipped: moves the scale. Throws bad_argument if no unscale() came since
  /// the last one; and on all ranks, with the scale as it was, where gradients are not finite at `least`. No
  /// communication.
  void update();
  /// Instead of update(), if the program discards the gradients and computes them again: forgets the result
  /// of unscale(). The scale stays.
  void discard() noexcept { found_ = Found::unknown; }

  /// All that a run needs to go on as if it had not stopped.
  struct State {
    double scale = 0;
    std::int64_t good_steps = 0;  ///< in a row
  };
  const State& state() const noexcept { return state_; }
  /// Throws bad_argument for a scale that is not finite and more than 0, or a count below 0.
  void set_state(const State& state);
  /// The state as a text for a checkpoint's description, and back: the same bits. Throws bad_argument for a
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
