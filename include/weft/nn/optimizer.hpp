// Optimizers: compute new values from gradients; each rank works on its own parts. Used by the thread that
// owns the model.
#pragma once

#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include "weft/nn/frame.hpp"
#include "weft/nn/parameter.hpp"

namespace weft {

/// Trains the given parameters that are trainable when the optimizer is made. step() leaves out a parameter
/// that was frozen later, and throws bad_argument for a parameter that was frozen when the optimizer was made
/// and is trainable now. The state of each parameter is kept under its path, on the device of the Compute,
/// with the layout that the master had when the optimizer was made. The constructor throws bad_argument if a
/// master is on another device. step() throws layout, naming parameter and axis, if a gradient is still
/// Partial on some axis, or if a gradient or a state has another layout than the master. It throws
/// bad_argument, naming the parameters, if parameters have no gradient. It throws before anything changes.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  /// Takes one step with learning rate `lr` over all parameters given to the constructor. Leaves the
  /// gradients as they are.
  void step(double lr);
  /// Forgets all gradients.
  void zero_gradients() noexcept;

  /// Calls see(path, name, tensor) for every tensor of the state, in the order of the parameters. This is for
  /// checkpoints: the caller may write values into the tensors. "step" is i64 of shape (1), on the host; the
  /// other tensors have the parameter's local shape and layout.
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
  std::vector<const Parameter*> frozen_;  // given to the constructor, but frozen at that time
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
    double weight_decay = 0.1;  ///< for parameters with Parameter::decays()
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
