// Copies tensors from one device to another. No other function of weft copies between devices.
#pragma once

#include "weft/base/tensor.hpp"
#include "weft/host/context.hpp"

namespace weft {

/// to = from. Both have the same dtype and shape; strides may differ. At least one of them is on the CPU, or
/// both are on one device. The copy runs on `stream`, a stream of the device that is not the CPU. If both
/// tensors are on the CPU, it is a stream of the CPU. Stream{} means this device's default stream. If `to` is
/// host memory, the elements have arrived after DeviceRuntime::wait(stream). `from` and `to` must not
/// overlap. Throws bad_argument if they differ, or if one has no memory. The text says what is wrong.
void copy(Context& context, const ConstTensorView& from, const TensorView& to, Stream stream = {});

/// Waits for all work queued on t's stream, and returns a copy in local memory of the host, with the same
/// layout. If t is on the host already, returns t.
Tensor to_host(Context& context, const Tensor& t);
/// Returns a copy on the device of `where`, with the same layout, ordered on the stream `where`. The program
/// may change t at once. If t is on that device already, it is not copied. The result is t, ordered on
/// `where` (Tensor::ordered_on).
Tensor to_device(Context& context, const Tensor& t, Stream where);

}  // namespace weft
