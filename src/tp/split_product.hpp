// Layers that multiply by one weight and are split over ranks, on views: the common checks and the common
// communication of weft/tp/linear.hpp and weft/tp/conv.hpp. A Product contains the differences between these
// layers. Included only inside tp.
#pragma once

#include "weft/tp/linear.hpp"

namespace weft::split {

/// The shapes of x, y and w.
struct Form {
  const char *x, *y, *w;      ///< in texts: `(…, in)`, `(…, out)`, `(out, in)`
  const char* feature;        ///< in texts: the meaning of one element of the dimension of features
  const char* sequence_dims;  ///< in texts, if they are always the same; null: all except the last
  int rank;                   ///< of x and y; 0: at least 1
  int features;               ///< the dimension of features; -1: the last
  int weight_rank;            ///< out, in, and then extents of 1
};

/// A kind of layer: its form and its kernels, each on one rank's part. The views fit each other, have the
/// dtypes that weft/tp/linear.hpp documents, and may have no elements.
class Product {
 public:
  explicit constexpr Product(const Form& form_in) : form(form_in) {}
  const Form form;

  /// y = w x, plus b if b is given.
  virtual void forward(Compute& compute, const ConstTensorView& x, const ConstTensorView& w,
                       const ConstTensorView& b, const TensorView& y) const = 0;
  /// y += b
  virtual void add_bias(Compute& compute, const ConstTensorView& b, const TensorView& y) const = 0;
  /// dx = the adjoint of w on dy
  virtual void input_gradient(Compute& compute, const ConstTensorView& dy, const ConstTensorView& w,
                              const TensorView& dx) const = 0;
  /// dw = or += the sum of dy x over all but features
  virtual void weight_gradient(Compute& compute, const ConstTensorView& dy, const ConstTensorView& x,
                               const TensorView& dw, bool add) const = 0;
  /// db = or += the sum of dy over all but features
  virtual void bias_gradient(Compute& compute, const ConstTensorView& dy, const TensorView& db,
                             bool add) const = 0;

 protected:
  ~Product() = default;
};

/// The functions of weft/tp/linear.hpp for any Product; `function` is the name in error texts.
struct Layer {
  const char* function;
  const Product& product;

  void column_forward(Compute& compute, const ConstTensorView& x, const ConstTensorView& w,
                      const ConstTensorView& b, const TensorView& y) const;
  void column_forward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& x,
                      const ConstTensorView& w, const ConstTensorView& b, const TensorView& y,
                      const ColumnOptions& options) const;
  void column_backward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& dy,
                       const ConstTensorView& x, const ConstTensorView& w, const LinearGradients& gradients,
                       const ColumnOptions& options) const;
  void row_forward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& x,
                   const ConstTensorView& w, const ConstTensorView& b, const TensorView& y,
                   const RowOptions& options) const;
  void row_backward(Compute& compute, const ConstTensorView& dy, const ConstTensorView& x,
                    const ConstTensorView& w, const LinearGradients& gradients) const;
  void row_backward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& dy,
                    const ConstTensorView& x, const ConstTensorView& w, const LinearGradients& gradients,
                    const RowOptions& options) const;
};

}  // namespace weft::split
