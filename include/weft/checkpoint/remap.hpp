// load_checkpoint() and convert_checkpoint() can read tensors that an older program stored under other names
// or with other shapes. They recognise these tensors by stored name and shape, and return them under the
// current names. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "weft/base/shape.hpp"

namespace weft {

/// A current tensor that consists of some rows of a stored tensor, with the same elements in the same order.
struct RemappedTensor {
  std::string name;
  Shape shape;                 ///< (rows, …): the stored extents, except the first, without trailing ones
  std::int64_t first_row = 0;  ///< of the stored tensor's first dimension
};

/// Given the name and shape of a stored tensor, returns the tensors into which it is split. Each of them is a
/// range of its rows. An empty result means that the tensor stays as it is.
using Remap = std::function<std::vector<RemappedTensor>(std::string_view name, const Shape& shape)>;

/// Converts the names and shapes that older programs used for the parameters of this library's modules
/// (`before`: any prefix up to a dot, or none):
///
///   before.to_qkv.weight, .weight_orig  (3 n, dim, 1, 1), [q|k|v] → before.to_q, to_k, to_v with the same ending, (n, dim) each
///   before.to_qkv.weight_u              (3 n) → a third each
///   before.to_qkv.weight_v              (dim) → the same for all three
///   before.to_qkv.weight                (1), an optimizer's count of steps → the same for all three
///   before.to_out, .layers.1, .layers.4 with .weight or .weight_orig  (out, in, 1, 1) → the same name, (out, in)
///   before.parametrizations.weight.original, .0._u, .0._v → before.weight_orig, weight_u, weight_v, and then as above
///
/// All other tensors do not change, so a second conversion changes nothing. weft/models/remap.hpp converts
/// tensors in memory in the same way.
std::vector<RemappedTensor> remap_old_names(std::string_view name, const Shape& shape);

}  // namespace weft
