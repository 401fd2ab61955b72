// Losses in exact mode. Included only inside nn.
#pragma once

#include "weft/nn/frame.hpp"
#include "weft/nn/kernels.hpp"

namespace weft::exact {

/// The terms (kernels::cross_entropy_terms) of each block of the classes that this rank has: f64 (blocks, …,
/// kLossTerms). logits: (…, classes here). `classes`: these classes.
Tensor loss_terms(Frame& frame, const Tensor& logits, const Tensor& labels, const kernels::VocabPart& classes,
                  const Tensor& valid, double smoothing);
/// Sums of `terms` of all blocks: softmax of each token, and the loss over blocks of samples.
void loss_sum(Frame& frame, const Tensor& terms, const Tensor& labels, const Tensor& softmax,
              const Tensor& loss, std::int64_t classes, const Tensor& valid, double smoothing, double z_loss);

/// kernels::element_loss_forward over blocks of samples, and of rows if y are maps (samples, channels, rows,
/// columns). Then the ranks that share the maps have added their sums: the loss is Partial on the axes that
/// cut samples alone.
Tensor element_loss(Frame& frame, const Tensor& y, const Tensor& target, const Tensor& count,
                    kernels::LossTerm term);

}  // namespace weft::exact
