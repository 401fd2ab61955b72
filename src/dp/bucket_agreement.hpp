// Checks that the reducers of all ranks agree: in their entries, in which entries are bound in memory in
// which they are reduced, and in their options. Private to dp.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "weft/dp/bucket_reducer.hpp"

namespace weft::dp {

struct ReducerToCompare {
  const std::vector<BucketEntry>& entries;
  const BucketOptions& options;
  std::int64_t number;                        ///< of this rank's existing reducers over the same axes
  std::function<bool(std::size_t)> in_place;  ///< whether entry i is reduced in the caller's memory
};

/// Throws mismatch, on all ranks, that names the first difference. Uses one all-gather over `axes`.
void expect_same_reducers(const DeviceMesh& axes, const ReducerToCompare& own);

}  // namespace weft::dp
