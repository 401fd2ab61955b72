// Tensors from one device to another. Nothing else moves them: no call of weft copies between devices on its
// own.
#pragma once

#include "weft/base/tensor.hpp"
#include "weft/host/context.hpp"

namespace weft {

/// to = from, of the same dtype and shape, with any strides; either is on the CPU or both are on one device.
/// On `stream`, one of that device; Stream{}: its default one. If `to` is the host's memory it is there
/// after DeviceRuntime::wait(stream). The two may not overlap. Throws bad_argument naming what differs, or
/// has no memory.
void copy(Context& context, const ConstTensorView& from, const TensorView& to, Stream stream = {});

/// A copy in local memory of the host, with the same layout, after all work queued on t's stream; waits for
/// it. A tensor that is there already is given back as it is.
Tensor to_host(Context& context, const Tensor& t);
/// A copy on the device of `where`, with the same layout, ordered on it; t may be changed at once. A tensor
/// that is on that device already is not copied: it is t, ordered on `where` (Tensor::ordered_on).
Tensor to_device(Context& context, const Tensor& t, Stream where);

}  // namespace weft
