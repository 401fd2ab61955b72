// The tensors that a forward pass leaves for its backward pass. A Frame belongs to one thread at a time.
// Several Frames may be in flight over one Compute.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "weft/base/exact.hpp"
#include "weft/base/random.hpp"
#include "weft/base/tensor.hpp"
#include "weft/host/compute.hpp"

namespace weft {

namespace kernels {
class KernelContext;
}
class Module;
class PackedDocuments;
class Parameter;

using Tensors = std::vector<Tensor>;

/// The kernels of the device of `compute`, with the state that they keep for one rank: threads, stream,
/// scratch memory. The first call makes the KernelContext, and throws its errors.
kernels::KernelContext& kernels_of(Compute& compute);

/// Identifies a pass of a training run. It decides the random numbers of the pass, and whether the pass
/// performs operations that belong only to training.
struct Pass {
  std::uint64_t seed = 0;
  std::int64_t step = -1;  ///< below 0: not given; Dropout then throws
  /// The number of the micro-batch within the step, from 0 on.
  std::int64_t micro_batch = 0;
  /// The number of samples of the earlier micro-batches of this step, over all ranks. Below 0: each earlier
  /// micro-batch has as many samples as this one. Set first_sample if micro-batches have unequal sizes.
  /// Otherwise Dropout refuses such micro-batches.
  std::int64_t first_sample = -1;
  bool training = true;
  /// The way in which layers add sums that parallelism may split (docs/exact.md).
  Exact exact = Exact::no;
  /// The documents inside of which Attention stays (weft/nn/packed_documents.hpp); null: sequences are whole.
  /// A Transformer whose second input they are sets them itself.
  std::shared_ptr<const PackedDocuments> documents = nullptr;
};

/// The random numbers of one pass under one path. Frame::rng() makes it. A value; any thread.
///
/// The random number of an element depends on its index in the global tensor of this micro-batch, whose first
/// dimension is the samples. The numbering of samples continues over the micro-batches of a step. So ranks
/// that have the same element (along tensor-parallel and other axes that do not cut samples) have the same
/// number, and ranks with other samples have other numbers. A sample has the same numbers on every mesh, and
/// however a batch is cut. If the micro-batches of a step have unequal numbers of samples, this needs
/// Pass::first_sample. All tensors of random numbers under one path in one step must have the same shape,
/// except for the number of samples. Use another path for another shape.
class PassRandom {
 public:
  /// Fill every element of `out`, which must be f32 on the host. uniform(): numbers on [0, 1); normal(): the
  /// standard normal distribution. `out` is plain or has a layout. If it is Partial, they throw layout.
  void uniform(const Tensor& out) const;
  void normal(const Tensor& out) const;

  /// For kernels that draw random numbers themselves: the stream of all numbers, and the position in the
  /// stream of the number for the first element of a global tensor of this shape.
  const RandomStream& stream() const noexcept { return stream_; }
  std::uint64_t first(const Shape& whole) const noexcept {
    const auto count = static_cast<std::uint64_t>(whole.count());
    if (first_sample_ < 0) return static_cast<std::uint64_t>(micro_batch_) * count;
    const std::int64_t samples = whole.rank() == 0 ? 1 : whole[0];
    return samples == 0
               ? 0
               : static_cast<std::uint64_t>(first_sample_) * (count / static_cast<std::uint64_t>(samples));
  }

 private:
  friend class Frame;
  PassRandom(RandomStream stream, const Pass& pass)
      : stream_(stream), micro_batch_(pass.micro_batch), first_sample_(pass.first_sample) {}
  RandomStream stream_;
  std::int64_t micro_batch_, first_sample_;
};

class Frame;

/// The gradients of weights that a backward pass has left over. Module::backward(dy, frame, left_over)
/// computes dx, with which the previous rank can continue, and run() computes dw. A pipeline's schedule fills
/// its gaps with the latter (P. Qi, X. Wan, G. Huang, M. Lin, "Zero Bubble Pipeline Parallelism", 2024, which
/// calls the halves B and W).
///
/// One thread at a time uses a LeftOver. A LeftOver keeps the activations and gradients that its deferred
/// work reads. Modules and their Compute must exist longer than it. Weights must not change before run(), and
/// no tensor that was passed to forward or to backward may be written before run(). With a spectral norm
/// whose weight is cut, run() communicates. All ranks must call it, in the same order among their calls, and
/// all of them or none may clear().
class LeftOver {
 public:
  LeftOver() = default;
  LeftOver(LeftOver&&) noexcept = default;
  LeftOver& operator=(LeftOver&&) noexcept = default;

