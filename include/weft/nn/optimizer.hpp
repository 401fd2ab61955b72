// Optimizers: compute new values from gradients. Each rank works on its own parts. The thread that owns the
// model uses it.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "weft/nn/frame.hpp"
#include "weft/nn/parameter.hpp"

namespace weft {

/// Parameters that an optimizer treats in another way than its options say.
struct ParameterGroup {
  /// Patterns for paths of parameters, or of modules with all parameters below them
  /// (weft/nn/path_pattern.hpp).
  std::vector<std::string> patterns;
  double rate = 1;  ///< a factor of the learning rate; 0: values do not change if gradients are finite
  /// The decay of all parameters of the group, also of parameters that otherwise do not decay
  /// (Parameter::decays()). Without a value the group decays as the optimizer's options say.
  std::optional<double> weight_decay = std::nullopt;
};

/// Trains the given parameters that are trainable when the optimizer is made. step() leaves out a
/// parameter that was frozen later. It throws bad_argument for a parameter that was frozen when the
/// optimizer was made and is trainable now, unless add() was called. The state of each parameter is kept
/// under its path, on the device of the Compute, with the layout that the master had when the state was
/// made. The constructor throws bad_argument for an option that is out of range, for a parameter given
/// twice, and if a master is on another device. step() throws layout, naming parameter and axis, if a
/// gradient is still Partial on some axis, or if a gradient or a state has another layout than the master.
/// It throws bad_argument, naming the parameters, if parameters have no gradient. It throws before
/// anything changes.
///
/// `groups`: if several groups match a parameter, the last one is used. The constructor throws bad_argument
/// for a pattern that matches none of the given parameters, and for a rate or a weight_decay that is negative
/// or not finite.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  /// Takes one step with learning rate `lr` over all parameters given to the constructor. It does not change
  /// the gradients. Throws bad_argument for a rate that is negative or not finite, and while values for
  /// evaluation, or averages (Ema), are in the place of the masters.
  void step(double lr);
  /// Forgets all gradients.
  void zero_gradients() noexcept;
  /// Begins to train a parameter that was frozen. Call it when the parameter is unfrozen, before the next
  /// step. Its state begins as that of a new optimizer, and its group is the one that the constructor would
  /// choose. Throws bad_argument if the optimizer trains the parameter already, or if it is still frozen.
  void add(Parameter& parameter);

  /// Calls see(path, name, tensor) for every tensor of the state, in the order of the parameters. It is for
  /// checkpoints: the caller may write values into the tensors. "step" is i64 of shape (1), and other tensors
  /// without a layout are f64. Both are on the host, and equal on all ranks. The other tensors are f32 and
  /// have the parameter's local shape and layout. Throws bad_argument while the values for evaluation are
  /// swapped in.
  using Visitor = std::function<void(const std::string& path, std::string_view name, const Tensor& tensor)>;
  void visit_state(const Visitor& see) const;
  std::span<Parameter* const> parameters() const noexcept { return parameters_; }
  /// A number that is equal on ranks whose optimizers are of one kind, with equal options and groups.
  std::uint64_t digest() const noexcept { return digest_; }

  /// Some optimizers train other values than those to evaluate and to export (ScheduleFreeAdamW). swap_in()
  /// writes the values for evaluation into the masters. swap_out() writes the trained values back, to the
  /// same bits. In between, the program must not write the masters. For other optimizers both do not change
  /// the masters. swap_in() throws bad_argument if they are already swapped in, or if averages (Ema) are in
  /// the place of the masters. swap_out() throws it if they are not swapped in.
  void swap_in();
  void swap_out();
  bool swapped() const noexcept { return swapped_; }

  /// As long as a Swapped exists, the values for evaluation are swapped in.
  class [[nodiscard]] Swapped {
   public:
    explicit Swapped(Optimizer& optimizer) : optimizer_(&optimizer) { optimizer.swap_in(); }
    ~Swapped();
    Swapped(const Swapped&) = delete;
    Swapped& operator=(const Swapped&) = delete;

   private:
    Optimizer* optimizer_;
  };

 protected:
  struct Named {
    std::string_view name;
    Tensor tensor;
  };
  /// The tensors that an optimizer keeps for a parameter.
  struct State {
    Tensor step;                 // i64 (1): steps taken
    std::vector<Named> tensors;  // f32, like the master
    std::vector<Named> numbers;  // f64, on the host
  };
  /// The names of `tensors`, and the names and counts of `numbers`, for one parameter.
  struct StateNames {
    std::vector<std::string_view> tensors;
    std::vector<std::pair<std::string_view, std::int64_t>> numbers = {};
  };
  /// A step of one parameter: its number, from 1, with the rate and the decay of its group.
  struct Item {
    Parameter* parameter;
    State* state;
    std::int64_t step;
    double lr, weight_decay;
  };
  /// `digest`: of the kind and the options. `weight_decay`: of parameters with Parameter::decays().
  Optimizer(Compute& compute, std::vector<Parameter*> parameters, std::vector<ParameterGroup> groups,
            std::uint64_t digest, double weight_decay);
  /// The constructor of each class calls it once. It makes the states.
  void begin(std::function<StateNames(const Parameter&)> names);
  Compute& compute() const noexcept { return *compute_; }
  State& state_of(std::size_t parameter) noexcept { return states_[parameter]; }

