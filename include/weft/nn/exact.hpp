// The conditions of exact mode for a model and for a batch (docs/exact.md). Pure functions of layouts. Any
// thread may call them.
#pragma once

#include <cstdint>
#include <string_view>

#include "weft/base/exact.hpp"
#include "weft/mesh/mesh.hpp"
#include "weft/nn/module.hpp"

namespace weft {

/// Throws bad_argument, on every rank, unless the passes of `root` can be exact. Every module of the tree
/// must have a rule (Module::has_exact_rule), and no weight may be used by two modules. The numbers of ranks
/// of the axes of `mesh`, and of each set of axes that cuts a parameter, must divide kExactBlocks and the
/// size that they cut: `exact: tp=3 does not divide 8 blocks`. Call it when all layouts are set.
void expect_exact(Module& root, const DeviceMesh& mesh);

/// Throws bad_argument unless `ranks` divide kExactBlocks and `size`: `exact: rows of a batch: 12 over 8
/// ranks (12 = 8 x 1 + 4); expected equal parts`.
void expect_exact_parts(std::string_view what, std::int64_t size, int ranks);

/// At the first call for this Compute, runs some kernels of `compute` on small operands, whole and in two
/// parts. Throws unsupported if the bits differ, naming the kernel and the sizes. Also throws it for the
/// Compute of a device.
void expect_exact_kernels(Compute& compute);

}  // namespace weft
