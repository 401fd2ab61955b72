// Windows on a tensor that is cut over ranks. Each rank gets the range of indices that it requests, from the
// ranks that hold it. Beyond the ends of the tensor it gets the values that an edge rule gives. Halo
// exchanges, padding, cropping and resharding are such windows. A Window is pure layout arithmetic and one
// exchange. One thread per rank uses a Window. Functions that communicate say so.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "weft/group/work.hpp"
#include "weft/mesh/layout.hpp"
#include "weft/mesh/transfer.hpp"

namespace weft {

/// Indices lo ≤ i < hi of a dimension of the whole tensor. The range of a window may lie beyond the ends of
/// the dimension.
struct IndexRange {
  std::int64_t lo = 0, hi = 0;
  std::int64_t size() const noexcept { return hi - lo; }
  friend bool operator==(const IndexRange&, const IndexRange&) = default;
};
/// Ranges, one after the other: the indices that a part of a dimension holds, or its ranks request.
using IndexRanges = std::vector<IndexRange>;

/// The values beyond an end of a dimension of n elements. x[-1] and x[n] are the first of these values.
struct Edge {
  enum class Kind : std::uint8_t {
    none,       ///< no values: a window that reaches there is an error
    zero,       ///< 0
    constant,   ///< `value`
    periodic,   ///< x[-1] = x[n-1], x[n] = x[0], as often as needed
    reflect,    ///< x[-1] = x[1], x[n] = x[n-2]; at most n-1 beyond the end
    replicate,  ///< x[-1] = x[0], x[n] = x[n-1]
    pole        ///< of a globe; see Edge::pole()
  };
  Kind kind = Kind::none;
  double value = 0;
  int longitude = -1;

  static Edge none() { return {}; }
  static Edge zero() { return {Kind::zero}; }
  /// `value` is rounded to the dtype of the elements that are filled.
  static Edge constant(double value) { return {Kind::constant, value}; }
  static Edge periodic() { return {Kind::periodic}; }
  static Edge reflect() { return {Kind::reflect}; }
  static Edge replicate() { return {Kind::replicate}; }
  /// Beyond the pole, rows of latitude continue on its other side, half a turn of longitude away: x[-1, j] =
  /// x[0, j + m/2 mod m], x[-2, j] = x[1, …]. Dimension `longitude_dim` has m elements, an even number. For
  /// grids whose first row is half a step from the pole. At most n rows beyond the end. The rule is for
  /// scalars. The components of a vector point in the opposite direction beyond a pole, and the rule does not
  /// change their signs.
  static Edge pole(int longitude_dim) { return {Kind::pole, 0, longitude_dim}; }

  friend bool operator==(const Edge&, const Edge&) = default;
};

/// The cut of one dimension of a tensor over axes of a mesh. Part p belongs to the ranks whose coordinates on
/// these axes give the number p. The first axis is the outermost.
struct PartitionDim {
  int dim = 0;
  std::vector<std::string> axes{};  ///< empty: the dimension is one part, which every rank has
  /// the indices that each part holds, in the order in which they lie in memory
  std::vector<IndexRanges> parts{};

  /// Part p holds the indices begins[p] to begins[p + 1] - 1. The last of `begins` is the size of the
  /// dimension: cut_at(0, {"y"}, {0, 3, 7, 8}) gives three parts of a dimension of 8.
  static PartitionDim cut_at(int dim, std::vector<std::string> axes, const std::vector<std::int64_t>& begins);
};

/// The places of the elements of a tensor: for each dimension that is cut, its parts, which may have any size
/// and be empty. A program makes a Partition from a layout, or states parts that no layout can have (for
/// example rows of latitude, numbered by the program). A value.
class Partition {
 public:
  /// The partition of a layout. Throws layout if the layout is Partial on an axis of several ranks:
  /// `window: x is Partial(sum) on tp=2; …`. Throws bad_argument if `layout` is null.
  Partition(const LayoutRef& layout);  // NOLINT(google-explicit-constructor)
  /// Dimensions that are not named are whole on every rank. Throws bad_argument if a dimension is named twice
  /// or does not exist, an axis is not in the mesh or cuts two dimensions, the number of parts differs from
  /// the number of ranks of the dimension's axes, or the parts do not hold each index of the dimension
  /// exactly once.
  Partition(const DeviceMesh& mesh, const Shape& global, std::vector<PartitionDim> dims);

