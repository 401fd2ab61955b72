// The sums of exact mode. Layers call them in the few places where parallelism may split a sum: over
// features, over samples, and over samples and positions of a sequence. Every sum is a balanced binary tree
// over kExactBlocks blocks of global indices. A rank adds its blocks, and the transport's canonical order
// adds the sums of the ranks. Only files of nn include it.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "weft/base/exact.hpp"
#include "weft/nn/frame.hpp"
#include "weft/nn/layouts.hpp"
#include "weft/nn/parameter.hpp"

namespace weft::exact {

/// How many of the blocks of dimension `dim` this rank has. Throws bad_argument as expect_exact_parts().
int blocks_here(const TensorName& what, const LayoutRef& layout, int dim);

// --- contractions; operands are both f32 or both bf16, all results f32

/// y = x wᵀ over blocks of the inputs. x: (…, in), w: (out, in)
void output(Frame& frame, const Module& layer, const Tensor& x, const Tensor& w, const float* bias,
            const Tensor& y);
/// dx = dy w over blocks of the outputs, 8 blocks of each of `segments` (sizes of the whole weight; empty:
/// one segment). Then dx is summed over the ranks that split the outputs. dx: the place of the result, with
/// its layout.
Tensor input_gradient(Frame& frame, const Module& layer, const Tensor& dy, const Tensor& w,
                      std::span<const std::int64_t> segments, const Tensor& dx);
/// dw = or += dyᵀ x over blocks of samples, the first dimension of x.
void weight_gradient(Frame& frame, const Module& layer, const Tensor& dy, const Tensor& x, const Tensor& dw,
                     bool add);

// --- other sums

/// t, summed over the axes on which it is Partial.
Tensor summed(const Tensor& t);

/// to = or += the sum over blocks of samples of `x`. leaf(tokens, sum) overwrites `sum`, of the shape of
/// `to`, with the sum over these tokens. Tokens are all of x's dimensions except the last `inner`.
void over_samples(Frame& frame, const Module& layer, const Tensor& x, int inner, const Tensor& to, bool add,
                  const std::function<void(Chunk tokens, const Tensor& sum)>& leaf);

/// Adds to the gradients of parameters of one dimension, or of one value per feature, the sum over blocks of
/// samples times blocks of positions. x: (samples, positions, …, features), or (samples, features). add(rows,
/// sums) adds the rows [offset, offset + size) of x to the arrays `sums`, one for each parameter. It is
/// called once for each row.
void over_positions(Frame& frame, const Module& layer, const Tensor& x,
                    std::span<Parameter* const> parameters,
                    const std::function<void(Chunk rows, std::span<float* const> sums)>& add);

}  // namespace weft::exact
