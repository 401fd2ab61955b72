// A view of a tensor in any memory, with a name and a layout. Functions that work on any list of tensors take
// such views.
#pragma once

#include <cstddef>
#include <string_view>
#include <type_traits>

#include "weft/base/view.hpp"
#include "weft/mesh/layout.hpp"

namespace weft {

/// Borrowed: the caller must keep the memory and the name alive until the call returns.
template <class Byte>
struct BasicNamedView {
  std::string_view name;  ///< "layers.0.mlp.up_proj.weight"
  /// This rank's part, with the shape layout->local_shape() and any dtype.
  BasicView<Byte> data;
  /// The layout of the elements over the mesh. Null if only this rank has them.
  LayoutRef layout = nullptr;

  operator BasicNamedView<const std::byte>() const requires(!std::is_const_v<Byte>) {
    return {name, data, layout};
  }
};
/// For tensors that are read.
using NamedView = BasicNamedView<const std::byte>;
/// For tensors that are written.
using MutableNamedView = BasicNamedView<std::byte>;

}  // namespace weft