  const DeviceMesh& mesh() const noexcept { return mesh_; }  ///< the root
  const Shape& global() const noexcept { return global_; }
  std::span<const PartitionDim> dims() const noexcept { return dims_; }
  /// The parts of dimension `dim`. If it is not cut, one part with all indices.
  PartitionDim dim(int dim) const;
  /// The number of the part that this rank, or rank `rank` of the mesh, holds of a dimension.
  int part(int dim) const { return part(dim, mesh_.rank()); }
  int part(int dim, int rank) const;

 private:
  DeviceMesh mesh_;
  Shape global_;
  std::vector<PartitionDim> dims_;
};

/// The requests of the ranks for one dimension.
struct WindowDim {
  int dim = 0;
  /// wanted[p]: the ranges that the ranks with part p request. Several ranges follow one another in the
  /// window.
  std::vector<IndexRanges> wanted{};
  Edge before{}, after{};

  /// Requests one range for each part, with the same edge rule at both ends.
  static WindowDim ranges(int dim, const std::vector<IndexRange>& wanted, const Edge& edge = {});
  /// A halo: each part's own elements, with `before` elements more at its beginning and `after` more at its
  /// end. An empty part requests nothing. Throws bad_argument if a part holds more than one range, or a width
  /// is negative or above 2^60.
  static WindowDim halo(const Partition& x, int dim, std::int64_t before, std::int64_t after,
                        const Edge& edge = {});
};

/// One field of an exchange: this rank's part, and its window. The views may have any strides. Each field may
/// have a different dtype, and a different size in dimensions of which no window is requested.
struct WindowField {
  ConstTensorView in;
  TensorView out;
};

/// An exchange in flight. All ranks must begin and finish their exchanges in the same order. Until finish()
/// returns, the caller must keep alive all memory that the exchange reads or writes, and nobody else may
/// write this memory. If an unfinished WindowTransfer is destroyed, its group fails, as with an unfinished
/// Work. Errors of done() and finish(), including those of the group's calls, begin with the interface that
/// the program called: `halo: ` or `window: `.
class [[nodiscard]] WindowTransfer {
 public:
  /// The remaining steps.
  class Steps {
   public:
    virtual ~Steps() = default;
    virtual bool done() = 0;
    virtual void finish() = 0;
    virtual Work& work() = 0;
  };
  WindowTransfer() = default;
  explicit WindowTransfer(std::unique_ptr<Steps> steps) : steps_(std::move(steps)) {}
  /// Returns true if finish() would not wait. Makes progress; does not wait. Throws if the exchange has
  /// failed, and timeout if the exchange has not ended within the group's deadline since the first call of
  /// done().
  bool done() { return steps_ == nullptr || steps_->done(); }
  /// Waits, and writes the elements that other ranks sent. Does nothing if the exchange is finished already.
  void finish() {
    if (const std::unique_ptr<Steps> steps = std::move(steps_)) steps->finish();
  }
  /// The Work of this exchange, for Work::then() and wait_on(); an invalid Work if this rank exchanges only
  /// with itself. Its errors do not begin with `halo: ` or `window: `. finish() waits for this Work, and must
  /// still be called. Null after finish().
  Work* work() noexcept { return steps_ == nullptr ? nullptr : &steps_->work(); }

 private:
  std::unique_ptr<Steps> steps_;
};

class Window;

/// A window, and views of its fields: see start_together().
struct WindowFields {
  const Window& window;
  std::span<const WindowField> fields;
};

/// The plan of an exchange. It is made once, and used as often as needed. Two ranks exchange nothing if
/// neither window needs elements of the other rank. On axes of one rank the exchange is a local copy.
/// Otherwise it is an exchange (ProcessGroup::make_exchange) in the group of the axes that cut the named
/// dimensions. It is a call of that group like any other, with its deadline, its number and traces.
///
/// The first start() of a Window waits for the first start() on the other ranks. The ranks compare their
/// arguments, and all throw mismatch if those differ: `window: the edge before dimension 0 is reflect on rank
/// 1 and zero on rank 0; expected the same on all ranks`.
class Window {
 public:
  /// `dims`: the dimensions of which a window is requested. In the other dimensions the window is this rank's
  /// part. No communication. All ranks must give the same arguments, so all throw the same error. Throws
  /// bad_argument if a dimension is named twice or does not exist, or if `wanted` does not have one entry for
  /// each part. Throws it if a range ends before it begins, has an index farther than 2^60 from 0, reaches
  /// elements for which the edge rule has no values, or wraps more than 65536 times around a periodic
  /// dimension; or if windows have more than 2^20 boxes (see start_adjoint()): `window: dimension 2: part 1
  /// wants [3, 9) of 8; with edge none expected within [0, 8)`.
  Window(Partition x, std::vector<WindowDim> dims);

