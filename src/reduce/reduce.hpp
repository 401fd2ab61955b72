// Element-wise reduction on the CPU, in the canonical order. It is one template over dtype and op, compiled
// for several instruction sets and chosen at run time. Pure functions. Any thread may call them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "weft/base/dtype.hpp"
#include "weft/base/op.hpp"

namespace weft {

/// Returns true if `reduce` supports the pair.
bool can_reduce(DType dtype, ReduceOp::Kind kind) noexcept;

/// For each element i < count: combines in[0][i] … in[n-1][i] by a binary tree over the index, split at the
/// largest power of two below n, and stores the result to every out[j][i]. 16-bit floats are accumulated in
/// f32 and rounded once. avg accumulates integers in at least twice their width, and f32 in f64, and divides
/// in the type of the accumulator. If the sum of an element of f64 or bf16 is not finite, the element is
/// summed again, from inputs divided by the smallest power of two that is at least n. premul_sum multiplies
/// in the type of the accumulator before it sums. Every NaN becomes the canonical quiet NaN. The bits are
/// equal on every instruction set. A user's function gets the elements unchanged, some KB at a time. It is
/// not called if there is one input.
///
/// An out may be the same pointer as an in (element i is read from all inputs before it is written to any
/// output). Any other overlap is not allowed. Pointers need only the dtype's alignment. `n`, the number of
/// ranks for an average, is in.size(). `stream`: whether it writes past the caches (with a fence before it
/// returns), which is for results larger than the shared cache.
void reduce(DType dtype, const ReduceOp& op, std::span<const std::byte* const> in,
            std::span<std::byte* const> out, std::int64_t count, bool stream = false) noexcept;

/// Like memcpy, but with `stream` it writes past the caches, with a fence before it returns.
void copy_bytes(std::byte* to, const std::byte* from, std::int64_t bytes, bool stream = false) noexcept;

/// Like memcpy, for any size, but writes past the caches. Other threads see the written bytes if they see a
/// value that was published after stream_fence().
void stream_bytes(std::byte* to, const std::byte* from, std::int64_t bytes) noexcept;
void stream_fence() noexcept;

}  // namespace weft
