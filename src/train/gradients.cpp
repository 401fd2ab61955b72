#include "weft/train/gradients.hpp"

#include <fmt/format.h>

#include "base/mutant.hpp"
#include "weft/base/error.hpp"

namespace weft {

namespace {

void put_gradients(std::vector<Gradient>& gradients, std::span<Parameter* const> parameters,
                   std::string_view what) {
  gradients.clear();
  gradients.reserve(parameters.size());
  for (const Parameter* p : parameters) {
    if (!p->trainable()) continue;
    if (!p->has_gradient())
      throw Error(ErrorCode::bad_argument, fmt::format("{}: \"{}\" has no gradient", what, p->path()));
    gradients.push_back({p->path(), p->gradient().view(), p->gradient_layout()});
  }
}

// The list of a call, in memory that the rank's Compute keeps for the next call.
class List {
 public:
  List(std::span<Parameter* const> parameters, std::string_view what, Compute* compute) : compute_(compute) {
    for (const Parameter* p : parameters)
      if (p->has_gradient()) {
        kept_ = &p->compute().attached<Kept>();
        if (compute_ == nullptr && p->compute().device() != Device{}) compute_ = &p->compute();
        break;
      }
    if (kept_ != nullptr) gradients_.swap(kept_->gradients);
    put_gradients(gradients_, parameters, what);
  }
  ~List() {
    if (kept_ == nullptr) return;
    gradients_.clear();
    kept_->gradients.swap(gradients_);
  }
  List(const List&) = delete;
  List& operator=(const List&) = delete;
  std::vector<Gradient>& gradients() noexcept { return gradients_; }
  /// The Compute of the options or, without one, the Compute of the gradients' device.
  Compute* compute() const noexcept { return compute_; }
  /// Gives the reduced gradients to their parameters.
  void state_layouts(std::span<Parameter* const> parameters) const {
    auto gradient = gradients_.begin();
    for (Parameter* p : parameters)
      if (p->trainable()) p->set_gradient_layout((gradient++)->layout);
  }

 private:
  struct Kept {
    explicit Kept(Compute&) {}
    std::vector<Gradient> gradients;
  };
  Compute* compute_;
  Kept* kept_ = nullptr;
  std::vector<Gradient> gradients_;
};

// Applies a function on views to the gradients of parameters. `what`: the function's name.
template <class Options>
void reduce_by(const char* what, void (*verb)(std::span<Gradient>, const DeviceMesh&, const Options&),
               std::span<Parameter* const> parameters, const DeviceMesh& axes, Options options) {
  List list(parameters, what, options.compute);
  options.compute = list.compute();
  verb(list.gradients(), axes, options);
  list.state_layouts(parameters);
}

Exact chosen(Exact exact) { return WEFT_MUTANT("exact_norm_in_f64") ? Exact::no : exact; }

}  // namespace

std::vector<Gradient> gradients_of(std::span<Parameter* const> parameters, std::string_view what) {
  std::vector<Gradient> gradients;
  put_gradients(gradients, parameters, what);
  return gradients;
}

double grad_norm(std::span<Parameter* const> parameters, double p, Compute* compute, Exact exact) {
  List list(parameters, "grad_norm", compute);
  return grad_norm(list.gradients(), p, list.compute(), chosen(exact));
}

double clip_grad_norm(std::span<Parameter* const> parameters, double max_norm, double p, NonFinite non_finite,
                      Compute* compute, Exact exact) {
  List list(parameters, "clip_grad_norm", compute);
  return clip_grad_norm(list.gradients(), max_norm, p, non_finite, list.compute(), chosen(exact));
}

void reduce_gradients(std::span<Parameter* const> parameters, const DeviceMesh& axes,
                      const ReduceOptions& options) {
  reduce_by("reduce_gradients", reduce_gradients, parameters, axes, options);
}

void sync_replicated_gradients(std::span<Parameter* const> parameters, const DeviceMesh& axes,
                               const SyncOptions& options) {
  reduce_by("sync_replicated_gradients", sync_replicated_gradients, parameters, axes, options);
}

}  // namespace weft
