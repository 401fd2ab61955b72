#include "nn/exact/loss.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/mutant.hpp"
#include "nn/exact/sums.hpp"
#include "nn/losses/checks.hpp"

namespace weft::exact {

Tensor loss_terms(Frame& frame, const Tensor& logits, const Tensor& labels, const kernels::VocabPart& classes,
                  const Tensor& valid, double smoothing) {
  const int blocks = WEFT_MUTANT("exact_classes_whole")
                         ? 1
                         : blocks_here("cross entropy: logits", logits.layout(), logits.shape().rank() - 1);
  const std::int64_t tokens = labels.count(), here = logits.shape().back();
  Shape shape{blocks};
  for (const std::int64_t extent : labels.shape()) shape.push_back(extent);
  shape.push_back(kernels::kLossTerms);
  Tensor terms = frame.compute().make(shape, DType::f64, Memory::shared);
  for (int i = 0; i < blocks; ++i) {
    const Chunk block = exact_block(here, blocks, i);
    const Tensor columns = frame.compute().make({tokens, block.size});
    for (std::int64_t t = 0; t < tokens; ++t)
      std::copy_n(logits.data_ptr<float>() + t * here + block.offset, block.size,
                  columns.data_ptr<float>() + t * block.size);
    kernels::cross_entropy_terms(frame.kernels(), columns.data_ptr<float>(), labels.data_ptr<std::int64_t>(),
                                 terms.data_ptr<double>() + i * tokens * kernels::kLossTerms, tokens,
                                 {classes.first + block.offset, block.size, classes.whole},
                                 valid.data_ptr<std::int64_t>(), smoothing);
  }
  return terms;
}

void loss_sum(Frame& frame, const Tensor& terms, const Tensor& labels, const Tensor& softmax,
              const Tensor& loss, std::int64_t classes, const Tensor& valid, double smoothing,
              double z_loss) {
  const int blocks =
      WEFT_MUTANT("exact_loss_in_a_row") ? 1 : blocks_here("cross entropy: labels", labels.layout(), 0);
  const std::int64_t parts = terms.size(0), tokens = labels.count(), samples = labels.size(0),
                     unit = samples == 0 ? 0 : tokens / samples;
  std::array<double, kExactBlocks> sums{};
  for (int i = 0; i < blocks; ++i) {
    const Chunk block = exact_block(samples, blocks, i);
    const std::int64_t first = block.offset * unit, count = block.size * unit;
    const Tensor own = frame.compute().make({parts, count, kernels::kLossTerms}, DType::f64);
    for (std::int64_t part = 0; part < parts; ++part)
      std::copy_n(terms.data_ptr<double>() + (part * tokens + first) * kernels::kLossTerms,
                  count * kernels::kLossTerms, own.data_ptr<double>() + part * count * kernels::kLossTerms);
    kernels::cross_entropy_sum(frame.kernels(), own.data_ptr<double>(), static_cast<int>(parts),
                               labels.data_ptr<std::int64_t>() + first,
                               softmax.data_ptr<double>() + first * kernels::kSoftmaxTerms,
                               &sums[static_cast<std::size_t>(i)], count, classes,
                               valid.data_ptr<std::int64_t>(), smoothing, z_loss);
  }
  for (int step = 1; step < blocks; step *= 2)
    for (int i = 0; i + step < blocks; i += 2 * step)
      sums[static_cast<std::size_t>(i)] += sums[static_cast<std::size_t>(i + step)];
  *loss.data_ptr<double>() = sums[0];
}

Tensor element_loss(Frame& frame, const Tensor& y, const Tensor& target, const Tensor& count,
                    kernels::LossTerm term) {
  constexpr int kRows = 2, kMapDims = 4;
  const char* const loss_name = kernels::name(term);
  const TensorName what("", fmt::format("{}: y", loss_name));
  const bool maps = y.shape().rank() == kMapDims;
  SampleBlocks blocks{.dim = kRows};
  if (maps)
    blocks = blocks_of(what, y, kRows);
  else if (y.shape().rank() > 0)
    blocks.samples = y.size(0), blocks.of_samples = blocks_here(what, y.layout(), 0);
  if (WEFT_MUTANT("exact_map_loss_whole")) blocks.of_positions = 1;
  for (int dim = 1; dim < y.shape().rank(); ++dim)
    if (dim != kRows || !maps) layouts::expect_whole_dim(what, y, "a loss in exact mode", dim);
  // Without rows each sample is one row.
  const std::int64_t of_sample = blocks.samples == 0 ? 0 : y.count() / blocks.samples,
                     channels = maps ? y.size(1) : 1, row = maps ? y.size(3) : of_sample;
  const Tensor sums =
      block_sums<double>(frame, y.layout(), blocks, 1, [&](std::int64_t sample, Chunk rows, double* sum) {
        for (std::int64_t c = 0; c < channels; ++c) {
          const std::int64_t at = sample * of_sample + (c * blocks.positions + rows.offset) * row;
          double part = 0;
          kernels::element_loss_forward(frame.kernels(), y.data_ptr<float>() + at,
                                        target.data_ptr<float>() + at, nullptr, &part,
                                        {rows.size * row, 1, 1}, count.data_ptr<std::int64_t>(), term);
          *sum += part;
        }
      });
  add_samples<double>(sums);
  const Tensor loss = frame.compute().make({1}, DType::f64, Memory::shared);
  *loss.data_ptr<double>() = *sums.data_ptr<double>();
  LayoutRef layout = losses::loss_layout(y.layout());
  if (layout != nullptr) {
    Placements placements = layout->placements;
    for (std::size_t axis = 0; axis < placements.size(); ++axis)
      if (is_shard(y.layout()->placements[axis], kRows)) placements[axis] = Replicate{};
    layout = layout->with(std::move(placements));
  }
  return loss.with_layout(layout);
}

}  // namespace weft::exact
