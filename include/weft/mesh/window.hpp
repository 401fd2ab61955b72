// Windows on a tensor that is cut over ranks: each rank gets the range of indices that it asks for, from
// any rank that holds it, and beyond the ends the values that an edge rule gives. Halo exchanges, padding,
// cropping and cutting anew are such windows. Pure layout arithmetic and one exchange. One thread per rank
// uses a Window; functions that communicate say so.
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

/// Indices lo ≤ i < hi of a dimension of the whole tensor. The range of a window may lie beyond its ends.
struct IndexRange {
  std::int64_t lo = 0, hi = 0;
  std::int64_t size() const noexcept { return hi - lo; }
  friend bool operator==(const IndexRange&, const IndexRange&) = default;
};
/// Ranges one after the other: the indices that one part of a dimension holds, or wants.
using IndexRanges = std::vector<IndexRange>;

/// The values beyond an end of a dimension of n elements; x[-1] and x[n] are the first elements there.
struct Edge {
  enum class Kind : std::uint8_t {
    none,       ///< nothing: a window that reaches there is an error
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
  /// The value is rounded to the dtype of the elements that are filled.
  static Edge constant(double value) { return {Kind::constant, value}; }
  static Edge periodic() { return {Kind::periodic}; }
  static Edge reflect() { return {Kind::reflect}; }
  static Edge replicate() { return {Kind::replicate}; }
  /// Rows of latitude go on beyond the pole on its other side, half a turn of longitude away: x[-1, j] =
  /// x[0, j + m/2 mod m], x[-2, j] = x[1, …], where dimension `longitude_dim` has m elements, an even
  /// number. For grids whose first row is half a step from the pole. At most n rows beyond the end. The
  /// rule is for scalars: a vector's components point the other way there, and the rule does not change
  /// them.
  static Edge pole(int longitude_dim) { return {Kind::pole, 0, longitude_dim}; }

  friend bool operator==(const Edge&, const Edge&) = default;
};

/// How one dimension of a tensor is cut over axes of a mesh: part p belongs to the ranks whose coordinates
/// on these axes, the first being the outermost, make the number p.
struct PartitionDim {
  int dim = 0;
  std::vector<std::string> axes{};   ///< none: one part, on every rank
  std::vector<IndexRanges> parts{};  ///< what each part holds, in the order in which it lies there
};

/// Where the elements of a tensor are: for each dimension that is cut, its parts, which may have any size
/// and be empty. It is made from a layout, or for parts that no layout has (rows of latitude in a program's
/// own numbers). A value.
class Partition {
 public:
  /// The partition of a layout. Throws layout if the layout is Partial on an axis of several ranks:
  /// `window: x is Partial(sum) on tp=2; …`; bad_argument if it is null.
  Partition(const LayoutRef& layout);  // NOLINT(google-explicit-constructor)
  /// Dimensions that are not named are whole on every rank. Throws bad_argument if a dimension is named
  /// twice or does not exist, an axis is not in the mesh or cuts two dimensions, the number of parts is not
  /// that of the ranks of its axes, or the parts do not hold each index of the dimension once.
  Partition(const DeviceMesh& mesh, const Shape& global, std::vector<PartitionDim> dims);

  const DeviceMesh& mesh() const noexcept { return mesh_; }  ///< the root
  const Shape& global() const noexcept { return global_; }
  std::span<const PartitionDim> dims() const noexcept { return dims_; }
  /// The parts of dimension `dim`; one part of everything if it is not cut.
  PartitionDim dim(int dim) const;
  /// The number of this rank's part of a dimension, or that of a rank of the mesh.
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
  /// The ranges that the ranks with part p want. Several ranges stand one after the other in the window.
  std::vector<IndexRanges> wanted{};
  Edge before{}, after{};

  /// One range for each part; the same rule at both ends.
  static WindowDim ranges(int dim, const std::vector<IndexRange>& wanted, const Edge& edge = {});
  /// A halo: each part's own elements, with `before` elements more at its beginning and `after` more at its
  /// end. An empty part wants nothing. Throws bad_argument if a part holds more than one range, or a width
  /// is negative or above 2^60.
  static WindowDim halo(const Partition& x, int dim, std::int64_t before, std::int64_t after,
                        const Edge& edge = {});
};

/// One field of an exchange: this rank's part, and its window. Any strides; each field may have a dtype of
/// its own and, in dimensions of which no window is wanted, a size of its own.
struct WindowField {
  ConstTensorView in;
  TensorView out;
};

/// An exchange in flight: the ranks begin and finish several in the same order. The memory that it reads
/// and writes lives, and nobody else writes it, until finish(). Dropping one that is not finished gives up
/// its group, as dropping a Work does. Errors of done() and finish(), those of the group's calls among
/// them, begin with the interface that the program called: `halo: ` or `window: `.
class [[nodiscard]] WindowTransfer {
 public:
  /// The steps that are left to be done.
  class Steps {
   public:
    virtual ~Steps() = default;
    virtual bool done() = 0;
    virtual void finish() = 0;
    virtual Work& work() = 0;
  };
  WindowTransfer() = default;
  explicit WindowTransfer(std::unique_ptr<Steps> steps) : steps_(std::move(steps)) {}
  /// True once finish() will not wait. Takes the next steps it can; does not wait. Throws if the exchange
  /// has failed, and timeout if it has not ended within the group's deadline since done() was first asked.
  bool done() { return steps_ == nullptr || steps_->done(); }
  /// Waits, and writes the elements that other ranks sent. Does nothing if it is finished already.
  void finish() {
    if (const std::unique_ptr<Steps> steps = std::move(steps_)) steps->finish();
  }
  /// The call of the group that this is, for Work::then() and wait_on(); an invalid Work if this rank
  /// exchanges with itself alone. Its errors do not begin with `halo: ` or `window: `. finish() waits for it,
  /// and must still be called. Null after finish().
  Work* work() noexcept { return steps_ == nullptr ? nullptr : &steps_->work(); }

