// Runs pipeline schedules over a model that is cut into stages. Used by the rank (thread) that owns the
// model; collective functions are collective over the ranks of the pipeline.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "weft/group/process_group.hpp"
#include "weft/host/compute.hpp"
#include "weft/mesh/layout.hpp"
#include "weft/nn/frame.hpp"
#include "weft/nn/module.hpp"
#include "weft/pp/schedule.hpp"
#include "weft/pp/stage.hpp"

namespace weft {

/// A tensor that crosses from a stage to the next one: this rank's part. Its gradient has the same shape,
/// dtype and layout.
struct PipelineBorder {
  Shape shape;
  DType dtype = DType::f32;
  /// Over the mesh of the stage; null: a plain tensor. Not Partial on any axis.
  LayoutRef layout = nullptr;
  /// The layout inside of the stages, of the same tensor, if it is another one than that in which the tensor
  /// crosses: the pipeline redistributes on both sides. Sequence parallel is whole at borders. Not Partial.
  LayoutRef inside = nullptr;
};

struct PipelineMicroBatch {
  Tensors inputs;  ///< of the first stage
  /// The inputs of the loss behind the output of the last stage. Ranks of other stages may leave them out.
  Tensors targets = {};
  /// Pass::documents of its passes, in all stages; see there.
  std::shared_ptr<const PackedDocuments> documents = nullptr;
};

struct PipelineOptions {
  PipelineSchedule schedule;
  /// The paths of the modules of each stage; see pipeline_path() and split_stages().
  std::vector<std::vector<std::string>> stages;
  /// Returns the border in front of `stage`, from 1 on, for a micro-batch with these inputs.
  std::function<PipelineBorder(int stage, const Tensors& inputs)> border;
  /// The result of untie(), if the model has tied weights.
  std::vector<TiedWeight> tied = {};
  /// Called behind each backward pass of a stage, and behind each half of one, with the stage's parameters: a
  /// program may take gradients away. Not with `tied`, whose gradients are added at the end.
  std::function<void(std::span<Parameter* const> parameters, int micro_batch)> after_gradients = {};
  /// Called before each action of this rank, for traces and tests. Its error is one of the action.
  std::function<void(const PipelineAction& action)> before_action = {};
  /// The sum of a loss over the ranks of the last stage. Empty: that of the loss's layout.
  std::function<double(const Tensor& loss)> total_loss = {};
};

/// One rank of a pipeline: it computes the stages that the schedule places on it. All ranks build the whole
/// tree of the model, which costs no memory, and materialise only the modules of their own stages.
///
///     Pipeline pipeline(model, &loss, mesh["pp"].group(), compute, {schedule, stages, border});
///     pipeline.materialise(seed);
///     const PipelineResult r = pipeline.run(micro_batches, {.seed = 1, .step = 0});
///
/// Losses and gradients have the same bits for every schedule, and every number of ranks: a schedule performs
/// the passes of a stage by rising micro-batch where gradients are summed. Tied weights: see TiedWeight.
class Pipeline {
 public:
  /// `model`, `loss` (null: for forward passes only), `group` and `compute` must outlive the Pipeline. Rank r
  /// of `group` performs the actions of rank r of the schedule. No communication. Throws the errors of
  /// check_pipeline_schedule() and pipeline_path(), and bad_argument if numbers of ranks or stages differ, a
  /// schedule that trains has no loss, or two modules share a weight that is not in `tied`.
  Pipeline(Module& model, Module* loss, ProcessGroup& group, Compute& compute, PipelineOptions options);
  ~Pipeline();
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  const PipelineSchedule& schedule() const noexcept;
  /// The number of this rank in the pipeline; of its stages.
  int rank() const noexcept;
  std::vector<int> stages() const;
  /// The parameters of this rank's stages, in the order of the model. If stages of several ranks use a tied
  /// weight, each of these ranks has a Parameter with the whole gradient: optimizers that take equal steps
  /// keep them equal. A rank with several uses has the Parameter of the first one here; run() gives the
  /// others its memory.
  std::vector<Parameter*> parameters() const;
  /// Gives the parameters and buffers of this rank's stages memory and initial values, which depend only on
  /// `seed`, path and index.
  void materialise(std::uint64_t seed, Memory memory = Memory::local);

  struct Result {
    std::vector<double> losses;  ///< of each micro-batch, on all ranks; empty without a loss
    /// The outputs of the last stage for each micro-batch, on its rank, if the schedule has no backward
    /// passes.
    std::vector<Tensors> outputs;
  };
  /// Performs the schedule: the gradients of all micro-batches are added to the parameters of this rank's
  /// stages. Collective. `pass`: seed, step and mode of the passes; micro_batch and first_sample are set for
  /// each micro-batch. Micro-batches may have unequal numbers of samples. `dloss`: the gradient of each loss,
  /// as for the backward of the loss; empty: 1.
  ///
  /// First all ranks compare, in one small all-gather, schedule, stages and the shapes at every border. They
  /// all throw mismatch if these differ, and bad_argument if the number of micro-batches is not that of the
  /// schedule, or `border` throws on a rank. A stage whose output is not what `border` says throws mismatch
  /// that names both. An error of a pass aborts the group: the other ranks throw `aborted` with the text of
  /// the error and the action. If a rank dies or stops, all others throw the group's error, which names it.
  /// After an error the Pipeline drops all passes under way; parameters may have parts of gradients.
  ///
  /// The memory in which messages arrive is kept for the next run. A run gives back what it did not use: that
  /// of shapes that only earlier runs had.
  Result run(std::span<const PipelineMicroBatch> micro_batches, const Pass& pass, Inputs dloss = {});

  /// The computations of this rank in the last run, in seconds since its first action, without the time that
  /// it waited for messages.
  const std::vector<PipelineTimeline::Span>& spans() const noexcept;
  /// The size of the memory in which messages arrive.
  std::int64_t message_bytes() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};
using PipelineResult = Pipeline::Result;

}  // namespace weft
