// The gradients of a model's parameters, as Gradients for the functions of weft/dp. Used by the thread that
// owns the model.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "weft/dp/grad_norm.hpp"
#include "weft/dp/replicated.hpp"
#include "weft/nn/parameter.hpp"

namespace weft {

/// The gradient of each trained parameter, in the order given, without a copy. Valid until the memory of a
/// gradient is replaced. Throws bad_argument, naming the parameter, if a parameter has no gradient:
/// `clip_grad_norm: "w" has no gradient`. `what` is the name of the caller in the text.
std::vector<Gradient> gradients_of(std::span<Parameter* const> parameters, std::string_view what);

/// Calls reduce_gradients() for gradients_of(parameters), and sets the new layouts of the gradients.
/// Collective. If options.compute is null and the model is on a device, this function and the functions below
/// use the Compute of materialise().
///
///   model.backward(dy, frame);
///   reduce_gradients(model.parameters(), mesh, {.data_axes = mesh["dp"]});
///
/// If a GradientReducer reduces over data axes during the backward pass, call reduce_gradients(parameters,
/// mesh["tp"]) for the tensor axis.
void reduce_gradients(std::span<Parameter* const> parameters, const DeviceMesh& axes,
                      const ReduceOptions& options = {});

/// Call grad_norm(), clip_grad_norm() and sync_replicated_gradients() for gradients_of(parameters).
double grad_norm(std::span<Parameter* const> parameters, double p = 2, Compute* compute = nullptr,
                 Exact exact = Exact::no);
double clip_grad_norm(std::span<Parameter* const> parameters, double max_norm, double p = 2,
                      NonFinite non_finite = NonFinite::error, Compute* compute = nullptr,
                      Exact exact = Exact::no);
void sync_replicated_gradients(std::span<Parameter* const> parameters, const DeviceMesh& axes,
                               const SyncOptions& options = {});

}  // namespace weft
