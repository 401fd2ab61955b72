// The rules by which a parameter gets its first values. The value of an element depends only on (seed, path,
// global index), so that a model has the same weights on every mesh.
#pragma once

#include <cstdint>
#include <variant>

#include "weft/base/cxx20.hpp"

namespace weft {

class Module;
class ModuleBuffer;
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

/// Fills this rank's part of the parameter's master, according to init(). Throws bad_argument before
/// materialise.
void initialise(Parameter& parameter, std::uint64_t seed);
/// Like the function above, for a buffer of f32, or a constant buffer of f64 or i64.
void initialise(ModuleBuffer& buffer, std::uint64_t seed);
/// Fills every parameter and buffer of the tree, each once.
void initialise(Module& root, std::uint64_t seed);

}  // namespace weft
