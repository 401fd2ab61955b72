// What a forward pass leaves for its backward pass. A Frame belongs to one thread at a time; several Frames
// may be in flight over one Compute.
#pragma once

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

/// What the kernels keep for one rank, with its threads and scratch memory; made by the first call.
kernels::KernelContext& kernels_of(Compute& compute);

/// What backward needs: each module's forward pushes, its backward pops, in exactly the reverse order.
/// Entries carry the module that pushed them, so a backward that does not mirror its forward is an error that
/// names both paths. One Frame per micro-batch; a Frame is empty again after its backward and may be reused.
class Frame {
 public:
  explicit Frame(Compute& compute) : compute_(&compute) {}
  /// A Frame that keeps nothing: for forward passes that no backward follows.
  static Frame inference(Compute& compute) {
    Frame f(compute);
    f.keeps_ = false;
    return f;
  }
  Frame(Frame&&) noexcept = default;
  Frame& operator=(Frame&&) noexcept = default;

  Compute& compute() const noexcept { return *compute_; }
  kernels::KernelContext& kernels() const noexcept { return kernels_of(*compute_); }
  bool keeps() const noexcept { return keeps_; }
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

  /// One backward inside another: while it lives, those made after it are not the outermost.
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
  bool keeps_ = true;
  std::vector<Entry> entries_;
  std::unordered_map<const Parameter*, int> uses_;  // in forward, not yet in backward
  int depth_ = 0;                                   // of calls of backward in each other
};

}  // namespace weft
