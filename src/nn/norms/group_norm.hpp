// Group norm of maps whose pixels are sharded over ranks. Included only inside nn.
//
// Each rank sums its own pixels in f64, channel by channel. The sums of a group are added over ranks in one
// all-reduce of two numbers for each sample and group. The sums stay on the device, and the host waits for
// none of them.
#pragma once

#include "nn/norms/numbers.hpp"
#include "weft/nn/norm.hpp"

namespace weft::group_norm {

/// Returns whether the pixels of x, (batch, channels, …), are sharded.
inline bool cut(const Tensor& x) { return norms::cut(x.layout(), 2); }

/// The number of groups whose channels this rank has. The checked variant throws if the channels of x do not
/// fit the norm.
inline std::int64_t groups_of(const GroupNorm& norm, const Tensor& x) {
  return x.size(1) / (norm.weight->global_shape()[0] / norm.groups());
}
std::int64_t checked_groups_of(const GroupNorm& norm, const TensorName& what, const Tensor& x);

/// The passes for such an x. Collective. The Frame keeps what backward needs.
Tensor forward(const GroupNorm& norm, const Tensor& x, Frame& frame);
Tensor backward(const GroupNorm& norm, const Tensor& dy, Frame& frame);

}  // namespace weft::group_norm
