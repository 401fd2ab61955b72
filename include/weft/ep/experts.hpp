// The experts of a layer: feed-forward networks, whose weights lie in one tensor for each matrix. Functions
// on views, and the module. On the host; one thread per rank.
#pragma once

#include <cstdint>
#include <span>

#include "weft/base/view.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/module.hpp"

namespace weft {

/// swiglu: y = down(silu(gate(x)) · up(x)) (N. Shazeer, "GLU Variants Improve Transformer", 2020). The
/// others: y = down(f(up(x))), without a gate.
enum class ExpertKind : unsigned char { swiglu, silu, gelu, relu };

/// The weights of several experts, one after the other; f32, or all bf16.
struct ExpertWeights {
  ConstTensorView gate{};  ///< (experts, hidden, dim); empty unless the kind is swiglu
  ConstTensorView up{};    ///< (experts, hidden, dim)
  ConstTensorView down{};  ///< (experts, dim, hidden)
};
/// The forward pass keeps these for the backward pass; all have the dtype of x.
struct ExpertActivations {
  TensorView gate{};    ///< (rows, hidden); empty unless the kind is swiglu
  TensorView up{};      ///< (rows, hidden)
  TensorView hidden{};  ///< (rows, hidden)
};
/// Exact mode (docs/exact.md): `hidden_blocks` of the 8 blocks of hidden features are on this rank, 1, 2, 4
/// or 8, and sums over hidden features are the balanced binary tree over them. y and dx are then
/// contributions, which the ranks of a tensor axis add in canonical order. 0: not exact. f32 only.
struct ExactExperts {
  int hidden_blocks = 0;
  /// The part of dx through gate, (rows, dim): a sum of its own; dx has the part through up. Empty unless the
  /// kind is swiglu.
  TensorView dx_gate{};
};
/// f32, of the shapes of the weights. An empty view: that gradient is not wanted.
struct ExpertGradients {
  TensorView gate{}, up{}, down{};
  /// Whether each of them is added to what is there; otherwise it is overwritten.
  bool add_gate = false, add_up = false, add_down = false;
  /// In exact mode: the rows of expert i are in `blocks` blocks, 1, 2, 4 or 8, and block j of them are rows
  /// block_offsets[i · (blocks + 1) + j] to the next; a gradient is the balanced binary tree over the blocks.
  std::span<const std::int64_t> block_offsets{};
  int blocks = 0;
};

/// y = the experts of x. x, y: (rows, dim), f32, or bf16 with weights in bf16; the rows of expert i are
/// offsets[i] to offsets[i + 1]. One product for each expert and matrix, of just its rows: nothing is padded,
/// and an expert without rows costs nothing. Sums are in f32. Throws bad_argument, naming the view, if
/// a shape or dtype does not fit.
void experts_forward(kernels::KernelContext& ctx, ExpertKind kind, const ConstTensorView& x,
                     std::span<const std::int64_t> offsets, const ExpertWeights& weights,
                     const ExpertActivations& kept, const TensorView& y, const ExactExperts& exact = {});
/// The first half of the backward pass: dx from dy. x and kept: of the forward pass; dx, dy: (rows, dim), of
/// its dtype. Afterwards kept.gate and kept.up are their gradients, which the second half needs.
void experts_backward(kernels::KernelContext& ctx, ExpertKind kind, const ConstTensorView& dy,
                      const ConstTensorView& x, std::span<const std::int64_t> offsets,
                      const ExpertWeights& weights, const ExpertActivations& kept, const TensorView& dx,
                      const ExactExperts& exact = {});
/// The second half: the gradients of the weights, at any time after the first half. dy, x and kept: as that
/// had them, and left them. of_weights: the dtype of the weights, in which products take their operands.
void experts_weight_gradients(kernels::KernelContext& ctx, ExpertKind kind, const ConstTensorView& dy,
                              const ConstTensorView& x, std::span<const std::int64_t> offsets,
                              DType of_weights, const ExpertActivations& kept,
                              const ExpertGradients& gradients);

/// The experts of one layer, as a module. Inputs: rows (rows, dim), and offsets, i64 (experts of this rank +
/// 1); in exact mode also ExpertGradients::block_offsets, i64 (experts of this rank, blocks + 1). Output:
/// (rows, dim). Parameters: gate_proj, up_proj (experts, hidden, dim), down_proj (experts, dim,
/// hidden).
///
/// Over an axis that splits the first dimension (apply_expert_parallel), each rank has the experts
/// [experts·r/n …), the first ones one more if they are uneven. Over a tensor axis that splits `hidden`,
/// outputs and the gradients of rows are contributions to a sum, which MoE adds up; in exact mode this module
/// adds them, one all-reduce of the rows forward and one backward. Rows are plain tensors:
/// how many a rank has depends on the routing. The gradient of a weight is a contribution on the axes that
/// set_tokens_layout() says.
class Experts : public Module {
 public:
  Experts(std::int64_t experts, std::int64_t dim, std::int64_t hidden, ExpertKind kind = ExpertKind::swiglu,
          Init init = Normal{0.02}, Init down_init = Normal{0.02});

  ParameterRef gate_proj, up_proj, down_proj;  ///< gate_proj: null unless the kind is swiglu
  ExpertKind kind() const noexcept { return kind_; }
  std::int64_t experts() const noexcept { return up_proj->global_shape()[0]; }
  std::int64_t hidden() const noexcept { return up_proj->global_shape()[1]; }
  std::int64_t dim() const noexcept { return up_proj->global_shape()[2]; }

  /// The layout of the tokens that the rows are from: gradients of weights are Partial on the axes that split
  /// it, except those that split the experts. MoE calls it before each pass.
  void set_tokens_layout(LayoutRef x) { tokens_layout_ = std::move(x); }
  /// Where outputs and gradients of rows lie: in shared memory other ranks read them in place. MoE calls it
  /// before each pass.
  void set_rows_memory(Memory memory) { rows_memory_ = memory; }
  ShardRule shard_rule(Split split) const override;
  bool has_exact_rule() const override { return typeid(*this) == typeid(Experts); }

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
  LayoutRef gradient_layout(const Parameter& p) const;
  ExpertWeights weights() const;
  DeviceMesh hidden_axes() const;
  ExpertKind kind_;
  LayoutRef tokens_layout_;
  Memory rows_memory_ = Memory::local;
};

}  // namespace weft
