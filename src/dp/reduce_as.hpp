// reduce_gradients() under the name of the function that the program called, for its errors. Private to dp.
#pragma once

#include <span>

#include "weft/dp/reduce_gradients.hpp"

namespace weft::dp {

void reduce_as(const char* what, std::span<Gradient> gradients, const DeviceMesh& axes,
               const ReduceOptions& options);

}  // namespace weft::dp
