// Checks of views for the functions on views, and the memory that kernels read and write as f32. Included
// only inside tp.
#pragma once

#include <fmt/format.h>

#include <initializer_list>
#include <string>
#include <utility>

#include "base/floating.hpp"
#include "mesh/view_memory.hpp"
#include "weft/base/error.hpp"
#include "weft/base/tensor.hpp"
#include "weft/host/compute.hpp"
#include "weft/mesh/mesh.hpp"
#include "weft/nn/frame.hpp"
#include "weft/nn/kernels.hpp"

namespace weft::views {

template <class T>
const T* as(const ConstTensorView& v) {
  return reinterpret_cast<const T*>(v.data);
}
template <class T>
T* as(const TensorView& v) {
  return reinterpret_cast<T*>(v.data);
}
/// A view that has elements but no memory counts as given. The check then refuses it.
inline bool given(const ConstTensorView& v) {
  return v.data != nullptr || (v.shape.rank() > 0 && v.count() != 0);
}

/// Checks of one call of `function`, whose texts begin with its name.
struct Checker {
  const char* function;
  Device device;  ///< of the Compute

  [[noreturn]] void wrong(const char* what, const std::string& text) const {
    throw Error(ErrorCode::bad_argument, fmt::format("{}: {} {}", function, what, text));
  }
  /// Makes the checks that hold for every view.
  void check(const char* what, const ConstTensorView& v) const {
    if (v.device != device)
      wrong(what, fmt::format("is on {}; expected {}, the device of the Compute", to_string(v.device),
                              to_string(device)));
    if (const std::string fault = memory_fault(v); !fault.empty()) wrong(what, fault);
  }
  /// Like check(), for a view of one of two dtypes.
  void check_floats(const char* what, const ConstTensorView& v) const {
    if (!is_weight_dtype(v.dtype))
      wrong(what, fmt::format("is {}; expected {}", name(v.dtype), kWeightDTypeNames));
    check(what, v);
  }
  void expect(const char* what, const Shape& got, const Shape& shape, const std::string& from) const {
    if (!(got == shape))
      wrong(what, fmt::format("is {}; expected {}, from {}", to_string(got), to_string(shape), from));
  }
  /// `out` is written while the other views are read or written. Views that are not given overlap nothing.
  void expect_apart(const char* what, const ConstTensorView& out,
                    std::initializer_list<std::pair<const char*, ConstTensorView>> others) const {
    for (const auto& [name, other] : others)
      if (given(out) && given(other) && overlap(out, other))
        wrong(what, fmt::format("overlaps {}; expected memory of its own", name));
  }
};

/// Returns null if nothing is to be sent. Throws for a mesh that cannot communicate, before anything is
/// written.
inline ProcessGroup* group_of(const DeviceMesh& axes) { return axes.size() > 1 ? &axes.group() : nullptr; }

/// The caller's memory as a tensor, ordered on the rank's stream.
inline Tensor borrowed(Compute& compute, const ConstTensorView& v) {
  return Tensor(
      Storage::borrow(const_cast<std::byte*>(v.data), static_cast<std::size_t>(v.bytes()), compute.stream()),
      0, v.shape, v.dtype);
}

/// The f32 memory that kernels write: the memory of a view, or memory whose contents round() copies to the
/// view.
class Output {
 public:
  Output(Compute& compute, const TensorView& to) : compute_(compute), to_(to) {
    if (to.dtype != DType::f32) wide_ = compute.make(to.shape);
  }
  float* data() const { return wide_ ? wide_.data_ptr<float>() : as<float>(to_); }
  Tensor tensor() const { return wide_ ? wide_ : borrowed(compute_, to_); }
  /// The present values of the view, to which results are added.
  void read() const {
    if (wide_) kernels::widen_bf16(kernels_of(compute_), as<bf16>(ConstTensorView(to_)), data(), to_.count());
  }
  void round() const {
    if (wide_) kernels::round_to_bf16(kernels_of(compute_), data(), as<bf16>(to_), to_.count());
  }

 private:
  Compute& compute_;
  const TensorView& to_;
  Tensor wide_;
};

/// The memory that kernels read as f32.
class Input {
 public:
  Input(Compute& compute, const ConstTensorView& from) : compute_(compute), from_(from) {
    if (!given(from) || from.dtype == DType::f32) return;
    wide_ = compute.make(from.shape);
    kernels::widen_bf16(kernels_of(compute), as<bf16>(from), wide_.data_ptr<float>(), from.count());
  }
  const float* data() const { return wide_ ? wide_.data_ptr<float>() : as<float>(from_); }
  Tensor tensor() const { return wide_ ? wide_ : borrowed(compute_, from_); }

 private:
  Compute& compute_;
  const ConstTensorView& from_;
  Tensor wide_;
};

}  // namespace weft::views