  bool empty() const noexcept { return work_.empty(); }
  std::size_t size() const noexcept { return work_.size(); }
  /// Does the work, in the order in which the backward pass left it. Gradients have the bits of a
  /// backward pass that leaves nothing over. A parameter's listeners are called when its gradient is
  /// final. If a part of the work throws, the other parts are dropped. If several LeftOvers have work of
  /// one weight, its gradients are added in the order of the calls. If a layer that does not call
  /// Frame::later() uses the weight, too, its gradient is added before the work. So the sum is rounded in
  /// another order.
  void run();
  /// Drops the work. Parameters keep their gradients.
  void clear() noexcept { drop_from(0); }

 private:
  friend class Frame;
  struct Part {
    Compute* compute;
    Pass pass;
    std::function<void(Frame&)> work;
  };
  // Parts are numbered in the order in which they were added, from 0 on. Parts before gone_ are gone.
  std::size_t end() const noexcept { return gone_ + work_.size(); }
  void drop_from(std::size_t number) noexcept {
    const std::size_t place = std::max(number, gone_) - gone_;
    if (place < work_.size()) work_.erase(work_.begin() + static_cast<std::ptrdiff_t>(place), work_.end());
  }
  std::vector<Part> work_;
  std::size_t gone_ = 0;
};

/// The tensors for backward. Each module's forward pushes tensors, and its backward pops them, in exactly the
/// reverse order. Entries carry the module that pushed them. If a backward does not mirror its forward, it
/// throws an error that names both paths. Each micro-batch needs its own Frame. A Frame is empty again after
/// its backward. It may then be reused.
class Frame {
  // The data that the first run of a pass leaves for the second run: the result of once(), or the hash of a
  // module's outputs.
  struct Result {
    std::string path;
    Tensors tensors;
    std::uint64_t hash = 0;
    bool outputs = false;
  };

 public:
  explicit Frame(Compute& compute, const Pass& pass = {}) : compute_(&compute), pass_(pass) {}
  /// A Frame that keeps nothing and does not train. It is for forward passes that no backward follows.
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
  /// Whether this is a forward pass that runs again for its backward (activation checkpointing). The first
  /// run has changed all state, and this run must not change it again. See once().
  bool recomputing() const noexcept { return recomputing_; }
  /// For modules and hooks that change state in forward, such as the vectors of a spectral norm, running
  /// statistics or counts. Calls `work` once in a pass and returns its tensors. If the module runs again for
  /// its backward, once() does not call `work`, but returns the tensors of the first run, which the Frame has
  /// kept. `path` identifies the caller. Throws mismatch if the second run requests other results, or in
  /// another order, than the first.
  Tensors once(std::string_view path, const std::function<Tensors()>& work);
  const Pass& pass() const noexcept { return pass_; }
  /// The documents inside of which Attention stays, now and in the backward of the modules that run now. They
  /// were an input of the model, or are those of Pass::documents. Null: sequences are whole.
  const std::shared_ptr<const PackedDocuments>& documents() const noexcept {
    return documents_ != nullptr ? documents_ : pass_.documents;
  }
  void set_documents(std::shared_ptr<const PackedDocuments> documents) noexcept {
    documents_ = std::move(documents);
  }
  bool exact() const noexcept { return pass_.exact == Exact::yes; }
  /// Begins the next pass. Throws bad_argument if the backward of the last pass is not done yet, because that
  /// backward would draw other random numbers than its forward. Also throws bad_argument for a training pass
  /// on an inference Frame.
  void begin(const Pass& pass);
  /// Random numbers that depend only on seed, step and `path` (usually the path() of a module). Backward gets
  /// the same numbers again. Throws bad_argument if the pass has no step, because every step would draw the
  /// same numbers: `"drop": random numbers in step -1, micro-batch 0; expected 0 or more of both:
  /// Frame(compute, {.seed = …, .step = …}) says which pass it is`.
  PassRandom rng(std::string_view path) const;
  bool empty() const noexcept { return entries_.empty(); }
  /// Calls `see` for each entry, the oldest first, with the module that pushed it. The inputs of a module
  /// that runs again, and what once() kept for it, are an entry, too.
  void visit_kept(const std::function<void(const Module&, const Tensors&)>& see) const;

  /// Keeps `tensors` for the backward of `of`. Does nothing on an inference Frame.
  void push(const Module& of, Tensors tensors);
  /// The tensors that `of` pushed last. Throws bad_argument if the newest entry is another module's
  /// (`frame: backward of "layers.1.mlp", but the newest entry is of "norm"…`), if no entry is left, and on
  /// an inference Frame.
  Tensors pop(const Module& of);
  /// Drops all entries. Call it after a forward pass that threw, or that will have no backward.
  void clear() noexcept {
    entries_.clear();
    uses_.clear();
  }