 private:
  std::unique_ptr<Steps> steps_;
};

class Window;

/// A window, and fields for it. Views; see start_together().
struct WindowFields {
  const Window& window;
  std::span<const WindowField> fields;
};

/// The plan of an exchange: made once, used as often as needed. Ranks whose windows touch nothing of each
/// other exchange nothing. On axes of one rank it is a local copy. Otherwise it is an exchange
/// (ProcessGroup::make_exchange) in the group of the axes that cut the dimensions named: a call of that
/// group like any other, with its deadline, its number and its place in traces.
///
/// The first start() of a Window waits for that of the other ranks: they compare their arguments, and all
/// throw mismatch if those differ: `window: the edge before dimension 0 is reflect on rank 1 and zero on
/// rank 0; expected the same on all ranks`.
class Window {
 public:
  /// `dims`: the dimensions of which a window is wanted; in the other dimensions the window is this rank's
  /// part as it is. No communication. Every rank gives the same, so that all throw the same. Throws
  /// bad_argument if a dimension is named twice or does not exist; if `wanted` has not one entry for each
  /// part; if a range ends before it begins, has an index farther than 2^60 from 0, reaches where the edge
  /// rule has nothing, or goes more than 65536 times round a periodic dimension; if windows have more than
  /// 2^20 boxes (a box: one of each dimension's pieces within, before, beyond, and of each turn): `window:
  /// dimension 2: part 1 wants [3, 9) of 8; with edge none expected within [0, 8)`.
  Window(Partition x, std::vector<WindowDim> dims);

  /// The shape of this rank's window if `part` is the shape of this rank's part.
  Shape window_shape(Shape part) const;
  /// How many indices of a dimension this rank's part and its window have. Here and below `dim` is a
  /// dimension of which a window is wanted; throws bad_argument otherwise.
  std::int64_t part_size(int dim) const;
  std::int64_t window_size(int dim) const;
  /// Indices of the window in a dimension that are filled when start() returns, whatever other ranks do:
  /// the longest run of elements that this rank holds itself. {0, 0}: none.
  IndexRange own(int dim) const;

  /// out = the window on in. Collective among the ranks of the axes that cut the dimensions named. `in` may
  /// be a part of `out`, the place in it where this rank's own elements belong: then they are not copied.
  /// Memory that is written may not overlap any other memory of any field; views that are interleaved do
  /// not overlap.
  /// Throws bad_argument naming the field whose shape does not fit, whose dtypes or devices differ, or that
  /// has no memory; or whose memory another exchange of this Window, in flight, still needs: `window: out
  /// is still written by an exchange in flight; finish that one first` (or read; or in is still written).
  /// Several exchanges may read the same memory. finish() throws mismatch if another rank gave other fields
  /// (their number, dtypes, sizes), and the group fails.
  WindowTransfer start(std::span<const WindowField> fields, Stream stream = {}) const;
  WindowTransfer start(const ConstTensorView& in, const TensorView& out, Stream stream = {}) const;
  void fetch(const ConstTensorView& in, const TensorView& out, Stream stream = {}) const {
    start(in, out, stream).finish();
  }

  /// The adjoint: `in` is a gradient of a window; `out`, of the shape of a part, becomes, for each of its
  /// elements, the sum of the gradients of that element in all windows. The sum runs over the windows in
  /// the order of their ranks. Within one it runs over boxes: each dimension is split into the pieces
  /// before the beginning, within, and beyond the end (and each turn of periodic); the first dimension
  /// named is outermost, but one with a pole comes first; within a box the elements follow row-major. So
  /// its bits do not depend on timing. The gradients of elements that were filled with a number are
  /// dropped. Floating-point and integer dtypes, in the memory of the host; bf16 and f16 are summed in f32
  /// and rounded once, at the end.
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

/// Begins the exchanges of several windows as one: each rank sends one message to each rank that it shares
/// elements with, in place of one for each window, and waits once. The windows are cut over the same axes of
/// one mesh. Everything else is as in Window::start(); all ranks give the same windows in the same order. Two
/// fields that are given do not share memory, also those of different windows. Throws as Window::start()
/// does, and bad_argument if the axes differ or a window is given twice: `window: window 1 is cut over
/// axes [x]; expected [y, x], as window 0`.
WindowTransfer start_together(std::span<const WindowFields> list, Stream stream = {});
inline WindowTransfer start_together(std::initializer_list<WindowFields> list, Stream stream = {}) {
  return start_together(std::span(list.begin(), list.size()), stream);
}

/// The window of a tensor with a layout: a plain tensor, in shared memory. Collective as Window::start()
/// is, and throws as it and Window's constructor do.
Tensor fetch_window(const Tensor& x, std::vector<WindowDim> dims);
Transfer start_fetch_window(const Tensor& x, std::vector<WindowDim> dims);
/// The adjoint of fetch_window(): the gradient of x, of this layout, from this rank's gradient of its
/// window.
Tensor fetch_window_adjoint(const Tensor& dwindow, const LayoutRef& x, std::vector<WindowDim> dims);

}  // namespace weft
