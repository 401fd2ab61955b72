// Tensors that a module keeps in addition to its parameters. They have layouts and are saved like weights,
// but are not trained.
#pragma once

#include <memory>
#include <string>

#include "weft/base/tensor.hpp"
#include "weft/host/compute.hpp"
#include "weft/nn/init.hpp"

namespace weft {

/// A tensor that a module keeps in addition to its parameters (the vectors of a spectral norm, the bias of a
/// router). It has a name and a layout and is saved like a parameter, but is not trained. Layout, memory and
/// values are set in the same order as for a Parameter.
class ModuleBuffer {
 public:
  /// `saved`: whether checkpoints contain the buffer.
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
  /// The layout over the root mesh. Null: a plain tensor on one rank.
  LayoutRef layout() const noexcept { return layout_; }
  /// Call it before materialise. Later it throws bad_argument. Throws layout if the global shape of `layout`
  /// is not global_shape(), or if `layout` is Partial.
  void set_layout(LayoutRef layout);
  /// Allocates the buffer, uninitialised, in the memory of `compute`, which must exist longer than the
  /// buffer. Throws bad_argument if the buffer already has memory.
  void materialise(Compute& compute, Memory memory = Memory::local);
  bool materialised() const noexcept { return static_cast<bool>(tensor_); }
  /// The Compute with which the buffer was materialised. Before materialise it throws bad_argument that names
  /// the path.
  Compute& compute() const;
  /// This rank's part, which the caller may read and write: a tensor of dtype() with layout(). Before
  /// materialise it throws bad_argument that names the path.
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