 private:
  virtual void update(const Item& item) = 0;
  /// All steps of one step(). Optimizers that treat several parameters together override it.
  virtual void update_all(std::span<const Item> items) {
    for (const Item& item : items) update(item);
  }
  virtual void exchange_in() {}
  virtual void exchange_out() {}
  void add_state(Parameter& parameter);
  void expect_trained_values(const char* call) const;
  struct Share {
    double rate, weight_decay;
  };
  Share share_of(const Parameter& parameter) const;

  Compute* compute_;
  std::vector<ParameterGroup> groups_;
  std::uint64_t digest_;
  double weight_decay_;
  std::function<StateNames(const Parameter&)> names_;
  std::vector<Parameter*> parameters_;
  std::vector<const Parameter*> frozen_;  // given to the constructor, but frozen at that time
  std::vector<State> states_;             // parallel to parameters_
  bool swapped_ = false;
};

/// p ← p − lr·wd·p, m ← b1·m + (1−b1)·g, v ← b2·v + (1−b2)·g², p ← p − lr·m̂/(√v̂ + eps), m̂ = m/(1−b1^t), v̂
/// = v/(1−b2^t). I. Loshchilov, F. Hutter, "Decoupled Weight Decay Regularization", 2019. State: "exp_avg",
/// "exp_avg_sq", "step".
class AdamW : public Optimizer {
 public:
  struct Options {
    double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;  ///< eps: above 0, also in f32
    double weight_decay = 0.1;                     ///< for parameters with Parameter::decays()
    /// Throws bad_argument, naming the option, if an option is out of range.
    void check() const;
  };
  AdamW(Compute& compute, std::vector<Parameter*> parameters, const Options& options,
        std::vector<ParameterGroup> groups = {});

 private:
  void update(const Item& item) override;
  Options options_;
};

/// v ← momentum·v + (g + wd·p), p ← p − lr·v. State: "momentum" if momentum is not 0, and "step".
class SGD : public Optimizer {
 public:
  struct Options {
    double momentum = 0, weight_decay = 0;
    void check() const;
  };
  SGD(Compute& compute, std::vector<Parameter*> parameters, const Options& options,
      std::vector<ParameterGroup> groups = {});

 private:
  void update(const Item& item) override;
  Options options_;
};

/// c = b1·m + (1−b1)·g, p ← p − lr·(sign(c) + wd·p), m ← b2·m + (1−b2)·g; the sign of 0 is 0. X. Chen et al.,
/// "Symbolic Discovery of Optimization Algorithms", 2023, who use a rate 3 to 10 times lower and a decay 3 to
/// 10 times higher than for AdamW. State: "exp_avg", "step".
class Lion : public Optimizer {
 public:
  struct Options {
    double beta1 = 0.9, beta2 = 0.99;
    double weight_decay = 0.1;  ///< for parameters with Parameter::decays()
    void check() const;
  };
  Lion(Compute& compute, std::vector<Parameter*> parameters, const Options& options,
       std::vector<ParameterGroup> groups = {});

 private:
  void update(const Item& item) override;
  Options options_;
};

/// AdamW without a schedule that must know the last step: A. Defazio et al., "The Road Less Scheduled", 2024.
/// The masters are y = (1−b1)·z + b1·x, where gradients are taken; x, the average of z, is evaluated:
///
///   v ← b2·v + (1−b2)·g²,  d = g/(√(v/(1−b2^t)) + eps) + wd·y,  c = r²/Σr² over the steps so far,
///   y ← (1−c)·y + c·z − lr·(1 − b1·(1−c))·d,  z ← z − lr·d
///
/// where r is the highest learning rate so far. Use a constant rate after a warm-up. Evaluate and export with
/// `Optimizer::Swapped`. It writes x into the masters, and needs memory for a copy of them meanwhile. State:
/// "z", "exp_avg_sq", "rates" (the sum of r² and r), "step".
class ScheduleFreeAdamW : public Optimizer {
 public:
  struct Options {
    double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;  ///< beta1 > 0, eps > 0
    double weight_decay = 0.1;                      ///< for parameters with Parameter::decays()
    void check() const;
  };
  ScheduleFreeAdamW(Compute& compute, std::vector<Parameter*> parameters, const Options& options,
                    std::vector<ParameterGroup> groups = {});

 private:
  void update(const Item& item) override;
  void exchange_in() override;
  void exchange_out() override;
  Options options_;
  std::vector<Tensor> kept_;  // the trained values, while those for evaluation are swapped in
};

}  // namespace weft
