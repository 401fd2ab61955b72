// The bucket in which each gradient lies, and its place there. This is arithmetic on the arguments of a
// BucketReducer. Private to dp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "weft/base/error.hpp"
#include "weft/dp/bucket_reducer.hpp"

namespace weft::dp {

struct PlannedBucket {
  DType dtype = DType::f32;
  ReduceOp op = ReduceOp::sum;
  std::int64_t bytes = 0;            // gaps for alignment included
  std::vector<std::size_t> members;  // gradients in it
};
struct Place {
  std::size_t bucket = 0;
  std::int64_t offset = 0;  // bytes
};
struct BucketPlan {
  std::vector<PlannedBucket> buckets;  // in the order they are posted
  std::vector<Place> places;           // by gradient
};

/// Throws bad_argument with "bucket_reducer: " before the text.
[[noreturn]] void refuse_bucket(const std::string& text);
/// Buckets in the order of the entries. One bucket of each (dtype, reduction) is open at a time. Throws like
/// the reducer's constructor.
BucketPlan plan_buckets(const std::vector<BucketEntry>& entries, const BucketOptions& options);

}  // namespace weft::dp
