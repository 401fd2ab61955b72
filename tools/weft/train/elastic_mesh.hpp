// The mesh of `weft train` when the number of ranks changes between starts. Any thread.
#pragma once

#include "trainer.hpp"

namespace weft::tools {

/// Sets `config.dp`, and if need be `config.tp`, so that the mesh fits at most `ranks` ranks: the largest
/// degree of data parallel, at most the one that was asked for, that TrainConfig::check() takes (in exact
/// mode: that divides 8); only if not even 1 fits, the next smaller degree of tensor parallel. Returns how
/// many ranks the mesh has; the others are spare. Throws bad_argument if no mesh fits, with the reason of
/// check() for the smallest.
int fit_mesh(TrainConfig& config, int ranks);

}  // namespace weft::tools
