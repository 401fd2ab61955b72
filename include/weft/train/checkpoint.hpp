// Saving a training run and taking it up again: parameters and the state of an optimizer as tensors of a
// checkpoint. Called by every rank of a mesh, each from the thread that owns its model.
#pragma once

#include "weft/checkpoint/async.hpp"
#include "weft/checkpoint/checkpoint.hpp"
#include "weft/checkpoint/full_state.hpp"
#include "weft/nn/module.hpp"
#include "weft/nn/optimizer.hpp"
#include "weft/nn/parameter.hpp"
#include "weft/train/ema.hpp"

namespace weft {

/// The state of a training besides its model: the state of an optimizer, and averages of the masters. Null:
/// there is none. An optimizer alone may stand for it. Loading writes into both.
struct TrainingState {
  TrainingState(const Optimizer* optimizer_in = nullptr, const Ema* ema_in = nullptr)
      : optimizer(optimizer_in), ema(ema_in) {}
  const Optimizer* optimizer;
  const Ema* ema;
};

/// save_checkpoint() of weft/checkpoint/checkpoint.hpp for the masters of `parameters`, as "param.<path>",
/// the state of the optimizer, as "optimizer.<state>.<path>", and averages, as "ema.average.<path>" and
/// "ema.updates.<path>". Throws as that does: `layout` for a parameter that has no layout on a mesh of
/// several ranks.
void save_checkpoint(const std::filesystem::path& directory, const DeviceMesh& mesh, std::int64_t step,
                     std::span<Parameter* const> parameters, const TrainingState& state,
                     const CheckpointExtra& extra = {}, const SaveOptions& options = {});

/// The same for a whole model: its parameters, and its buffers that are saved, as "buffer.<path>".
void save_checkpoint(const std::filesystem::path& directory, const DeviceMesh& mesh, std::int64_t step,
                     const Module& model, const TrainingState& state, const CheckpointExtra& extra = {},
                     const SaveOptions& options = {});

/// The same in the background, as AsyncCheckpoint::save() does: the call returns when copies are made, and
/// false if it was refused. `saves` was made for the mesh of the model.
bool start_save(AsyncCheckpoint& saves, const std::filesystem::path& directory, std::int64_t step,
                std::span<Parameter* const> parameters, const TrainingState& state,
                const CheckpointExtra& extra = {}, const SaveOptions& options = {});
bool start_save(AsyncCheckpoint& saves, const std::filesystem::path& directory, std::int64_t step,
                const Module& model, const TrainingState& state, const CheckpointExtra& extra = {},
                const SaveOptions& options = {});

/// Reads the masters of `parameters` and `state`. Without an optimizer, parameters alone: its state and
/// averages may be there, and stay. With one, averages that are there and not asked for are an error, as all
/// else is. Parameters must be materialised. Tensors that are stored under older names (remap_old_names() of
/// weft/checkpoint/remap.hpp), and not requested under them, are read under today's: CheckpointInfo::remapped
/// lists them, and rank 0 logs one warning that says so. Throws as load_checkpoint() of tensors does. If
/// reading fails halfway, some masters are new and others are not; weights are those of their masters.
CheckpointInfo load_checkpoint(const std::filesystem::path& directory, const DeviceMesh& mesh,
                               std::span<Parameter* const> parameters, const TrainingState& state);
/// The same for a whole model, with its buffers.
CheckpointInfo load_checkpoint(const std::filesystem::path& directory, const DeviceMesh& mesh,
                               const Module& model, const TrainingState& state);

/// gather_full_state() and set_full_state() of weft/checkpoint/full_state.hpp for a model and `state`, under
/// the names that a checkpoint has. If the model is on a device, this rank's parts are copied to the host
/// first. After set_full_state() weights are made again from the masters.
void gather_full_state(const DeviceMesh& mesh, const Module& model, const TrainingState& state, int root,
                       const FullStateVisitor& see);
void set_full_state(const DeviceMesh& mesh, const Module& model, const TrainingState& state, int root,
                    const FullStateSource& give);

}  // namespace weft
