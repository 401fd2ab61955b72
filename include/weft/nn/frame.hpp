// What one rank computes with (Compute), and what a forward pass leaves for its backward pass (Frame). Each
// belongs to one thread at a time; several Frames may be in flight over one Compute.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "weft/base/tensor.hpp"
#include "weft/host/context.hpp"

namespace weft {

namespace kernels {
class KernelContext;
}
class Module;

using Tensors = std::vector<Tensor>;

/// The means of one rank: its memory, and its kernels with their threads and scratch space. Threads are set,
/// not guessed. Must outlive every Frame made with it; the Context must outlive it.
class Compute {
 public:
  /// Throws bad_argument where `threads` < 1.
  explicit Compute(Context& context, int threads = 1);
  ~Compute();
  Compute(const Compute&) = delete;
  Compute& operator=(const Compute&) = delete;

  Context& context() const noexcept { return *context_; }
  kernels::KernelContext& kernels() const noexcept { return *kernels_; }
  int threads() const noexcept { return threads_; }

  /// An uninitialised tensor in this rank's memory.
  Tensor make(const Shape& shape, DType dtype = DType::f32, Memory memory = Memory::local) const {
    return Tensor(*context_, shape, dtype, memory);
  }

 private:
  Context* context_;
  int threads_;
  std::unique_ptr<kernels::KernelContext> kernels_;
};

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
  kernels::KernelContext& kernels() const noexcept { return compute_->kernels(); }
  bool keeps() const noexcept { return keeps_; }
  bool empty() const noexcept { return entries_.empty(); }

  /// Keeps `tensors` for the backward of `of`; nothing on an inference Frame.
  void push(const Module& of, Tensors tensors);
  /// What `of` pushed last. Throws bad_argument where the newest entry is another module's ("frame: backward
  /// of "layers.1.mlp" reached, but the newest entry is of "norm"…"), where none is left, or on an inference
  /// Frame.
  Tensors pop(const Module& of);
  /// Forgets everything: after a forward pass that threw, or that no backward will follow.
  void clear() noexcept { entries_.clear(); }

 private:
  struct Entry {
    const Module* of;
    Tensors tensors;
  };
  Compute* compute_;
  bool keeps_ = true;
  std::vector<Entry> entries_;
};

}  // namespace weft
