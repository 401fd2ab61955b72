// Weights and activations in the dtype that a kernel takes. Inside nn.
#pragma once

#include "weft/nn/frame.hpp"
#include "weft/nn/kernels.hpp"

namespace weft {

/// x, f32, rounded to bf16; with the same layout.
inline Tensor rounded_to_bf16(Frame& frame, const Tensor& x) {
  const Tensor y = frame.compute().make(x.shape(), DType::bf16).with_layout(x.layout());
  kernels::round_to_bf16(frame.kernels(), x.data_ptr<float>(), y.data_ptr<bf16>(), x.count());
  return y;
}

/// A weight as f32: itself, or a copy where it is bf16; with the same layout.
inline Tensor widened(Frame& frame, const Tensor& w) {
  if (w.dtype() != DType::bf16) return w;
  const Tensor y = frame.compute().make(w.shape()).with_layout(w.layout());
  kernels::widen_bf16(frame.kernels(), w.data_ptr<bf16>(), y.data_ptr<float>(), w.count());
  return y;
}

}  // namespace weft
