// Tensors that a module keeps besides its parameters: they are laid out and saved as weights are, but not
// trained.
#pragma once

#include <memory>
#include <string>

#include "weft/base/tensor.hpp"
#include "weft/host/compute.hpp"
#include "weft/nn/init.hpp"

namespace weft {

/// A tensor that a module keeps beside its parameters: named, laid out and saved as they are, but not trained
/// (the vectors of a spectral norm, the bias of a router). Life: as that of a Parameter.
class ModuleBuffer {
 public:
  /// `saved`: whether checkpoints contain it.
  explicit ModuleBuffer(const Shape& global, DType dtype = DType::f32, Init init = Constant{0.0},
                        bool saved = true)
      : global_(global), dtype_(dtype), init_(init), saved_(saved) {}
  ModuleBuffer(const ModuleBuffer&) = delete;
  ModuleBuffer& operator=(const ModuleBuffer&) = delete;

  const std::string& path() const noexcept { return path_; }
  const Shape& global_shape() const noexcept { return global_; }
  DType dtype() const noexcept { return dtype_; }
  const Init& init() const noexcept { return init_; }
  bool saved() const noexcept { return saved_; }
  /// Over the root mesh; null: plain, one rank.
  LayoutRef layout() const noexcept { return layout_; }
  /// Before materialise only (bad_argument after). Throws layout if its global shape is not
  /// global_shape(), or it is Partial.
  void set_layout(LayoutRef layout);
  /// Allocates it, uninitialised, in the memory of `compute`, which must outlive it. Throws bad_argument
  /// if it has memory already.
  void materialise(Compute& compute, Memory memory = Memory::local);
  bool materialised() const noexcept { return static_cast<bool>(tensor_); }
  /// The Compute that it was materialised with. Throws bad_argument naming the path before materialise.
  Compute& compute() const;
  /// This rank's part, to be read and written: a tensor of dtype() that carries layout(). Throws bad_argument
  /// naming the path before materialise.
  const Tensor& tensor() const;

 private:
  friend class Module;
  Shape global_;
  DType dtype_;
  Init init_;
  bool saved_;
  std::string path_;
  LayoutRef layout_ = nullptr;
  Compute* compute_ = nullptr;
  Tensor tensor_;
};

using ModuleBufferRef = std::shared_ptr<ModuleBuffer>;

}  // namespace weft
