// Halos of fields that a program stores with their ghost cells. An array holds this rank's part and, around
// it, copies of elements that other ranks hold. For simulations. Models use Window (weft/mesh/window.hpp).
// One thread per rank uses it.
#pragma once

#include <initializer_list>
#include <span>
#include <vector>

#include "weft/mesh/window.hpp"

namespace weft {

/// Ghost cells along one dimension.
struct HaloDim {
  int dim = 0;
  std::int64_t before = 1, after = 1;  ///< the numbers of ghost cells
  Edge before_edge = Edge::none();     ///< the ghost cells' values at the ends of the global tensor
  Edge after_edge = before_edge;
};

struct HaloFields;

/// The plan of an exchange that fills ghost cells, including corners. Make it once, and use it in every step:
///
///   const Halo halo(make_layout(mesh, {{"y", Shard{0}}, {"x", Shard{1}}}, {400, 600}),
///                   {{0, 1, 1, Edge::zero()}, {1, 1, 1, Edge::periodic()}});
///   std::vector<double> cells(halo.shape().count());
///   halo.exchange(view(cells.data(), halo.shape()));
///
/// With edge none the ghost cells beyond an end of the global tensor do not change: the program sets the
/// boundary condition itself.
class Halo {
 public:
  /// A rank whose part is empty has no ghost cells, and exchanges nothing. Throws the errors of
  /// WindowDim::halo() and Window, with "halo:" in place of "window:".
  Halo(const Partition& x, const std::vector<HaloDim>& dims);

  /// The shape of this rank's array: its part and the ghost cells.
  const Shape& shape() const noexcept { return shape_; }
  /// The place of this rank's part in that array (inner), and its place in the global tensor (offset).
  const Box& inner() const noexcept { return inner_; }
  const Dims& offset() const noexcept { return offset_; }
  /// This rank's part of an array.
  TensorView inner(const TensorView& cells) const;
  ConstTensorView inner(const ConstTensorView& cells) const;

  /// Fills the ghost cells of one or several arrays of shape shape(), with any dtypes and strides. Until
  /// finish() the program may read the inner cells, but not write them. It may neither read nor write ghost
  /// cells. Collective like Window::start(). start() and finish() throw the errors of Window::start(), with
  /// "halo:" in place of "window:". If an exchange of a field is still in flight, start() throws `halo: the
  /// ghost cells of field 1 are still written by an exchange in flight; finish that one first`.
  WindowTransfer start(std::span<const TensorView> fields) const;
  WindowTransfer start(const TensorView& field) const { return start(std::span(&field, 1)); }
  void exchange(std::span<const TensorView> fields) const { start(fields).finish(); }
  void exchange(const TensorView& field) const { start(field).finish(); }

  /// The adjoint of start(), in place: each ghost cell is added to the inner cell of which start() makes it a
  /// copy, on the rank that holds that cell. An inner cell gets the contributions of rank 0 first, then those
  /// of rank 1, and so on. Contributions of this rank's own ghost cells (beyond a periodic end, for example)
  /// are added when it is this rank's turn. The contributions of one rank are added in the order of
  /// Window::start_adjoint(). So the bits do not depend on timing. Ghost cells do not change. Ghost cells
  /// that start() sets to a number are not added to any cell. Only cells near the border change. For
  /// integers, which wrap, and for f64, f32, bf16 and f16. bf16 and f16 are added in f32 and rounded once. In
  /// host memory only. Until finish() the program may read ghost cells, but it may neither read nor write
  /// inner cells within reach of another rank's halo. Use it for forces and masses of nodes that ranks share,
  /// and for gradients.
  WindowTransfer start_add(std::span<const TensorView> fields) const;
  WindowTransfer start_add(const TensorView& field) const { return start_add(std::span(&field, 1)); }
  void add(std::span<const TensorView> fields) const { start_add(fields).finish(); }
  void add(const TensorView& field) const { start_add(field).finish(); }

 private:
  friend WindowTransfer start_together(std::span<const HaloFields> list);
  std::vector<WindowField> fields_of(std::span<const TensorView> fields, bool add) const;
  Window window_;
  Shape shape_;
  Box inner_, reached_;  // reached_: the part of the array that the window writes
  Dims offset_;
  Halo(const Partition& x, const std::vector<HaloDim>& dims, std::vector<WindowDim> wanted);
};

/// A halo, and views of the arrays whose ghost cells it fills.
struct HaloFields {
  const Halo& halo;
  std::span<const TensorView> fields;
};

/// Begins the exchanges of several halos (of nodes and of cells, for example) as one. See start_together() in
/// weft/mesh/window.hpp.
WindowTransfer start_together(std::span<const HaloFields> list);
inline WindowTransfer start_together(std::initializer_list<HaloFields> list) {
  return start_together(std::span(list.begin(), list.size()));
}

}  // namespace weft
