// Converts weights from the names and shapes of other programs to those of this library's modules. Pure
// functions of tensors on the host; any thread.
#pragma once

#include <map>
#include <string>

#include "weft/base/tensor.hpp"

namespace weft {

/// Tensors by name, as a file of weights holds them.
using NamedTensors = std::map<std::string, Tensor>;

/// Converts the stage of a weather model that was stored with 1x1 convolutions and one fused product for q, k
/// and v (miles-credit's crossformer) to the form of WeatherStage (miles-credit's wxformer_next). Each name
/// on the left may be the whole name, or follow a dot:
///
///   to_qkv.weight, to_qkv.weight_orig (3·n, dim, 1, 1), [q|k|v] → to_q, to_k, to_v, (n, dim) each
///   to_qkv.weight_u (3·n), [q|k|v] → a third each to_qkv.weight_v (dim) → the same for all three to_out,
///   layers.1, layers.4 with .weight or .weight_orig (out, in, 1, 1) → (out, in); entries of any other shape
///   stay
///
/// With a spectral norm (weight_orig) the converted layers compute something else than the stored ones: the
/// fused weight was divided by one sigma, while to_q, to_k and to_v have a sigma each. With the converted
/// vectors these three sigmas add up to the stored sigma; the first training pass makes each of them the
/// largest singular value of its own weight.
///
/// All other entries stay. A second call changes nothing. Tensors that are split or reshaped share the memory
/// of the given tensor; the copies of weight_v have their own. Throws bad_argument, naming the entry, if the
/// rows of a fused entry are no multiple of 3, if an entry has none of these shapes, or if a new name already
/// exists (to_q.weight in addition to to_qkv.weight).
NamedTensors remap_conv_weights(Context& context, const NamedTensors& stored);

/// Renames the entries of spectral norms. torch has two forms of names: weight_orig, weight_u and weight_v
/// (torch.nn.utils.spectral_norm), which weft's Linear and Conv2d use; and parametrizations.weight.original,
/// parametrizations.weight.0._u and ._v (torch.nn.utils.parametrizations.spectral_norm). This function
/// renames the second form to the first. All other entries stay. A second call changes nothing. Throws
/// bad_argument if both forms of one weight exist.
NamedTensors remap_spectral_norm_names(const NamedTensors& stored);

}  // namespace weft
