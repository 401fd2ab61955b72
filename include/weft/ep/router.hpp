// The choice of experts for each token: scores, the best k of them, capacity, and losses that keep the load
// of experts even. Functions on views, and the module. On the host; one thread per rank.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "weft/base/view.hpp"
#include "weft/nn/linear.hpp"
#include "weft/nn/module.hpp"

namespace weft {

/// How the scores of a token are made from its logits.
enum class RouterScores : unsigned char { softmax, sigmoid };

/// The use of a number per expert that is added in the router.
enum class RouterBias : unsigned char {
  none,
  /// It is added to the scores where experts are chosen, and not to the weights of the chosen ones: a buffer
  /// that update_router_bias() moves (L. Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for
  /// Mixture-of-Experts", arXiv:2408.15664).
  selects,
  /// It is added to the logits, so it selects and weighs: a trained parameter, which update_router_bias()
  /// may move as well.
  weighs
};

/// Which assignments of tokens to an expert are dropped if the expert has too many. Weights of the other
/// assignments stay as they are: they are not normalised again.
enum class Capacity : unsigned char {
  none,  ///< no assignment is dropped
  /// An expert keeps the assignments with the largest weights of the global batch; of equal weights the
  /// first. Each rank then gets all choices of the data ranks.
  by_weight,
  /// An expert keeps the first assignments of the global batch, in the order (token, choice).
  by_position,
  /// For each choice k separately, an expert keeps the first assignments of this rank's tokens. The result
  /// depends on how the batch is cut over ranks. Models of KempnerForge are trained so.
  per_choice_and_rank
};

/// Over which tokens the auxiliary loss balances experts.
enum class Balance : unsigned char {
  micro_batch,  ///< all tokens of the micro-batch, over all ranks
  sequence,     ///< the tokens of each sample on its own; the loss is the mean over the samples of all ranks
  step          ///< shares of experts in all micro-batches of the step so far; scores of this micro-batch
};

struct RouterOptions {
  int top_k = 2;
  RouterScores scores = RouterScores::softmax;
  /// Whether the weights of a token are its scores divided by their sum over the chosen experts. If that sum
  /// is 0, the weights are 0.
  bool normalise = true;
  RouterBias bias = RouterBias::none;
  /// Standard deviation of normal numbers that are added to the logits in training.
  double noise = 0;
  Capacity capacity = Capacity::none;
  /// An expert keeps at most ceil(capacity_factor · tokens · top_k / experts) assignments, at least 1; for
  /// per_choice_and_rank, that many of each choice, with this rank's tokens.
  double capacity_factor = 1;
  Balance balance = Balance::micro_batch;
  /// The factors of the auxiliary loss, experts · Σ_i share_i · mean score_i (W. Fedus, B. Zoph, N. Shazeer,
  /// "Switch Transformers", 2021; shares of the chosen assignments, before capacity), and of the z-loss, the
  /// mean of (log-sum-exp of a token's logits, without bias)² (B. Zoph et al., "ST-MoE", 2022). Both are
  /// means over the global tokens; their gradients are added in the backward pass of the router.
  double aux_loss = 0, z_loss = 0;
};

/// Chooses the experts of each token. logits: (tokens, experts), bias: (experts) or an empty view; both f32.
/// experts: i32 (tokens, top_k), by falling score, equal scores by rising number; weights: f32 (tokens,
/// top_k). Throws bad_argument, naming the view, if a shape does not fit, if top_k is not 1 to experts, and
/// for a logit that is not finite: `route_tokens: the logits of token 3 are not finite`.
void route_tokens(const ConstTensorView& logits, const ConstTensorView& bias, const RouterOptions& options,
                  const TensorView& experts, const TensorView& weights);

/// Sums over tokens, as doubles: counts[i] of the assignments to expert i, scores[i] of the scores of expert
/// i, and z, of (log-sum-exp of the logits)². Adds to what they have.
struct RouterSums {
  std::vector<double> counts, scores;
  double z = 0;
};
void add_router_sums(const ConstTensorView& logits, const ConstTensorView& bias,
                     const ConstTensorView& experts, const RouterOptions& options, RouterSums& sums);

/// The terms of a router's losses in its backward pass.
struct RouterLossTerms {
  std::span<const double> shares{};  ///< share of each expert in the assignments; empty: no auxiliary loss
  double aux = 0;                    ///< factor of the auxiliary loss, divided by the tokens of its mean
  double z = 0;                      ///< factor of the z-loss, divided by the global number of tokens
};
/// dlogits = the gradient of the weights' use, and of the losses. experts and weights: the results of
/// route_tokens(); a negative number in experts is an assignment that was dropped, and its dweights do not
/// count. dweights: (tokens, top_k); dlogits: (tokens, experts); dbias: (experts), to which the gradient of a
/// bias that weighs is added, or an empty view.
void route_tokens_backward(const ConstTensorView& logits, const ConstTensorView& bias,
                           const ConstTensorView& experts, const ConstTensorView& weights,
                           const ConstTensorView& dweights, const RouterOptions& options,
                           const RouterLossTerms& losses, const TensorView& dlogits,
                           const TensorView& dbias = {});

/// The number of assignments that an expert keeps: max(1, ceil(factor · tokens · top_k / experts)).
std::int64_t expert_capacity(double factor, std::int64_t tokens, int top_k, std::int64_t experts);

/// The choices of a router in its last forward pass, over all data ranks. Losses are without their factors.
struct RouterReport {
  std::int64_t tokens = 0, assignments = 0, dropped = 0;
  std::vector<std::int64_t> counts;  ///< assignments of each expert, before capacity
  double aux_loss = 0, z_loss = 0;
  double dropped_share() const noexcept {
    return assignments == 0 ? 0 : static_cast<double>(dropped) / static_cast<double>(assignments);
  }
  /// The largest count divided by the mean count: 1 is an even load.
  double imbalance() const noexcept;
};

/// Chooses experts for tokens x: (…, dim). Outputs: experts, i32 (tokens, top_k), where ~e is an assignment
/// to expert e that was dropped; and weights, f32 (tokens, top_k), whose gradient is the input of backward.
/// tokens: this rank's, in row-major order.
///
/// x may be split in its first dimension only. The ranks along these axes share counts and losses: one
/// all-gather of 6 + 2 · experts numbers, in each forward pass, whatever is chosen. If a logit is not finite
/// on any rank, all of these ranks throw bad_argument: `"layers.0.mlp.router": the logits of token 17 on dp
/// rank 1 are not finite`. Losses and capacity are those of the global batch, so they do not depend on the
/// mesh.
///
/// If the module runs again for its backward (activation checkpointing), it keeps the choice of the first
/// run, communicates nothing, and counts nothing again.
///
/// Parameters: gate.weight (experts, dim); with RouterBias::weighs expert_bias (experts). Buffers: with
/// RouterBias::selects expert_bias; with weighs expert_share, the moving mean of update_router_bias().
class Router : public Module {
 public:
  /// Throws bad_argument unless 1 <= top_k <= experts, for factors that are negative or not finite, and for a
  /// capacity_factor without a capacity.
  Router(std::int64_t dim, std::int64_t experts, const RouterOptions& options, Init init = Normal{0.02});

