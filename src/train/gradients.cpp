#include "weft/train/gradients.hpp"

#include <fmt/format.h>

#include "weft/base/error.hpp"

namespace weft {

std::vector<Gradient> gradients_of(std::span<Parameter* const> parameters, std::string_view what) {
  std::vector<Gradient> gradients;
  gradients.reserve(parameters.size());
  for (const Parameter* p : parameters) {
    if (!p->trainable()) continue;
    if (!p->has_gradient())
      throw Error(ErrorCode::bad_argument, fmt::format("{}: \"{}\" has no gradient", what, p->path()));
    gradients.push_back({p->path(), p->gradient().view(), p->gradient_layout()});
  }
  return gradients;
}

double grad_norm(std::span<Parameter* const> parameters, double p, Compute* compute) {
  return grad_norm(gradients_of(parameters, "grad_norm"), p, compute);
}

double clip_grad_norm(std::span<Parameter* const> parameters, double max_norm, double p, NonFinite non_finite,
                      Compute* compute) {
  return clip_grad_norm(gradients_of(parameters, "clip_grad_norm"), max_norm, p, non_finite, compute);
}

void sync_replicated_gradients(std::span<Parameter* const> parameters, const DeviceMesh& axes,
                               const SyncOptions& options) {
  std::vector<Gradient> gradients = gradients_of(parameters, "sync_replicated_gradients");
  sync_replicated_gradients(gradients, axes, options);
  auto gradient = gradients.begin();
  for (Parameter* p : parameters)
    if (p->trainable()) p->set_gradient_layout((gradient++)->layout);
}

}  // namespace weft
