// Reduces gradients of a model's replicated parameters, over the ranks that saw different data, during the
// backward pass. Used by the one rank (thread) that owns the model.
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

/// A BucketReducer that listens to parameters. Every gradient that is Partial on the axes (sum, or avg if
/// each rank has the mean of its own data) becomes Replicate on these axes. If a parameter itself is cut
/// along an axis (a LayerNorm over space is cut along the axes of its maps), its gradient is reduced only
/// over the other axes. A step has one backward pass, or several with no_sync() around all except the last,
/// and then finish():
///
///   { const NoSync off = reducer.no_sync();  … micro-batches but the last … }
///   … the last micro-batch …   reducer.finish();   optimizer.step(rate);   zero gradients
///
/// The first pass shows in which order gradients become final: finish() then cuts that order into buckets
/// (flat blocks in shared memory), moves the gradients there and reduces them. From then on gradients are
/// views of the buckets, nothing is copied, and a bucket's reduction is posted as soon as its last gradient
/// is final and all buckets before it are posted. Each gradient that becomes final later polls the reductions
/// in flight. Buckets are the same on all ranks: they follow the order that the first rank of the axes saw.
///
/// The first finish() compares among the ranks the list of parameters, the options, and the present values of
/// the parameters that the axes replicate, including frozen parameters; if they differ, all ranks throw
/// mismatch that names the first difference. In later steps the reductions also compare the options, the
/// learning rate and the number of the last step that AdamW or SGD took. If these differ, all ranks throw
/// mismatch; if some of the parameters have had no step, they are not compared.
///
/// The buckets of a model on a device are on that device. All parameters must have been materialised with the
/// same Compute: options.compute, or any Compute if that is null. The comment of BucketReducer says when the
/// host waits.
///
/// While a bucket is in flight its gradients belong to the reduction: do not touch them before finish().
class GradientReducer {
 public:
  using Options = GradientReducerOptions;

  /// Listens to those of `parameters` that are trained; all must outlive the reducer, and need no memory yet.
  /// `axes`: a sub-mesh of one or more axes (HSDP's replicate axis; dp and domain). All ranks of `axes` must
  /// give the same parameters in the same order. No communication if nothing is wrong. Throws bad_argument,
  /// naming the parameter, if a parameter has another GradientReducer, because two reducers would reduce one
  /// gradient twice. Also throws for options that BucketReducer refuses. Before it throws, this rank waits,
  /// at most its deadline, until the other ranks finish() their first step; they throw `gradient_reducer: dp
  /// rank 1 failed: …`.
  GradientReducer(std::vector<Parameter*> parameters, DeviceMesh axes, Options options = {});
  /// Stops listening. If a reduction is still in flight, the group of the axes fails.
  ~GradientReducer();
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  /// While the result exists, backward passes only accumulate, and nothing is sent (PyTorch: no_sync()).
  /// finish() reduces gradients that only such passes have made. Throws bad_argument if a gradient of this
  /// step is already final, and may be in flight: `gradient_reducer: no_sync() after the gradient of "w"
  /// became final; finish() comes first`.
  NoSync no_sync();

  /// Call it after the last backward pass: waits until every gradient is reduced, and sets the gradients'
  /// layouts accordingly. Collective over the axes. While a NoSync exists, throws bad_argument before
  /// anything is sent, because the last pass must come after it. Throws bad_argument on all ranks for
  /// parameters that no pass used: `gradient_reducer: no backward pass used "a.weight" on dp rank 1 …`;
  /// layout, naming parameter and axis, if a gradient is not Partial (a sum would count replicas several
  /// times, and mix different shards), or is not cut like its parameter. Also throws layout if there is a
  /// hook and parameters are reduced over several sets of axes. After such an error no gradient is usable
  /// until the gradients are zeroed.
  void finish();
  /// finish() on a rank whose passes have failed, so that its gradients are not those of the step, whole or
  /// in part. finish() throws on all other ranks: this rank used no parameter (Unused::error), or its passes
  /// have failed (Unused::zeros). Gradients are not usable afterwards. Does not throw.
  void give_up() noexcept;

  const Options& options() const noexcept { return options_; }

  /// Bytes of each bucket, in the order they are reduced; empty before the first finish().
  std::vector<std::int64_t> bucket_bytes() const;
  /// The number of reductions posted during backward passes, and not by finish(): a measure of overlap.
  std::int64_t posted_early() const noexcept { return posted_early_; }

 private:
  void finish(bool failed);
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

/// For a program in which only one rank takes the step, and sends the new values to the others: call it after
/// each step, on all ranks. Reducers, sharded models and trainers then use the values of `parameter` as they
/// are, and compare no options or learning rates. `parameter` must be materialised.
void forget_history(const Parameter& parameter);

}  // namespace weft
