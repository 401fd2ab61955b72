// Applies a plan to a model that has no memory yet. Pure arithmetic, no communication. Each rank calls it for
// its own copy of the tree.
#pragma once

#include "weft/mesh/mesh.hpp"
#include "weft/nn/module.hpp"
#include "weft/tp/plan.hpp"

namespace weft {

/// Splits the layers that `plan` names over `axis`, a sub-mesh of one or more axes. It sets layouts of
/// parameters and boundaries of modules, and nothing else. Types and paths stay. Parameters that already have
/// a layout keep it on the other axes. parallelize() does not change parameters to which the plan does not
/// apply. Call replicate() for these.
///
/// On an axis of one rank it only checks the plan.
///
/// Throws before anything changes:
///   bad_argument  a pattern that matches nothing; two entries for one module; a layer of the wrong kind; a
///                 size, or one of a module's units() (heads), that does not divide into the ranks of the
///                 axis, with the arithmetic, which counts the parts that calls before it made over other axes; an `enter` without a column layer inside; a weight that another
///                 module uses too, unless the plan splits all of them so that it lies alike; a boundary or a split on this axis that is there already; a model that
///                 has its memory already
/// The texts name the pattern or the path: `parallelize: "layers.0.attention" has 4 heads; they do not divide
/// into tp=3 (4 = 3 x 1 + 1)`.
void parallelize(Module& root, const DeviceMesh& axis, const Plan& plan);

}  // namespace weft
