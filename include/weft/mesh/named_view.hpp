// A view of a tensor in anybody's memory, with a name and a layout: the argument of functions that work on
// any list of tensors.
#pragma once

#include <cstddef>
#include <string_view>
#include <type_traits>

#include "weft/base/view.hpp"
#include "weft/mesh/layout.hpp"

namespace weft {

/// Borrowed: the caller keeps the memory and the name alive until the call returns.
template <class Byte>
struct BasicNamedView {
  std::string_view name;  ///< "layers.0.mlp.up_proj.weight"
  /// This rank's part, of layout->local_shape(): any dtype.
  BasicView<Byte> data;
  /// The layout of the elements over the mesh; null: only this rank has them.
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
