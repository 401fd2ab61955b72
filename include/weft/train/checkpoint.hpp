// Saves and resumes a training run: parameters and the state of an optimizer become tensors of a checkpoint.
// All ranks of a mesh call these functions, each from the thread that owns its model.
#pragma once

#include "weft/checkpoint/async.hpp"
#include "weft/checkpoint/checkpoint.hpp"
#include "weft/checkpoint/full_state.hpp"
#include "weft/checkpoint/reader.hpp"
#include "weft/checkpoint/remap.hpp"
#include "weft/nn/module.hpp"
#include "weft/nn/optimizer.hpp"
#include "weft/nn/parameter.hpp"
#include "weft/train/ema.hpp"

namespace weft {

/// The state of a training run in addition to its model: an optimizer, and averages of the masters; each may
/// be null. An optimizer converts to a TrainingState. Loading writes into both.
struct TrainingState {
  TrainingState(const Optimizer* optimizer_in = nullptr, const Ema* ema_in = nullptr)
      : optimizer(optimizer_in), ema(ema_in) {}
  const Optimizer* optimizer;
  const Ema* ema;
};

/// Calls save_checkpoint() of weft/checkpoint/checkpoint.hpp for the masters of `parameters`, as
/// "param.<path>", the state of the optimizer, as "optimizer.<state>.<path>", and averages, as
/// "ema.average.<path>" and "ema.updates.<path>". Throws the errors of that function, for example `layout` if
/// a parameter has no layout on a mesh of several ranks.
void save_checkpoint(const std::filesystem::path& directory, const DeviceMesh& mesh, std::int64_t step,
                     std::span<Parameter* const> parameters, const TrainingState& state,
                     const CheckpointExtra& extra = {}, const SaveOptions& options = {});

/// Like the function above, for a whole model: its parameters, and its saved buffers, as "buffer.<path>".
void save_checkpoint(const std::filesystem::path& directory, const DeviceMesh& mesh, std::int64_t step,
                     const Module& model, const TrainingState& state, const CheckpointExtra& extra = {},
                     const SaveOptions& options = {});

/// Saves in the background by AsyncCheckpoint::save(): returns when the copies are made; returns false if the
/// save was refused. `saves` must have been made for the mesh of the model.
bool start_save(AsyncCheckpoint& saves, const std::filesystem::path& directory, std::int64_t step,
                std::span<Parameter* const> parameters, const TrainingState& state,
                const CheckpointExtra& extra = {}, const SaveOptions& options = {});
bool start_save(AsyncCheckpoint& saves, const std::filesystem::path& directory, std::int64_t step,
                const Module& model, const TrainingState& state, const CheckpointExtra& extra = {},
                const SaveOptions& options = {});

/// Reads the masters of `parameters` and `state`. Without an optimizer it reads only parameters, and ignores
/// stored optimizer states and averages; if ScheduleFreeAdamW has trained them, the masters get the values
/// for evaluation. With an optimizer, stored averages that are not requested are an
/// error, like any other tensor that is not requested. Parameters must be materialised. Tensors that are
/// stored under older names (remap_old_names() of weft/checkpoint/remap.hpp), and are not requested under
/// these names, are read under the current names: CheckpointInfo::remapped lists them, and rank 0 logs one
/// warning. Throws the errors of load_checkpoint() for tensors. If reading fails halfway, some masters have
/// new values and others do not; each weight agrees with its master.
CheckpointInfo load_checkpoint(const std::filesystem::path& directory, const DeviceMesh& mesh,
                               std::span<Parameter* const> parameters, const TrainingState& state);
/// Like the function above, for a whole model, with its buffers.
CheckpointInfo load_checkpoint(const std::filesystem::path& directory, const DeviceMesh& mesh,
                               const Module& model, const TrainingState& state);

/// The parameter with this path as it is evaluated and exported: its global values, f32 on the host, which
/// for ScheduleFreeAdamW are not those that are trained. Throws the errors of CheckpointReader::read().
Tensor value_for_evaluation(const CheckpointReader& reader, Compute& compute, std::string_view path);
/// Whether there is a parameter for which value_for_evaluation() differs from the stored values.
bool has_values_for_evaluation(const CheckpointReader& reader);

struct InitOptions {
  /// Patterns of paths, of parameters and buffers or of modules: these keep their values, and what the
  /// checkpoint has under these paths is not read. For a new head.
  std::vector<std::string> except = {};
  /// The same for what only the checkpoint has.
  std::vector<std::string> left_out = {};
  /// Names and shapes of another program, as in LoadOptions; of parameters that ScheduleFreeAdamW has
  /// trained, the values for evaluation are read, as without a function. Tensors that it does not know go to
  /// remap_old_names(). Names in checkpoints of weft are "param.<path>".
  Remap remap = {};
};
/// Begins a fine-tuning: reads the parameters and buffers of a model from another run's checkpoint, and
/// neither an optimizer nor averages. Call it before the optimizer, the averages or the Trainer are made,
/// which begin with the parameters' values; freeze parts by Parameter::set_trainable(), BuildOptions::frozen
/// or a FreezeSchedule. Collective over `mesh`. Throws bad_argument if an entry of `except` matches nothing
/// in the model, and the errors of load_checkpoint().
CheckpointInfo init_from(const std::filesystem::path& directory, const DeviceMesh& mesh, const Module& model,
                         const InitOptions& options = {});

/// Save and load the whole model of a pipeline: each rank gives the parameters, buffers and state of its own
/// stages. `stages` is the axis of the pipeline; layouts lie over its root. The checkpoint has the names of
/// the whole model, so any mesh loads it, with or without a pipeline, and load_stages() loads checkpoints of
/// any mesh. Collective over the root. Throw the errors of save_checkpoint() and load_checkpoint().
void save_stages(const std::filesystem::path& directory, const DeviceMesh& stages, std::int64_t step,
                 std::span<Parameter* const> parameters, std::span<ModuleBuffer* const> buffers,
                 const TrainingState& state, const CheckpointExtra& extra = {},
                 const SaveOptions& options = {});
/// Like start_save(), for the stages of a pipeline; the mesh of `saves` is the root of `stages`.
bool start_save_stages(AsyncCheckpoint& saves, const std::filesystem::path& directory,
                       const DeviceMesh& stages, std::int64_t step, std::span<Parameter* const> parameters,
                       std::span<ModuleBuffer* const> buffers, const TrainingState& state,
                       const CheckpointExtra& extra = {}, const SaveOptions& options = {});
CheckpointInfo load_stages(const std::filesystem::path& directory, const DeviceMesh& stages,
                           std::span<Parameter* const> parameters, std::span<ModuleBuffer* const> buffers,
                           const TrainingState& state);

/// init_from() for a pipeline: `parameters` and `buffers` are those of this rank's stages of `model`.
CheckpointInfo init_stages_from(const std::filesystem::path& directory, const DeviceMesh& stages,
                                const Module& model, std::span<Parameter* const> parameters,
                                std::span<ModuleBuffer* const> buffers, const InitOptions& options = {});

/// Call gather_full_state() and set_full_state() of weft/checkpoint/full_state.hpp for a model and `state`,
/// with the names that a checkpoint would have. If the model is on a device, this rank's parts are copied to
/// the host first. After set_full_state() weights are made again from the masters.
void gather_full_state(const DeviceMesh& mesh, const Module& model, const TrainingState& state, int root,
                       const FullStateVisitor& see);
void set_full_state(const DeviceMesh& mesh, const Module& model, const TrainingState& state, int root,
                    const FullStateSource& give);

}  // namespace weft
