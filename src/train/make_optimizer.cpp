#include "weft/train/make_optimizer.hpp"

namespace weft {
namespace {

// The optimizer among Kind and Others whose options these are.
template <class Kind, class... Others>
std::unique_ptr<Optimizer> made(Compute& compute, std::vector<Parameter*>& parameters,
                                const OptimizerOptions& options, std::vector<ParameterGroup>& groups) {
  if (const auto* const of_kind = std::get_if<typename Kind::Options>(&options))
    return std::make_unique<Kind>(compute, std::move(parameters), *of_kind, std::move(groups));
  if constexpr (sizeof...(Others) > 0) return made<Others...>(compute, parameters, options, groups);
  return nullptr;
}

}  // namespace

std::unique_ptr<Optimizer> make_optimizer(Compute& compute, std::vector<Parameter*> parameters,
                                          const OptimizerOptions& options,
                                          std::vector<ParameterGroup> groups) {
  return made<AdamW, SGD, Lion, ScheduleFreeAdamW, Muon>(compute, parameters, options, groups);
}

}  // namespace weft
