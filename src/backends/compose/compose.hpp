// Composition: the operations that a transport lacks, made from operations that it has.
//
// The basis is one exchange of blocks between all pairs of ranks: the transport's own all_to_all_v, or a send
// and a receive per pair. Operations that only move data are one such exchange. A reduction is composed if
// the transport does not know it, or if the call requests the canonical order and the transport combines in
// another order. The ranks exchange the blocks of the inputs, combine them with `reduce` (which gives the
// canonical bits) and, for all_reduce, exchange the results. This moves as many bytes as a ring algorithm. An
// average is also composed in this way, because a transport's sum could overflow or wrap before it is
// divided. A scan is like an all_reduce whose ranks get different results. It moves as many bytes, and each
// rank computes all prefixes of its slice.
#pragma once

#include <memory>

#include "weft/backends/backend.hpp"

namespace weft {

/// A Backend that has every operation, over an inner backend that has send and recv, or all_to_all_v, and
/// perhaps more. The inner backend gets calls with separate numbers, in the same order on all ranks. While a
/// composed call still has steps to post, later collectives wait. Operations on device memory are not
/// composed if that needs arithmetic. traits() returns the traits of the inner backend. Staged data lies in
/// local memory of `context`, or of its Allocator. After a failure, if the inner backend is not quiet, a peer
/// may still write to this memory; then it is never freed.
std::unique_ptr<Backend> compose(Context& context, std::unique_ptr<Backend> inner, int rank, int size);

}  // namespace weft
