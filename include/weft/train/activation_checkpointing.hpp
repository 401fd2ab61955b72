// Activation checkpointing: modules that keep only their inputs in a forward pass, and run again in backward.
// Used by the rank (thread) that owns the model.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "weft/nn/module.hpp"

namespace weft {

enum class AcMode : unsigned char {
  none,      ///< forward keeps all that backward needs
  full,      ///< each block, or every n-th block, runs again
  selective  ///< only some modules inside the blocks run again: the attentions, or those that are named
};

/// `none`, `full` or `selective`; throws bad_argument for any other text.
AcMode ac_mode_of(std::string_view text);
std::string_view name(AcMode mode) noexcept;

/// Which modules run again. A value.
struct AcPolicy {
  AcMode mode = AcMode::none;
  /// Patterns of paths below the root, as in a Plan. full: the blocks ("layers.*"). selective: the modules;
  /// if empty, every attention of the tree (Attention, CrossAttention, WindowAttention).
  std::vector<std::string> modules = {};
  /// full: the first of each so many blocks runs again, in the order of the tree; at least 1, all of them.
  int every = 1;
  /// Compares the hashes of the outputs of all modules inside with those of the first run, and names the
  /// first module that differs. Slow: for finding a fault.
  bool compare_outputs = false;
  /// Checks that the second run changes no buffer and no parameter. By default in debug builds.
#ifdef NDEBUG
  bool check_state = false;
#else
  bool check_state = true;
#endif
};

/// Makes passes of some modules keep only their inputs. Their backward runs forward again, on a scratch
/// Frame, and then backward: the same numbers, bit for bit, in less memory and more time
/// (Module::set_recompute).
///
/// The second run draws the random numbers of the first (dropout), and repeats each collective of the forward
/// pass of these modules once, on all ranks in the same order: the boundaries of tensor and sequence
/// parallel, halos, but no gathers of fully_shard() where a block is what runs again, and no power iteration
/// of a spectral norm. A module changes its state (statistics, counts) once, in Frame::once(). Hooks of the
/// modules inside run again, too; Frame::recomputing() tells a hook so.
///
/// Returns the paths of the modules that run again, in the order of the tree. Call it after parallelize() and
/// before fully_shard() or GradientReducer. No communication. Throws bad_argument before anything changes:
/// for a pattern that matches no module, a selection without any module, `every` below 1, full without
/// patterns, a selected module inside another, or a module of `root` that runs again already. If a module
/// around `root` runs again, the first backward throws bad_argument that names the module inside.
std::vector<std::string> apply_ac(Module& root, const AcPolicy& policy);

/// Numbers of bytes on this rank.
struct ActivationBytes {
  std::int64_t kept = 0;  ///< on the Frame, between forward and backward
  /// The largest number in backward: what is still kept at that point, the activations of the module that
  /// runs again, and the gradients on their way between modules.
  std::int64_t peak = 0;
};

/// The tensors that each module of a model keeps for its backward, found by one forward and one backward pass
/// without activation checkpointing. Bytes grow with the rows of a batch: where a whole batch does not fit,
/// profile one row.
class ActivationProfile {
 public:
  /// Runs root.forward(x, frame), and backward with the outputs in the place of their gradients; then drops
  /// the gradients and restores the buffers. Collective like the passes. For a model before apply_ac() and
  /// without data parallel: throws bad_argument if a module runs again, or if a parameter has a gradient.
  ActivationProfile(Module& root, Inputs x, Frame& frame);
  /// The bytes of passes like those after apply_ac(root, policy), without the gradient that backward gets,
  /// gradients of parameters, tensors that layers use only inside themselves, and results of Frame::once().
  /// Throws the errors of apply_ac().
  ActivationBytes predict(const AcPolicy& policy) const;

 private:
  using Blocks = std::map<const void*, std::int64_t>;  // bytes of memory by its address
  struct Run {                                         // of a module, with those inside it
    const Module* module;
    Blocks inputs;
    std::size_t first, last;  // the entries that were pushed meanwhile
  };
  struct Moment {  // of the backward pass
    std::size_t entries;
    Blocks gradients;
  };
  static void add(Blocks& to, Inputs tensors);
  void record_forward(Module& root, Inputs x, Frame& frame, Tensors& y);
  void record_backward(Module& root, const Tensors& dy, Frame& frame);
  Module* root_;
  std::vector<Blocks> entries_;
  std::vector<Run> runs_;
  std::vector<Moment> moments_;
  std::vector<Tensors> alive_;  // while the passes run: an address then means one tensor
};

/// The bytes of all tensors that a Frame holds; memory that several of them share counts once.
std::int64_t kept_bytes(const Frame& frame);

}  // namespace weft
