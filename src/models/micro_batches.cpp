#include "models/micro_batches.hpp"

#include "weft/host/copy.hpp"
#include "weft/nn/frame.hpp"
#include "weft/nn/kernels.hpp"

namespace weft {

MicroBatchSum::MicroBatchSum(std::span<Parameter* const> parameters, Compute& compute) : compute_(&compute) {
  for (Parameter* p : parameters)
    if (p->trainable()) parameters_.push_back(p);
}

void MicroBatchSum::add(const Tensor& first, const Tensor& second, const Tensor& sum) const {
  kernels::add(kernels_of(*compute_), first.data_ptr<float>(), second.data_ptr<float>(),
               sum.data_ptr<float>(), sum.count());
}

void MicroBatchSum::take() {
  Gradients carry;
  for (Parameter* p : parameters_) {
    const Tensor own = compute_->make(p->gradient().shape());
    copy(compute_->context(), p->gradient(), own, compute_->stream());
    carry.push_back(own);
    p->zero_gradient();
  }
  std::size_t level = 0;
  for (; level < kept_.size() && !kept_[level].empty(); ++level) {
    for (std::size_t i = 0; i < carry.size(); ++i) add(kept_[level][i], carry[i], carry[i]);
    kept_[level].clear();
  }
  if (level == kept_.size()) kept_.emplace_back();
  kept_[level] = std::move(carry);
}

void MicroBatchSum::add_to_last() {
  for (const Gradients& sums : kept_)
    for (std::size_t i = 0; i < sums.size(); ++i)
      add(sums[i], parameters_[i]->gradient(), parameters_[i]->gradient());
}

void MicroBatchGradients::take(std::span<Parameter* const> parameters, int micro_batch) {
  for (Parameter* p : parameters) {
    if (!p->trainable() || !p->has_gradient()) continue;
    const Tensor own = compute_->make(p->gradient().shape());
    copy(compute_->context(), p->gradient(), own, compute_->stream());
    kept_[micro_batch].emplace_back(p, own.with_layout(p->gradient_layout()));
    p->zero_gradient();
  }
}

void MicroBatchGradients::give(int micro_batch) {
  for (const auto& [p, gradient] : kept_[micro_batch]) p->accumulate(gradient);
  kept_.erase(micro_batch);
}

}  // namespace weft
