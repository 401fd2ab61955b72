// A gradient in any memory. Functions that reduce, measure or clip gradients take Gradients, and depend on
// neither modules nor parameters.
#pragma once

#include <span>
#include <string_view>

#include "weft/base/view.hpp"
#include "weft/host/compute.hpp"
#include "weft/mesh/layout.hpp"

namespace weft {

/// Borrowed: the caller must keep the memory, the name and the mesh of the layout alive until the call
/// returns.
struct Gradient {
  std::string_view name;  ///< for error texts: "layers.0.mlp.up_proj.weight"
  /// This rank's part: contiguous, f64, f32, bf16 or f16, of shape layout->local_shape(). It lies on the
  /// host. But if a function gets a Compute of a device, it lies on that device, with the values that the
  /// stream of the Compute has written.
  TensorView data;
  /// The layout of the elements over the mesh. Null if only this rank has them. Functions that reduce a
  /// gradient change its layout.
  LayoutRef layout = nullptr;
};

/// The shape of this rank's part. Throws bad_argument if `layout` is null.
const Shape& local_shape_of_gradient(std::string_view name, const LayoutRef& layout);

/// Makes a Gradient whose part on this rank begins at `data`. T is double, float, bf16 or f16. Throws
/// bad_argument if `layout` is null, because the length is then unknown. In that case write Gradient{"bias",
/// view(vector)}.
template <class T>
Gradient make_gradient(std::string_view name, T* data, const LayoutRef& layout) {
  return {name, view(data, local_shape_of_gradient(name, layout)), layout};
}

/// Throws if a gradient does not meet the rules above. Throws bad_argument for a wrong dtype, device or
/// strides, elements without memory (`has no memory`), memory not aligned for the dtype, negative extents,
/// and two gradients that overlap (give a tied weight only once). Throws layout if the shape is not
/// layout->local_shape(): `grad_norm: the gradient of "w" is (3, 4); (7, 4) as [dp: Shard(0)] is (4, 4) on
/// this rank`. `what` names the caller. The gradients must be on the device of `compute`, or on the host if
/// `compute` is null.
void check_gradients(std::string_view what, std::span<const Gradient> gradients,
                     const Compute* compute = nullptr);

}  // namespace weft
