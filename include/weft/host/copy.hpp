// Copies tensors from one device to another. No other call of weft copies between devices.
#pragma once

#include "weft/base/tensor.hpp"
#include "weft/host/context.hpp"

namespace weft {

/// to = from, of the same dtype and shape, with any strides; one of them is on the CPU, or both are on one
/// device. The copy runs on `stream`, a stream of that device; Stream{} means its default stream. If `to` is
/// host memory, the elements have arrived after DeviceRuntime::wait(stream). `from` and `to` must not
/// overlap. Throws bad_argument naming what differs, or has no memory.
void copy(Context& context, const ConstTensorView& from, const TensorView& to, Stream stream = {});

/// A copy in local memory of the host, with the same layout, after all work queued on t's stream; waits for
/// it. If the tensor is on the host already, it is returned as it is.
Tensor to_host(Context& context, const Tensor& t);
/// A copy on the device of `where`, with the same layout, ordered on it; t may be changed at once. If t is on
/// that device already, it is not copied: the result is t, ordered on `where` (Tensor::ordered_on).
Tensor to_device(Context& context, const Tensor& t, Stream where);

}  // namespace weft
