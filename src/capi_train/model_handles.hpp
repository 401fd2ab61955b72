// The types behind weft_model and weft_trainer, and helpers that their functions share.
#pragma once

#include <algorithm>
#include <string_view>

#include "capi/mesh_handles.hpp"
#include "capi_train/handles.hpp"
#include "weft/models/moe_transformer.hpp"
#include "weft/models/trainer.hpp"

namespace weft::capi {

struct ModelState {
  /// `what`: a Recipe or a TransformerConfig.
  ModelState(std::shared_ptr<ComputeState> compute_in, MeshOwner owner_in, const DeviceMesh& mesh,
             const auto& what, const BuildOptions& options)
      : compute(std::move(compute_in)),
        owner(std::move(owner_in)),
        parts(build_parallel_model(what, mesh, compute->compute, options)),
        parameters(parts.parameters()) {}
  std::shared_ptr<ComputeState> compute;
  MeshOwner owner;
  ParallelModel parts;  // destroyed before its mesh
  std::vector<Parameter*> parameters;
  Tensors outputs;                    // of the last weft_model_forward
  std::vector<LayerBalance> balance;  // of the last weft_model_expert_balance
};

/// Throws if `model` is NULL, and throws unsupported in a child made by fork().
ModelState& model_of(const char* function, const weft_model* model);

/// Throws if `mesh` is NULL, or a part of another mesh.
const weft_mesh& whole_mesh_of(const char* function, const weft_mesh* mesh);

TokenBatch batch_of(const weft_token_batch& batch);
/// Copies the rows of the caller.
Batch batch_of(const char* function, Context& context, const weft_batch& batch);

/// Returns the caller's buffer, which has, or receives, f32 elements of this shape on the device of
/// `compute`. `whose` says whose elements they are: "logits->count is 7; expected 8, of the scores (2, 4)".
TensorView elements(const char* function, const weft_buffer* buffer, const char* which, const Shape& shape,
                    std::string_view whose, const Compute& compute);

/// Throws if `trainer` is NULL, and throws unsupported in a child made by fork().
Trainer& trainer_of(const char* function, const weft_trainer* trainer);
weft_step_result in_c(const Trainer::Result& of);
weft_evaluation in_c(const Trainer::Evaluation& of);

/// Copies `from` to `to`; the host waits.
void copy(Compute& compute, const ConstTensorView& from, const TensorView& to);

}  // namespace weft::capi

struct weft_model : weft::capi::Handle<weft_model> {
  static constexpr const char* kKind = "weft_model";
  explicit weft_model(std::shared_ptr<weft::capi::ModelState> state_in) : state(std::move(state_in)) {}
  std::shared_ptr<weft::capi::ModelState> state;
};

struct weft_trainer : weft::capi::Handle<weft_trainer> {
  static constexpr const char* kKind = "weft_trainer";
  weft_trainer(std::shared_ptr<weft::capi::ModelState> model_in, std::unique_ptr<weft::Trainer> trainer_in)
      : model(std::move(model_in)), trainer(std::move(trainer_in)) {}
  std::shared_ptr<weft::capi::ModelState> model;
  std::unique_ptr<weft::Trainer> trainer;
  std::vector<std::unique_ptr<weft_layout>> layouts;  // of gradients, as they were last asked for
  weft::CheckpointExtra loaded;                       // of the checkpoint that was loaded last
};
