// How a parameter's first value is made. The value of an element depends on (seed, path, global index) only,
// so that a model has the same weights on every mesh.
#pragma once

#include <cstdint>
#include <variant>

namespace weft {

class Module;
class Parameter;

/// Every element is `value`.
struct Constant {
  double value = 0;
};
/// Normally distributed with this standard deviation and mean.
struct Normal {
  double std = 0.02;
  double mean = 0;
};
using Init = std::variant<Constant, Normal>;

/// Fills the parameter's value (this rank's part of it) according to its init(). Throws bad_argument before
/// materialise.
void initialise(Parameter& parameter, std::uint64_t seed);
/// The same for every parameter of the tree, each once.
void initialise(Module& root, std::uint64_t seed);

}  // namespace weft
