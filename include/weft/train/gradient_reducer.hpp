// Gradients of a model's replicated parameters, reduced over the ranks that saw different data while backward
// goes on. Used by the one rank (thread) that owns the model.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "weft/base/error.hpp"
#include "weft/dp/bucket_reducer.hpp"
#include "weft/mesh/layout.hpp"
#include "weft/nn/parameter.hpp"

namespace weft {

using GradientReducerOptions = BucketOptions;
using AveragerOptions [[deprecated("GradientReducerOptions")]] = BucketOptions;

/// A BucketReducer that listens to parameters: brings every gradient that is Partial on the axes (sum, or avg
/// where each rank has the mean of its own data) to Replicate there. If a parameter itself is cut along an
/// axis, as a LayerNorm over space is along the axes of its maps, its gradient is reduced over the other axes
/// alone. One backward pass, or several with no_sync() around those before the last, then finish():
///
///   { const NoSync off = reducer.no_sync();  … micro-batches but the last … }
///   … the last micro-batch …   reducer.finish();   optimizer.step(rate);   zero gradients
///
/// The first pass shows in which order gradients become final: finish() then cuts that order into buckets
/// (flat blocks in shared memory), moves the gradients there and reduces them. From then on gradients are
/// views of the buckets, nothing is copied, and a bucket's reduction is posted as soon as its last gradient
/// is final and all buckets before it are posted; every gradient that becomes final afterwards polls it.
/// Buckets are the same on all ranks: they follow the order that the first rank of the axes saw.
///
/// The first finish() compares among the ranks the list of parameters, the options, and the values of the
/// parameters that the axes replicate, frozen ones too, as they are then: mismatch on all ranks, naming the
/// first that differs. Later steps compare, with the reductions, the options, learning rate and number of the
/// last step that AdamW or SGD took: mismatch on all ranks if they differ, unless some of the parameters
/// have had no step.
///
/// A model on a device has its buckets there; all parameters were materialised with one Compute, which is
/// options.compute or, where that is null, taken for it. See BucketReducer for the waits of the host.
///
/// While a bucket is in flight its gradients belong to the reduction: do not touch them before finish().
class GradientReducer {
 public:
  using Options = GradientReducerOptions;

  /// Listens to those of `parameters` that are trained; all must outlive it, and need no memory yet. `axes`:
  /// a sub-mesh of one or more axes (HSDP's replicate axis; dp and domain). The same parameters in the same
  /// order on all its ranks. No communication if nothing is wrong. Throws bad_argument if a parameter has
  /// another GradientReducer, naming it: two would reduce one gradient twice; and for options that
  /// BucketReducer refuses. This rank then waits, at most its deadline, until the others finish() their first
  /// step: they get `gradient_reducer: dp rank 1 failed: …`.
  GradientReducer(std::vector<Parameter*> parameters, DeviceMesh axes, Options options = {});
  /// Stops listening. A reduction still in flight is given up, and with it the group of the axes.
  ~GradientReducer();
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  /// While the result lives, backward passes only accumulate, and nothing is sent (PyTorch: no_sync()).
  /// Gradients of such passes alone are reduced by finish(). Throws bad_argument if a gradient of this step
  /// is final already, and perhaps on its way: `gradient_reducer: no_sync() after the gradient of "w" became
  /// final; finish() comes first`.
  NoSync no_sync();

  /// After the last backward pass: waits until every gradient is reduced and states so in its layout.
  /// Collective over the axes. Throws bad_argument while a NoSync lives, before anything is sent: the last
  /// pass comes after it. Throws on all ranks bad_argument for parameters that no pass used:
  /// `gradient_reducer: no backward pass used "a.weight" on dp rank 1 …`; layout if a gradient is not Partial
  /// (Replicate or Shard would be counted or mixed), or not cut where the parameter is, naming parameter and
  /// axis; for a hook where parameters are reduced over several sets of axes. Such a throw leaves no gradient
  /// usable before they are zeroed.
  void finish();

  /// Bytes of each bucket, in the order they are reduced; empty before the first finish().
  std::vector<std::int64_t> bucket_bytes() const;
  /// Reductions posted during backward passes, rather than by finish(): a measure of overlap.
  std::int64_t posted_early() const noexcept { return posted_early_; }

 private:
  struct Slot;
  struct Agreement;
  struct Reduced;
  void became_final(std::size_t index);
  void expect_partial(std::size_t index);
  Agreement agree(const std::optional<Error>& fault);
  void agree_on_place(Agreement& agreed, std::size_t i, std::size_t axis, int rank, std::int64_t place) const;
  void note_history();
  Compute* compute_of_buckets() const;
  std::vector<DeviceMesh> reduced_along(const Parameter& parameter) const;
  std::size_t set_of(const Slot& slot);
  void make_reducers();

  DeviceMesh axes_;
  std::vector<DeviceMesh> each_axis_;  // those of several ranks
  Options options_;
  std::vector<Slot> slots_;               // one per parameter, in the order given
  std::vector<Parameter*> trained_;       // parallel to slots_
  std::vector<const Parameter*> frozen_;  // given, but not trained
  std::vector<std::size_t> final_order_;  // in which gradients first became final
  std::vector<std::unique_ptr<Reduced>>
      reduced_;  // one for each set of axes; empty before the first finish()
  bool made_reducers_ = false;
  bool noted_history_ = false;  // of this step
  std::int64_t posted_early_ = 0;
  std::shared_ptr<int> no_syncs_ = std::make_shared<int>(0);  // that live
};

using GradientAverager [[deprecated("GradientReducer")]] = GradientReducer;

/// For a program in which one rank alone steps, and sends the others the new values: after each step, on all
/// ranks. Reducers, sharded models and trainers then take the values of `parameter` as they are, and compare
/// no options or learning rates. It is materialised.
void forget_history(const Parameter& parameter);

}  // namespace weft
