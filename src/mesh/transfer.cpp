#include "weft/mesh/transfer.hpp"

namespace weft {

bool Transfer::done() { return steps_ == nullptr || steps_->done(); }

Tensor Transfer::finish() {
  if (steps_ == nullptr) return std::move(ready_);
  const std::unique_ptr<Steps> steps = std::move(steps_);
  return steps->finish();
}

}  // namespace weft
