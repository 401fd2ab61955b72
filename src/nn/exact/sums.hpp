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
/// dw = or += dyᵀ x over blocks of samples, the first dimension of x. If x has more than three dimensions, it
/// is of maps, and its second dimension has blocks, too: rows, or windows. Its layout is then that of
/// summed_over_positions(), as the ranks that cut the second dimension have added their sums.
void weight_gradient(Frame& frame, const Module& layer, const Tensor& dy, const Tensor& x, const Tensor& dw,
                     bool add);

/// `gradient`, replicated on axes that cut the second dimension of x.
LayoutRef summed_over_positions(const LayoutRef& gradient, const LayoutRef& x);

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

/// The same for maps, x: (samples, channels, rows, …), of which ranks may have rows.
void over_rows(Frame& frame, const Module& layer, const Tensor& x, std::span<Parameter* const> parameters,
               const std::function<void(std::int64_t sample, Chunk rows, std::span<float* const> sums)>& add);

/// The blocks of samples and of positions, dimension `dim`, that this rank has.
struct SampleBlocks {
  int dim = 1, of_samples = 1, of_positions = 1;
  std::int64_t samples = 1, positions = 1;  // of this rank
};
SampleBlocks blocks_of(const TensorName& what, const Tensor& x, int dim);

/// (blocks of samples, width): for each of them the tree over the blocks of positions, also of the ranks that
/// share dimension `blocks.dim` of x. add(sample, positions, sum) adds to the `width` numbers at `sum`, which
/// are 0 at first. T: float or double.
template <class T>
Tensor block_sums(Frame& frame, const LayoutRef& x, const SampleBlocks& blocks, std::int64_t width,
                  const std::function<void(std::int64_t sample, Chunk positions, T* sum)>& add);
/// The tree over the first dimension of (blocks of samples, width): the sum is then the first array.
template <class T>
void add_samples(const Tensor& sums);

}  // namespace weft::exact
