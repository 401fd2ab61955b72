// Layers that pad, pool and resize maps; x, y: (batch, channels, height, width). They have no parameters. x
// may be split in batch and channels, and in space by apply_domain_parallel() (weft/domain/domain.hpp).
#pragma once

#include "weft/nn/conv.hpp"

namespace weft {

/// A layer whose output is linear in its input, separately for rows and for columns. Two tables of taps
/// describe the layer. Programs may derive their own layers from it.
class Resampling2d : public Module {
 public:
  /// For an x of this height, the rows of x from which each row of y is computed. Throws bad_argument if x
  /// has too few rows.
  virtual kernels::Taps rows(std::int64_t height) const = 0;
  virtual kernels::Taps columns(std::int64_t width) const = 0;

 private:
  Tensors do_forward(Inputs x, Frame& frame) final;
  Tensors do_backward(Inputs dy, Frame& frame) final;
};

struct Pad2dConfig {
  std::int64_t top = 0, bottom = 0, left = 0, right = 0;
  kernels::Padding rows = kernels::Padding::zeros,
                   /// the rules for pixels above and below, and for pixels left and right
      columns = kernels::Padding::zeros;
};

/// Adds pixels around the border, as torch.nn.functional.pad does. Rows and columns have separate rules: a
/// globe is circular in columns.
class Pad2d : public Resampling2d {
 public:
  /// Throws bad_argument for a width below 0.
  explicit Pad2d(const Pad2dConfig& config);
  const Pad2dConfig& config() const noexcept { return config_; }
  kernels::Taps rows(std::int64_t height) const override;
  kernels::Taps columns(std::int64_t width) const override;

 private:
  Pad2dConfig config_;
};

struct Pool2dConfig {
  Extent2d kernel = 2, stride = 2, padding = 0, dilation = 1;  ///< dilation: only for MaxPool2d
  bool count_padding = true;  ///< AvgPool2d: zeros beyond the border count in the mean
};

/// y has the means of the pixels that a kernel sees, as with torch.nn.AvgPool2d.
class AvgPool2d : public Resampling2d {
 public:
  /// Throws bad_argument for a kernel or stride below 1, for a padding of more than half the kernel, and for
  /// a dilation other than 1.
  explicit AvgPool2d(const Pool2dConfig& config);
  const Pool2dConfig& config() const noexcept { return config_; }
  kernels::Taps rows(std::int64_t height) const override;
  kernels::Taps columns(std::int64_t width) const override;

 private:
  Pool2dConfig config_;
};

/// y has `out` pixels. They are the means of parts of about equal size, which may share pixels, as with
/// torch.nn.AdaptiveAvgPool2d. With `out` 1 it is the mean of the map.
class AdaptiveAvgPool2d : public Resampling2d {
 public:
  /// Throws bad_argument for an extent below 1.
  explicit AdaptiveAvgPool2d(const Extent2d& out);
  const Extent2d& out() const noexcept { return out_; }
  kernels::Taps rows(std::int64_t height) const override;
  kernels::Taps columns(std::int64_t width) const override;

 private:
  Extent2d out_;
};

/// y has the largest pixels that a kernel sees, as with torch.nn.MaxPool2d. If several pixels are the
/// largest, the first of them gets the gradient.
class MaxPool2d : public Module {
 public:
  /// Throws bad_argument for sizes below 1, and a padding of more than half the kernel.
  explicit MaxPool2d(const Pool2dConfig& config);
  const Pool2dConfig& config() const noexcept { return config_; }

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
  Pool2dConfig config_;
};

enum class Resizing : unsigned char { nearest, bilinear };
struct Resize2dConfig {
  Resizing mode = Resizing::nearest;
  Extent2d out = 0;            ///< the size of y; 0: `scale` gives it
  Extent2d scale = 1;          ///< the rows and columns of y per row and column of x
  bool align_corners = false;  ///< for bilinear: the corner pixels of x and y have the same position
};

/// Let x have n rows and y have m rows. nearest: row r of y is row floor(r n / m) of x. bilinear: row r of y
/// is interpolated between the two rows of x around position (r + 1/2) n / m - 1/2. nearest uses exact
/// integer arithmetic. torch.nn.Upsample multiplies r by n / m rounded to f32, and so takes the neighbouring
/// row if the product falls on the other side of a whole number. For example, from 4 rows to 82, row 41 is
/// row 2 of x here, and row 1 in torch.
class Resize2d : public Resampling2d {
 public:
  /// Throws bad_argument if neither an out nor a scale of at least 1 is given.
  explicit Resize2d(const Resize2dConfig& config);
  const Resize2dConfig& config() const noexcept { return config_; }
  kernels::Taps rows(std::int64_t height) const override;
  kernels::Taps columns(std::int64_t width) const override;

 private:
  kernels::Taps taps(const char* what, std::int64_t n, std::int64_t out, std::int64_t scale) const;
  Resize2dConfig config_;
};

}  // namespace weft
