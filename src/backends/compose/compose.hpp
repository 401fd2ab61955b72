// Composition: the operations that a transport lacks, made from those that it has.
//
// Everything rests on one exchange of blocks between all pairs of ranks: the transport's own all_to_all_v, or
// a send and a receive per pair. Operations that only move data are such an exchange. A reduction is composed
// where the transport does not know it, or does it in another order than the canonical one that the call asks
// for: the ranks exchange the blocks of the inputs, combine them with `reduce` (so the bits are the canonical
// ones) and, for all_reduce, exchange the results: as many bytes as a ring. An average is composed in this
// way, too: a transport's sum could overflow or wrap before it is divided. A scan is an all_reduce whose
// ranks get different results: as many bytes, and each rank computes all prefixes of its slice.
#pragma once

#include <memory>

#include "weft/backends/backend.hpp"

namespace weft {

/// A Backend that has every operation, over an inner one that has send and recv, or all_to_all_v, and perhaps
/// more. The inner one gets calls with numbers of its own, in the same order on all ranks: while a composed
/// call still has steps to post, later collectives wait. Operations on device memory are not composed if
/// that needs arithmetic. traits() are those of the inner backend. Staged data lies in local memory of
/// `context`, or of its Allocator; after a failure a peer may still write there if the inner backend is not
/// quiet: then that memory is never given back.
std::unique_ptr<Backend> compose(Context& context, std::unique_ptr<Backend> inner, int rank, int size);

}  // namespace weft
