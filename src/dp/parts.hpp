// Cuts lists of gradients into the parts on which kernels work. The parts are always the same, so that
// results depend neither on the number of threads nor on the device. Only the thread that uses the Compute
// may use them. Private to dp.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

#include "host/threads/workers.hpp"
#include "weft/base/tensor.hpp"
#include "weft/base/view.hpp"
#include "weft/dp/kernels.hpp"
#include "weft/host/compute.hpp"
#include "weft/host/copy.hpp"
#include "weft/host/device_runtime.hpp"

namespace weft::dp {

/// The kernels for the device of `compute`. Null: the CPU's kernels. Throws unsupported: `clip_grad_norm:
/// this Context has no gradient kernels of cuda:0; add_gradient_kernels() adds them`. `what`: the caller's
/// name.
const GradientKernels& kernels_of(std::string_view what, const Compute* compute);

inline bool on_device(const Compute* compute) noexcept {
  return compute != nullptr && compute->device() != Device{};
}

/// The stream on which the calls and the memory of `compute` are ordered. Null: the host.
inline Stream stream_of(const Compute* compute) noexcept {
  return compute == nullptr ? Stream{} : compute->stream();
}

struct Copied {
  const std::byte* from;
  std::byte* to;
  std::int64_t bytes;
};
/// Performs each of copy_of(0), copy_of(1), …, with the threads of `compute`, or on its device's stream.
/// Null: with this thread.
template <class CopyOf>
void copy_all(Compute* compute, std::size_t count, const CopyOf& copy_of) {
  if (on_device(compute)) {
    for (std::size_t i = 0; i < count; ++i)
      if (const Copied c = copy_of(i); c.bytes > 0)
        compute->runtime().copy(c.from, compute->device(), c.to, compute->device(),
                                {static_cast<std::size_t>(c.bytes)}, compute->stream());
    return;
  }
  constexpr std::int64_t kWord = 4;  // blocks have as many elements as blocks of f32
  threads::for_blocks(
      compute, count, [&](std::size_t i) { return (copy_of(i).bytes + kWord - 1) / kWord; },
      [&](const threads::Block& b) {
        const Copied c = copy_of(b.tensor);
        const std::int64_t begin = b.begin * kWord;
        std::memcpy(c.to + begin, c.from + begin,
                    static_cast<std::size_t>(std::min(b.count * kWord, c.bytes - begin)));
      });
}

/// The elements of `v`, which must be contiguous, for the host: the memory itself or, if it lies on a device,
/// a copy. The host waits for the copy.
inline Tensor on_host(const TensorView& v, const Compute* compute) {
  if (v.count() == 0 || !on_device(compute))
    return Tensor(Storage::borrow(v.data, static_cast<std::size_t>(v.bytes())), 0, v.shape, v.dtype);
  const Tensor here(compute->context(), v.shape, v.dtype);
  copy(compute->context(), v, here, compute->stream());
  compute->wait();
  return here;
}

/// Some parts, each with the tensor to which it belongs.
struct Batch {
  std::array<GradientPart, kGradientPartsAtOnce> parts;
  std::array<std::size_t, kGradientPartsAtOnce> tensor;
  std::size_t count = 0;
  std::span<const GradientPart> all() const noexcept { return {parts.data(), count}; }
};

/// Calls use(batch) for the parts of view_of(0), view_of(1), …, which are contiguous, in order.
template <class ViewOf, class Use>
void for_batches(std::size_t tensors, const ViewOf& view_of, const Use& use) {
  Batch batch;
  for (std::size_t t = 0; t < tensors; ++t) {
    const TensorView v = view_of(t);
    const std::int64_t count = v.count(), size = size_bytes(v.dtype);
    for (std::int64_t begin = 0; begin < count; begin += kGradientPart) {
      batch.parts[batch.count] = {v.data + begin * size, std::min(count - begin, kGradientPart), v.dtype};
      batch.tensor[batch.count] = t;
      if (++batch.count < kGradientPartsAtOnce) continue;
      use(batch);
      batch.count = 0;
    }
  }
  if (batch.count > 0) use(batch);
}

/// Calls use(tensor, sum) for the power sums of all parts, in order. On a device, the host waits once.
template <class ViewOf, class Use>
void for_power_sums(std::string_view what, Compute* compute, std::size_t tensors, const ViewOf& view_of,
                    double p, const Use& use) {
  const GradientKernels& kernels = kernels_of(what, compute);
  const auto use_all = [&](const Batch& batch, const PowerSum* sums) {
    for (std::size_t i = 0; i < batch.count; ++i) use(batch.tensor[i], sums[i]);
  };
  if (!on_device(compute)) {
    std::array<PowerSum, kGradientPartsAtOnce> sums;
    for_batches(tensors, view_of, [&](const Batch& batch) {
      kernels.power_sums(compute, batch.all(), p, sums.data());
      use_all(batch, sums.data());
    });
    return;
  }
  static_assert(sizeof(PowerSum) == 2 * sizeof(double));
  std::int64_t parts = 0;
  for_batches(tensors, view_of, [&](const Batch& batch) { parts += static_cast<std::int64_t>(batch.count); });
  if (parts == 0) return;
  const Tensor there = compute->make({2 * parts}, DType::f64);
  const auto begin = [](const Tensor& sums) { return reinterpret_cast<PowerSum*>(sums.data()); };
  PowerSum* next = begin(there);
  for_batches(tensors, view_of, [&](const Batch& batch) {
    kernels.power_sums(compute, batch.all(), p, next);
    next += batch.count;
  });
  const Tensor here = to_host(compute->context(), there);
  next = begin(here);
  for_batches(tensors, view_of, [&](const Batch& batch) {
    use_all(batch, next);
    next += batch.count;
  });
}

/// Scales all elements.
template <class ViewOf>
void scale_all(std::string_view what, Compute* compute, std::size_t tensors, const ViewOf& view_of,
               double factor) {
  const GradientKernels& kernels = kernels_of(what, compute);
  for_batches(tensors, view_of, [&](const Batch& batch) { kernels.scale(compute, batch.all(), factor); });
}

}  // namespace weft::dp
