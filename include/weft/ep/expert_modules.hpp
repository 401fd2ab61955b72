// Experts that are modules of the program. On the host; used by the one rank (thread) that owns the model.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "weft/nn/module.hpp"

namespace weft {

/// Makes one expert: a module with one input and one output, both (rows, dim), of one dtype. Each call gives
/// an equal module.
using MakeExpert = std::function<std::unique_ptr<Module>()>;

/// The experts of one layer, each a module of the program. Inputs: rows (rows, dim), and offsets, i64
/// (experts of this rank + 1). Output: (rows, dim). Each expert is called with its rows, a plain contiguous
/// tensor; an expert without rows is not called, and its gradients are 0.
///
/// A parameter of the module is one parameter here, for all experts: `up_proj.weight` (hidden, dim) is
/// `experts.up_proj.weight` (experts, hidden, dim), expert j at index j, on every mesh. So checkpoints,
/// uneven numbers of experts, reducers, norms and sharded data parallel are those of Experts. Initial values
/// are those of the module's Init, by global index.
///
/// Experts are on the host and are not divided over a tensor axis; exact mode, float8 layers and hooks do not
/// reach inside.
class ExpertModules : public Module {
 public:
  /// Throws bad_argument for what would not be equal on every mesh, naming it: buffers, tied weights and
  /// Dropout, whose numbers depend on the rows of a rank; and if there is no function or no module.
  ExpertModules(std::int64_t experts, MakeExpert make);
  ~ExpertModules() override;

  std::int64_t experts() const noexcept { return experts_; }
  /// See Experts.
  void set_tokens_layout(LayoutRef x) { tokens_layout_ = std::move(x); }
  void set_rows_memory(Memory memory) { rows_memory_ = memory; }
  ShardRule shard_rule(Split split) const override;

 private:
  struct Node;
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
  Module& expert(std::size_t i, Compute& compute);
  void place_weights(std::size_t i, Module& expert) const;
  std::int64_t experts_;
  MakeExpert make_;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::vector<Parameter*> stacked_;  // in the order of the module's parameters()
  std::vector<std::unique_ptr<Module>>
      of_rank_{};  // the experts of this rank; their memory is that of stacked_
  LayoutRef tokens_layout_;
  Memory rows_memory_ = Memory::local;
};

}  // namespace weft
