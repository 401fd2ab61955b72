// Names and shapes of weights that were stored with 1x1 convolutions and one product for q, k and v, and the
// two forms of spectral norms. These are the rules of weft/checkpoint/remap.hpp and weft/models/remap.hpp.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "weft/checkpoint/remap.hpp"

namespace weft {

/// The kind of such a weight. Nothing if the weight has no such kind.
struct ConvFormat {
  std::vector<RemappedTensor> pieces;
  /// The expected shape, if the name belongs to a fused weight but the shape does not.
  std::string expected;
};
ConvFormat conv_format(std::string_view name, const Shape& shape);

/// Converts the name of a spectral norm's tensor in the form of torch.nn.utils.parametrizations to its name
/// in torch.nn.utils.spectral_norm. Returns any other name unchanged.
std::string spectral_norm_name(std::string_view name);

}  // namespace weft
