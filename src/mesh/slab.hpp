// Moving a range of one dimension between contiguous tensors: all that packing, unpacking, padding and
// slicing is. No state; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "weft/base/dtype.hpp"
#include "weft/base/shape.hpp"

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

/// to[o, to.at + i, :] = from[o, from.at + i, :] for every o and for i < length. The two do not overlap.
inline void copy_slab(const Fold& f, std::int64_t length, Slab<const std::byte> from,
                      Slab<std::byte> to) noexcept {
  if (length == 0 || f.inner_bytes == 0) return;
  const std::size_t run = static_cast<std::size_t>(length) * f.inner_bytes;
  for (std::int64_t o = 0; o < f.outer; ++o)
    std::memcpy(to.data + static_cast<std::size_t>(o * to.extent + to.at) * f.inner_bytes,
                from.data + static_cast<std::size_t>(o * from.extent + from.at) * f.inner_bytes, run);
}

/// to[o, to.at + i, :] = 0.
inline void clear_slab(const Fold& f, std::int64_t length, Slab<std::byte> to) noexcept {
  if (length == 0 || f.inner_bytes == 0) return;
  const std::size_t run = static_cast<std::size_t>(length) * f.inner_bytes;
  for (std::int64_t o = 0; o < f.outer; ++o)
    std::memset(to.data + static_cast<std::size_t>(o * to.extent + to.at) * f.inner_bytes, 0, run);
}

}  // namespace weft
