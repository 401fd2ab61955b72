// Layer norm over several dimensions, with a gain and a bias for each element of them, whole or cut in space.
// Inside nn.
//
// Statistics are sums in f64, over ranks in one all-reduce each way: two numbers for each thing that is
// normalised. They stay on the device, and the host waits for none of them.
#pragma once

#include "weft/nn/norm.hpp"

namespace weft::space_norm {

/// x: (…, as the gain). If x is cut in the dimensions that are normalised, the gain is cut alike: throws
/// layout if it is not; bad_argument if the shapes do not fit. Keeps on the Frame what backward needs.
Tensor forward(const LayerNorm& norm, const Tensor& x, Frame& frame, Memory memory);
Tensor backward(const LayerNorm& norm, const Tensor& dy, Frame& frame, Memory memory);

}  // namespace weft::space_norm
