// An exponential moving average of a model's masters: each rank averages its own shards, without
// communication. Used by the rank (thread) that owns the model.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "weft/base/tensor.hpp"
#include "weft/host/compute.hpp"
#include "weft/nn/optimizer.hpp"
#include "weft/nn/parameter.hpp"

namespace weft {

/// Computes average <- d average + (1 - d) master after each step of the optimizer; the average begins as a
/// copy of the master. B. Polyak, A. Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992,
/// with weights that decay.
///
///   Ema ema(compute, model.parameters());
///   for each step:  …  optimizer.step(rate);  ema.update();
///   { const Ema::Swapped averages(ema);  … evaluate or export: masters are the averages … }
///
/// Averages are f32, with the layout of the masters, on their device: equal replicas stay equal.
class Ema {
 public:
  struct Options {
    double decay = 0.999;
    /// Update n (from 0) uses min(decay, (1 + n) / (10 + n)), so that the first values soon lose their
    /// weight.
    bool warm_up = false;
  };

  /// Averages those of `parameters` that are trained now, with `compute`, as an optimizer does. All
  /// parameters must be materialised, and must outlive the Ema. Throws bad_argument for a decay that is not
  /// in [0, 1), for a parameter given twice, and for a master on another device than that of `compute`.
  Ema(Compute& compute, std::vector<Parameter*> parameters, const Options& options);
  Ema(Compute& compute, std::vector<Parameter*> parameters)
      : Ema(compute, std::move(parameters), Options()) {}
  Ema(const Ema&) = delete;
  Ema& operator=(const Ema&) = delete;

  /// Begins to average a parameter that was frozen: call it when the parameter is unfrozen, before the next
  /// step. The average begins as a copy of the master. Throws bad_argument if the parameter is already
  /// averaged, or still frozen.
  void add(Parameter& parameter);

  /// Updates the averages with the present masters; masters that are now frozen, and their averages, do not
  /// change. Throws bad_argument while averages are swapped in, and if a parameter given to the constructor
  /// was frozen then and is not frozen now: `ema: "w" was frozen when the ema was made; add() it when it is
  /// unfrozen`; throws layout if a master's layout is not that of its average. If it throws, nothing has
  /// changed.
  void update();
  /// The factor d of update n (from 0): the part of the average that the update keeps.
  double decay_at(std::int64_t n) const noexcept;

  /// swap_in() exchanges masters and averages in place, so the model then computes with the averages.
  /// swap_out() exchanges them back, to the same bits. Do not call them between a forward pass and its
  /// backward. swap_in() throws bad_argument if the averages are already swapped in, and swap_out() if they
  /// are not; both throw layout like update().
  void swap_in();
  void swap_out();
  bool swapped() const noexcept { return swapped_; }

  /// As long as a Swapped exists, the averages are swapped in.
  class [[nodiscard]] Swapped {
   public:
    explicit Swapped(Ema& ema) : ema_(&ema) { ema.swap_in(); }
    ~Swapped();
    Swapped(const Swapped&) = delete;
    Swapped& operator=(const Swapped&) = delete;

   private:
    Ema* ema_;
  };

  /// The averaged parameters.
  std::span<Parameter* const> parameters() const noexcept { return parameters_; }
  /// The average of parameters()[i]. While the averages are swapped in, this tensor holds the master.
  const Tensor& average(std::size_t i) const { return averages_.at(i).value; }

  /// Calls `see`, like Optimizer::visit_state(), for the tensors that a checkpoint of a run keeps. For each
  /// parameter these are "updates", i64 (1), the same on all ranks and without a layout, and "average", with
  /// the layout of the master. The caller may write into the tensors. Throws bad_argument while averages are
  /// swapped in, because a checkpoint would store them as masters.
  void entries(const Optimizer::Visitor& see) const;

 private:
  struct Average {
    Tensor updates;  // i64 (1)
    Tensor value;
  };
  void expect_sound(std::string_view call) const;
  void expect_same_layouts() const;
  void exchange();
  Compute* compute_;
  Options options_;
  std::vector<Parameter*> parameters_;
  std::vector<Average> averages_;         // parallel to parameters_
  std::vector<const Parameter*> frozen_;  // given, but not trained then
  bool swapped_ = false;
};

}  // namespace weft
