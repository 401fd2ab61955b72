// Moves a range of one dimension between contiguous tensors of one device. Packing, unpacking, padding and slicing
// are made of this. No state; any thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "weft/base/dtype.hpp"
#include "weft/base/shape.hpp"
#include "weft/base/tensor.hpp"
#include "weft/host/context.hpp"
#include "weft/host/device_runtime.hpp"

namespace weft {

/// A shape seen from one of its dimensions: (outer, that dimension, inner).
struct Fold {
  std::int64_t outer = 1;
  std::size_t inner_bytes = 0;
};

inline Fold fold(const Shape& shape, int dim, DType dtype) noexcept {
  Fold f{1, static_cast<std::size_t>(size_bytes(dtype))};
  for (int d = 0; d < dim; ++d) f.outer *= shape[d];
  for (int d = dim + 1; d < shape.rank(); ++d) f.inner_bytes *= static_cast<std::size_t>(shape[d]);
  return f;
}

/// Where a slab lies: a contiguous (outer, extent, inner) tensor, from index `at` of the middle dimension on.
template <class Byte>
struct Slab {
  Byte* data;
  std::int64_t extent;
  std::int64_t at;
};

/// Moves the bytes of tensors that lie on one device, in order on their stream.
struct Mover {
  DeviceRuntime& runtime;
  Stream stream;
  Mover(Context& context, const Tensor& t) : runtime(context.device(t.device())), stream(t.stream()) {}
};

/// to[o, to.at + i, :] = from[o, from.at + i, :] for every o and for i < length. The two do not overlap.
inline void copy_slab(const Mover& mover, const Fold& f, std::int64_t length, Slab<const std::byte> from,
                      Slab<std::byte> to) {
  const std::size_t run = static_cast<std::size_t>(length) * f.inner_bytes;
  if (run == 0 || f.outer == 0) return;
  const auto extent = [&](std::int64_t n) { return static_cast<std::size_t>(n) * f.inner_bytes; };
  const Device device = mover.stream.device;
  mover.runtime.copy(from.data + extent(from.at), device, to.data + extent(to.at), device,
                     {run, f.outer, extent(from.extent), extent(to.extent)}, mover.stream);
}

/// to[o, to.at + i, :] = 0.
inline void clear_slab(const Mover& mover, const Fold& f, std::int64_t length, Slab<std::byte> to) {
  const std::size_t run = static_cast<std::size_t>(length) * f.inner_bytes;
  if (run == 0 || f.outer == 0) return;
  const auto extent = [&](std::int64_t n) { return static_cast<std::size_t>(n) * f.inner_bytes; };
  mover.runtime.fill(to.data + extent(to.at), 0, {run, f.outer, 0, extent(to.extent)}, mover.stream);
}

}  // namespace weft
