#include "weft/train/make_optimizer.hpp"

namespace weft {
namespace {

template <class Options>
struct OptimizerOf;
template <>
struct OptimizerOf<AdamW::Options> {
  using type = AdamW;
};
template <>
struct OptimizerOf<SGD::Options> {
  using type = SGD;
};
template <>
struct OptimizerOf<Lion::Options> {
  using type = Lion;
};
template <>
struct OptimizerOf<ScheduleFreeAdamW::Options> {
  using type = ScheduleFreeAdamW;
};
template <>
struct OptimizerOf<Muon::Options> {
  using type = Muon;
};

}  // namespace

std::unique_ptr<Optimizer> make_optimizer(Compute& compute, std::vector<Parameter*> parameters,
                                          const OptimizerOptions& options,
                                          std::vector<ParameterGroup> groups) {
  return std::visit(
      [&]<class Options>(const Options& o) -> std::unique_ptr<Optimizer> {
        return std::make_unique<typename OptimizerOf<Options>::type>(compute, std::move(parameters), o,
                                                                     std::move(groups));
      },
      options);
}

}  // namespace weft
