// Element-wise reduction on the CPU, in the canonical order: one template over dtype and op, compiled for
// several instruction sets and chosen at run time. Pure functions; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "weft/base/dtype.hpp"
#include "weft/base/op.hpp"

namespace weft {

/// True if `reduce` knows the pair.
bool can_reduce(DType dtype, ReduceOp::Kind kind) noexcept;

/// For each element i < count: combines in[0][i] … in[n-1][i] by a binary tree over the index, split at the
/// largest power of two below n, and stores the result to every out[j][i]. 16-bit floats are accumulated in
/// f32 and rounded once. avg accumulates integers in twice their width or more and f32 in f64, and divides
/// there; of f64 and bf16 an element whose sum is not finite is summed again, of inputs smaller by the power
/// of two from n on. premul_sum multiplies there before it sums. NaNs are the one quiet NaN. The same bits on
/// every instruction set. A user's function gets the elements as they are, some KB at a time; with one input
/// it is not called.
///
/// An out may be the same pointer as an in (element i is read everywhere before it is written anywhere); any
/// other overlap is not allowed. Pointers need only the dtype's alignment. `n` is the number of ranks
/// averaged over: in.size(). `stream`: write around the caches (fenced before it returns); for results beyond
/// the shared cache.
void reduce(DType dtype, const ReduceOp& op, std::span<const std::byte* const> in,
            std::span<std::byte* const> out, std::int64_t count, bool stream = false) noexcept;

/// memcpy that may write around the caches, fenced before it returns.
void copy_bytes(std::byte* to, const std::byte* from, std::int64_t bytes, bool stream = false) noexcept;

/// memcpy around the caches, of any size. Other threads see what was written once they see something that was
/// published after stream_fence().
void stream_bytes(std::byte* to, const std::byte* from, std::int64_t bytes) noexcept;
void stream_fence() noexcept;

}  // namespace weft