  Linear gate;
  ParameterRef bias_parameter;  ///< of RouterBias::weighs
  ModuleBufferRef bias_buffer;  ///< of RouterBias::selects
  ModuleBufferRef share;        ///< of RouterBias::weighs
  std::int64_t experts() const noexcept { return experts_; }
  /// A bias that weighs has no rule, nor has a capacity that depends on how the batch is cut.
  bool has_exact_rule() const override {
    return typeid(*this) == typeid(Router) && bias_parameter == nullptr &&
           options_.capacity != Capacity::per_choice_and_rank;
  }
  const RouterOptions& options() const noexcept { return options_; }

  /// A factor of the gradients of both losses: 1 / micro-batches of a step, times the factor of a loss that
  /// was scaled. Default: 1.
  void set_loss_scale(double scale) noexcept { loss_scale_ = scale; }
  const RouterReport& report() const noexcept { return report_; }
  /// The assignments of each expert since update_router_bias(), in training, over all data ranks.
  std::span<const std::int64_t> counts_since_update() const noexcept { return counts_; }
  /// Forgets them: after a step that was not taken.
  void forget_counts() noexcept { counts_.clear(); }

 private:
  friend void update_router_bias(Router& router, double rate, double mean_rate);
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dweights, Frame& frame) override;
  Tensor bias_values() const;
  Tensors choose(const Tensor& x, const Tensor& logits, Frame& frame);
  std::int64_t experts_;
  RouterOptions options_;
  double loss_scale_ = 1;
  RouterReport report_;
  std::vector<std::int64_t> counts_;  // since update_router_bias()
  std::vector<double> step_counts_;   // of the micro-batches of this step so far
};

/// Moves the bias of a router by the counts since the last call, and forgets them. Call it once a step, on
/// all ranks. Counts are those of all ranks, so all ranks move alike. Does nothing without a bias, and if
/// nothing was counted.
///   selects: bias_i += rate · sign(mean count − count_i)
///   weighs:  share_i += mean_rate · (count_i / all counts − share_i);
///            bias_i += rate · (1 / experts − share_i)
void update_router_bias(Router& router, double rate = 0.001, double mean_rate = 0.01);
/// The same for every Router of a model.
void update_router_biases(Module& model, double rate = 0.001, double mean_rate = 0.01);
/// Router::forget_counts() of each router in the model.
void forget_router_counts(Module& model);

}  // namespace weft
