// The gradients of a model's parameters as what dp works on. Used by the one thread that owns the model.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "weft/dp/grad_norm.hpp"
#include "weft/dp/replicated.hpp"
#include "weft/nn/parameter.hpp"

namespace weft {

/// The gradient of each parameter that is trained, where it lies, in the order given. Valid until a gradient
/// is placed elsewhere. Throws bad_argument naming a parameter without gradient:
/// `clip_grad_norm: "w" has no gradient`. `what` names the caller.
std::vector<Gradient> gradients_of(std::span<Parameter* const> parameters, std::string_view what);

/// reduce_gradients() of gradients_of(parameters), whose new layouts it states. Collective. If
/// options.compute is null and the model is on a device, the Compute of materialise() is taken; so it is in
/// the functions below.
///
///   model.backward(dy, frame);
///   reduce_gradients(model.parameters(), mesh, {.data_axes = mesh["dp"]});
///
/// A GradientReducer does the same on data axes while backward goes on; then reduce_gradients(parameters,
/// mesh["tp"]) does the rest.
void reduce_gradients(std::span<Parameter* const> parameters, const DeviceMesh& axes,
                      const ReduceOptions& options = {});

/// grad_norm(), clip_grad_norm() and sync_replicated_gradients() of gradients_of(parameters).
double grad_norm(std::span<Parameter* const> parameters, double p = 2, Compute* compute = nullptr);
double clip_grad_norm(std::span<Parameter* const> parameters, double max_norm, double p = 2,
                      NonFinite non_finite = NonFinite::error, Compute* compute = nullptr);
void sync_replicated_gradients(std::span<Parameter* const> parameters, const DeviceMesh& axes,
                               const SyncOptions& options = {});

}  // namespace weft
