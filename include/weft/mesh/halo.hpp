// Halos of fields that a program keeps with their ghost cells: an array holds this rank's part and around
// it copies of elements that other ranks hold. For simulations; models use Window (weft/mesh/window.hpp).
// One thread per rank uses it.
#pragma once

#include <span>
#include <vector>

#include "weft/mesh/window.hpp"

namespace weft {

/// Ghost cells along one dimension.
struct HaloDim {
  int dim = 0;
  std::int64_t before = 1, after = 1;  ///< how many
  Edge before_edge = Edge::none();     ///< what they are at the ends of the whole
  Edge after_edge = before_edge;
};

/// The plan of an exchange that fills ghost cells, corners too. Made once, used in every step:
///
///   const Halo halo(make_layout(mesh, {{"y", Shard{0}}, {"x", Shard{1}}}, {400, 600}),
///                   {{0, 1, 1, Edge::zero()}, {1, 1, 1, Edge::periodic()}});
///   std::vector<double> cells(halo.shape().count());
///   halo.exchange(view(cells.data(), halo.shape()));
///
/// With edge none the ghost cells beyond an end of the whole stay as they are: a boundary condition that the
/// program sets itself.
class Halo {
 public:
  /// A rank whose part is empty has no ghost cells, and exchanges nothing. Throws as WindowDim::halo() and
  /// Window do, with "halo:" in place of "window:".
  Halo(const Partition& x, const std::vector<HaloDim>& dims);

  /// The shape of this rank's array: its part and the ghost cells.
  const Shape& shape() const noexcept { return shape_; }
  /// The place of this rank's part in that array, and its place in the whole.
  const Box& inner() const noexcept { return inner_; }
  const Dims& offset() const noexcept { return offset_; }
  /// This rank's part of an array.
  TensorView inner(const TensorView& cells) const;
  ConstTensorView inner(const ConstTensorView& cells) const;

  /// Fills the ghost cells of one array or several, of shape(), of any dtypes and strides. Until finish()
  /// the program may read the inner cells, but not write them; it may neither read nor write ghost cells.
  /// Collective as Window::start() is. Throws as that does, also in finish(), with "halo:" in place of
  /// "window:". If a field's exchange is in flight, it throws: `halo: the ghost cells of field 1 are still
  /// written by an exchange in flight; finish that one first`.
  WindowTransfer start(std::span<const TensorView> fields) const;
  WindowTransfer start(const TensorView& field) const { return start(std::span(&field, 1)); }
  void exchange(std::span<const TensorView> fields) const { start(fields).finish(); }
  void exchange(const TensorView& field) const { start(field).finish(); }

 private:
  Window window_;
  Shape shape_;
  Box inner_, reached_;  // reached_: what the window writes, in the array
  Dims offset_;
  Halo(const Partition& x, const std::vector<HaloDim>& dims, std::vector<WindowDim> wanted);
};

}  // namespace weft
