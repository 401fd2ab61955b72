// What a forward pass leaves for its backward pass. A Frame belongs to one thread at a time; several Frames
// may be in flight over one Compute.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "weft/base/tensor.hpp"
#include "weft/host/compute.hpp"

namespace weft {

namespace kernels {
class KernelContext;
}
class Module;
class Parameter;

using Tensors = std::vector<Tensor>;

/// The kernels of the device of `compute`, with what they keep for one rank: its threads, its stream, scratch memory.
/// Made by the first call, which throws as KernelContext does.
kernels::KernelContext& kernels_of(Compute& compute);

/// Which pass of a training it is. Random numbers of a pass depend on it, and so does what only training does.
struct Pass {
  std::uint64_t seed = 0;
  std::int64_t step = -1;  ///< below 0: not given; then Dropout throws
  /// Number within the step, from 0 on. All micro-batches of a step have the same number of samples over all ranks, so
  /// that sample s of this one is sample micro_batch * samples + s of the step.
  std::int64_t micro_batch = 0;
  bool training = true;
};

/// What backward needs: each module's forward pushes, its backward pops, in exactly the reverse order.
/// Entries carry the module that pushed them, so a backward that does not mirror its forward is an error that
/// names both paths. One Frame per micro-batch; a Frame is empty again after its backward and may be reused.
class Frame {
 public:
  explicit Frame(Compute& compute, const Pass& pass = {}) : compute_(&compute), pass_(pass) {}
  /// A Frame that keeps nothing and does not train: for forward passes that no backward follows.
  static Frame inference(Compute& compute) {
    Frame f(compute);
    f.pass_.training = false;
    f.keeps_ = false;
    return f;
  }
  Frame(Frame&&) noexcept = default;
  Frame& operator=(Frame&&) noexcept = default;

  Compute& compute() const noexcept { return *compute_; }
  kernels::KernelContext& kernels() const noexcept { return kernels_of(*compute_); }
  bool keeps() const noexcept { return keeps_; }
  const Pass& pass() const noexcept { return pass_; }
  /// Begins the next pass. Throws bad_argument before the backward of the last pass is done, which would then draw
  /// other random numbers than its forward did; and for a training pass on an inference Frame.
  void begin(const Pass& pass);
  bool empty() const noexcept { return entries_.empty(); }

  /// Keeps `tensors` for the backward of `of`; nothing on an inference Frame.
  void push(const Module& of, Tensors tensors);
  /// What `of` pushed last. Throws bad_argument where the newest entry is another module's (`frame: backward
  /// of "layers.1.mlp", but the newest entry is of "norm"…`), where no entry is left, and on an inference
  /// Frame.
  Tensors pop(const Module& of);
  /// Forgets everything: after a forward pass that threw, or that no backward will follow.
  void clear() noexcept {
    entries_.clear();
    uses_.clear();
  }

  /// Module::forward counts each use of a parameter, Module::backward drops it. drop_use: true where it was
  /// the last one on this Frame, so that the parameter's gradient of this pass is final.
  void count_use(const Parameter& parameter);
  bool drop_use(const Parameter& parameter);

  /// Marks a backward that may contain others: one that is made while another lives is not the outermost.
  class Nested {
   public:
    explicit Nested(Frame& frame) noexcept : frame_(frame), outermost_(frame.depth_++ == 0) {}
    Nested(const Nested&) = delete;
    Nested& operator=(const Nested&) = delete;
    ~Nested() { --frame_.depth_; }
    bool outermost() const noexcept { return outermost_; }

   private:
    Frame& frame_;
    bool outermost_;
  };

 private:
  struct Entry {
    const Module* of;
    Tensors tensors;
  };
  Compute* compute_;
  Pass pass_;
  bool keeps_ = true;
  std::vector<Entry> entries_;
  std::unordered_map<const Parameter*, int> uses_;  // in forward, not yet in backward
  int depth_ = 0;                                   // of nested calls of backward
};

}  // namespace weft
