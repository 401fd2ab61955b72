// An optimizer from a value that says which one.
#pragma once

#include <memory>
#include <variant>
#include <vector>

#include "weft/train/muon.hpp"

namespace weft {

using OptimizerOptions =
    std::variant<AdamW::Options, SGD::Options, Lion::Options, ScheduleFreeAdamW::Options, Muon::Options>;

/// Makes the optimizer whose options are given; throws what its constructor throws.
std::unique_ptr<Optimizer> make_optimizer(Compute& compute, std::vector<Parameter*> parameters,
                                          const OptimizerOptions& options,
                                          std::vector<ParameterGroup> groups = {});

}  // namespace weft
