// Optimizers: from gradients to new values, each rank on its own parts. Used by the thread that owns the
// model.
#pragma once

#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include "weft/nn/frame.hpp"
#include "weft/nn/parameter.hpp"

namespace weft {

/// Trains those of the given parameters that are trainable when the optimizer is made. step() leaves out a
/// parameter that was frozen since, and throws bad_argument for a parameter that was frozen then and is
/// trainable now. Each parameter's state is kept under its path, on the device of the Compute (bad_argument
/// if its master is on another), with the master's layout at that time. step() throws layout if a gradient is
/// still Partial on some axis, or a gradient or state is laid out otherwise than the master, naming parameter
/// and axis; and bad_argument naming every parameter that has no gradient. It throws both before anything
/// changes.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  /// One step with learning rate `lr` over all parameters given at creation. Leaves the gradients as they
  /// are.
  void step(double lr);
  /// Forgets all gradients.
  void zero_gradients() noexcept;

  /// Every tensor of the state, in the order of the parameters: (path, name, tensor). This is for
  /// checkpoints: the caller may write values into the tensors. "step": i64 of shape (1), on the host; the
  /// others have the parameter's local shape and layout.
  using Visitor = std::function<void(const std::string& path, std::string_view name, const Tensor& tensor)>;
  void visit_state(const Visitor& see) const;
  std::span<Parameter* const> parameters() const noexcept { return parameters_; }

 protected:
  Optimizer(Compute& compute, std::vector<Parameter*> parameters, std::vector<std::string> names);
  struct State {
    Tensor step;                  // i64 (1): steps taken
    std::vector<Tensor> tensors;  // one tensor per name
  };
  Compute& compute() const noexcept { return *compute_; }

 private:
  virtual void update(Parameter& p, State& state, std::int64_t step, double lr) = 0;
  Compute* compute_;
  std::vector<Parameter*> parameters_;
  std::vector<const Parameter*> frozen_;  // given, but not trained then
  std::vector<std::string> names_;
  std::vector<State> states_;  // parallel to parameters_
};

/// p ← p − lr·wd·p, m ← b1·m + (1−b1)·g, v ← b2·v + (1−b2)·g², p ← p − lr·m̂/(√v̂ + eps), m̂ = m/(1−b1^t), v̂
/// = v/(1−b2^t). I. Loshchilov, F. Hutter, "Decoupled Weight Decay Regularization", 2019. State: "exp_avg",
/// "exp_avg_sq", "step".
class AdamW : public Optimizer {
 public:
  struct Options {
    double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
    double weight_decay = 0.1;  ///< for parameters that decay
  };
  AdamW(Compute& compute, std::vector<Parameter*> parameters, const Options& options);

 private:
  void update(Parameter& p, State& state, std::int64_t step, double lr) override;
  Options options_;
};

/// v ← momentum·v + (g + wd·p), p ← p − lr·v. State: "momentum" if momentum is not 0, and "step".
class SGD : public Optimizer {
 public:
  struct Options {
    double momentum = 0, weight_decay = 0;
  };
  SGD(Compute& compute, std::vector<Parameter*> parameters, const Options& options);

 private:
  void update(Parameter& p, State& state, std::int64_t step, double lr) override;
  Options options_;
};

}  // namespace weft
