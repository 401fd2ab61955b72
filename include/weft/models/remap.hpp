// Converts weights from the names and shapes of other programs to those of this library's modules. Pure
// functions of tensors on the host; any thread.
#pragma once

#include <map>
#include <string>

#include "weft/base/tensor.hpp"

namespace weft {

/// Tensors by name, as a file of weights holds them.
using NamedTensors = std::map<std::string, Tensor>;

/// The stage of a weather model that was stored with 1x1 convolutions and one fused product for q, k and v
/// (miles-credit's crossformer), as WeatherStage has it (its wxformer_next). A suffix of a name counts from a
/// dot on, or is the whole name:
///
///   to_qkv.weight, to_qkv.weight_orig  (3·n, dim, 1, 1), [q|k|v] → to_q, to_k, to_v, (n, dim) each
///   to_qkv.weight_u                    (3·n), [q|k|v] → a third each
///   to_qkv.weight_v                    (dim) → the same for all three
///   to_out, layers.1, layers.4 with .weight or .weight_orig   (out, in, 1, 1) → (out, in); of any other shape they stay
///
/// With a spectral norm (weight_orig) the layers are not those that were stored: the fused weight was divided
/// by one sigma, of all of it, and to_q, to_k and to_v have one each. With the vectors as they come here
/// these three add up to it; the first pass of a training makes each the largest singular value of its own
/// weight.
///
/// Every other entry stays. Applied again it changes nothing. Tensors that are split or reshaped share the
/// memory of the given tensor; the copies of weight_v have their own. Throws bad_argument, naming the entry,
/// for a fused one whose rows are no multiple of 3 or that has no shape of these, and for a name that is
/// there already (to_q.weight beside to_qkv.weight).
NamedTensors remap_conv_weights(Context& context, const NamedTensors& stored);

/// torch has two forms of a spectral norm: weight_orig, weight_u and weight_v (torch.nn.utils.spectral_norm),
/// as Linear and Conv2d have it here; and parametrizations.weight.original, parametrizations.weight.0._u and
/// ._v (torch.nn.utils.parametrizations.spectral_norm), whose names these are changed to. Every other entry
/// stays. Applied again it changes nothing. Throws bad_argument if both forms of one are there.
NamedTensors remap_spectral_norm_names(const NamedTensors& stored);

}  // namespace weft
