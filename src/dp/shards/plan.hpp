// The parts of a list of tensors that each rank keeps, and the calls in which they travel. Pure arithmetic.
// Private to dp.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "weft/dp/sharded_parameters.hpp"

namespace weft::dp {

/// A range of rows of the whole tensor, of which each rank has a part. There is one for each segment of
/// dimension 0. Counts are in elements.
struct ShardSegment {
  std::int64_t begin = 0, count = 0;  ///< in the whole tensor
  std::vector<std::int64_t> counts;   ///< by rank of the axes
  std::vector<std::int64_t> offsets;  ///< the place at which each begins, counted from `begin`
  bool even = false;                  ///< all counts are alike
};

struct ShardItem {
  ShardEntry entry;
  LayoutRef shard = nullptr;
  std::int64_t count = 0;  ///< elements of the whole tensor
  std::vector<ShardSegment> segments;
  std::vector<std::int64_t> shard_counts;  ///< by rank
  bool packed = false;                     ///< travels with others
  std::int64_t whole_at = 0;               ///< bytes, in a buffer of whole tensors
  std::int64_t gradient_at = 0;            ///< elements, in a buffer of gradients
  std::int64_t shard_at = 0;               ///< elements, in a buffer of reduced gradients

  /// Calls see(offset in the whole tensor, offset in the part, count) for each segment's part of `rank` of
  /// the axes. All three are in elements.
  template <class See>
  void for_each_run(std::size_t rank, const See& see) const {
    std::int64_t at = 0;
    for (const ShardSegment& s : segments) {
      see(s.begin + s.offsets[rank], at, s.counts[rank]);
      at += s.counts[rank];
    }
  }
};

/// The packing of small tensors. There is one block for each rank, one after the other, and each block has
/// the parts of all packed tensors in order.
struct Packing {
  std::vector<std::int64_t> counts, offsets;  ///< of the blocks, by rank
  std::vector<std::vector<std::int64_t>> at;  ///< by place in ShardPlan::packed and rank: within the block
  std::int64_t total = 0;
};

struct ShardPlan {
  /// Throws like the constructor of ShardedParameters.
  ShardPlan(DeviceMesh axes, std::vector<ShardEntry> entries, const ShardedParametersOptions& options);

  DeviceMesh axes;
  ShardedParametersOptions options;
  std::vector<ShardItem> items;
  std::vector<std::size_t> packed;  ///< indices of items
  Packing bytes;                    ///< of values, in bytes
  Packing elements;                 ///< of gradients, in elements
  std::int64_t whole_bytes = 0, gradient_count = 0, shard_count = 0;
};

}  // namespace weft::dp
