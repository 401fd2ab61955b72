// What a transport lacks, made once from what it has.
//
// Everything rests on one exchange of blocks between all pairs of ranks: the transport's own all_to_all_v, or
// a send and a receive per pair. Moving operations are such an exchange. Reductions that the transport does
// not know, and every reduction in canonical order where its own order is another, exchange the blocks of the
// inputs, combine them here with `reduce` (so the bits are the canonical ones) and, for all_reduce, exchange
// the results: as many bytes as a ring. `avg` over a native sum divides afterwards.
#pragma once

#include <memory>

#include "weft/backends/backend.hpp"

namespace weft {

/// A Backend that has every operation, over one that has send and recv, or all_to_all_v, and perhaps more.
/// The inner one sees calls numbered anew, in the same order on all ranks: while a composed call still has
/// steps to post, later collectives wait. Memory on a device is not composed where that needs arithmetic.
/// traits() are the inner one's.
std::unique_ptr<Backend> compose(std::unique_ptr<Backend> inner, int rank, int size);

}  // namespace weft
