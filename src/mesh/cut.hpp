// The rule by which one axis of a mesh shards a dimension. Pure arithmetic.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "weft/mesh/layout.hpp"

namespace weft {

/// The segments of a dimension, each divided into as many parts as there are ranks. Without segments the
/// dimension counts as one segment.
struct Cut {
  std::vector<std::int64_t> segments;  ///< lengths
  int ranks = 1;

  std::int64_t whole() const noexcept {
    std::int64_t sum = 0;
    for (const std::int64_t length : segments) sum += length;
    return sum;
  }
  /// How many elements `rank` holds. Rank 0 holds the most.
  std::int64_t size(int rank) const noexcept {
    std::int64_t sum = 0;
    for (const std::int64_t length : segments) sum += chunk_of(length, ranks, rank).size;
    return sum;
  }
  /// Returns whether all parts have one size and, one after the other, form the whole dimension.
  bool even() const noexcept { return segments.size() == 1 && segments[0] % ranks == 0; }
  /// Calls see(offset in the whole dimension, offset in the part, length) for each segment's part of `rank`.
  template <class See>
  void for_each_run(int rank, const See& see) const {
    std::int64_t begin = 0, at = 0;
    for (const std::int64_t length : segments) {
      const Chunk chunk = chunk_of(length, ranks, rank);
      see(begin + chunk.offset, at, chunk.size);
      begin += length;
      at += chunk.size;
    }
  }
};

/// The part of each segment of dimension `dim` that the rank with these coordinates holds: its offset in the
/// whole dimension, and its length. `skip`: an axis that counts as if it did not shard. -1: none.
std::vector<Chunk> runs_of(const LayoutSpec& spec, const MeshShape& mesh, std::span<const int> coordinates,
                           int dim, int skip = -1);

}  // namespace weft