  /// Module::forward calls count_use() for each use of a parameter, and Module::backward calls drop_use().
  /// drop_use() returns true if this was the last use on this Frame, so that the parameter's gradient of this
  /// pass is final.
  void count_use(const Parameter& parameter);
  bool drop_use(const Parameter& parameter);

  /// For layers. Does `work(frame)`, which computes gradients of parameters and which dx does not need. Or
  /// leaves it over, if the pass has a LeftOver. `work` holds all data that it needs: the module, and tensors
  /// by value. The Frame that `work` gets has the Pass of this one. The do_backward of a layer must not write
  /// to its dy, since the work of the next layer may still read it.
  template <class Work>
  void later(Work work) {
    if (left_over_ == nullptr) return work(*this);
    left_over_->work_.push_back({compute_, pass_, std::move(work)});
  }
  /// Leaves work to `left_over` for as long as it exists. If an exception ends it, the work that was left
  /// meanwhile is dropped, since its pass failed.
  class Leaving {
   public:
    Leaving(Frame& frame, LeftOver& left_over) noexcept
        : frame_(frame), left_over_(left_over), before_(std::exchange(frame.left_over_, &left_over)) {}
    Leaving(const Leaving&) = delete;
    Leaving& operator=(const Leaving&) = delete;
    ~Leaving() {
      frame_.left_over_ = before_;
      if (std::uncaught_exceptions() > exceptions_) left_over_.drop_from(first_);
    }

   private:
    Frame& frame_;
    LeftOver& left_over_;
    LeftOver* before_;
    const std::size_t first_ = left_over_.end();
    const int exceptions_ = std::uncaught_exceptions();
  };
  /// A forward pass of `of` that keeps its inputs `x` and the results of once(), and nothing else. keep()
  /// pushes them when the pass is done. For Module::forward.
  class Checkpoint {
   public:
    Checkpoint(Frame& frame, const Module& of, Tensors x, bool compares);
    Checkpoint(const Checkpoint&) = delete;
    Checkpoint& operator=(const Checkpoint&) = delete;
    ~Checkpoint();
    void keep();

   private:
    friend class Frame;
    Frame& frame_;
    const Module& of_;
    Checkpoint* before_;
    Tensors x_;
    bool compares_;
    std::vector<Result> results_;
  };
  /// Whether the newest entry is a Checkpoint of `of`.
  bool has_checkpoint(const Module& of) const noexcept {
    return !entries_.empty() && entries_.back().of == &of && entries_.back().checkpoint;
  }
  /// Pops the newest entry, a Checkpoint. `x` gets the inputs. Returns the scratch Frame on which the module
  /// runs again, forward and backward, for this backward pass. This Frame must exist longer than it.
  Frame pop_checkpoint(Tensors& x);
  /// States that the forward pass on such a Frame is over. Throws mismatch if it used too few results.
  void end_recomputing();
  /// Records, or compares, the hash of a module's outputs, as a Checkpoint says. Throws mismatch if they
  /// differ from those of the first run.
  void note_outputs(const Module& of, const Tensors& y);

  /// Does all work that is left over so far, also that of earlier passes. So a weight that several modules
  /// use is announced only when no work of it is left, and its sums have their order.
  void run_left_over() {
    if (left_over_ != nullptr) left_over_->run();
  }

  /// Marks a backward that may contain other backwards. A mark that is made while another mark exists is not
  /// the outermost mark.
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
    bool checkpoint = false;  // `tensors` are the inputs of `of`, which runs again
    bool compares = false;
    std::vector<Result> results{};
    std::shared_ptr<const PackedDocuments> documents{};  // that were set then; its backward needs them
  };
  const Result& next_result(std::string_view path, bool outputs);
  Compute* compute_;
  Pass pass_;
  bool keeps_ = true;
  std::shared_ptr<const PackedDocuments> documents_;
  std::vector<Entry> entries_;
  Checkpoint* checkpoint_ = nullptr;  // the innermost one that is in progress
  // of a scratch Frame
  Frame* outer_ = nullptr;  // the Frame that counts the uses of parameters
  bool recomputing_ = false, compares_ = false;
  std::vector<Result> results_;  // of the first run
  std::size_t used_results_ = 0;
  std::unordered_map<const Parameter*, int> uses_;  // uses in forward that backward has not handled yet
  int depth_ = 0;                                   // the depth of nested calls of backward
  LeftOver* left_over_ = nullptr;                   // null: nothing is left over
};

}  // namespace weft
