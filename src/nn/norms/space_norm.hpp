// Layer norm over several dimensions, with one gain and one bias for each element of them, whole or sharded
// in space. Only files of nn include it.
//
// Statistics are sums in f64, added over ranks in one all-reduce per direction. There are two numbers for
// each normalised sample. They stay on the device, and the host waits for none of them.
#pragma once

#include "weft/nn/norm.hpp"

namespace weft::space_norm {

/// x: (…, then the dimensions of the gain). If x is sharded in the normalised dimensions, the gain must be
/// sharded in the same way. Otherwise it throws layout; bad_argument if the shapes do not fit. The Frame
/// keeps what backward needs.
Tensor forward(const LayerNorm& norm, const Tensor& x, Frame& frame, Memory memory);
Tensor backward(const LayerNorm& norm, const Tensor& dy, Frame& frame, Memory memory);

}  // namespace weft::space_norm