  /// The shape of this rank's window if `part` is the shape of this rank's part.
  Shape window_shape(Shape part) const;
  /// The number of indices of this rank's part, and of its window, in a dimension. Here and below `dim` must
  /// be a dimension of which a window is requested. Otherwise it throws bad_argument.
  std::int64_t part_size(int dim) const;
  std::int64_t window_size(int dim) const;
  /// Indices of the window in a dimension that are filled when start() returns, whatever other ranks do. This
  /// is the longest run of elements that this rank holds itself. {0, 0} if there are none.
  IndexRange own(int dim) const;

  /// out = the window on in. Collective among the ranks of the axes that cut the named dimensions. `in` may
  /// be the part of `out` to which this rank's own elements belong. Then they are not copied. Memory that is
  /// written may not overlap any other memory of any field. Views that are interleaved do not overlap. Throws
  /// bad_argument that names the field if its shape does not fit, its dtypes or devices differ, it has no
  /// memory, or another unfinished exchange of this Window still uses its memory: `window: out is still
  /// written by an exchange in flight; finish that one first` (or read; or in is still written). Several
  /// exchanges may read the same memory. finish() throws mismatch if another rank gave other fields (their
  /// number, dtypes, sizes), and the group fails.
  WindowTransfer start(std::span<const WindowField> fields, Stream stream = {}) const;
  WindowTransfer start(const ConstTensorView& in, const TensorView& out, Stream stream = {}) const;
  void fetch(const ConstTensorView& in, const TensorView& out, Stream stream = {}) const {
    start(in, out, stream).finish();
  }

  /// The adjoint. `in` is a gradient of a window. `out` has the shape of a part: each of its elements becomes
  /// the sum of the gradients of that element in all windows. The sum runs over the windows in the order of
  /// their ranks. Within each window the sum runs over its boxes. Every dimension is split into the pieces
  /// before the beginning, inside, and beyond the end (a periodic dimension: one piece per wrap-around).
  /// Boxes are visited with the first named dimension outermost, except that a dimension with a pole always
  /// comes first. Within a box the elements are visited in row-major order. So the bits of the sum do not
  /// depend on timing. The gradients of elements that were filled with a number are dropped. For
  /// floating-point and integer dtypes, in host memory. bf16 and f16 are summed in f32 and rounded once, at
  /// the end.
  WindowTransfer start_adjoint(std::span<const WindowField> fields) const;
  WindowTransfer start_adjoint(const ConstTensorView& in, const TensorView& out) const;
  void adjoint(const ConstTensorView& in, const TensorView& out) const { start_adjoint(in, out).finish(); }

  struct Plan;  // private

 private:
  friend class Halo;
  WindowTransfer start_add(std::span<const WindowField> fields) const;  // Halo::start_add()
  friend WindowTransfer start_together(std::span<const WindowFields> list, Stream stream);
  std::shared_ptr<Plan> plan_;
};

/// Begins the exchanges of several windows as one. Each rank sends one message, instead of one per window, to
/// each rank with which it shares elements, and waits once. The windows must be cut over the same axes of one
/// mesh. All other rules are as in Window::start(). All ranks must give the same windows in the same order.
/// No two fields may share memory, even fields of different windows. Throws the errors of Window::start(),
/// and bad_argument if the axes differ or a window is given twice: `window: window 1 is cut over axes [x];
/// expected [y, x], as window 0`.
WindowTransfer start_together(std::span<const WindowFields> list, Stream stream = {});
inline WindowTransfer start_together(std::initializer_list<WindowFields> list, Stream stream = {}) {
  return start_together(std::span(list.begin(), list.size()), stream);
}

/// Returns the window of a tensor with a layout as a plain tensor, in shared memory. Collective like
/// Window::start(). Throws the errors of Window's constructor and of start().
Tensor fetch_window(const Tensor& x, std::vector<WindowDim> dims);
Transfer start_fetch_window(const Tensor& x, std::vector<WindowDim> dims);
/// The adjoint of fetch_window(): the gradient of x, with layout `x`, from this rank's gradient of its
/// window.
Tensor fetch_window_adjoint(const Tensor& dwindow, const LayoutRef& x, std::vector<WindowDim> dims);

}  // namespace weft
