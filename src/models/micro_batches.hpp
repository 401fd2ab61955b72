// Sums of the gradients of micro-batches in exact mode. Included only inside models.
#pragma once

#include <map>
#include <span>
#include <utility>
#include <vector>

#include "weft/host/compute.hpp"
#include "weft/nn/parameter.hpp"

namespace weft {

/// The sum of the gradients of micro-batches, already reduced over data ranks: a balanced binary tree over
/// the number of the micro-batch, kept as a binary counter, so that at most log2 of their number are kept.
class MicroBatchSum {
 public:
  MicroBatchSum(std::span<Parameter* const> parameters, Compute& compute);

  /// Takes the gradients of the next micro-batch from the parameters, which then have none.
  void take();
  /// Adds what was taken to the gradients of the last micro-batch, which the parameters have.
  void add_to_last();

 private:
  using Gradients = std::vector<Tensor>;  // in the order of the parameters
  void add(const Tensor& first, const Tensor& second, const Tensor& sum) const;

  std::vector<Parameter*> parameters_;  // the trained ones
  Compute* compute_;
  std::vector<Gradients> kept_;  // level l: the sum of 2^l micro-batches; empty: none
};

/// The gradients of each micro-batch of a pipeline in exact mode, before they are reduced over data ranks.
/// The stages of a rank end a micro-batch at different times, and one reduction is for all of them.
class MicroBatchGradients {
 public:
  explicit MicroBatchGradients(Compute& compute) : compute_(&compute) {}

  /// Takes the gradients that these parameters have: one half of a backward pass makes those of some.
  void take(std::span<Parameter* const> parameters, int micro_batch);
  /// Gives back, and forgets, all that were taken of a micro-batch.
  void give(int micro_batch);

 private:
  Compute* compute_;
  std::map<int, std::vector<std::pair<Parameter*, Tensor>>> kept_;
};

}  // namespace weft
